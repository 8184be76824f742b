#pragma once
// Every public op as a row: how to make inputs, how to call it, what it is by definition, and how well it must round.
// One row, many uses: gradient check, every dtype against f64, CPU against GPU, exact integers, Autocast against
// explicit casts, NaN, poisoned memory (op_*_test.cpp). A new elementwise op needs nothing here; any other op needs a
// row.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oracle.h"
#include "support.h"

namespace mantissa::testing {

enum class Layout { contiguous, strided, broadcast, empty, one, odd, large, aligned };
inline bool is_large(Layout l) { return l == Layout::large || l == Layout::aligned; }
inline const char* name(Layout l) {
  constexpr const char* names[] = {"contiguous",  "strided",   "broadcast", "empty",
                                   "one element", "odd sizes", "large",     "large and aligned"};
  return names[static_cast<int>(l)];
}

/// An input: its shape, the interval its values come from, or a count of classes for an index.
struct Input {
  Shape shape;
  double low = -2, high = 2;
  std::int64_t classes = 0;  // > 0: i64 indices below it
  bool differentiable = true;
  bool parameter = false;  // stays in the compute dtype: weights of norms
  bool bounded = false;    // nothing outside the interval: the op has a domain
};
using Inputs = std::vector<Input>;  // empty: the layout does not apply
using Args = std::span<const Tensor>;

struct Row {
  std::string op;       // its name in autocast_table(), or of the function
  std::string variant;  // options of this row
  std::function<Inputs(Layout)> inputs;
  std::function<Tensor(Args)> call;
  std::function<oracle::Array(Args)> oracle = {};     // by definition, in f64; none: the op itself in f64
  double forward_limit = 1.10, backward_limit = 2.0;  // ratio to perfect rounding in 16 bits
  bool elementwise = false;
  bool exact = false;       // small integers in, exact integers out, forward and backward
  bool inner_kink = false;  // a kink behind a sum: inputs on a grid, so that rounding the sum can not cross it
};

/// One shape for each layout, for ops that take any.
inline Shape any_shape(Layout l) {
  switch (l) {
    case Layout::empty:
      return {0, 3};
    case Layout::one:
      return {1};
    case Layout::odd:
      return {3, 5, 7};
    case Layout::large:
      return {67, 301};
    case Layout::aligned:
      return {64, 320};
    default:
      return {4, 6};
  }
}
inline Inputs any_input(Layout l) { return l == Layout::broadcast ? Inputs{} : Inputs{{any_shape(l)}}; }

template <class Op> Input domain_input(const Op&, const Shape& shape) {
  if constexpr (requires { Op::domain; })
    return {.shape = shape, .low = Op::domain.low, .high = Op::domain.high, .bounded = true};
  return {shape, -2.5, 2.5};
}

inline void add_elementwise(std::vector<Row>& rows) {
  for_each_op<UnaryOp>([&](auto op) {
    Row row{
        .op = op.name,
        .variant = "",
        .inputs = [op](Layout l) { return l == Layout::broadcast ? Inputs{} : Inputs{domain_input(op, any_shape(l))}; },
        .call = [op](Args x) { return unary(op, x[0]); },
        // A gradient taken from the rounded output rounds twice.
        .backward_limit = op.needs == Needs::output ? 2.0 : 1.10,
        .elementwise = true};
    if (const auto formula = oracle::unary_formulas().find(op.name); formula != oracle::unary_formulas().end())
      row.oracle = [f = formula->second](Args x) { return oracle::map(x[0], f); };
    rows.push_back(row);
  });
  for_each_op<BinaryOp>([&](auto op) {
    Row row{.op = op.name,
            .variant = "",
            .inputs =
                [op](Layout l) {
                  if (l == Layout::broadcast) return Inputs{domain_input(op, {4, 1, 3}), domain_input(op, {5, 1})};
                  return Inputs{domain_input(op, any_shape(l)), domain_input(op, any_shape(l))};
                },
            .call = [op](Args x) { return binary(op, x[0], x[1]); },
            .backward_limit = 1.10,
            .elementwise = true};
    if (const auto formula = oracle::binary_formulas().find(op.name); formula != oracle::binary_formulas().end())
      row.oracle = [f = formula->second](Args x) { return oracle::zip(x[0], x[1], f); };
    rows.push_back(row);
  });
  for (Row& row : rows)
    for (const char* name : {"neg", "abs", "square", "relu", "clamp", "add_scalar", "mul_scalar", "add", "sub", "mul",
                             "maximum", "minimum"})
      row.exact |= row.op == name;
}

struct ProductSize {
  std::int64_t m = 4, k = 6, n = 5;
};
inline ProductSize product_size(Layout l) {
  switch (l) {
    case Layout::empty:
      return {0, 6, 5};
    case Layout::one:
      return {1, 1, 1};
    case Layout::odd:
      return {7, 11, 3};
    case Layout::large:
      return {129, 257, 130};
    case Layout::aligned:
      return {128, 256, 128};
    default:
      return {};
  }
}

inline void add_products(std::vector<Row>& rows) {
  const auto call = [](Args x) { return matmul(x[0], x[1]); };
  const auto by_definition = [](Args x) { return oracle::matmul(x[0], x[1]); };
  rows.push_back({.op = "matmul",
                  .variant = "",
                  .inputs =
                      [](Layout l) {
                        const auto [m, k, n] = product_size(l);
                        if (l == Layout::broadcast) return Inputs{{{2, 1, m, k}}, {{3, k, n}}};
                        return Inputs{{{m, k}}, {{k, n}}};
                      },
                  .call = call,
                  .oracle = by_definition,
                  .exact = true});
  rows.push_back({.op = "matmul",
                  .variant = "batched",
                  .inputs =
                      [](Layout l) {
                        const auto [m, k, n] = product_size(l);
                        if (l == Layout::broadcast) return Inputs{{{2, 3, m, k}}, {{k, n}}};
                        return Inputs{{{3, m, k}}, {{3, k, n}}};
                      },
                  .call = call,
                  .oracle = by_definition,
                  .exact = true});
  rows.push_back({.op = "matmul",
                  .variant = "vector",
                  .inputs =
                      [](Layout l) {
                        const auto [m, k, n] = product_size(l);
                        if (l == Layout::broadcast || is_large(l)) return Inputs{};
                        return Inputs{{{k}}, {{3, k, n}}};
                      },
                  .call = call,
                  .exact = true});
  for (const auto activation : {Activation::none, Activation::relu, Activation::gelu_tanh})
    for (const bool bias : {true, false}) {
      const char* names[] = {"", "relu", "gelu_tanh"};
      const std::string name = names[static_cast<int>(activation)];
      rows.push_back({.op = "linear",
                      .variant = name + (bias ? " bias" : ""),
                      .inputs =
                          [=](Layout l) {
                            const auto [m, k, n] = product_size(l);
                            if (l == Layout::broadcast) return Inputs{};
                            Inputs in{{{2, is_large(l) ? m / 2 : m, k}}, {{n, k}}};
                            if (bias) in.push_back({{n}});
                            return in;
                          },
                      .call = [=](Args x) { return linear(x[0], x[1], bias ? x[2] : Tensor{}, activation); },
                      .oracle =
                          [=](Args x) {
                            return oracle::linear(x[0], x[1], bias ? x[2].to_vector<double>() : std::vector<double>{},
                                                  name);
                          },
                      .exact = activation != Activation::gelu_tanh,
                      .inner_kink = activation == Activation::relu});
    }
}

inline void add_attention(std::vector<Row>& rows) {
  for (const bool causal : {false, true})
    for (const std::int64_t groups : {1, 2})
      rows.push_back({.op = "attention",
                      .variant = std::string(causal ? "causal" : "full") + (groups > 1 ? " grouped" : ""),
                      .inputs =
                          [=](Layout l) {
                            std::int64_t b = 2, h = 2 * groups, t = 5, d = 4, s = 6;
                            if (l == Layout::broadcast) return Inputs{};
                            if (l == Layout::empty) b = 0;
                            if (l == Layout::one) b = t = d = s = 1, h = groups;
                            if (l == Layout::odd) b = 1, t = s = 7, d = 3;
                            if (is_large(l))
                              // Enough samples that the ratio is that of the kernel, not of the draw.
                              b = 8, h = 4, t = s = l == Layout::large ? 71 : 64, d = l == Layout::large ? 40 : 64;
                            return Inputs{{{b, h, t, d}}, {{b, h / groups, s, d}}, {{b, h / groups, s, d}}};
                          },
                      .call = [=](Args x) { return attention(x[0], x[1], x[2], causal); },
                      .oracle =
                          [=](Args x) {
                            return oracle::attention(x[0], x[1], x[2], causal,
                                                     1 / std::sqrt(static_cast<double>(x[0].size(3))));
                          },
                      // On the GPU the gradients of k and v of grouped heads come close to 2.0 and now and then
                      // pass it (2.07): cuDNN rounds those of each head to 16 bits before it adds them.
                      .forward_limit = 1.5});
  rows.push_back({.op = "attention_qkv",
                  .variant = "",
                  .inputs =
                      [](Layout l) {
                        std::int64_t b = 2, t = 5, d = 4;
                        if (l == Layout::broadcast) return Inputs{};
                        if (l == Layout::empty) b = 0;
                        if (l == Layout::one) b = t = d = 1;
                        if (l == Layout::odd) b = 3, t = 7, d = 3;
                        if (is_large(l)) t = l == Layout::large ? 71 : 64, d = l == Layout::large ? 40 : 64;
                        return Inputs{{{b, t, 3 * 2 * d}}};
                      },
                  .call = [](Args x) { return attention_qkv(x[0], 2); },
                  .oracle =
                      [](Args x) {  // the packed projection taken apart by indices
                        const oracle::Array packed = x[0];
                        const std::int64_t b = packed.size(0), t = packed.size(1), d = packed.size(2) / 6;
                        oracle::Array part[3] = {oracle::Array({b, 2, t, d}), oracle::Array({b, 2, t, d}),
                                                 oracle::Array({b, 2, t, d})};
                        for (int which = 0; which < 3; ++which)
                          oracle::for_each_index(part[which].shape, [&](std::size_t flat, const Shape& at) {
                            part[which].v[flat] = packed(at[0], at[2], (which * 2 + at[1]) * d + at[3]);
                          });
                        const oracle::Array y =
                            oracle::attention(part[0], part[1], part[2], true, 1 / std::sqrt(static_cast<double>(d)));
                        oracle::Array merged({b, t, 2 * d});
                        oracle::for_each_index(y.shape, [&](std::size_t flat, const Shape& at) {
                          merged(at[0], at[2], at[1] * d + at[3]) = y.v[flat];
                        });
                        return merged;
                      },
                  .forward_limit = 1.5});
}

inline void add_norms(std::vector<Row>& rows) {
  for (const int axis : {-1, 0}) {
    const auto inputs = [](Layout l) { return l == Layout::broadcast ? Inputs{} : Inputs{{any_shape(l), -3, 3}}; };
    rows.push_back({.op = "softmax",
                    .variant = axis < 0 ? "last axis" : "first axis",
                    .inputs = inputs,
                    .call = [axis](Args x) { return softmax(x[0], axis); },
                    .oracle = [axis](Args x) { return oracle::softmax(x[0], axis, false); }});
    rows.push_back({.op = "log_softmax",
                    .variant = axis < 0 ? "last axis" : "first axis",
                    .inputs = inputs,
                    .call = [axis](Args x) { return log_softmax(x[0], axis); },
                    .oracle = [axis](Args x) { return oracle::softmax(x[0], axis, true); }});
  }
  const auto inputs = [](bool residual, bool weight, bool bias) {
    return [=](Layout l) {
      if (l == Layout::broadcast) return Inputs{};
      const Shape shape = l == Layout::one ? Shape{1, 3} : any_shape(l);
      Inputs in{{shape}};
      if (residual) in.push_back({shape});
      if (weight) in.push_back({.shape = {shape.back()}, .parameter = true});
      if (bias) in.push_back({.shape = {shape.back()}, .parameter = true});
      return in;
    };
  };
  const auto list = [](const Tensor& x) { return x.to_vector<double>(); };
  // The sum is stored rounded, so the reference of a norm in 16 bits starts a rounding later: no oracle, and a limit
  // of 2.
  rows.push_back({.op = "layer_norm",
                  .variant = "",
                  .inputs = inputs(false, true, true),
                  .call = [](Args x) { return layer_norm(x[0], x[1], x[2]); },
                  .oracle = [=](Args x) { return oracle::norm(x[0], false, list(x[1]), list(x[2]), 1e-5); }});
  rows.push_back({.op = "layer_norm",
                  .variant = "plain",
                  .inputs = inputs(false, false, false),
                  .call = [](Args x) { return layer_norm(x[0]); },
                  .oracle = [](Args x) { return oracle::norm(x[0], false, {}, {}, 1e-5); }});
  rows.push_back({.op = "rms_norm",
                  .variant = "",
                  .inputs = inputs(false, true, false),
                  .call = [](Args x) { return rms_norm(x[0], x[1]); },
                  .oracle = [=](Args x) { return oracle::norm(x[0], true, list(x[1]), {}, 1e-6); }});
  const auto sum = [](Args x) { return oracle::zip(x[0], x[1], [](double a, double b) { return a + b; }); };
  rows.push_back({.op = "add_layer_norm",
                  .variant = "norm",
                  .inputs = inputs(true, true, true),
                  .call = [](Args x) { return add_layer_norm(x[0], x[1], x[2], x[3]).y; },
                  .oracle = [=](Args x) { return oracle::norm(sum(x), false, list(x[2]), list(x[3]), 1e-5); },
                  .forward_limit = 2.0});
  rows.push_back({.op = "add_layer_norm",
                  .variant = "sum",
                  .inputs = inputs(true, true, true),
                  .call = [](Args x) { return add_layer_norm(x[0], x[1], x[2], x[3]).sum; },
                  .oracle = sum});
  rows.push_back({.op = "add_layer_norm",
                  .variant = "both",
                  .inputs = inputs(true, true, true),
                  .call =
                      [](Args x) {
                        const Normed n = add_layer_norm(x[0], x[1], x[2], x[3]);
                        return concat({n.y, n.sum}, 0);
                      },
                  .forward_limit = 2.0});
  rows.push_back({.op = "add_rms_norm",
                  .variant = "norm",
                  .inputs = inputs(true, true, false),
                  .call = [](Args x) { return add_rms_norm(x[0], x[1], x[2]).y; },
                  .oracle = [=](Args x) { return oracle::norm(sum(x), true, list(x[2]), {}, 1e-6); },
                  .forward_limit = 2.0});
  for (const bool training : {true, false})
    rows.push_back(
        {.op = "batch_norm",
         .variant = training ? "training" : "inference",
         .inputs =
             [](Layout l) {
               if (l == Layout::broadcast || l == Layout::empty || l == Layout::one) return Inputs{};
               const Shape shape = l == Layout::odd       ? Shape{3, 5, 3, 1}
                                   : l == Layout::large   ? Shape{8, 17, 13, 11}
                                   : l == Layout::aligned ? Shape{8, 16, 12, 12}
                                                          : Shape{2, 3, 2, 3};
               return Inputs{
                   {shape}, {.shape = {shape[1]}, .parameter = true}, {.shape = {shape[1]}, .parameter = true}};
             },
         .call =
             [training](Args x) {
               const TensorOptions o{compute_dtype(x[0].dtype()), x[0].device()};
               return batch_norm(x[0], x[1], x[2], full({x[0].size(1)}, 0.1, o), full({x[0].size(1)}, 1.5, o),
                                 training);
             },
         .oracle = [training](Args x) { return oracle::batch_norm(x[0], x[1], x[2], 0.1, 1.5, training, 1e-5); }});
}

inline void add_losses(std::vector<Row>& rows) {
  for (const double smoothing : {0.0, 0.1})
    rows.push_back(
        {.op = "cross_entropy",
         .variant = smoothing > 0 ? "smoothing" : "",
         .inputs =
             [](Layout l) {
               if (l == Layout::broadcast) return Inputs{};
               std::int64_t n = 4, classes = 6;
               if (l == Layout::empty) n = 0;
               if (l == Layout::one) n = classes = 1;
               if (l == Layout::odd) n = 7, classes = 5;
               if (l == Layout::large) n = 130, classes = 501;
               if (l == Layout::aligned) n = 128, classes = 512;
               return Inputs{{{n, classes}, -3, 3}, {.shape = {n}, .classes = classes, .differentiable = false}};
             },
         .call = [smoothing](
                     Args x) { return cross_entropy(x[0], x[1], {.ignore_index = 2, .label_smoothing = smoothing}); },
         .oracle = [smoothing](Args x) { return oracle::cross_entropy(x[0], x[1], 2, smoothing); }});
  rows.push_back({.op = "mse_loss",
                  .variant = "",
                  .inputs =
                      [](Layout l) {
                        if (l == Layout::broadcast || l == Layout::empty) return Inputs{};
                        return Inputs{{any_shape(l)}, {any_shape(l)}};
                      },
                  .call = [](Args x) { return mse_loss(x[0], x[1]); },
                  .oracle = [](Args x) { return oracle::mse_loss(x[0], x[1]); }});
}

inline void add_reductions(std::vector<Row>& rows) {
  for (const std::vector<int>& axes : std::vector<std::vector<int>>{{}, {0}, {-1}, {0, -1}}) {
    std::string variant = "axes";
    for (const int a : axes) variant.append(" ").append(std::to_string(a));
    const auto inputs = [axes](Layout l) { return l == Layout::one && axes.size() > 1 ? Inputs{} : any_input(l); };
    rows.push_back({.op = "sum",
                    .variant = variant,
                    .inputs = inputs,
                    .call = [axes](Args x) { return sum(x[0], axes); },
                    .oracle = [axes](Args x) { return oracle::reduce(oracle::Reduction::sum, x[0], axes, false); },
                    .exact = true});
    rows.push_back({.op = "mean",
                    .variant = variant,
                    .inputs = [inputs](Layout l) { return l == Layout::empty ? Inputs{} : inputs(l); },
                    .call = [axes](Args x) { return mean(x[0], axes, true); },
                    .oracle = [axes](Args x) { return oracle::reduce(oracle::Reduction::mean, x[0], axes, true); }});
  }
  const auto plain = [](Layout l) { return l == Layout::empty ? Inputs{} : any_input(l); };
  rows.push_back({.op = "var",
                  .variant = "",
                  .inputs = [plain](Layout l) { return l == Layout::one ? Inputs{} : plain(l); },
                  .call = [](Args x) { return var(x[0], {0}); },
                  .oracle = [](Args x) { return oracle::reduce(oracle::Reduction::var, x[0], {0}, false); }});
  rows.push_back({.op = "max",
                  .variant = "",
                  .inputs = plain,
                  .call = [](Args x) { return max(x[0], -1); },
                  .oracle = [](Args x) { return oracle::reduce(oracle::Reduction::max, x[0], {-1}, false); },
                  .exact = true});
  rows.push_back({.op = "min",
                  .variant = "",
                  .inputs = plain,
                  .call = [](Args x) { return min(x[0], 0, true); },
                  .oracle = [](Args x) { return oracle::reduce(oracle::Reduction::min, x[0], {0}, true); },
                  .exact = true});
}

inline void add_images(std::vector<Row>& rows) {
  struct Conv {
    const char* variant;
    std::int64_t kernel;
    Conv2dOptions o;
    bool bias;
  };
  const Conv2dOptions plain, padded{.padding = {1, 1}}, strided{.stride = {2, 3}, .padding = {0, 2}},
      dilated{.padding = {2, 2}, .dilation = {2, 2}}, grouped{.groups = 2};
  for (const Conv& c :
       {Conv{"1x1", 1, plain, true}, Conv{"padded", 3, padded, true}, Conv{"strided", 3, strided, false},
        Conv{"dilated", 3, dilated, false}, Conv{"grouped", 3, grouped, true}})
    rows.push_back({.op = "conv2d",
                    .variant = c.variant,
                    .inputs =
                        [c](Layout l) {
                          if (l == Layout::broadcast) return Inputs{};
                          std::int64_t n = 2, in = 4, out = 6, h = 6, w = 5;
                          if (l == Layout::empty) n = 0;
                          if (l == Layout::one)
                            n = 1, in = out = c.o.groups, h = w = c.kernel + (c.kernel - 1) * (c.o.dilation[0] - 1);
                          if (l == Layout::odd) n = 3, in = 2, out = 4, h = 7, w = 9;
                          if (l == Layout::large) n = 4, in = 16, out = 24, h = 14, w = 13;
                          if (l == Layout::aligned) n = 4, in = 32, out = 64, h = w = 16;
                          Inputs inputs{{{n, in, h, w}}, {{out, in / c.o.groups, c.kernel, c.kernel}}};
                          if (c.bias) inputs.push_back({{out}});
                          return inputs;
                        },
                    .call = [c](Args x) { return conv2d(x[0], x[1], c.bias ? x[2] : Tensor{}, c.o); },
                    .oracle =
                        [c](Args x) {
                          return oracle::conv2d(x[0], x[1], c.bias ? x[2].to_vector<double>() : std::vector<double>{},
                                                c.o);
                        },
                    .forward_limit = c.bias ? 2.0 : 1.10,  // the bias is added to the rounded product
                    .exact = true});
  const Pool2dOptions overlapping{.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
  Pool2dOptions inside = overlapping;
  inside.count_include_pad = false;
  const auto inputs = [](Layout l) {
    switch (l) {
      case Layout::broadcast:
        return Inputs{};
      case Layout::empty:
        return Inputs{{{0, 3, 4, 4}}};
      case Layout::one:
        return Inputs{{{1, 1, 2, 2}}};
      case Layout::odd:
        return Inputs{{{2, 3, 7, 5}}};
      case Layout::large:
        return Inputs{{{4, 63, 15, 16}}};
      case Layout::aligned:
        return Inputs{{{4, 64, 16, 16}}};
      default:
        return Inputs{{{2, 3, 4, 6}}};
    }
  };
  const auto add = [&](const char* variant, const Pool2dOptions& o, bool both) {
    if (both)
      rows.push_back({.op = "max_pool2d",
                      .variant = variant,
                      .inputs = inputs,
                      .call = [o](Args x) { return max_pool2d(x[0], o); },
                      .oracle = [o](Args x) { return oracle::pool2d(x[0], true, o); },
                      .exact = true});
    rows.push_back({.op = "avg_pool2d",
                    .variant = variant,
                    .inputs = inputs,
                    .call = [o](Args x) { return avg_pool2d(x[0], o); },
                    .oracle = [o](Args x) { return oracle::pool2d(x[0], false, o); },
                    .exact = o.kernel[0] == 2});
  };
  add("", {}, true);
  add("overlapping", overlapping, true);
  add("without padding", inside, false);
}

inline void add_indexing(std::vector<Row>& rows) {
  rows.push_back(
      {.op = "embedding",
       .variant = "",
       .inputs =
           [](Layout l) {
             if (l == Layout::broadcast) return Inputs{};
             const Shape ids = l == Layout::empty     ? Shape{0, 2}
                               : l == Layout::one     ? Shape{1}
                               : l == Layout::large   ? Shape{9, 301}
                               : l == Layout::aligned ? Shape{32, 64}
                                                      : Shape{3, 5};
             return Inputs{{.shape = ids, .classes = 7, .differentiable = false}, {{7, l == Layout::odd ? 5 : 8}}};
           },
       .call = [](Args x) { return embedding(x[0], x[1]); },
       .oracle = [](Args x) { return oracle::embedding(x[0], x[1]); },
       .exact = true});
  const auto inputs = [](Layout l, bool base) {
    if (l == Layout::broadcast) return Inputs{};
    std::int64_t range = 5, columns = 3, picks = 4;
    if (l == Layout::empty) columns = 0;
    if (l == Layout::one) range = columns = picks = 1;
    if (is_large(l)) columns = l == Layout::large ? 300 : 256, picks = 40;
    Inputs in{{{range, columns}}, {.shape = {picks, columns}, .classes = range, .differentiable = false}};
    if (base) in.push_back({{picks, columns}});
    return in;
  };
  rows.push_back({.op = "gather",
                  .variant = "",
                  .inputs = [inputs](Layout l) { return inputs(l, false); },
                  .call = [](Args x) { return gather(x[0], 0, x[1]); },
                  .oracle = [](Args x) { return oracle::gather(x[0], x[1]); },
                  .exact = true});
  rows.push_back({.op = "scatter_add",
                  .variant = "",
                  .inputs = [inputs](Layout l) { return inputs(l, true); },
                  .call = [](Args x) { return scatter_add(x[0], 0, x[1], x[2]); },
                  .oracle = [](Args x) { return oracle::scatter_add(x[0], x[1], x[2]); },
                  .exact = true});
}

inline void add_shapes(std::vector<Row>& rows) {
  const auto add = [&](const char* op, std::function<Tensor(Args)> call,
                       std::function<Inputs(Layout)> inputs = any_input) {
    rows.push_back({.op = op,
                    .variant = "",
                    .inputs = std::move(inputs),
                    .call = std::move(call),
                    .backward_limit = 1.10,
                    .exact = true});
  };
  const auto two = [](Layout l) { return l == Layout::broadcast ? Inputs{} : Inputs{{any_shape(l)}, {any_shape(l)}}; };
  add("reshape", [](Args x) { return x[0].reshape({x[0].numel(), 1}); });
  add("permute", [](Args x) { return x[0].rank() == 3 ? x[0].permute({2, 0, 1}) : x[0].transpose(0, -1); });
  add("slice", [](Args x) { return x[0].slice(-1, x[0].size(-1) > 1 ? 1 : 0, x[0].size(-1), 2); });
  add("select", [](Args x) { return x[0].select(-1, -1); });
  add("expand", [](Args x) {
    Shape shape = x[0].shape();
    shape.insert(1, 3);
    return x[0].unsqueeze(1).expand(shape);
  });
  add("contiguous", [](Args x) { return x[0].transpose(0, -1).contiguous(); });
  add("clone", [](Args x) { return x[0].transpose(0, -1).clone(); });
  add(
      "concat",
      [](Args x) {
        return concat({x[0], x[1], x[0]}, -1);
      },
      two);
  add(
      "stack",
      [](Args x) {
        return stack({x[0], x[1]}, 1);
      },
      two);
  add("split", [](Args x) { return split(x[0], 2, -1).back() * 2.0; });
  add(
      "where",
      [](Args x) {
        return where(compare(CompareOp::equal, x[0], ones({}, {i64, x[0].device()})), x[1], x[2]);
      },
      [](Layout l) {
        const bool broadcast = l == Layout::broadcast;
        return Inputs{{.shape = broadcast ? Shape{4, 1} : any_shape(l), .classes = 2, .differentiable = false},
                      {broadcast ? Shape{1, 6} : any_shape(l)},
                      {broadcast ? Shape{4, 6} : any_shape(l)}};
      });
  // The stream is put back, so that each call of a row draws the same mask.
  const auto fixed = [](auto f) {
    const PhiloxState now = random_state();
    set_random_state({.seed = 7, .offset = 3});
    Tensor y = f();
    set_random_state(now);
    return y;
  };
  add("dropout", [=](Args x) { return fixed([&] { return dropout(x[0], 0.5); }); });  // divides by 0.5: exact
  add(
      "checkpoint",
      [=](Args x) {
        return fixed([&] { return checkpoint([](Args in) { return dropout(in[0] * in[1], 0.5); }, {x[0], x[1]}); });
      },
      two);
}

inline const std::vector<Row>& op_table() {
  static const std::vector<Row> table = [] {
    std::vector<Row> rows;
    add_elementwise(rows);
    add_products(rows);
    add_attention(rows);
    add_norms(rows);
    add_losses(rows);
    add_reductions(rows);
    add_images(rows);
    add_indexing(rows);
    add_shapes(rows);
    return rows;
  }();
  return table;
}

}  // namespace mantissa::testing
