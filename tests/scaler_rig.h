#pragma once
// A loss scaler driven by a script.

#include "step_support.h"

namespace mantissa::testing {

using optim::DynamicScale;
using optim::LossScaler;
using optim::SGD;
using optim::StaticScale;

inline constexpr LossScaler::Options kNeverStop{.enabled = true, .max_streak = 0};

/// One parameter, SGD and a scaler, driven by a script: '.' clean, 'i' inf, '-' -inf, 'n' NaN, 'z' zero
/// gradient, ' ' no gradient at all.
struct Rig {
  template <class Policy>
  Rig(Device device, const Policy& policy, LossScaler::Options options = kNeverStop)
      : w(leaf(zeros({3}, {DType::f32, device}))), sgd({w}, {.lr = 0.5}), scaler(policy, options) {}

  optim::StepResult step(char kind) {
    const double values[] = {1, kInf, -kInf, kNaN, 0};
    const auto which = std::string(".i-nz").find(kind);
    const Tensor g = which == std::string::npos ? Tensor{} : full({3}, values[which], {DType::f32, w.device()});
    scaler.backward(loss_with_gradients({w}, {g}));
    return scaler.step(sgd);
  }
  /// The scale after each step of the script.
  std::vector<double> run(const std::string& script) {
    std::vector<double> scales;
    for (const char kind : script) {
      step(kind);
      scales.push_back(scaler.scale());
    }
    return scales;
  }

  Tensor w;
  SGD sgd;
  LossScaler scaler;
};

using Scales = std::vector<double>;

}  // namespace mantissa::testing
