#pragma once
// The code of the documentation, compiled. docs_test.cpp checks that every C++ block of README.md and docs/ stands here
// or in an example, word for word.

#include <cstdio>
#include <functional>

#include "mantissa/mantissa.h"

namespace snippets {
using namespace mantissa;
namespace mt = mantissa;

// docs/adding-an-op.md
struct Cube {
  static constexpr auto name = "cube";
  static constexpr auto needs = Needs::input;  // what grad() reads besides g: nothing, the input or the output
  static constexpr auto cast = Cast::full;     // what Autocast does: keep, low, full or widest
  template <class A> MT_HD A operator()(A x) const { return x * x * x; }
  template <class A> MT_HD A grad(A g, A x) const { return A(3) * g * x * x; }
};

static_assert(Unary<Cube>);

inline Tensor softmax_last(const Tensor& x) {
  MT_CHECK(DTypeError, is_float(x.dtype()), "softmax: expected a float tensor, got ", x);
  const Tensor data = x.detach().contiguous();
  Tensor y = empty_like(data);
  backend(x).softmax(data, false, y);
  return record({"softmax", Cast::full}, y, {x}, [y = save(y)](Grads g, GradOut& out) {
    Tensor gx = empty_like(y.get());
    backend(gx).softmax_grad(g[0].contiguous(), y.get(), false, gx);
    out.set(0, gx);
  });
}

// docs/mixed-precision.md
inline void train(mt::Device device, const mt::Tensor& x, const mt::Tensor& y) {
  mt::nn::MLP model({784, 256, 10}, device);  // 1. parameters are f32 masters
  mt::optim::AdamW optimizer(model.parameters());
  mt::optim::LossScaler scaler;  // 3. loss scaling

  mt::Tensor loss;
  {
    mt::Autocast scope(mt::f16);  // 2. products in f16
    loss = mt::cross_entropy(model(x), y);
  }
  scaler.backward(loss);
  optimizer.clip_grad_norm(1.0);
  scaler.step(optimizer);
}

inline void policies() {
  mt::optim::LossScaler fixed{mt::optim::StaticScale{1024}};
  mt::optim::LossScaler careful{
      mt::optim::DynamicScale{.initial = 4096, .growth_interval = 500, .hysteresis = 2, .floor = 1}};
}

inline void results(mt::optim::LossScaler& scaler, mt::optim::Optimizer& optimizer) {
  auto result = scaler.step(optimizer);
  result.verdict();    // applied, skipped_overflow, skipped_nan, at_floor, nothing_to_do
  result.grad_norm();  // of the unscaled gradients, before clipping
}

// docs/performance.md
inline void captured(mt::nn::GPT& model, mt::optim::AdamW& optimizer, mt::optim::LossScaler& scaler,
                     const mt::Tensor& tokens, const mt::Tensor& targets) {
  mt::train::CapturedStep step([&](const mt::Tensor& x, const mt::Tensor& y) {
    mt::Tensor loss;
    {
      mt::Autocast scope(mt::f16);
      loss = model.loss(x, y);
    }
    scaler.backward(loss);
    optimizer.clip_grad_norm(1.0);
    scaler.step(optimizer);
    return loss;
  });
  for (int i = 0; i < 100; ++i) {
    mt::Tensor loss = step(tokens, targets);            // the first call runs, the second records, the rest replay
    if (i % 10 == 0) std::printf("%f\n", loss.item());  // waiting is for outside
  }
  auto result = optimizer.last_result();  // of the newest step, a replayed one too
}

inline void count(mt::Device device, const std::function<void()>& step) {
  const mt::BackendCounters before = mt::backend(device).counters;
  for (int i = 0; i < 20; ++i) step();
  const mt::BackendCounters after = mt::backend(device).counters;
  std::printf("%lld waits, %lld casts, %lld launches a step\n",
              static_cast<long long>(after.synchronizations - before.synchronizations),
              static_cast<long long>(after.casts - before.casts),
              static_cast<long long>((after.launches - before.launches) / 20));
  std::printf("%s", mt::memory_report(device).c_str());
}

// docs/saving.md
inline void save_and_load(mt::nn::Module& model, const std::string& path) {
  mt::train::save_file(path, model.named_parameters(), {{"format", "pt"}});
  mt::train::load_into(model.named_parameters(), path);

  mt::train::LoadReport report = mt::train::load_into(model.named_parameters(), path, /*strict=*/false);
  for (const std::string& name : report.missing) std::printf("kept its value: %s\n", name.c_str());

  for (const mt::train::SafetensorsEntry& e : mt::train::read_header(path).entries)
    std::printf("%s has %lld bytes\n", e.name.c_str(), static_cast<long long>(e.end - e.begin));
}

}  // namespace snippets
