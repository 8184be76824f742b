// Error messages of optimizers, the loss scaler, layers and models.

#include "errors_support.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::DynamicScale;
using optim::LossScaler;
using optim::SGD;

class Errors : public ErrorsOnDevice {};
MT_ON_DEVICES(Errors);

// ---- optim and nn
// ---------------------------------------------------------------------------------------------------------

TEST_P(Errors, OptimizerOptions) {
  const Tensor p = leaf(f({2}));
  refuses<ConfigError>([&] { const SGD sgd(std::vector<Tensor>{}); }, {"optimizer: no parameters were given"});
  refuses<AutogradError>([&] { const SGD sgd({f({2})}); },
                         {"optimizer: " + is("f32[2]") + " is not a leaf that requires a gradient"});
  refuses<AutogradError>([&] { const SGD sgd({p * 2.0}); }, {"optimizer: " + is("f32[2]") + " is not a leaf"});
  refuses<DTypeError>([&] { const SGD sgd({leaf(f({2}, DType::f16))}); },
                      {"optimizer: parameters are f32 masters, got " + is("f16[2]"), "Autocast"});
  refuses<ConfigError>([&] { const SGD sgd({leaf(f({4}).slice(0, 0, 4, 2))}); },
                       {"optimizer: " + is("f32[2]") + " is a view with gaps"});
  refuses<ConfigError>([&] { const SGD sgd({p, p}); }, {"optimizer: a parameter " + is("f32[2]") + " appears twice"});
  refuses<ConfigError>(
      [&] {
        const SGD sgd(std::vector<optim::ParamGroup>{{{p}, -1, 0}}, {});
      },
      {"optimizer: weight_decay and lr_scale must not be negative, got 0 and -1"});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.weight_decay = kNaN}); },
                       {"optimizer: weight_decay and lr_scale", "nan"});
  for (const double lr : {-1.0, kNaN, kInf})
    refuses<ConfigError>(
        [&] { const SGD sgd({p}, {.lr = lr}); },
        {"schedule: the learning rate must be finite and not negative, got " + detail::number_to_string(lr)});
  for (const double m : {-0.1, 1.0, kNaN})
    refuses<ConfigError>([&] { const SGD sgd({p}, {.momentum = m}); },
                         {"SGD: momentum must lie in [0, 1), got " + detail::number_to_string(m)});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.nesterov = true}); },
                       {"SGD: nesterov needs momentum and no dampening"});
  refuses<ConfigError>([&] { const SGD sgd({p}, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}); },
                       {"SGD: nesterov needs momentum and no dampening"});
  for (const double b : {-0.1, 1.0, kNaN}) {
    refuses<ConfigError>([&] { const optim::Adam adam({p}, {.beta1 = b}); },
                         {"Adam: betas must lie in [0, 1), got " + detail::number_to_string(b)});
    refuses<ConfigError>([&] { const optim::AdamW adam({p}, {.beta2 = b}); },
                         {"Adam: betas must lie in [0, 1)", detail::number_to_string(b)});
  }
  refuses<ConfigError>([&] { const optim::Adam adam({p}, {.eps = -1}); }, {"Adam: eps must not be negative, got -1"});
  SGD sgd({p});
  refuses<ConfigError>([&] { sgd.clip_grad_norm(0); }, {"clip_grad_norm: the limit must be positive, got 0"});
  refuses<ConfigError>([&] { sgd.clip_grad_norm(kNaN); }, {"clip_grad_norm: the limit must be positive, got nan"});
  refuses<ConfigError>([&] { sgd.clip_grad_value(-2); }, {"clip_grad_value: the limit must be positive, got -2"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::constant(1, -1)); },
                       {"schedule: warmup must not be negative and `every` positive, got -1 and 1"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::step_decay(1, 0)); },
                       {"schedule: warmup must not be negative and `every` positive, got 0 and 0"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::cosine_decay(1, 5, 5)); },
                       {"schedule: total (5) must exceed warmup (5)"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::linear_decay(1, 0)); },
                       {"schedule: total (0) must exceed warmup (0)"});
  for (const double final : {-1.0, kNaN, kInf})
    refuses<ConfigError>([&] { sgd.set_schedule(optim::linear_decay(1, 5, 0, final)); },
                         {"schedule: the learning rate must be finite and not negative"});
  refuses<ConfigError>([&] { sgd.set_schedule(optim::step_decay(1, 5, kNaN)); },
                       {"schedule: the factor must be finite and not negative, got nan"});
  refuses<ConfigError>([&] { sgd.load_state_dict({}); },
                       {"load_state_dict: the state does not fit this optimizer; missing applied"});
  refuses<AutogradError>([] { optim::StepResult().verdict(); }, {"StepResult: empty; it comes from step()"});
  sgd.groups()[0].parameters.push_back(leaf(f({2})));
  refuses<ConfigError>(
      [&] { sgd.step(); },
      {"optimizer: the parameters of its groups have changed since it was made: found " + is("f32[2]")});
}

TEST_P(Errors, Steps) {
  const Tensor p = leaf(f({1})), q = leaf(f({1}));
  SGD sgd({p, q}), late({p});
  LossScaler scaler, other(DynamicScale{}, {.max_streak = 1});
  const auto scaled = [&](LossScaler& by, const Tensor& x, double g) {
    by.backward(loss_with_gradients({x}, {full({1}, g, on())}));
  };
  scaled(scaler, p, 1);
  refuses<AutogradError>([&] { sgd.step(); }, {"optimizer: the gradients carry a loss scale; call "
                                               "scaler.step(optimizer) of the scaler that scaled them"});
  q.set_grad(f({1}));
  refuses<AutogradError>([&] { scaler.step(sgd); }, {"scaler.step: some gradients are scaled and some are not"});
  refuses<AutogradError>([&] { scaled(other, p, 1); },
                         {"a gradient scaled by one scaler can not be added to one with another scale; call "
                          "zero_grad() in between"});
  sgd.zero_grad();
  const optim::StepResult early = sgd.step();
  sgd.step();
  refuses<AutogradError>([&] { early.verdict(); },
                         {"StepResult: read too late: the optimizer has taken another step since"});
  scaled(other, p, kNaN);
  other.step(late).verdict();
  refuses<NonFiniteError>([&] { other.step(late); },
                          {"LossScaler: 1 steps in a row were skipped (skipped: NaN; 1 NaN and 0 inf "
                           "gradient elements at scale 65536, floor 1)",
                           "not a scaling problem"});
  refuses<AutogradError>([&] { scaler.backward({}); }, {"LossScaler.backward: the loss is undefined"});
  refuses<DTypeError>([&] { scaler.backward(leaf(f({}, DType::bf16))); },
                      {"LossScaler.backward: the loss must be f32 (or f64), got " + is("bf16[]")});
  ScaleState state;
  state.scale = 0.5;
  refuses<ConfigError>([&] { scaler.load_state(state); },
                       {"LossScaler.load_state: scale 0.5 is outside [1, 16777216]"});
  state.scale = 2;
  state.clean_steps = -1;
  refuses<ConfigError>([&] { scaler.load_state(state); },
                       {"LossScaler.load_state: counters out of range: -1 clean steps"});
  const auto make = [](DynamicScale policy) { return [policy] { const LossScaler s(policy); }; };
  refuses<ConfigError>(make({.initial = -1}), {"LossScaler: initial must be positive and finite, got -1"});
  refuses<ConfigError>(make({.growth = 3}), {"LossScaler: growth must be a power of two so that scaling is "
                                             "exact, got 3; set any_factor to allow it"});
  refuses<ConfigError>(make({.backoff = 4}),
                       {"LossScaler: growth must be at least 1 and backoff at most 1, got 2 and 4"});
  refuses<ConfigError>(make({.hysteresis = 0}),
                       {"LossScaler: growth_interval and hysteresis must be positive, got 2000 and 0"});
  refuses<ConfigError>(make({.initial = 1, .floor = 2}),
                       {"LossScaler: need 2^-126 <= floor <= initial <= cap <= 2^127, got 2, 1, 16777216"});
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
  refuses<ConfigError>([=] { nn::Conv2d(3, 4, 3, {.groups = 2}, d); },
                       {"Conv2d: 2 groups do not divide 3 and 4 channels"});
  refuses<ConfigError>([] { nn::MaxPool2d(0); }, {"MaxPool2d: sizes must be positive, got 0"});
  refuses<ConfigError>([] { nn::AvgPool2d(-2); }, {"AvgPool2d: sizes must be positive, got -2"});
  refuses<ConfigError>([=] { nn::SelfAttention(10, 3, d); }, {"SelfAttention: 3 heads do not divide width 10"});
  refuses<ConfigError>([=] { nn::SelfAttention(10, 0, d); }, {"SelfAttention: 0 heads"});
  refuses<ConfigError>([=] { nn::MLP({3}, d); }, {"MLP: need at least an input and an output size"});
  refuses<ConfigError>([=] { nn::SmallCNN({.width = 0}, d); }, {"Conv2d: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::SmallCNN({.dropout = 2}, d); },
                       {"Dropout: the probability must lie in [0, 1], got 2"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 5, .context = 4, .width = 4, .layers = 0, .heads = 1}, d); },
                       {"GPT: need at least one layer, got 0"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 0, .context = 4, .width = 4, .layers = 1, .heads = 1}, d); },
                       {"Embedding: sizes must be positive, got 0"});
  refuses<ConfigError>([=] { nn::GPT({.vocabulary = 5, .context = 4, .width = 5, .layers = 1, .heads = 2}, d); },
                       {"SelfAttention: 2 heads do not divide width 5"});
  for (const auto init :
       {nn::init::kaiming_normal, nn::init::kaiming_uniform, nn::init::xavier_normal, nn::init::xavier_uniform})
    refuses<ShapeError>([=] { init({3}, 1); }, {"init: fans need a weight of at least two axes, got [3]"});
  nn::GPT gpt({.vocabulary = 5, .context = 4, .width = 4, .layers = 1, .heads = 1}, d);
  refuses<ShapeError>([&] { gpt(i({1, 5})); }, {"GPT: expected tokens [batch, length <= 4], got " + is("i64[1,5]")});
  refuses<ShapeError>([&] { gpt(i({4})); }, {"GPT: expected tokens [batch, length <= 4], got " + is("i64[4]")});
  refuses<ConfigError>([&] { gpt.generate({}, 3); }, {"generate: the prompt is empty"});
  refuses<ConfigError>([&] { gpt.generate({1}, 3, -1); }, {"generate: temperature and top_k must not be negative"});
  refuses<ConfigError>([&] { gpt.generate({1}, 3, 1, -1); }, {"generate: temperature and top_k must not be negative"});
  nn::MLP mlp({4, 3}, d);
  refuses<ShapeError>(
      [&] {
        mlp(f({2, 5}));
      },
      {"linear: inner dimensions differ: x is " + is("f32[2,5]") + ", w is " + is("f32[3,4]")});
}

TEST(ErrorsOfDevices, ParametersOnDifferentDevices) {
  MT_NEEDS_GPU();
  const Tensor a = leaf(ones({2, 3})), b = leaf(ones({2, 3}, {DType::f32, cuda(0)}));
  refuses<DeviceError>([&] { const SGD sgd({a, b}); }, {"optimizer: parameters are on cpu and cuda:0"});
  refuses<ShapeError>([&] { a.set_grad(b.detach()); },
                      {"set_grad: the gradient is f32[2,3]@cuda:0, the tensor f32[2,3]@cpu"});
  LossScaler scaler;
  scaler.backward(sum(a));
  refuses<DeviceError>([&] { scaler.backward(sum(b)); }, {"LossScaler: was used on cpu, now on cuda:0"});
}

TEST(ErrorsOfDevices, CapturedStepsWhoseWorldChanged) {
  MT_NEEDS_GPU();
  Tensor w = leaf(ones({8, 8}, {DType::f32, cuda(0)}));
  SGD sgd({w});
  DType low = f16;
  train::CapturedStep step([&](const Tensor& x) {
    Tensor loss;
    {
      const Autocast scope(low);
      loss = sum(matmul(x, w).to(f32));
    }
    loss.backward();
    sgd.step();
    return loss;
  });
  const Tensor x = ones({2, 8}, {DType::f32, cuda(0)});
  const auto record = [&] {
    step.reset();
    for (int i = 0; i < 3; ++i) step(x);
  };
  record();
  sgd.groups()[0].lr_scale = 2;
  refuses<ConfigError>([&] { step(x); },
                       {"captured step: lr_scale or weight_decay of group 0 changed", "reset() it to record again"});
  record();
  low = bf16;
  step(ones({3, 8}, {DType::f32, cuda(0)}));  // another shape runs as it is, and makes another working copy
  refuses<AutogradError>([&] { step(x); }, {"captured step: the 16-bit copy of " + to_string(w), "was replaced"});
  record();
  sum(matmul(x, w)).backward();
  const Tensor held = w.grad();
  w.zero_grad();
  sum(matmul(x, w)).backward();
  w.zero_grad();
  refuses<AutogradError>([&] { step(x); }, {"captured step: the gradient buffer of " + to_string(w), "was replaced"});
  record();
}

MT_ERRORS_INVENTORY([](const std::string& file) { return file.starts_with("optim/") || file.starts_with("nn/"); });

}  // namespace
}  // namespace mantissa
