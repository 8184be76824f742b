#pragma once
// Every public op as a row: how to make inputs, how to call it, and how well it must round. One row, many uses: gradient
// check, every dtype against f64, CPU against GPU, Autocast against explicit casts (op_test.cpp).

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "support.h"

namespace mantissa::testing {

enum class Layout { contiguous, strided, broadcast, empty, one, odd, large, aligned };
inline const char* name(Layout l) {
  constexpr const char* names[] = {"contiguous", "strided", "broadcast", "empty", "one element", "odd sizes", "large", "large and aligned"};
  return names[static_cast<int>(l)];
}

/// An input: its shape, the interval its values come from, or a count of classes for an index.
struct Input {
  Shape shape;
  double low = -2, high = 2;
  std::int64_t classes = 0;       // > 0: i64 indices below it
  bool differentiable = true;
  bool parameter = false;         // stays in the compute dtype: weights of norms
};

struct Row {
  std::string op;                                       // its name in autocast_table()
  std::string variant;                                  // options of this row
  std::function<std::vector<Input>(Layout)> inputs;     // empty vector: the layout does not apply
  std::function<Tensor(std::span<const Tensor>)> call;
  double forward_limit = 1.10, backward_limit = 2.0;    // ratio to perfect rounding in 16 bits
  bool elementwise = false;
};

inline std::vector<Input> same(std::initializer_list<Input> inputs) { return inputs; }

/// One shape for each layout, for ops that take any.
inline Shape any_shape(Layout l) {
  switch (l) {
    case Layout::empty: return {0, 3};
    case Layout::one: return {1};
    case Layout::odd: return {3, 5, 7};
    case Layout::large: return {67, 301};
    case Layout::aligned: return {64, 320};
    default: return {4, 6};
  }
}

template <class Op>
Input domain_input(const Op&, const Shape& shape) {
  if constexpr (requires { Op::domain; }) return {shape, Op::domain.low, Op::domain.high};
  return {shape, -2.5, 2.5};
}

inline void add_elementwise(std::vector<Row>& rows) {
  for_each_op<UnaryOp>([&](auto op) {
    rows.push_back({op.name, "", [op](Layout l) { return l == Layout::broadcast ? std::vector<Input>{} : same({domain_input(op, any_shape(l))}); },
                    [op](std::span<const Tensor> x) { return unary(op, x[0]); }, 1.10,
                    op.needs == Needs::output ? 2.0 : 1.10, true});  // a gradient taken from the rounded output rounds twice
  });
  for_each_op<BinaryOp>([&](auto op) {
    rows.push_back({op.name, "", [op](Layout l) {
                      if (l == Layout::broadcast) return same({domain_input(op, {4, 1, 3}), domain_input(op, {5, 1})});
                      return same({domain_input(op, any_shape(l)), domain_input(op, any_shape(l))});
                    },
                    [op](std::span<const Tensor> x) { return binary(op, x[0], x[1]); }, 1.10, 1.10, true});
  });
}

inline void add_linear(std::vector<Row>& rows) {
  const auto sizes = [](Layout l, std::int64_t& m, std::int64_t& k, std::int64_t& n) {
    m = 4, k = 6, n = 5;
    if (l == Layout::empty) m = 0;
    if (l == Layout::one) m = k = n = 1;
    if (l == Layout::odd) m = 7, k = 11, n = 3;
    if (l == Layout::large) m = 129, k = 257, n = 130;
    if (l == Layout::aligned) m = 128, k = 256, n = 192;
  };
  rows.push_back({"matmul", "", [=](Layout l) {
                    std::int64_t m, k, n;
                    sizes(l, m, k, n);
                    if (l == Layout::broadcast) return same({{{2, 1, m, k}}, {{3, k, n}}});
                    return same({{{m, k}}, {{k, n}}});
                  },
                  [](std::span<const Tensor> x) { return matmul(x[0], x[1]); }});
  rows.push_back({"matmul", "batched", [=](Layout l) {
                    std::int64_t m, k, n;
                    sizes(l, m, k, n);
                    if (l == Layout::broadcast) return std::vector<Input>{};
                    return same({{{3, m, k}}, {{3, k, n}}});
                  },
                  [](std::span<const Tensor> x) { return matmul(x[0], x[1]); }});
  rows.push_back({"matmul", "vector", [=](Layout l) {
                    std::int64_t m, k, n;
                    sizes(l, m, k, n);
                    if (l == Layout::broadcast || l == Layout::large || l == Layout::aligned) return std::vector<Input>{};
                    return same({{{k}}, {{3, k, n}}});
                  },
                  [](std::span<const Tensor> x) { return matmul(x[0], x[1]); }});
  for (const auto activation : {Activation::none, Activation::relu, Activation::gelu_tanh})
    for (const bool bias : {true, false}) {
      const char* names[] = {"none", "relu", "gelu_tanh"};
      rows.push_back({"linear", std::string(names[static_cast<int>(activation)]) + (bias ? " bias" : ""), [=](Layout l) {
                        std::int64_t m, k, n;
                        sizes(l, m, k, n);
                        if (l == Layout::broadcast) return std::vector<Input>{};
                        std::vector<Input> in{{{2, m, k}}, {{n, k}}};
                        if (bias) in.push_back({{n}});
                        return in;
                      },
                      [=](std::span<const Tensor> x) { return linear(x[0], x[1], bias ? x[2] : Tensor{}, activation); },
                      activation == Activation::gelu_tanh ? 1.25 : 1.10, 2.0});
    }
  for (const bool causal : {false, true})
    for (const std::int64_t groups : {1, 2}) {
      rows.push_back({"attention", std::string(causal ? "causal" : "full") + (groups > 1 ? " grouped" : ""), [=](Layout l) {
                        std::int64_t b = 2, h = 2 * groups, t = 5, d = 4;
                        if (l == Layout::broadcast) return std::vector<Input>{};
                        if (l == Layout::empty) b = 0;
                        if (l == Layout::one) b = t = d = 1, h = groups;
                        if (l == Layout::odd) b = 1, t = 7, d = 3;
                        if (l == Layout::large || l == Layout::aligned) b = 2, h = 4, t = l == Layout::large ? 96 : 128, d = 64;
                        return same({{{b, h, t, d}}, {{b, h / groups, t, d}}, {{b, h / groups, t, d}}});
                      },
                      [=](std::span<const Tensor> x) { return attention(x[0], x[1], x[2], causal); }, 1.5, 2.0});
    }
  rows.push_back({"attention_qkv", "", [](Layout l) {
                    std::int64_t b = 2, t = 5, d = 4;
                    if (l == Layout::broadcast) return std::vector<Input>{};
                    if (l == Layout::empty) b = 0;
                    if (l == Layout::one) b = t = d = 1;
                    if (l == Layout::odd) b = 3, t = 7, d = 3;
                    if (l == Layout::large || l == Layout::aligned) b = 2, t = l == Layout::large ? 120 : 128, d = 64;
                    return same({{{b, t, 3 * 2 * d}}});
                  },
                  [](std::span<const Tensor> x) { return attention_qkv(x[0], 2); }, 1.5, 2.0});
}

inline void add_norms(std::vector<Row>& rows) {
  for (const int axis : {-1, 0}) {
    const auto inputs = [](Layout l) {
      if (l == Layout::broadcast) return std::vector<Input>{};
      return same({{l == Layout::empty ? Shape{0, 3} : any_shape(l), -3, 3}});
    };
    rows.push_back({"softmax", "axis " + std::to_string(axis), inputs, [axis](std::span<const Tensor> x) { return softmax(x[0], axis); }});
    rows.push_back({"log_softmax", "axis " + std::to_string(axis), inputs, [axis](std::span<const Tensor> x) { return log_softmax(x[0], axis); }});
  }
  const auto norm_inputs = [](bool residual, bool weight, bool bias) {
    return [=](Layout l) {
      if (l == Layout::broadcast) return std::vector<Input>{};
      const Shape shape = l == Layout::one ? Shape{1, 3} : any_shape(l);
      std::vector<Input> in{{shape}};
      if (residual) in.push_back({shape});
      if (weight) in.push_back({.shape = {shape.back()}, .parameter = true});
      if (bias) in.push_back({.shape = {shape.back()}, .parameter = true});
      return in;
    };
  };
  rows.push_back({"layer_norm", "", norm_inputs(false, true, true), [](std::span<const Tensor> x) { return layer_norm(x[0], x[1], x[2]); }});
  rows.push_back({"layer_norm", "plain", norm_inputs(false, false, false), [](std::span<const Tensor> x) { return layer_norm(x[0]); }});
  rows.push_back({"rms_norm", "", norm_inputs(false, true, false), [](std::span<const Tensor> x) { return rms_norm(x[0], x[1]); }});
  rows.push_back({"add_layer_norm", "norm", norm_inputs(true, true, true), [](std::span<const Tensor> x) { return add_layer_norm(x[0], x[1], x[2], x[3]).y; }, 2.0, 2.0});
  rows.push_back({"add_layer_norm", "sum", norm_inputs(true, true, true), [](std::span<const Tensor> x) { return add_layer_norm(x[0], x[1], x[2], x[3]).sum; }});
  rows.push_back({"add_layer_norm", "both", norm_inputs(true, true, true),
                  [](std::span<const Tensor> x) {
                    const Normed n = add_layer_norm(x[0], x[1], x[2], x[3]);
                    return concat({n.y, n.sum}, 0);
                  }, 2.0, 2.0});
  rows.push_back({"add_rms_norm", "norm", norm_inputs(true, true, false), [](std::span<const Tensor> x) { return add_rms_norm(x[0], x[1], x[2]).y; }, 2.0, 2.0});
  for (const bool training : {true, false})
    rows.push_back({"batch_norm", training ? "training" : "inference", [](Layout l) {
                      if (l == Layout::broadcast || l == Layout::empty || l == Layout::one) return std::vector<Input>{};
                      const Shape shape = l == Layout::odd ? Shape{3, 5, 3, 1} : l == Layout::large ? Shape{8, 17, 13, 11} : l == Layout::aligned ? Shape{8, 16, 12, 12} : Shape{2, 3, 2, 3};
                      return same({{shape}, {.shape = {shape[1]}, .parameter = true}, {.shape = {shape[1]}, .parameter = true}});
                    },
                    [training](std::span<const Tensor> x) {
                      const TensorOptions o{compute_dtype(x[0].dtype()), x[0].device()};
                      return batch_norm(x[0], x[1], x[2], full({x[0].size(1)}, 0.1, o), full({x[0].size(1)}, 1.5, o), training);
                    }});
}

inline void add_losses(std::vector<Row>& rows) {
  for (const double smoothing : {0.0, 0.1})
    rows.push_back({"cross_entropy", smoothing > 0 ? "smoothing" : "", [](Layout l) {
                      if (l == Layout::broadcast) return std::vector<Input>{};
                      const std::int64_t n = l == Layout::empty ? 0 : l == Layout::one ? 1 : l == Layout::odd ? 7 : l == Layout::large ? 130 : l == Layout::aligned ? 128 : 4;
                      const std::int64_t classes = l == Layout::one ? 1 : l == Layout::odd ? 5 : l == Layout::large ? 501 : l == Layout::aligned ? 512 : 6;
                      return same({{{n, classes}, -3, 3}, {.shape = {n}, .classes = classes, .differentiable = false}});
                    },
                    [smoothing](std::span<const Tensor> x) {
                      return cross_entropy(x[0], x[1], {.ignore_index = 2, .label_smoothing = smoothing});
                    }});
  rows.push_back({"mse_loss", "", [](Layout l) {
                    if (l == Layout::broadcast || l == Layout::empty) return std::vector<Input>{};
                    return same({{any_shape(l)}, {any_shape(l)}});
                  },
                  [](std::span<const Tensor> x) { return mse_loss(x[0], x[1]); }});
}

inline void add_reductions(std::vector<Row>& rows) {
  for (const std::vector<int>& axes : std::vector<std::vector<int>>{{}, {0}, {-1}, {0, -1}}) {
    std::string variant = "axes";
    for (const int a : axes) variant += " " + std::to_string(a);
    const auto inputs = [axes](Layout l) {
      if (l == Layout::broadcast || (l == Layout::one && axes.size() > 1)) return std::vector<Input>{};
      return same({{any_shape(l)}});
    };
    rows.push_back({"sum", variant, inputs, [axes](std::span<const Tensor> x) { return sum(x[0], axes); }});
    rows.push_back({"mean", variant, [inputs](Layout l) { return l == Layout::empty ? std::vector<Input>{} : inputs(l); },
                    [axes](std::span<const Tensor> x) { return mean(x[0], axes, true); }});
  }
  const auto plain = [](Layout l) {
    if (l == Layout::broadcast || l == Layout::empty) return std::vector<Input>{};
    return same({{any_shape(l)}});
  };
  rows.push_back({"var", "", [plain](Layout l) { return l == Layout::one ? std::vector<Input>{} : plain(l); },
                  [](std::span<const Tensor> x) { return var(x[0], {0}); }});
  rows.push_back({"max", "", plain, [](std::span<const Tensor> x) { return max(x[0], -1); }});
  rows.push_back({"min", "", plain, [](std::span<const Tensor> x) { return min(x[0], 0, true); }});
}

inline void add_images(std::vector<Row>& rows) {
  struct Conv {
    const char* variant;
    std::int64_t kernel;
    Conv2dOptions o;
    bool bias;
  };
  Conv2dOptions plain, padded, strided, dilated, grouped;
  padded.padding[0] = padded.padding[1] = 1;
  strided.stride[0] = 2;
  strided.stride[1] = 3;
  strided.padding[1] = 2;
  dilated.dilation[0] = dilated.dilation[1] = 2;
  dilated.padding[0] = dilated.padding[1] = 2;
  grouped.groups = 2;
  for (const Conv& c : {Conv{"1x1", 1, plain, true}, Conv{"padded", 3, padded, true}, Conv{"strided", 3, strided, false}, Conv{"dilated", 3, dilated, false},
                        Conv{"grouped", 3, grouped, true}})
    rows.push_back({"conv2d", c.variant, [c](Layout l) {
                      if (l == Layout::broadcast) return std::vector<Input>{};
                      std::int64_t n = 2, in = 4, out = 6, h = 6, w = 5;
                      if (l == Layout::empty) n = 0;
                      if (l == Layout::one) n = 1, in = out = c.o.groups, h = w = c.kernel + (c.kernel - 1) * (c.o.dilation[0] - 1);
                      if (l == Layout::odd) n = 3, in = 2, out = 4, h = 7, w = 9;
                      if (l == Layout::large) n = 4, in = 16, out = 24, h = 14, w = 13;
                      if (l == Layout::aligned) n = 4, in = 32, out = 64, h = w = 16;
                      std::vector<Input> inputs{{{n, in, h, w}}, {{out, in / c.o.groups, c.kernel, c.kernel}}};
                      if (c.bias) inputs.push_back({{out}});
                      return inputs;
                    },
                    [c](std::span<const Tensor> x) { return conv2d(x[0], x[1], c.bias ? x[2] : Tensor{}, c.o); }, c.bias ? 2.0 : 1.10, 2.0});
  Pool2dOptions overlapping;
  for (int i = 0; i < 2; ++i) overlapping.kernel[i] = 3, overlapping.stride[i] = 2, overlapping.padding[i] = 1;
  for (const Pool2dOptions& o : {Pool2dOptions{}, overlapping}) {
    const auto inputs = [](Layout l) {
      if (l == Layout::broadcast) return std::vector<Input>{};
      return same({{l == Layout::empty ? Shape{0, 3, 4, 4} : l == Layout::one ? Shape{1, 1, 2, 2} : l == Layout::odd ? Shape{2, 3, 7, 5} : l == Layout::large ? Shape{4, 32, 15, 14} : l == Layout::aligned ? Shape{4, 32, 16, 16} : Shape{2, 3, 4, 6}}});
    };
    const std::string variant = o.padding[0] > 0 ? "overlapping" : "";
    rows.push_back({"max_pool2d", variant, inputs, [o](std::span<const Tensor> x) { return max_pool2d(x[0], o); }});
    rows.push_back({"avg_pool2d", variant, inputs, [o](std::span<const Tensor> x) { return avg_pool2d(x[0], o); }});
  }
}

inline void add_indexing(std::vector<Row>& rows) {
  rows.push_back({"embedding", "", [](Layout l) {
                    if (l == Layout::broadcast) return std::vector<Input>{};
                    const Shape ids = l == Layout::empty ? Shape{0, 2} : l == Layout::one ? Shape{1} : l == Layout::large ? Shape{9, 301} : l == Layout::aligned ? Shape{16, 64} : Shape{3, 5};
                    return same({{.shape = ids, .classes = 7, .differentiable = false}, {{7, l == Layout::odd ? 5 : 8}}});
                  },
                  [](std::span<const Tensor> x) { return embedding(x[0], x[1]); }});
  const auto inputs = [](Layout l, bool base) {
    if (l == Layout::broadcast || l == Layout::strided) return std::vector<Input>{};
    const std::int64_t rows_count = l == Layout::one ? 1 : 5, columns = l == Layout::large ? 300 : l == Layout::aligned ? 256 : l == Layout::empty ? 0 : l == Layout::one ? 1 : 3, picks = l == Layout::large || l == Layout::aligned ? 40 : l == Layout::one ? 1 : 4;
    std::vector<Input> in{{{rows_count, columns}}, {.shape = {picks, columns}, .classes = rows_count, .differentiable = false}};
    if (base) in.push_back({{picks, columns}});
    return in;
  };
  rows.push_back({"gather", "", [inputs](Layout l) { return inputs(l, false); }, [](std::span<const Tensor> x) { return gather(x[0], 0, x[1]); }});
  rows.push_back({"scatter_add", "", [inputs](Layout l) { return inputs(l, true); }, [](std::span<const Tensor> x) { return scatter_add(x[0], 0, x[1], x[2]); }});
}

inline const std::vector<Row>& op_table() {
  static const std::vector<Row> table = [] {
    std::vector<Row> rows;
    add_elementwise(rows);
    add_linear(rows);
    add_norms(rows);
    add_losses(rows);
    add_reductions(rows);
    add_images(rows);
    add_indexing(rows);
    return rows;
  }();
  return table;
}

}  // namespace mantissa::testing
