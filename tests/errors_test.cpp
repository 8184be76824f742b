// Error messages of tensors, the allocator and the graph: the type, what was asked for, the operands, the
// place.

#include "errors_support.h"

namespace mantissa {
namespace {

using namespace testing;

class Errors : public ErrorsOnDevice {};
MT_ON_DEVICES(Errors);

// ---- core
// -----------------------------------------------------------------------------------------------------------------

TEST_P(Errors, Shapes) {
  refuses<ShapeError>([] { Shape({1, 1, 1, 1, 1, 1, 1, 1, 1}); }, {"shape: at most 8 axes are supported, got 9"});
  refuses<ShapeError>([] { f({1, 1, 1, 1, 1, 1, 1, 1}).unsqueeze(0); }, {"shape: at most 8 axes are supported"});
  refuses<ShapeError>([] { zeros({2, -3}, on()); }, {"shape: negative size in [2,-3]"});
  refuses<ShapeError>(
      [] {
        empty({1ll << 40, 1ll << 40}, on());
      },
      {"shape: too many elements in [1099511627776,1099511627776]"});
  refuses<ShapeError>([] { empty({1ll << 62}, on(DType::f64)); },
                      {"empty: too many bytes for f64[4611686018427387904]"});
  refuses<OutOfMemoryError>([] { backend(device()).allocator().allocate(std::size_t{1} << 60, MemoryCategory::data); },
                            {"out of memory on " + to_string(device()), "requested"});
  refuses<ShapeError>([] { channels_last_strides({2, 3}); }, {"channels_last_strides: expected [N,C,H,W], got [2,3]"});
  refuses<ShapeError>(
      [] {
        from_vector(std::vector<float>{1, 2, 3}, {2, 2}, on());
      },
      {"from_vector: 3 values do not fill shape [2,2]"});
  refuses<ShapeError>([] { arange(-1, on(DType::i64)); }, {"arange: negative length -1"});
}

TEST_P(Errors, ShapeHelpers) {  // which the ops call with their own names
  refuses<ShapeError>(
      [] {
        broadcast_shapes("op", {2, 3}, {4, 3});
      },
      {"op: shapes do not broadcast: [2,3] and [4,3]", "counted from the right"});
  refuses<ShapeError>([] { normalize_axis("op", 2, 2); }, {"op: axis 2 is out of range for rank 2"});
}

TEST_P(Errors, ReadingTensors) {
  refuses<AutogradError>([] { Tensor().to_vector(); }, {"to_vector: the tensor is undefined"});
  refuses<ShapeError>(
      [] {
        f({2, 3}, DType::f16).item();
      },
      {"item: expected a tensor of one element, got " + is("f16[2,3]")});
  refuses<ShapeError>([] { Tensor().item(); }, {"item", "undefined"});
  refuses<DTypeError>([] { f({2}, DType::f16).data<float>(); }, {"data: asked for f32 of " + is("f16[2]")});
}

TEST_P(Errors, NamesOfDevicesAndPrecisions) {
  for (const char* text : {"gpu", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999", "cpu "})
    refuses<ConfigError>([text] { parse_device(text); },
                         {std::string("device: '") + text + "' is not one of cpu, cuda, cuda:<index>, auto"});
  if (cuda_device_count() == 0) {
    refuses<DeviceError>([] { parse_device("cuda"); },
                         {"device: no GPU can be used: " + cuda_unavailable_reason(), "use cpu"});
    refuses<DeviceError>([] { zeros({1}, {DType::f32, cuda(0)}); }, {"cuda:0: " + cuda_unavailable_reason()});
    EXPECT_EQ(parse_device("auto"), cpu);
  } else {
    refuses<DeviceError>([] { parse_device("cuda:77"); }, {"device: there is no cuda:77; this machine has"});
    EXPECT_EQ(parse_device("auto"), cuda(0));
  }
  for (const char* text : {"fp8", "", "FP32", "half"})
    refuses<ConfigError>([text] { parse_precision(text); },
                         {std::string("precision: '") + text + "' is not one of fp32, tf32, fp16-mixed, bf16-mixed"});
  for (const std::string& name : precision_names()) EXPECT_EQ(to_string(parse_precision(name)), name);
  refuses<ConfigError>([] { set_num_threads(0); }, {"set_num_threads: need at least one thread, got 0"});
  for (const DType dtype : {DType::f64, DType::i64, DType::f8e4m3})
    refuses<DTypeError>([dtype] { const Autocast scope(dtype); },
                        {"Autocast: expected f16 or bf16, or f32 to turn it off, got " + to_string(dtype)});
}

TEST_P(Errors, KernelsRefuseTypesThatTheyDoNotHave) {  // behind the checks of the ops, for those who call a
                                                       // backend directly
  Tensor x = i({2}), y = i({2}), w = f({3, 2}), out = f({2, 2});
  refuses<DTypeError>([&] { backend(x).unary(Exp{}, x, y); },
                      {"no kernel for dtype i64; expected f64, f32, f16 or bf16"});
  refuses<DTypeError>([&] { backend(w).embedding(f({2}), w, out); }, {"indices must be i64 or i32, got f32"});
}

// ---- graph
// ----------------------------------------------------------------------------------------------------------------

TEST_P(Errors, Graph) {
  refuses<AutogradError>([] { f({}).backward(); },
                         {"backward: " + is("f32[]"), "does not depend on a tensor that requires a gradient"});
  refuses<AutogradError>([] { backward({}); }, {"backward: undefined"});
  refuses<ShapeError>(
      [] {
        (leaf(f({2, 3})) * 2.0).backward();
      },
      {"backward: the root must have one element, got " + is("f32[2,3]"), "seed"});
  refuses<ShapeError>([] { backward(leaf(f({2})) * 2.0, {.seed = f({3})}); },
                      {"backward: the seed is " + is("f32[3]"), "the root " + is("f32[2]")});
  const Tensor twice = sum(square(leaf(f({2}))));
  twice.backward();
  refuses<AutogradError>([&] { twice.backward(); },
                         {"backward: the graph of", "was used already", "retain_graph = true"});
  refuses<AutogradError>([] { Tensor().set_requires_grad(); }, {"set_requires_grad: the tensor is undefined"});
  refuses<AutogradError>(
      [] { exp(leaf(f({2}))).set_requires_grad(); },
      {"set_requires_grad: " + is("f32[2]") + " is the result of 'exp', not a leaf; detach() it first"});
  refuses<DTypeError>([] { i({2}).set_requires_grad(); },
                      {"set_requires_grad: only float tensors have gradients, got " + is("i64[2]")});
  refuses<AutogradError>([] { f({2}).register_hook([](const Tensor& g) { return g; }); },
                         {"register_hook: " + is("f32[2]") + " does not require a gradient"});
  refuses<AutogradError>([] { register_accumulated_hook(f({2}), [](const Tensor&) {}); },
                         {"register_accumulated_hook: " + is("f32[2]") + " is not a leaf that requires a gradient"});
  refuses<AutogradError>([] { f({2}).set_grad(f({2})); }, {"set_grad: " + is("f32[2]") + " is not a leaf"});
  refuses<ShapeError>([] { leaf(f({2})).set_grad(f({3})); },
                      {"set_grad: the gradient is " + is("f32[3]") + ", the tensor " + is("f32[2]")});
  refuses<AutogradError>([] { leaf(f({})).set_grad({}); }, {"set_grad: the gradient is undefined"});
  refuses<DTypeError>([] { leaf(f({2})).set_grad(i({2})); },
                      {"set_grad: expected f64, f32, f16 or bf16, got " + is("i64[2]")});
  const Tensor x = leaf(f({2}));
  const auto wrong = [](const Tensor&) { return ones({5}); };
  refuses<AutogradError>(
      [&] {
        const Tensor y = x * 2.0;
        y.register_hook(wrong);
        sum(y).backward();
      },
      {"gradient hook: returned f32[5]@cpu for a gradient " + is("f32[2]")});
  refuses<AutogradError>(
      [&] {
        const Tensor hooked = leaf(f({3}));
        hooked.register_hook(wrong);
        sum(hooked * 2.0).backward();
      },
      {"gradient hook: returned f32[5]@cpu for a gradient " + is("f32[3]")});
  refuses<AutogradError>(
      [&] {
        const Tensor a = leaf(f({2})), h = a * 2.0, loss = sum(square(h));
        const NoGrad off;
        h.fill_(1);
        loss.backward();
      },
      {"square: a tensor that backward needs, " + is("f32[2]") + ", was changed in place: it is at version",
       "clone()"});
  refuses<DTypeError>([] { gradcheck([](std::span<const Tensor> in) { return sum(in[0]); }, {leaf(f({2}))}); },
                      {"gradcheck: inputs must be f64 leaves, got " + is("f32[2]")});
  refuses<AutogradError>(
      [&] {
        const Tensor twice_scaled = leaf(f({1}));
        optim::LossScaler one, other;
        one.backward(loss_with_gradients({twice_scaled}, {f({1})}));
        other.backward(loss_with_gradients({twice_scaled}, {f({1})}));
      },
      {"a gradient scaled by one scaler can not be added to one with another scale; call zero_grad() in "
       "between"});
  const auto broken = [](const Tensor& in) {  // an op by a user whose backward is wrong
    return record({"broken", Cast::keep}, in.detach().clone(), {in},
                  [](Grads, GradOut& out) { out.set(0, ones({7})); });
  };
  refuses<InternalError>([&] { sum(broken(x)).backward(); },
                         {"broken: gradient of input 0 is f32[7]@cpu, but the input has shape [2]"});
}

MT_ERRORS_INVENTORY([](const std::string& file) {
  return file.starts_with("core/") || (file.starts_with("autograd/") && !contains(file, "/op"));
});

}  // namespace
}  // namespace mantissa
