// What the library says about its callers' mistakes: the type of the error, the op, the operands, the place. The last test
// takes the inventory: every MT_CHECK of the library's sources must have been met by one of the tests above it.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::DynamicScale;
using optim::LossScaler;
using optim::SGD;

std::set<std::string> met;  // "autograd/ops.cpp:12": where the errors of this program were thrown

/// Expects `f` to throw exactly E with every part in its text, and notes the place.
template <class E, class F>
void refuses(F&& f, const std::vector<std::string>& parts) {
  expect_error<E>(f, parts);
  const std::string text = error_text<E>(f);
  const auto open = text.rfind('['), close = text.rfind(']');
  if (open != std::string::npos && close != std::string::npos) met.insert(text.substr(open + 1, close - open - 1));
}

class Errors : public OnDevice {
 protected:
  static Tensor f(const Shape& shape, DType dtype = DType::f32) { return ones(shape, on(dtype)); }
  static Tensor i(const Shape& shape, double value = 0, DType dtype = DType::i64) { return full(shape, value, on(dtype)); }
  /// "f16[2,3]@cpu"
  static std::string is(const std::string& what) { return what + "@" + to_string(device()); }
};
MT_ON_DEVICES(Errors);

// ---- core -----------------------------------------------------------------------------------------------------------------

TEST_P(Errors, Shapes) {
  refuses<ShapeError>([] { Shape({1, 1, 1, 1, 1, 1, 1, 1, 1}); }, {"shape: at most 8 axes are supported, got 9"});
  refuses<ShapeError>([] { f({1, 1, 1, 1, 1, 1, 1, 1}).unsqueeze(0); }, {"shape: at most 8 axes are supported"});
  refuses<ShapeError>([] { zeros({2, -3}, on()); }, {"shape: negative size in [2,-3]"});
  refuses<ShapeError>([] { empty({1ll << 40, 1ll << 40}, on()); }, {"shape: too many elements in [1099511627776,1099511627776]"});
  refuses<ShapeError>([] { empty({1ll << 62}, on(DType::f64)); }, {"empty: too many bytes for f64[4611686018427387904]"});
  refuses<OutOfMemoryError>([] { backend(device()).allocator().allocate(std::size_t{1} << 60, MemoryCategory::data); }, {"out of memory on " + to_string(device()), "requested"});
  refuses<ShapeError>([] { channels_last_strides({2, 3}); }, {"channels_last_strides: expected [N,C,H,W], got [2,3]"});
  refuses<ShapeError>([] { from_vector(std::vector<float>{1, 2, 3}, {2, 2}, on()); }, {"from_vector: 3 values do not fill shape [2,2]"});
  refuses<ShapeError>([] { arange(-1, on(DType::i64)); }, {"arange: negative length -1"});
}

TEST_P(Errors, ReadingTensors) {
  refuses<AutogradError>([] { Tensor().to_vector(); }, {"to_vector: the tensor is undefined"});
  refuses<ShapeError>([] { f({2, 3}, DType::f16).item(); }, {"item: expected a tensor of one element, got " + is("f16[2,3]")});
  refuses<ShapeError>([] { Tensor().item(); }, {"item", "undefined"});
  refuses<DTypeError>([] { f({2}, DType::f16).data<float>(); }, {"data: asked for f32 of " + is("f16[2]")});
}

TEST_P(Errors, NamesOfDevicesAndPrecisions) {
  for (const char* text : {"gpu", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999", "cpu "})
    refuses<ConfigError>([text] { parse_device(text); }, {std::string("device: '") + text + "' is not one of cpu, cuda, cuda:<index>, auto"});
  if (cuda_device_count() == 0) {
    refuses<DeviceError>([] { parse_device("cuda"); }, {"device: no GPU can be used: " + cuda_unavailable_reason(), "use cpu"});
    refuses<DeviceError>([] { zeros({1}, {DType::f32, cuda(0)}); }, {"cuda:0: " + cuda_unavailable_reason()});
    EXPECT_EQ(parse_device("auto"), cpu);
  } else {
    refuses<DeviceError>([] { parse_device("cuda:77"); }, {"device: there is no cuda:77; this machine has"});
    EXPECT_EQ(parse_device("auto"), cuda(0));
  }
  for (const char* text : {"fp8", "", "FP32", "half"})
    refuses<ConfigError>([text] { parse_precision(text); }, {std::string("precision: '") + text + "' is not one of fp32, tf32, fp16-mixed, bf16-mixed"});
  for (const std::string& name : precision_names()) EXPECT_EQ(to_string(parse_precision(name)), name);
  refuses<ConfigError>([] { set_num_threads(0); }, {"set_num_threads: need at least one thread, got 0"});
  for (const DType dtype : {DType::f64, DType::i64, DType::f8e4m3})
    refuses<DTypeError>([dtype] { const Autocast scope(dtype); }, {"Autocast: expected f16 or bf16, or f32 to turn it off, got " + to_string(dtype)});
}

TEST_P(Errors, KernelsRefuseTypesThatTheyDoNotHave) {  // behind the checks of the ops, for those who call a backend directly
  Tensor x = i({2}), y = i({2}), w = f({3, 2}), out = f({2, 2});
  refuses<DTypeError>([&] { backend(x).unary(Exp{}, x, y); }, {"no kernel for dtype i64; expected f64, f32, f16 or bf16"});
  refuses<DTypeError>([&] { backend(w).embedding(f({2}), w, out); }, {"indices must be i64 or i32, got f32"});
}

// ---- graph ----------------------------------------------------------------------------------------------------------------

TEST_P(Errors, Graph) {
  refuses<AutogradError>([] { f({}).backward(); }, {"backward: " + is("f32[]"), "does not depend on a tensor that requires a gradient"});
  refuses<AutogradError>([] { backward({}); }, {"backward: undefined"});
  refuses<ShapeError>([] { (leaf(f({2, 3})) * 2.0).backward(); }, {"backward: the root must have one element, got " + is("f32[2,3]"), "seed"});
  refuses<ShapeError>([] { backward(leaf(f({2})) * 2.0, {.seed = f({3})}); }, {"backward: the seed is " + is("f32[3]"), "the root " + is("f32[2]")});
  const Tensor twice = sum(square(leaf(f({2}))));
  twice.backward();
  refuses<AutogradError>([&] { twice.backward(); }, {"backward: the graph of", "was used already", "retain_graph = true"});
  refuses<AutogradError>([] { Tensor().set_requires_grad(); }, {"set_requires_grad: the tensor is undefined"});
  refuses<AutogradError>([] { exp(leaf(f({2}))).set_requires_grad(); }, {"set_requires_grad: " + is("f32[2]") + " is the result of 'exp', not a leaf; detach() it first"});
  refuses<DTypeError>([] { i({2}).set_requires_grad(); }, {"set_requires_grad: only float tensors have gradients, got " + is("i64[2]")});
  refuses<AutogradError>([] { f({2}).register_hook([](const Tensor& g) { return g; }); }, {"register_hook: " + is("f32[2]") + " does not require a gradient"});
  refuses<AutogradError>([] { register_accumulated_hook(f({2}), [](const Tensor&) {}); }, {"register_accumulated_hook: " + is("f32[2]") + " is not a leaf that requires a gradient"});
  refuses<AutogradError>([] { f({2}).set_grad(f({2})); }, {"set_grad: " + is("f32[2]") + " is not a leaf"});
  refuses<ShapeError>([] { leaf(f({2})).set_grad(f({3})); }, {"set_grad: the gradient is " + is("f32[3]") + ", the tensor " + is("f32[2]")});
  refuses<AutogradError>([] { leaf(f({})).set_grad({}); }, {"set_grad: the gradient is undefined"});
  refuses<DTypeError>([] { leaf(f({2})).set_grad(i({2})); }, {"set_grad: expected f64, f32, f16 or bf16, got " + is("i64[2]")});
  const Tensor x = leaf(f({2}));
  const auto wrong = [](const Tensor&) { return ones({5}); };
  refuses<AutogradError>([&] {
    const Tensor y = x * 2.0;
    y.register_hook(wrong);
    sum(y).backward();
  }, {"gradient hook: returned f32[5]@cpu for a gradient " + is("f32[2]")});
  refuses<AutogradError>([&] {
    const Tensor hooked = leaf(f({3}));
    hooked.register_hook(wrong);
    sum(hooked * 2.0).backward();
  }, {"gradient hook: returned f32[5]@cpu for a gradient " + is("f32[3]")});
  refuses<AutogradError>([&] {
    const Tensor a = leaf(f({2})), h = a * 2.0, loss = sum(square(h));
    const NoGrad off;
    h.fill_(1);
    loss.backward();
  }, {"square: a tensor that backward needs, " + is("f32[2]") + ", was changed in place: it is at version", "clone()"});
  refuses<AutogradError>([&] { x.fill_(1); }, {"fill_: " + is("f32[2]") + " requires a gradient; do it under NoGrad"});
  refuses<AutogradError>([&] { x.copy_(f({2})); }, {"copy_: " + is("f32[2]") + " requires a gradient; do it under NoGrad"});
  refuses<DTypeError>([] { gradcheck([](std::span<const Tensor> in) { return sum(in[0]); }, {leaf(f({2}))}); }, {"gradcheck: inputs must be f64 leaves, got " + is("f32[2]")});
  const auto broken = [](const Tensor& in) {  // an op by a user whose backward is wrong
    return record({"broken", Cast::keep}, in.detach().clone(), {in}, [](Grads, GradOut& out) { out.set(0, ones({7})); });
  };
  refuses<InternalError>([&] { sum(broken(x)).backward(); }, {"broken: gradient of input 0 is f32[7]@cpu, but the input has shape [2]"});
}

// ---- shapes ---------------------------------------------------------------------------------------------------------------

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
    refuses<ShapeError>([&, b = begin, e = end, s = step] { x.slice(1, b, e, s); }, {"slice: [" + std::to_string(begin), "is not within axis 1 of " + name});
  refuses<ShapeError>([&] { x.slice(2, 0, 1); }, {"slice: axis 2 is out of range"});
  refuses<ShapeError>([&] { x.select(1, 3); }, {"select: index 3 is out of range for axis 1 of " + name});
  refuses<ShapeError>([&] { x.select(1, -4); }, {"select: index -4"});
  refuses<ShapeError>([&] { x.expand({2, 2, 4}); }, {"expand", "[2,3]", "[2,2,4]"});
  refuses<ShapeError>([&] { x.expand({3}); }, {"expand: " + name + " does not broadcast to [3]"});
  refuses<ShapeError>([&] { x.squeeze(0); }, {"squeeze: axis 0 of " + name + " does not have size 1"});
  refuses<ShapeError>([&] { x.unsqueeze(4); }, {"unsqueeze: axis 4 is out of range for rank 3"});
  refuses<ShapeError>([&] { x.copy_(f({5})); }, {"copy_", "[5]", "[2,3]"});
  refuses<ShapeError>([&] { x.copy_(f({1, 2, 3})); }, {"copy_: " + is("f32[1,2,3]") + " does not broadcast to " + name});
  refuses<ShapeError>([] { concat({}); }, {"concat: nothing to concatenate"});
  refuses<ShapeError>([&] { concat({x, f({2})}); }, {"concat: ranks differ: " + name + " and " + is("f32[2]")});
  refuses<ShapeError>([&] { concat({x, f({2, 4}, DType::f16)}); }, {"concat: sizes off axis 0 differ: " + name + " and " + is("f16[2,4]")});
  refuses<DTypeError>([&] { concat({x, i({2, 3})}); }, {"concat: expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<DTypeError>([&] { concat({i({2, 3}), x}); }, {"concat: expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<ShapeError>([] { concat({f({}), f({})}); }, {"concat: axis 0 is out of range for rank 0"});
  refuses<ShapeError>([] { stack({}); }, {"stack: nothing to stack"});
  refuses<ShapeError>([&] { split(x, 0); }, {"split: the size must be positive, got 0"});
  refuses<ShapeError>([&] { split(x, 1, 5); }, {"split: axis 5 is out of range"});
}

TEST_P(Errors, UndefinedOperands) {
  const Tensor none, x = f({2, 3}), w = f({4, 3}), id = i({2}), image = f({1, 1, 4, 4}), c = f({1});
  struct Case {
    const char* name;
    std::function<void()> call;
  };
  const std::vector<Case> cases{
      {"exp", [&] { exp(none); }}, {"relu", [&] { relu(none); }}, {"add", [&] { none + x; }}, {"mul", [&] { x * none; }}, {"compare", [&] { none < x; }},
      {"where", [&] { where(none, x, x); }}, {"where", [&] { where(x, none, x); }}, {"dropout", [&] { dropout(none, 0.5); }}, {"sum", [&] { sum(none); }},
      {"mean", [&] { mean(none); }}, {"var", [&] { var(none); }}, {"max", [&] { max(none, 0); }}, {"argmax", [&] { argmax(none, 0); }},
      {"matmul", [&] { matmul(x, none); }}, {"linear", [&] { linear(none, w); }}, {"linear", [&] { linear(x, none); }}, {"attention", [&] { attention(none, x, x); }},
      {"attention_qkv", [&] { attention_qkv(none, 1); }}, {"softmax", [&] { softmax(none); }}, {"log_softmax", [&] { log_softmax(none); }},
      {"layer_norm", [&] { layer_norm(none); }}, {"rms_norm", [&] { rms_norm(none); }}, {"add_layer_norm", [&] { add_layer_norm(x, none); }},
      {"add_rms_norm", [&] { add_rms_norm(x, none); }}, {"batch_norm", [&] { batch_norm(none, c, c, c, c, true); }},
      {"batch_norm", [&] { batch_norm(image, c, c, none, none, true); }},
      {"cross_entropy", [&] { cross_entropy(none, id); }}, {"cross_entropy", [&] { cross_entropy(x, none); }}, {"mse_loss", [&] { mse_loss(x, none); }},
      {"conv2d", [&] { conv2d(none, image); }}, {"conv2d", [&] { conv2d(image, none); }}, {"max_pool2d", [&] { max_pool2d(none); }},
      {"avg_pool2d", [&] { avg_pool2d(none); }}, {"embedding", [&] { embedding(none, w); }}, {"embedding", [&] { embedding(id, none); }},
      {"gather", [&] { gather(none, 0, id); }}, {"gather", [&] { gather(x, 0, none); }}, {"scatter_add", [&] { scatter_add(x, 0, i({2, 3}), none); }},
      {"scatter_add", [&] { scatter_add(none, 0, id, x); }}, {"concat", [&] { concat({none, x}); }}, {"concat", [&] { concat({x, none}); }},
      {"split", [&] { split(none, 1); }}, {"cast", [&] { cast(none, DType::f16); }}, {"reshape", [&] { none.reshape({1}); }}, {"permute", [&] { none.permute({0}); }},
      {"transpose", [&] { none.transpose(0, 1); }}, {"slice", [&] { none.slice(0, 0, 1); }}, {"select", [&] { none.select(0, 0); }},
      {"expand", [&] { none.expand({1}); }}, {"squeeze", [&] { none.squeeze(0); }}, {"unsqueeze", [&] { none.unsqueeze(0); }},
      {"contiguous", [&] { none.contiguous(); }}, {"clone", [&] { none.clone(); }}, {"fill_", [&] { none.fill_(1); }}, {"copy_", [&] { x.copy_(none); }},
      {"copy_", [&] { none.copy_(x); }}, {"to", [&] { none.to(device()); }}};
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
  const std::vector<Case> cases{{"exp", [&] { exp(whole); }}, {"add", [&] { whole + x; }}, {"add", [&] { x + whole; }}, {"where", [&] { where(x > x, whole, x); }},
                                {"dropout", [&] { dropout(whole, 0.5); }}, {"sum", [&] { sum(whole); }}, {"var", [&] { var(whole); }}, {"max", [&] { max(whole, 0); }},
                                {"argmax", [&] { argmax(whole, 0); }}, {"matmul", [&] { matmul(x, whole); }}, {"linear", [&] { linear(x, whole); }},
                                {"softmax", [&] { softmax(whole); }}, {"layer_norm", [&] { layer_norm(whole); }}, {"rms_norm", [&] { rms_norm(whole); }},
                                {"cross_entropy", [&] { cross_entropy(whole, whole); }}, {"mse_loss", [&] { mse_loss(x, whole); }}, {"embedding", [&] { embedding(whole, whole); }},
                                {"gather", [&] { gather(whole, 0, whole); }}, {"scatter_add", [&] { scatter_add(x, 0, whole, whole); }}};
  for (const Case& c : cases) refuses<DTypeError>(c.call, {std::string(c.name) + ": expected f64, f32, f16 or bf16, got " + is("i64[2,3]")});
  refuses<DTypeError>([&] { exp(tiny); }, {"exp: expected f64, f32, f16 or bf16, got " + is("f8e4m3[2,3]")});
  refuses<DTypeError>([&] { embedding(x, x); }, {"embedding: indices must be i64 or i32, got " + is("f32[2,3]")});
  refuses<DTypeError>([&] { cross_entropy(x, f({2})); }, {"cross_entropy: indices must be i64 or i32, got " + is("f32[2]")});
  refuses<DTypeError>([&] { gather(x, 0, x); }, {"gather: indices must be i64 or i32"});
  refuses<DTypeError>([&] { compare(CompareOp::less, x, whole); }, {"compare: dtypes differ: " + is("f32[2,3]") + " and " + is("i64[2,3]")});
  refuses<DTypeError>([&] { where(x, x, x); }, {"where: the condition must be bool, got " + is("f32[2,3]")});
  refuses<DTypeError>([&] { rand({2}, on(DType::i64)); }, {"random: expected f64, f32, f16 or bf16, got " + is("i64[2]")});
  refuses<DTypeError>([&] { linear(x, f({4, 3}, DType::f16)); }, {"linear: dtypes differ: x is " + is("f32[2,3]") + ", w is " + is("f16[4,3]"), "Autocast"});
  refuses<DTypeError>([&] { linear(x, f({4, 3}), f({4}, DType::bf16)); }, {"linear: dtypes differ", "b is " + is("bf16[4]")});
  refuses<DTypeError>([&] { conv2d(image, f({1, 1, 3, 3}, DType::bf16)); }, {"conv2d: dtypes differ: x is " + is("f32[1,1,4,4]") + ", w is " + is("bf16[1,1,3,3]")});
  refuses<DTypeError>([&] { attention(image, image, f({1, 1, 4, 4}, DType::f16)); }, {"attention: dtypes differ: q is", "v is " + is("f16[1,1,4,4]")});
  refuses<DTypeError>([&] { add_layer_norm(x, f({2, 3}, DType::f16)); }, {"add_layer_norm: dtypes differ: x is " + is("f32[2,3]") + ", residual is " + is("f16[2,3]")});
  refuses<DTypeError>([&] { scatter_add(x, 0, whole, f({2, 3}, DType::f16)); }, {"scatter_add: dtypes differ: base is " + is("f32[2,3]") + ", x is " + is("f16[2,3]")});
  refuses<DTypeError>([&] { batch_norm(image, f({1}), f({1}), f({1}, DType::f16), f({1}), true); }, {"batch_norm: running statistics must be f32, got " + is("f16[1]")});
}

// ---- ops ------------------------------------------------------------------------------------------------------------------

TEST_P(Errors, ShapesOfOps) {
  const Tensor x = f({32, 784}, DType::f16), image = f({2, 3, 8, 8}), c = f({3});
  refuses<ShapeError>([&] { x + f({3, 784}, DType::f16); }, {"add: shapes do not broadcast: [32,784] and [3,784]", "equal or contain a 1"});
  refuses<ShapeError>([&] { x < f({3, 784}, DType::f16); }, {"compare: shapes do not broadcast"});
  refuses<ShapeError>([&] { where(x > x, x, f({5})); }, {"where: shapes do not broadcast"});
  refuses<ShapeError>([&] { sum(x, {2}); }, {"sum: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { mean(x, {-3}); }, {"mean: axis -3 is out of range for rank 2"});
  refuses<ShapeError>([&] { var(x, {7}); }, {"axis 7 is out of range for rank 2"});
  refuses<ShapeError>([&] { max(f({2, 0}), 1); }, {"max: axis 1 of " + is("f32[2,0]") + " is empty"});
  refuses<ShapeError>([&] { min(f({0}), 0); }, {"min: axis 0 of " + is("f32[0]") + " is empty"});
  refuses<ShapeError>([&] { argmax(f({0, 2}), 0); }, {"argmax: axis 0 of " + is("f32[0,2]") + " is empty"});
  refuses<ShapeError>([&] { matmul(x, f({32, 784}, DType::f16)); }, {"matmul: inner dimensions differ: a is " + is("f16[32,784]") + ", b is " + is("f16[32,784]")});
  refuses<ShapeError>([&] { matmul(x, f({})); }, {"matmul: scalars have no product; a is " + is("f16[32,784]") + ", b is " + is("f32[]")});
  refuses<ShapeError>([&] { matmul(f({2, 4, 5}), f({3, 5, 4})); }, {"matmul: shapes do not broadcast: [2] and [3]"});
  refuses<ShapeError>([&] { linear(x, f({10, 100}, DType::f16)); }, {"linear: inner dimensions differ: x is " + is("f16[32,784]") + ", w is " + is("f16[10,100]") + " (w is [out, in])"});
  refuses<ShapeError>([&] { linear(x, f({784}, DType::f16)); }, {"linear: inner dimensions differ"});
  refuses<ShapeError>([&] { linear(f({}), f({1, 1})); }, {"linear: inner dimensions differ: x is " + is("f32[]")});
  refuses<ShapeError>([&] { linear(f({2, 3}), f({4, 3}), f({3})); }, {"linear: b is " + is("f32[3]") + ", w is " + is("f32[4,3]")});
  refuses<ShapeError>([&] { attention(f({1, 2, 3}), image, image); }, {"attention: expected [batch, heads, length, head size], got " + is("f32[1,2,3]")});
  refuses<ShapeError>([&] { attention(f({1, 3, 4, 8}), f({1, 2, 4, 8}), f({1, 2, 4, 8})); }, {"attention: shapes do not fit: q is " + is("f32[1,3,4,8]"), "heads divide q's"});
  refuses<ShapeError>([&] { attention(f({1, 2, 4, 8}), f({1, 2, 4, 8}), f({1, 2, 5, 8})); }, {"attention: shapes do not fit", "v is " + is("f32[1,2,5,8]")});
  refuses<ShapeError>([&] { attention(f({1, 1, 4, 8}), f({1, 1, 3, 8}), f({1, 1, 3, 8}), true); }, {"attention: causal needs at least as many keys as queries: q is " + is("f32[1,1,4,8]")});
  refuses<ShapeError>([&] { attention_qkv(f({1, 4, 10}), 3); }, {"attention_qkv: expected [batch, length, 3 x heads x head size] with 3 heads, got " + is("f32[1,4,10]")});
  refuses<ShapeError>([&] { attention_qkv(f({1, 4, 12}), 0); }, {"attention_qkv", "with 0 heads"});
  refuses<ShapeError>([&] { softmax(f({})); }, {"softmax: expected at least one axis, got " + is("f32[]")});
  refuses<ShapeError>([&] { log_softmax(x, 2); }, {"log_softmax: axis 2 is out of range for rank 2"});
  refuses<ShapeError>([&] { layer_norm(f({})); }, {"layer_norm: expected at least one axis"});
  refuses<ShapeError>([&] { layer_norm(x, f({783})); }, {"layer_norm: w is " + is("f32[783]") + ", expected [784] for x " + is("f16[32,784]")});
  refuses<ShapeError>([&] { layer_norm(x, f({784}), f({1, 784})); }, {"layer_norm: b is " + is("f32[1,784]")});
  refuses<ShapeError>([&] { add_rms_norm(x, f({784}, DType::f16)); }, {"add_rms_norm: x is " + is("f16[32,784]") + ", residual is " + is("f16[784]")});
  refuses<ShapeError>([&] { batch_norm(x, c, c, c, c, true); }, {"batch_norm: expected [N,C,H,W], got " + is("f16[32,784]")});
  refuses<ShapeError>([&] { batch_norm(image, f({4}), c, c, c, true); }, {"batch_norm: w is " + is("f32[4]") + ", expected [3]"});
  refuses<ShapeError>([&] { batch_norm(image, c, c, f({4}), c, true); }, {"batch_norm: running statistics are " + is("f32[4]") + ", expected [3]"});
  refuses<ShapeError>([&] { batch_norm(f({1, 3, 1, 1}), c, c, c, c, true); }, {"batch_norm: training needs more than one value per channel, got " + is("f32[1,3,1,1]")});
  refuses<ShapeError>([&] { cross_entropy(x, i({31})); }, {"cross_entropy: x is " + is("f16[32,784]") + ", so targets must be [32], got " + is("i64[31]")});
  refuses<ShapeError>([&] { cross_entropy(f({4, 0}), i({4})); }, {"cross_entropy: expected [..., classes], got " + is("f32[4,0]")});
  refuses<ShapeError>([&] { cross_entropy(f({}), i({})); }, {"cross_entropy: expected [..., classes]"});
  refuses<ShapeError>([&] { mse_loss(f({3}), f({1})); }, {"mse_loss: x is " + is("f32[3]") + ", target is " + is("f32[1]")});
  refuses<ShapeError>([&] { conv2d(x, f({4, 3, 3, 3})); }, {"conv2d: expected x[N,C,H,W] and w[O,C/groups,KH,KW], got x " + is("f16[32,784]")});
  refuses<ShapeError>([&] { conv2d(image, f({4, 2, 3, 3})); }, {"conv2d: channels differ: x is " + is("f32[2,3,8,8]") + ", w is " + is("f32[4,2,3,3]") + ", groups 1"});
  refuses<ShapeError>([&] { conv2d(image, f({4, 3, 9, 9})); }, {"conv2d: a window of 9 does not fit " + is("f32[2,3,8,8]") + " with padding 0"});
  refuses<ShapeError>([&] { conv2d(image, f({4, 3, 3, 3}), f({3})); }, {"conv2d: b is " + is("f32[3]") + ", w is " + is("f32[4,3,3,3]")});
  refuses<ShapeError>([&] { max_pool2d(x); }, {"max_pool2d: expected [N,C,H,W], got " + is("f16[32,784]")});
  refuses<ShapeError>([&] { avg_pool2d(image, {.kernel = {9, 9}}); }, {"avg_pool2d: a window of 9 does not fit"});
  refuses<ShapeError>([&] { embedding(i({2}), f({4})); }, {"embedding: w must be [rows, size], got " + is("f32[4]")});
  refuses<ShapeError>([&] { gather(x, 0, i({2})); }, {"gather: index must have the rank of " + is("f16[32,784]") + ", got " + is("i64[2]")});
  refuses<ShapeError>([&] { gather(x, 0, i({1, 785})); }, {"gather: index " + is("i64[1,785]") + " is larger than " + is("f16[32,784]") + " on axis 1"});
  refuses<ShapeError>([&] { gather(x, 2, i({1, 1})); }, {"gather: axis 2 is out of range"});
  refuses<ShapeError>([&] { scatter_add(f({3, 2}), 0, i({2, 2}), f({2, 1})); }, {"scatter_add: index is " + is("i64[2,2]") + ", x is " + is("f32[2,1]")});
}

TEST_P(Errors, OptionsOfOps) {
  const Tensor x = f({2, 3}), image = f({2, 4, 8, 8}), w = f({4, 4, 3, 3});
  for (const double p : {-0.1, 1.1, kNaN}) {
    refuses<ConfigError>([&] { dropout(x, p); }, {"dropout: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { bernoulli({2}, p, on()); }, {"bernoulli: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { cross_entropy(x, i({2}), {.label_smoothing = p}); }, {"cross_entropy: label_smoothing must lie in [0, 1], got " + detail::number_to_string(p)});
    refuses<ConfigError>([&] { const nn::Dropout layer(p); }, {"Dropout: the probability must lie in [0, 1], got " + detail::number_to_string(p)});
  }
  refuses<ConfigError>([] { uniform({2}, 1, 0, on()); }, {"uniform: empty interval [1, 0)"});
  refuses<ConfigError>([] { normal({2}, 0, -1, on()); }, {"normal: negative deviation -1"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.stride = {0, 1}}); }, {"conv2d: kernel, stride and dilation must be positive and padding not negative"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.padding = {0, -1}}); }, {"conv2d: kernel, stride and dilation must be positive and padding not negative"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.dilation = {0, 1}}); }, {"conv2d: kernel, stride"});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.groups = 3}); }, {"conv2d: 3 groups do not divide the channels of x " + is("f32[2,4,8,8]")});
  refuses<ConfigError>([&] { conv2d(image, w, {}, {.groups = 0}); }, {"conv2d: 0 groups"});
  refuses<ConfigError>([&] { max_pool2d(image, {.kernel = {0, 2}}); }, {"max_pool2d: kernel, stride"});
  refuses<ConfigError>([&] { max_pool2d(image, {.stride = {2, 0}}); }, {"max_pool2d: kernel, stride"});
  refuses<ConfigError>([&] { avg_pool2d(image, {.padding = {2, 0}}); }, {"avg_pool2d: padding must be at most half of the kernel"});
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
      refuses<IndexError>([&] { gather(f({10, 3}), 0, ids); }, {"gather: an index of " + what + " lies outside [0, 10)"});
      refuses<IndexError>([&] { scatter_add(f({10, 3}), 0, ids, f({2, 3})); }, {"scatter_add: an index of " + what + " lies outside [0, 10)"});
      refuses<IndexError>([&] { cross_entropy(f({2, 3, 10}), ids); }, {"cross_entropy: an index of " + what + " lies outside [0, 10)"});
    }
  }
  EXPECT_TRUE(std::isfinite(cross_entropy(f({2, 10}), i({2}, -100)).item())) << "the ignored label is legal";
  nn::GPT model({.vocabulary = 7, .context = 4, .width = 4, .layers = 1, .heads = 1}, device());
  refuses<IndexError>([&] { model(i({1, 4}, 7)); }, {"embedding: an index of " + is("i64[1,4]") + " lies outside [0, 7)"});
  refuses<IndexError>([&] { model.loss(i({1, 4}), i({1, 4}, 9)); }, {"cross_entropy: an index of " + is("i64[1,4]") + " lies outside [0, 7)"});
  set_check_indices(false);
}

TEST(ErrorsOfDevices, OperandsOnDifferentDevices) {
  MT_NEEDS_GPU();
  const Tensor here = ones({2, 3}), there = ones({2, 3}, {DType::f32, cuda(0)});
  const std::vector<std::string> both{"operands are on different devices", "f32[2,3]@cpu", "f32[2,3]@cuda:0", ".to(device)"};
  refuses<DeviceError>([&] { here + there; }, both);
  refuses<DeviceError>([&] { matmul(here, there.transpose(0, 1)); }, {"matmul: operands are on different devices"});
  refuses<DeviceError>([&] { linear(there, here); }, both);
  refuses<DeviceError>([&] { where(here > here, there, there); }, {"where: operands are on different devices"});
  refuses<DeviceError>([&] { cross_entropy(there, zeros({2}, {DType::i64, cpu})); }, {"cross_entropy: operands are on different devices", "i64[2]@cpu"});
  refuses<DeviceError>([&] { concat({here, there}); }, both);
  const Tensor a = leaf(here.clone()), b = leaf(there.clone());
  refuses<DeviceError>([&] { const SGD sgd({a, b}); }, {"optimizer: parameters are on cpu and cuda:0"});
  refuses<ShapeError>([&] { a.set_grad(there); }, {"set_grad: the gradient is f32[2,3]@cuda:0, the tensor f32[2,3]@cpu"});
  LossScaler scaler;
  scaler.backward(sum(a));
  refuses<DeviceError>([&] { scaler.backward(sum(b)); }, {"LossScaler: was used on cpu, now on cuda:0"});
  if (cuda_device_count() > 1) refuses<DeviceError>([&] { there.to(cuda(1)); }, {"to: copies between GPUs go through the CPU; got f32[2,3]@cuda:0 to cuda:1"});
}

// ---- optim and nn ---------------------------------------------------------------------------------------------------------

TEST_P(Errors, OptimizerOptions) {
  const Tensor p = leaf(f({2}));
  refuses<ConfigError>([&] { const SGD sgd(std::vector<Tensor>{}); }, {"optimizer: no parameters were given"});
  refuses<AutogradError>([&] { const SGD sgd({f({2})}); }, {"optimizer: " + is("f32[2]") + " is not a leaf that requires a gradient"});
  refuses<AutogradError>([&] { const SGD sgd({p * 2.0}); }, {"optimizer: " + is("f32[2]") + " is not a leaf"});
  refuses<DTypeError>([&] { const SGD sgd({leaf(f({2}, DType::f16))}); }, {"optimizer: parameters are f32 masters, got " + is("f16[2]"), "Autocast"});
  refuses<ConfigError>([&] { const SGD sgd({leaf(f({4}).slice(0, 0, 4, 2))}); }, {"optimizer: " + is("f32[2]") + " is a view with gaps"});
  refuses<ConfigError>([&] { const SGD sgd({p, p}); }, {"optimizer: a parameter " + is("f32[2]") + " appears twice"});
  refuses<ConfigError>([&] { const SGD sgd(std::vector<optim::ParamGroup>{{{p}, -1, 0}}, {}); }, {"optimizer: weight_decay and lr_scale must not be negative, got 0 and -1"});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.weight_decay = kNaN}); }, {"optimizer: weight_decay and lr_scale", "nan"});
  for (const double lr : {-1.0, kNaN, kInf})
    refuses<ConfigError>([&] { const SGD sgd({p}, {.lr = lr}); }, {"schedule: the learning rate must be finite and not negative, got " + detail::number_to_string(lr)});
  for (const double m : {-0.1, 1.0, kNaN}) refuses<ConfigError>([&] { const SGD sgd({p}, {.momentum = m}); }, {"SGD: momentum must lie in [0, 1), got " + detail::number_to_string(m)});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.nesterov = true}); }, {"SGD: nesterov needs momentum and no dampening"});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}); }, {"SGD: nesterov needs momentum and no dampening"});
  for (const double b : {-0.1, 1.0, kNaN}) {
    refuses<ConfigError>([&] { const optim::Adam adam({p}, {.beta1 = b}); }, {"Adam: betas must lie in [0, 1), got " + detail::number_to_string(b)});
    refuses<ConfigError>([&] { const optim::AdamW adam({p}, {.beta2 = b}); }, {"Adam: betas must lie in [0, 1)", detail::number_to_string(b)});
  }
  refuses<ConfigError>([&] { const optim::Adam adam({p}, {.eps = -1}); }, {"Adam: eps must not be negative, got -1"});
  SGD sgd({p});
  refuses<ConfigError>([&] { sgd.clip_grad_norm(0); }, {"clip_grad_norm: the limit must be positive, got 0"});
  refuses<ConfigError>([&] { sgd.clip_grad_norm(kNaN); }, {"clip_grad_norm: the limit must be positive, got nan"});
  refuses<ConfigError>([&] { sgd.clip_grad_value(-2); }, {"clip_grad_value: the limit must be positive, got -2"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::constant(1, -1)); }, {"schedule: warmup must not be negative and `every` positive, got -1 and 1"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::step_decay(1, 0)); }, {"schedule: warmup must not be negative and `every` positive, got 0 and 0"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::cosine_decay(1, 5, 5)); }, {"schedule: total (5) must exceed warmup (5)"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::linear_decay(1, 0)); }, {"schedule: total (0) must exceed warmup (0)"});
  for (const double final : {-1.0, kNaN, kInf}) refuses<ConfigError>([&] { sgd.set_schedule(optim::linear_decay(1, 5, 0, final)); }, {"schedule: the learning rate must be finite and not negative"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::step_decay(1, 5, kNaN)); }, {"schedule: the factor must be finite and not negative, got nan"});
  refuses<ConfigError>([&] { sgd.load_state_dict({}); }, {"load_state_dict: the state does not fit this optimizer; missing applied"});
  refuses<AutogradError>([] { optim::StepResult().verdict(); }, {"StepResult: empty; it comes from step()"});
  sgd.groups()[0].parameters.push_back(leaf(f({2})));
  refuses<ConfigError>([&] { sgd.step(); }, {"optimizer: the parameters of its groups have changed since it was made: found " + is("f32[2]")});
}

TEST_P(Errors, Steps) {
  const Tensor p = leaf(f({1})), q = leaf(f({1}));
  SGD sgd({p, q}), late({p});
  LossScaler scaler, other(DynamicScale{}, {.max_streak = 1});
  const auto scaled = [&](LossScaler& by, const Tensor& x, double g) { by.backward(loss_with_gradients({x}, {full({1}, g, on())})); };
  scaled(scaler, p, 1);
  refuses<AutogradError>([&] { sgd.step(); }, {"optimizer: the gradients carry a loss scale; call scaler.step(optimizer) of the scaler that scaled them"});
  q.set_grad(f({1}));
  refuses<AutogradError>([&] { scaler.step(sgd); }, {"scaler.step: some gradients are scaled and some are not"});
  refuses<AutogradError>([&] { scaled(other, p, 1); }, {"a gradient scaled by one scaler can not be added to one with another scale; call zero_grad() in between"});
  sgd.zero_grad();
  const optim::StepResult early = sgd.step();
  sgd.step();
  refuses<AutogradError>([&] { early.verdict(); }, {"StepResult: read too late: the optimizer has taken another step since"});
  scaled(other, p, kNaN);
  other.step(late).verdict();
  refuses<NonFiniteError>([&] { other.step(late); }, {"LossScaler: 1 steps in a row were skipped (skipped: NaN; 1 NaN and 0 inf gradient elements at scale 65536, floor 1)", "not a scaling problem"});
  refuses<AutogradError>([&] { scaler.backward({}); }, {"LossScaler.backward: the loss is undefined"});
  refuses<DTypeError>([&] { scaler.backward(leaf(f({}, DType::bf16))); }, {"LossScaler.backward: the loss must be f32 (or f64), got " + is("bf16[]")});
  ScaleState state;
  state.scale = 0.5;
  refuses<ConfigError>([&] { scaler.load_state(state); }, {"LossScaler.load_state: scale 0.5 is outside [1, 16777216]"});
  state.scale = 2;
  state.clean_steps = -1;
  refuses<ConfigError>([&] { scaler.load_state(state); }, {"LossScaler.load_state: counters out of range: -1 clean steps"});
  const auto make = [](DynamicScale policy) { return [policy] { const LossScaler s(policy); }; };
  refuses<ConfigError>(make({.initial = -1}), {"LossScaler: initial must be positive and finite, got -1"});
  refuses<ConfigError>(make({.growth = 3}), {"LossScaler: growth must be a power of two so that scaling is exact, got 3; set any_factor to allow it"});
  refuses<ConfigError>(make({.backoff = 4}), {"LossScaler: growth must be at least 1 and backoff at most 1, got 2 and 4"});
  refuses<ConfigError>(make({.hysteresis = 0}), {"LossScaler: growth_interval and hysteresis must be positive, got 2000 and 0"});
  refuses<ConfigError>(make({.initial = 1, .floor = 2}), {"LossScaler: need 2^-126 <= floor <= initial <= cap <= 2^127, got 2, 1, 16777216"});
}

TEST_P(Errors, LayersAndModels) {
  const Device d = device();
  refuses<ConfigError>([=] { nn::Linear(0, 3, d); }, {"Linear: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::Embedding(3, -1, d); }, {"Embedding: sizes must be positive, got -1"});
  refuses<ConfigError>([=] { nn::LayerNorm(0, 1e-5, d); }, {"LayerNorm: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::RMSNorm(-4, 1e-5, d); }, {"RMSNorm: sizes must be positive, got -4"});
  refuses<ConfigError>([=] { nn::BatchNorm2d(0, 0.1, 1e-5, d); }, {"BatchNorm2d: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::Conv2d(3, 4, 0, d); }, {"Conv2d: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::Conv2d(3, 4, 3, {.stride = -1}, d); }, {"Conv2d: sizes must be positive, got -1"});
  refuses<ConfigError>([=] { nn::Conv2d(3, 4, 3, {.groups = 2}, d); }, {"Conv2d: 2 groups do not divide 3 and 4 channels"});
  refuses<ConfigError>([] { nn::MaxPool2d(0); }, {"MaxPool2d: sizes must be positive, got 0"});
  refuses<ConfigError>([] { nn::AvgPool2d(-2); }, {"AvgPool2d: sizes must be positive, got -2"});
  refuses<ConfigError>([=] { nn::SelfAttention(10, 3, d); }, {"SelfAttention: 3 heads do not divide width 10"});
  refuses<ConfigError>([=] { nn::SelfAttention(10, 0, d); }, {"SelfAttention: 0 heads"});
  refuses<ConfigError>([=] { nn::MLP({3}, d); }, {"MLP: need at least an input and an output size"});
  refuses<ConfigError>([=] { nn::SmallCNN({.width = 0}, d); }, {"Conv2d: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::SmallCNN({.dropout = 2}, d); }, {"Dropout: the probability must lie in [0, 1], got 2"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 5, .context = 4, .width = 4, .layers = 0, .heads = 1}, d); }, {"GPT: need at least one layer, got 0"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 0, .context = 4, .width = 4, .layers = 1, .heads = 1}, d); }, {"Embedding: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 5, .context = 4, .width = 5, .layers = 1, .heads = 2}, d); }, {"SelfAttention: 2 heads do not divide width 5"});
  for (const auto init : {nn::init::kaiming_normal, nn::init::kaiming_uniform, nn::init::xavier_normal, nn::init::xavier_uniform})
    refuses<ShapeError>([=] { init({3}, 1); }, {"init: fans need a weight of at least two axes, got [3]"});
  nn::GPT gpt({.vocabulary = 5, .context = 4, .width = 4, .layers = 1, .heads = 1}, d);
  refuses<ShapeError>([&] { gpt(i({1, 5})); }, {"GPT: expected tokens [batch, length <= 4], got " + is("i64[1,5]")});
  refuses<ShapeError>([&] { gpt(i({4})); }, {"GPT: expected tokens [batch, length <= 4], got " + is("i64[4]")});
  refuses<ConfigError>([&] { gpt.generate({}, 3); }, {"generate: the prompt is empty"});
  refuses<ConfigError>([&] { gpt.generate({1}, 3, -1); }, {"generate: temperature and top_k must not be negative"});
  refuses<ConfigError>([&] { gpt.generate({1}, 3, 1, -1); }, {"generate: temperature and top_k must not be negative"});
  nn::MLP mlp({4, 3}, d);
  refuses<ShapeError>([&] { mlp(f({2, 5})); }, {"linear: inner dimensions differ: x is " + is("f32[2,5]") + ", w is " + is("f32[3,4]")});
}

// ---- inventory ------------------------------------------------------------------------------------------------------------

struct Place {
  std::string file, text;
  int first, last;  // lines of the statement
};

/// Every MT_CHECK and MT_THROW of a source file.
std::vector<Place> places_in(const std::filesystem::path& path, const std::string& name) {
  std::ifstream in(path);
  const std::string source{std::istreambuf_iterator<char>(in), {}};
  std::vector<Place> places;
  for (const std::string& macro : {std::string("MT_CHECK("), std::string("MT_THROW(")}) {
    for (std::size_t at = source.find(macro); at != std::string::npos; at = source.find(macro, at + 1)) {
      int depth = 0;
      std::size_t end = at;
      bool quoted = false;
      for (; end < source.size(); ++end) {
        const char c = source[end];
        if (c == '"' && source[end - 1] != '\\' && source[end - 1] != '\'') quoted = !quoted;
        if (!quoted && c == '(') ++depth;
        if (!quoted && c == ')' && --depth == 0) break;
      }
      const auto line = [&](std::size_t to) { return 1 + static_cast<int>(std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(to), '\n')); };
      places.push_back({name, source.substr(at, end - at + 1), line(at), line(end)});
    }
  }
  return places;
}

class ErrorsInventory : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Last, ErrorsInventory, ::testing::Values(0));

TEST_P(ErrorsInventory, EveryCheckWasMet) {
  namespace fs = std::filesystem;
  const fs::path root = MANTISSA_SOURCE_DIR;
  if (!fs::exists(root / "core/tensor.cpp")) GTEST_SKIP() << "the sources are not at " << root;
  if (::testing::GTEST_FLAG(filter) != "*") GTEST_SKIP() << "only some of the tests ran";
  // Out of reach here, by a part of the statement.
  std::vector<std::string> exempt{"define MT_CHECK"};
  const int gpus = cuda_device_count();
  if (gpus == 0) exempt.insert(exempt.end(), {"different devices", "was used on", "parameters are on", "there is no cuda:"});
  if (gpus > 0) exempt.push_back("no GPU can be used");
  if (gpus < 2) exempt.push_back("copies between GPUs");
  std::vector<Place> places;
  for (const char* folder : {"core", "autograd", "optim", "nn"}) {
    for (const auto& entry : fs::directory_iterator(root / folder)) {
      const std::string file = entry.path().filename().string();
      if (file == "error.h" || (file == "no_cuda.cpp" && gpus > 0)) continue;  // the macros themselves; not in this build
      if (entry.path().extension() != ".cpp" && entry.path().extension() != ".h") continue;
      for (Place& place : places_in(entry.path(), std::string(folder) + "/" + file)) places.push_back(std::move(place));
    }
  }
  std::size_t hit = 0, excused = 0;
  for (const Place& place : places) {
    bool found = false;
    for (int line = place.first; line <= place.last && !found; ++line)
      found = std::ranges::any_of(met, [&](const std::string& at) { return at.ends_with(place.file + ":" + std::to_string(line)); });
    const bool out_of_reach = std::ranges::any_of(exempt, [&](const std::string& part) { return contains(place.text, part); });
    hit += found;
    excused += !found && out_of_reach;
    EXPECT_TRUE(found || out_of_reach) << "no test meets " << place.file << ":" << place.first << ": " << place.text;
  }
  std::printf("checks: %zu, met %zu, out of reach on this machine %zu\n", places.size(), hit, excused);
  EXPECT_GT(places.size(), 100u);
}

}  // namespace
}  // namespace mantissa
