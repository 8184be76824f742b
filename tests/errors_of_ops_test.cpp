// Error messages of every op: the type, the op, the operands, the place.

#include "errors_support.h"

namespace mantissa {
namespace {

using namespace testing;

class Errors : public ErrorsOnDevice {};
MT_ON_DEVICES(Errors);

// ---- shapes
// ---------------------------------------------------------------------------------------------------------------

TEST_P(Errors, Views) {
  const Tensor x = f({2, 3}, DType::f16);
  const std::string name = is("f16[2,3]");
  refuses<ShapeError>([&] { x.reshape({4, 2}); }, {"reshape: " + name + " has 6 elements, [4,2] has 8"});
  refuses<ShapeError>([&] { x.reshape({4, -1}); }, {"reshape: " + name + " does not fit [4,-1]"});
  refuses<ShapeError>([&] { x.reshape({0, -1}); }, {"reshape: " + name + " does not fit [0,-1]"});
  refuses<ShapeError>([&] { x.reshape({-1, -1}); }, {"reshape: at most one size may be -1", "[-1,-1]"});
  refuses<ShapeError>([&] { x.reshape({-2, 3}); }, {"reshape: at most one size may be -1 and none less", "[-2,3]"});
  refuses<ShapeError>([&] { x.permute({0}); }, {"permute: [0] does not name every axis of " + name});
  refuses<ShapeError>([&] { x.permute({0, 0}); }, {"permute: axis 0 appears twice in [0,0]"});
  refuses<ShapeError>([&] { x.permute({0, 2}); }, {"permute: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { x.transpose(0, 2); }, {"transpose: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { x.transpose(-3, 0); }, {"transpose: axis -3 is out of range for rank 2"});
  for (const auto& [begin, end, step] : {std::tuple{2, 1, 1}, {0, 4, 1}, {-4, 3, 1}, {0, 3, 0}, {0, 3, -1}})
    refuses<ShapeError>([&, b = begin, e = end, s = step] { x.slice(1, b, e, s); },
                        {"slice: [" + std::to_string(begin), "is not within axis 1 of " + name});
  refuses<ShapeError>([&] { x.slice(2, 0, 1); }, {"slice: axis 2 is out of range"});
  refuses<ShapeError>([&] { x.select(1, 3); }, {"select: index 3 is out of range for axis 1 of " + name});
  refuses<ShapeError>([&] { x.select(1, -4); }, {"select: index -4"});
  refuses<ShapeError>([&] { x.expand({2, 2, 4}); }, {"expand", "[2,3]", "[2,2,4]"});
  refuses<ShapeError>([&] { x.expand({3}); }, {"expand: " + name + " does not broadcast to [3]"});
  refuses<ShapeError>([&] { x.squeeze(0); }, {"squeeze: axis 0 of " + name + " does not have size 1"});
  refuses<ShapeError>([&] { x.unsqueeze(4); }, {"unsqueeze: axis 4 is out of range for rank 3"});
  refuses<ShapeError>([&] { x.copy_(f({5})); }, {"copy_", "[5]", "[2,3]"});
  refuses<ShapeError>(
      [&] {
        x.copy_(f({1, 2, 3}));
      },
      {"copy_: " + is("f32[1,2,3]") + " does not broadcast to " + name});
  refuses<ShapeError>([] { concat({}); }, {"concat: nothing to concatenate"});
  refuses<ShapeError>([&] { concat({x, f({2})}); }, {"concat: ranks differ: " + name + " and " + is("f32[2]")});
  refuses<ShapeError>(
      [&] {
        concat({x, f({2, 4}, DType::f16)});
      },
      {"concat: sizes off axis 0 differ: " + name + " and " + is("f16[2,4]")});
  refuses<DTypeError>(
      [&] {
        concat({x, i({2, 3})});
      },
      {"concat: expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<DTypeError>(
      [&] {
        concat({i({2, 3}), x});
      },
      {"concat: expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<ShapeError>([] { concat({f({}), f({})}); }, {"concat: axis 0 is out of range for rank 0"});
  refuses<ShapeError>([] { stack({}); }, {"stack: nothing to stack"});
  refuses<ShapeError>([&] { split(x, 0); }, {"split: the size must be positive, got 0"});
  refuses<ShapeError>([&] { split(x, 1, 5); }, {"split: axis 5 is out of range"});
}

TEST_P(Errors, InPlaceWrites) {
  const Tensor x = leaf(f({2}));
  refuses<AutogradError>([&] { x.fill_(1); }, {"fill_: " + is("f32[2]") + " requires a gradient; do it under NoGrad"});
  refuses<AutogradError>([&] { x.copy_(f({2})); },
                         {"copy_: " + is("f32[2]") + " requires a gradient; do it under NoGrad"});
}

TEST_P(Errors, UndefinedOperands) {
  const Tensor none, x = f({2, 3}), w = f({4, 3}), id = i({2}), image = f({1, 1, 4, 4}), c = f({1});
  struct Case {
    const char* name;
    std::function<void()> call;
  };
  const std::vector<Case> cases{{"exp", [&] { exp(none); }},
                                {"relu", [&] { relu(none); }},
                                {"add", [&] { none + x; }},
                                {"mul", [&] { x* none; }},
                                {"compare", [&] { none < x; }},
                                {"where", [&] { where(none, x, x); }},
                                {"where", [&] { where(x, none, x); }},
                                {"dropout", [&] { dropout(none, 0.5); }},
                                {"sum", [&] { sum(none); }},
                                {"mean", [&] { mean(none); }},
                                {"var", [&] { var(none); }},
                                {"max", [&] { max(none, 0); }},
                                {"argmax", [&] { argmax(none, 0); }},
                                {"matmul", [&] { matmul(x, none); }},
                                {"linear", [&] { linear(none, w); }},
                                {"linear", [&] { linear(x, none); }},
                                {"attention", [&] { attention(none, x, x); }},
                                {"attention_qkv", [&] { attention_qkv(none, 1); }},
                                {"softmax", [&] { softmax(none); }},
                                {"log_softmax", [&] { log_softmax(none); }},
                                {"layer_norm", [&] { layer_norm(none); }},
                                {"rms_norm", [&] { rms_norm(none); }},
                                {"add_layer_norm", [&] { add_layer_norm(x, none); }},
                                {"add_rms_norm", [&] { add_rms_norm(x, none); }},
                                {"batch_norm", [&] { batch_norm(none, c, c, c, c, true); }},
                                {"batch_norm", [&] { batch_norm(image, c, c, none, none, true); }},
                                {"cross_entropy", [&] { cross_entropy(none, id); }},
                                {"cross_entropy", [&] { cross_entropy(x, none); }},
                                {"mse_loss", [&] { mse_loss(x, none); }},
                                {"conv2d", [&] { conv2d(none, image); }},
                                {"conv2d", [&] { conv2d(image, none); }},
                                {"max_pool2d", [&] { max_pool2d(none); }},
                                {"avg_pool2d", [&] { avg_pool2d(none); }},
                                {"embedding", [&] { embedding(none, w); }},
                                {"embedding", [&] { embedding(id, none); }},
                                {"gather", [&] { gather(none, 0, id); }},
                                {"gather", [&] { gather(x, 0, none); }},
                                {"scatter_add",
                                 [&] {
                                   scatter_add(x, 0, i({2, 3}), none);
                                 }},
                                {"scatter_add", [&] { scatter_add(none, 0, id, x); }},
                                {"concat",
                                 [&] {
                                   concat({none, x});
                                 }},
                                {"concat",
                                 [&] {
                                   concat({x, none});
                                 }},
                                {"split", [&] { split(none, 1); }},
                                {"cast", [&] { cast(none, DType::f16); }},
                                {"reshape", [&] { none.reshape({1}); }},
                                {"permute", [&] { none.permute({0}); }},
                                {"transpose", [&] { none.transpose(0, 1); }},
                                {"slice", [&] { none.slice(0, 0, 1); }},
                                {"select", [&] { none.select(0, 0); }},
                                {"expand", [&] { none.expand({1}); }},
                                {"squeeze", [&] { none.squeeze(0); }},
                                {"unsqueeze", [&] { none.unsqueeze(0); }},
                                {"contiguous", [&] { none.contiguous(); }},
                                {"clone", [&] { none.clone(); }},
                                {"fill_", [&] { none.fill_(1); }},
                                {"copy_", [&] { x.copy_(none); }},
                                {"copy_", [&] { none.copy_(x); }},
                                {"to", [&] { none.to(device()); }}};
  for (const Case& one : cases) refuses<AutogradError>(one.call, {one.name, "is undefined"});
  refuses<AutogradError>([&] { batch_norm(image, none, none, c, c, true); }, {"batch_norm: w and b must be given"});
  std::printf("%zu ops refuse undefined operands\n", cases.size());
}

TEST_P(Errors, WrongTypes) {
  const Tensor x = f({2, 3}), whole = i({2, 3}), image = f({1, 1, 4, 4}), tiny = zeros({2, 3}, on(DType::f8e4m3));
  struct Case {
    const char* name;
    std::function<void()> call;
  };
  const std::vector<Case> cases{{"exp", [&] { exp(whole); }},
                                {"add", [&] { whole + x; }},
                                {"add", [&] { x + whole; }},
                                {"where", [&] { where(x > x, whole, x); }},
                                {"dropout", [&] { dropout(whole, 0.5); }},
                                {"sum", [&] { sum(whole); }},
                                {"var", [&] { var(whole); }},
                                {"max", [&] { max(whole, 0); }},
                                {"argmax", [&] { argmax(whole, 0); }},
                                {"matmul", [&] { matmul(x, whole); }},
                                {"linear", [&] { linear(x, whole); }},
                                {"softmax", [&] { softmax(whole); }},
                                {"layer_norm", [&] { layer_norm(whole); }},
                                {"rms_norm", [&] { rms_norm(whole); }},
                                {"cross_entropy", [&] { cross_entropy(whole, whole); }},
                                {"mse_loss", [&] { mse_loss(x, whole); }},
                                {"embedding", [&] { embedding(whole, whole); }},
                                {"gather", [&] { gather(whole, 0, whole); }},
                                {"scatter_add", [&] { scatter_add(x, 0, whole, whole); }}};
  for (const Case& c : cases)
    refuses<DTypeError>(c.call, {std::string(c.name) + ": expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<DTypeError>([&] { exp(tiny); }, {"exp: expected f64, f32, f16 or bf16, got " + is("f8e4m3[2,3]")});
  refuses<DTypeError>([&] { embedding(x, x); }, {"embedding: indices must be i64 or i32, got " + is("f32[2,3]")});
  refuses<DTypeError>([&] { cross_entropy(x, f({2})); },
                      {"cross_entropy: indices must be i64 or i32, got " + is("f32[2]")});
  refuses<DTypeError>([&] { gather(x, 0, x); }, {"gather: indices must be i64 or i32"});
  refuses<DTypeError>([&] { compare(CompareOp::less, x, whole); },
                      {"compare: dtypes differ: " + is("f32[2,3]") + " and " + is("i64[2,3]")});
  refuses<DTypeError>([&] { where(x, x, x); }, {"where: the condition must be bool, got " + is("f32[2,3]")});
  refuses<DTypeError>([&] { rand({2}, on(DType::i64)); },
                      {"random: expected f64, f32, f16 or bf16, got " + is("i64[2]")});
  refuses<DTypeError>(
      [&] {
        linear(x, f({4, 3}, DType::f16));
      },
      {"linear: dtypes differ: x is " + is("f32[2,3]") + ", w is " + is("f16[4,3]"), "Autocast"});
  refuses<DTypeError>(
      [&] {
        linear(x, f({4, 3}), f({4}, DType::bf16));
      },
      {"linear: dtypes differ", "b is " + is("bf16[4]")});
  refuses<DTypeError>(
      [&] {
        conv2d(image, f({1, 1, 3, 3}, DType::bf16));
      },
      {"conv2d: dtypes differ: x is " + is("f32[1,1,4,4]") + ", w is " + is("bf16[1,1,3,3]")});
  refuses<DTypeError>(
      [&] {
        attention(image, image, f({1, 1, 4, 4}, DType::f16));
      },
      {"attention: dtypes differ: q is", "v is " + is("f16[1,1,4,4]")});
  refuses<DTypeError>(
      [&] {
        add_layer_norm(x, f({2, 3}, DType::f16));
      },
      {"add_layer_norm: dtypes differ: x is " + is("f32[2,3]") + ", residual is " + is("f16[2,3]")});
  refuses<DTypeError>(
      [&] {
        scatter_add(x, 0, whole, f({2, 3}, DType::f16));
      },
      {"scatter_add: dtypes differ: base is " + is("f32[2,3]") + ", x is " + is("f16[2,3]")});
  refuses<DTypeError>([&] { batch_norm(image, f({1}), f({1}), f({1}, DType::f16), f({1}), true); },
                      {"batch_norm: running statistics must be f32, got " + is("f16[1]")});
}

// ---- ops
// ------------------------------------------------------------------------------------------------------------------

TEST_P(Errors, ShapesOfOps) {
  const Tensor x = f({32, 784}, DType::f16), image = f({2, 3, 8, 8}), c = f({3});
  refuses<ShapeError>(
      [&] {
        x + f({3, 784}, DType::f16);
      },
      {"add: shapes do not broadcast: [32,784] and [3,784]", "equal or contain a 1"});
  refuses<ShapeError>([&] { x < f({3, 784}, DType::f16); }, {"compare: shapes do not broadcast"});
  refuses<ShapeError>([&] { where(x > x, x, f({5})); }, {"where: shapes do not broadcast"});
  refuses<ShapeError>([&] { sum(x, {2}); }, {"sum: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { mean(x, {-3}); }, {"mean: axis -3 is out of range for rank 2"});
  refuses<ShapeError>([&] { var(x, {7}); }, {"axis 7 is out of range for rank 2"});
  refuses<ShapeError>([&] { max(f({2, 0}), 1); }, {"max: axis 1 of " + is("f32[2,0]") + " is empty"});
  refuses<ShapeError>([&] { min(f({0}), 0); }, {"min: axis 0 of " + is("f32[0]") + " is empty"});
  refuses<ShapeError>([&] { argmax(f({0, 2}), 0); }, {"argmax: axis 0 of " + is("f32[0,2]") + " is empty"});
  refuses<ShapeError>(
      [&] {
        matmul(x, f({32, 784}, DType::f16));
      },
      {"matmul: inner dimensions differ: a is " + is("f16[32,784]") + ", b is " + is("f16[32,784]")});
  refuses<ShapeError>([&] { matmul(x, f({})); },
                      {"matmul: scalars have no product; a is " + is("f16[32,784]") + ", b is " + is("f32[]")});
  refuses<ShapeError>([&] { matmul(f({2, 4, 5}), f({3, 5, 4})); }, {"matmul: shapes do not broadcast: [2] and [3]"});
  refuses<ShapeError>(
      [&] {
        linear(x, f({10, 100}, DType::f16));
      },
      {"linear: inner dimensions differ: x is " + is("f16[32,784]") + ", w is " + is("f16[10,100]") +
       " (w is [out, in])"});
  refuses<ShapeError>([&] { linear(x, f({784}, DType::f16)); }, {"linear: inner dimensions differ"});
  refuses<ShapeError>([&] { linear(f({}), f({1, 1})); }, {"linear: inner dimensions differ: x is " + is("f32[]")});
  refuses<ShapeError>(
      [&] {
        linear(f({2, 3}), f({4, 3}), f({3}));
      },
      {"linear: b is " + is("f32[3]") + ", w is " + is("f32[4,3]")});
  refuses<ShapeError>(
      [&] {
        attention(f({1, 2, 3}), image, image);
      },
      {"attention: expected [batch, heads, length, head size], got " + is("f32[1,2,3]")});
  refuses<ShapeError>(
      [&] {
        attention(f({1, 3, 4, 8}), f({1, 2, 4, 8}), f({1, 2, 4, 8}));
      },
      {"attention: shapes do not fit: q is " + is("f32[1,3,4,8]"), "heads divide q's"});
  refuses<ShapeError>(
      [&] {
        attention(f({1, 2, 4, 8}), f({1, 2, 4, 8}), f({1, 2, 5, 8}));
      },
      {"attention: shapes do not fit", "v is " + is("f32[1,2,5,8]")});
  refuses<ShapeError>(
      [&] {
        attention(f({1, 1, 4, 8}), f({1, 1, 3, 8}), f({1, 1, 3, 8}), true);
      },
      {"attention: causal needs at least as many keys as queries: q is " + is("f32[1,1,4,8]")});
  refuses<ShapeError>(
      [&] {
        attention_qkv(f({1, 4, 10}), 3);
      },
      {"attention_qkv: expected [batch, length, 3 x heads x head size] with 3 heads, got " + is("f32[1,4,10]")});
  refuses<ShapeError>([&] { attention_qkv(f({1, 4, 12}), 0); }, {"attention_qkv", "with 0 heads"});
  refuses<ShapeError>([&] { softmax(f({})); }, {"softmax: expected at least one axis, got " + is("f32[]")});
  refuses<ShapeError>([&] { log_softmax(x, 2); }, {"log_softmax: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { layer_norm(f({})); }, {"layer_norm: expected at least one axis"});
  refuses<ShapeError>([&] { layer_norm(x, f({783})); },
                      {"layer_norm: w is " + is("f32[783]") + ", expected [784] for x " + is("f16[32,784]")});
  refuses<ShapeError>([&] { layer_norm(x, f({784}), f({1, 784})); }, {"layer_norm: b is " + is("f32[1,784]")});
  refuses<ShapeError>([&] { add_rms_norm(x, f({784}, DType::f16)); },
                      {"add_rms_norm: x is " + is("f16[32,784]") + ", residual is " + is("f16[784]")});
  refuses<ShapeError>([&] { batch_norm(x, c, c, c, c, true); },
                      {"batch_norm: expected [N,C,H,W], got " + is("f16[32,784]")});
  refuses<ShapeError>([&] { batch_norm(image, f({4}), c, c, c, true); },
                      {"batch_norm: w is " + is("f32[4]") + ", expected [3]"});
  refuses<ShapeError>([&] { batch_norm(image, c, c, f({4}), c, true); },
                      {"batch_norm: running statistics are " + is("f32[4]") + ", expected [3]"});
  refuses<ShapeError>(
      [&] {
        batch_norm(f({1, 3, 1, 1}), c, c, c, c, true);
      },
      {"batch_norm: training needs more than one value per channel, got " + is("f32[1,3,1,1]")});
  refuses<ShapeError>([&] { cross_entropy(x, i({31})); },
                      {"cross_entropy: x is " + is("f16[32,784]") + ", so targets must be [32], got " + is("i64[31]")});
  refuses<ShapeError>(
      [&] {
        cross_entropy(f({4, 0}), i({4}));
      },
      {"cross_entropy: expected [..., classes], got " + is("f32[4,0]")});
  refuses<ShapeError>([&] { cross_entropy(f({}), i({})); }, {"cross_entropy: expected [..., classes]"});
  refuses<ShapeError>([&] { mse_loss(f({3}), f({1})); },
                      {"mse_loss: x is " + is("f32[3]") + ", target is " + is("f32[1]")});
  refuses<ShapeError>(
      [&] {
        conv2d(x, f({4, 3, 3, 3}));
      },
      {"conv2d: expected x[N,C,H,W] and w[O,C/groups,KH,KW], got x " + is("f16[32,784]")});
  refuses<ShapeError>(
      [&] {
        conv2d(image, f({4, 2, 3, 3}));
      },
      {"conv2d: channels differ: x is " + is("f32[2,3,8,8]") + ", w is " + is("f32[4,2,3,3]") + ", groups 1"});
  refuses<ShapeError>(
      [&] {
        conv2d(image, f({4, 3, 9, 9}));
      },
      {"conv2d: a window of 9 does not fit " + is("f32[2,3,8,8]") + " with padding 0"});
  refuses<ShapeError>(
      [&] {
        conv2d(image, f({4, 3, 3, 3}), f({3}));
      },
      {"conv2d: b is " + is("f32[3]") + ", w is " + is("f32[4,3,3,3]")});
  refuses<ShapeError>([&] { max_pool2d(x); }, {"max_pool2d: expected [N,C,H,W], got " + is("f16[32,784]")});
  refuses<ShapeError>([&] { avg_pool2d(image, {.kernel = {9, 9}}); }, {"avg_pool2d: a window of 9 does not fit"});
  refuses<ShapeError>([&] { embedding(i({2}), f({4})); }, {"embedding: w must be [rows, size], got " + is("f32[4]")});
  refuses<ShapeError>([&] { gather(x, 0, i({2})); },
                      {"gather: index must have the rank of " + is("f16[32,784]") + ", got " + is("i64[2]")});
  refuses<ShapeError>(
      [&] {
        gather(x, 0, i({1, 785}));
      },
      {"gather: index " + is("i64[1,785]") + " is larger than " + is("f16[32,784]") + " on axis 1"});
  refuses<ShapeError>([&] { gather(x, 2, i({1, 1})); }, {"gather: axis 2 is out of range"});
  refuses<ShapeError>(
      [&] {
        scatter_add(f({3, 2}), 0, i({2, 2}), f({2, 1}));
      },
      {"scatter_add: index is " + is("i64[2,2]") + ", x is " + is("f32[2,1]")});
}

TEST_P(Errors, OptionsOfOps) {
  const Tensor x = f({2, 3}), image = f({2, 4, 8, 8}), w = f({4, 4, 3, 3});
  for (const double p : {-0.1, 1.1, kNaN}) {
    refuses<ConfigError>([&] { dropout(x, p); },
                         {"dropout: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { bernoulli({2}, p, on()); },
                         {"bernoulli: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { cross_entropy(x, i({2}), {.label_smoothing = p}); },
                         {"cross_entropy: label_smoothing must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { const nn::Dropout layer(p); },
                         {"Dropout: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
  }
  refuses<ConfigError>([] { uniform({2}, 1, 0, on()); }, {"uniform: empty interval [1, 0)"});
  refuses<ConfigError>([] { normal({2}, 0, -1, on()); }, {"normal: negative deviation -1"});
  refuses<ConfigError>(
      [&] {
        conv2d(image, w, {}, {.stride = {0, 1}});
      },
      {"conv2d: kernel, stride and dilation must be positive and padding not negative"});
  refuses<ConfigError>(
      [&] {
        conv2d(image, w, {}, {.padding = {0, -1}});
      },
      {"conv2d: kernel, stride and dilation must be positive and padding not negative"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.dilation = {0, 1}}); }, {"conv2d: kernel, stride"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.groups = 3}); },
                       {"conv2d: 3 groups do not divide the channels of x " + is("f32[2,4,8,8]")});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.groups = 0}); }, {"conv2d: 0 groups"});
  refuses<ConfigError>([&] { max_pool2d(image, {.kernel = {0, 2}}); }, {"max_pool2d: kernel, stride"});
  refuses<ConfigError>([&] { max_pool2d(image, {.stride = {2, 0}}); }, {"max_pool2d: kernel, stride"});
  refuses<ConfigError>(
      [&] {
        avg_pool2d(image, {.padding = {2, 0}});
      },
      {"avg_pool2d: padding must be at most half of the kernel"});
}

TEST_P(Errors, IndicesOutOfRange) {  // checked on the CPU always, on the GPU in checking mode
  set_check_indices(true);
  const Tensor w = f({10, 4});
  for (const DType dtype : {DType::i64, DType::i32}) {
    for (const double bad : {-1.0, 10.0}) {
      Tensor ids = i({2, 3}, 0, dtype);
      poke(ids, 5, bad);
      const std::string what = is(to_string(dtype) + "[2,3]");
      refuses<IndexError>([&] { embedding(ids, w); }, {"embedding: an index of " + what + " lies outside [0, 10)"});
      refuses<IndexError>(
          [&] {
            gather(f({10, 3}), 0, ids);
          },
          {"gather: an index of " + what + " lies outside [0, 10)"});
      refuses<IndexError>(
          [&] {
            scatter_add(f({10, 3}), 0, ids, f({2, 3}));
          },
          {"scatter_add: an index of " + what + " lies outside [0, 10)"});
      refuses<IndexError>(
          [&] {
            cross_entropy(f({2, 3, 10}), ids);
          },
          {"cross_entropy: an index of " + what + " lies outside [0, 10)"});
    }
  }
  EXPECT_TRUE(std::isfinite(cross_entropy(f({2, 10}), i({2}, -100)).item())) << "the ignored label is legal";
  nn::GPT model({.vocabulary = 7, .context = 4, .width = 4, .layers = 1, .heads = 1}, device());
  refuses<IndexError>(
      [&] {
        model(i({1, 4}, 7));
      },
      {"embedding: an index of " + is("i64[1,4]") + " lies outside [0, 7)"});
  refuses<IndexError>(
      [&] {
        model.loss(i({1, 4}), i({1, 4}, 9));
      },
      {"cross_entropy: an index of " + is("i64[1,4]") + " lies outside [0, 7)"});
  set_check_indices(false);
}

TEST(ErrorsOfDevices, OperandsOnDifferentDevices) {
  MT_NEEDS_GPU();
  const Tensor here = ones({2, 3}), there = ones({2, 3}, {DType::f32, cuda(0)});
  const std::vector<std::string> both{"operands are on different devices", "f32[2,3]@cpu", "f32[2,3]@cuda:0",
                                      ".to(device)"};
  refuses<DeviceError>([&] { here + there; }, both);
  refuses<DeviceError>([&] { matmul(here, there.transpose(0, 1)); }, {"matmul: operands are on different devices"});
  refuses<DeviceError>([&] { linear(there, here); }, both);
  refuses<DeviceError>([&] { where(here > here, there, there); }, {"where: operands are on different devices"});
  refuses<DeviceError>(
      [&] {
        cross_entropy(there, zeros({2}, {DType::i64, cpu}));
      },
      {"cross_entropy: operands are on different devices", "i64[2]@cpu"});
  refuses<DeviceError>([&] { concat({here, there}); }, both);
  if (cuda_device_count() > 1)
    refuses<DeviceError>([&] { there.to(cuda(1)); },
                         {"to: copies between GPUs go through the CPU; got f32[2,3]@cuda:0 to cuda:1"});
}

MT_ERRORS_INVENTORY([](const std::string& file) { return contains(file, "autograd/op"); });

}  // namespace
}  // namespace mantissa
