#pragma once
// Loss scaling: small f16 gradients survive because the loss is multiplied by a scale, and the update divides by it.
//
//   mt::optim::LossScaler scaler;         // dynamic; does nothing when no tensor of the graph is f16
//   scaler.backward(loss);                // scaled backward
//   optimizer.clip_grad_norm(1.0);        // folded into the update
//   auto result = scaler.step(optimizer); // unscale, check, update or skip, adapt the scale: nothing waits
//
// The scale, its counters and the verdict live on the device. Scales are powers of two, so scaling is exact.

#include <initializer_list>
#include <memory>
#include <vector>

#include "core/step.h"
#include "optim/optimizer.h"

namespace mantissa::optim {

/// A scale that never changes.
struct StaticScale {
  double scale = 128;
};

/// PyTorch's rule by default: start at 2^16, double after exactly 2000 clean steps in a row, halve on overflow.
struct DynamicScale {
  double initial = 65536, growth = 2, backoff = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t hysteresis = 1;    // bad steps before the scale falls
  bool refill_hysteresis = true;  // by every clean step; false: only by growth, as in Megatron
  double floor = 1, cap = 16777216;
  bool any_factor = false;  // allow values that are not powers of two
};

class LossScaler {
 public:
  struct Options {
    bool enabled = true;  // false: backward and step without scaling, checks stay
    // Skipped steps in a row of one optimizer after which step() throws NonFiniteError, until its state is loaded
    // again; 0: never.
    std::int64_t max_streak = 40;
  };
  explicit LossScaler(const DynamicScale& policy, Options options);
  LossScaler(const StaticScale& policy, Options options);
  explicit LossScaler(const DynamicScale& policy = {}) : LossScaler(policy, Options{}) {}
  explicit LossScaler(const StaticScale& policy) : LossScaler(policy, Options{}) {}
  LossScaler(const LossScaler&) = delete;
  LossScaler& operator=(const LossScaler&) = delete;

  /// Differentiates scale * loss when the graph holds an f16 tensor, else the loss itself. The scale stays the same
  /// until step(), so micro-batches accumulate under one scale.
  void backward(const Tensor& loss);
  /// Unscales, checks, updates or skips, and adapts the scale once.
  StepResult step(Optimizer& optimizer);
  /// Several optimizers under one scale: each has its own verdict, and the scale falls if any of them overflowed.
  std::vector<StepResult> step(std::initializer_list<Optimizer*> optimizers);

  double scale() const;                      // waits for the device
  ScaleState state() const;                  // for checkpoints; waits for the device
  void load_state(const ScaleState& state);  // also before the first use
  /// The newest state that has reached the host; never waits, may be a few steps old.
  ScaleState recent_state() const;
  const ScaleRule& rule() const { return rule_; }

 private:
  void prepare(Device device);
  void stop_at_streak(const Optimizer& optimizer) const;

  ScaleRule rule_;
  Options options_;
  ScaleState initial_;
  Tensor device_state_;              // ScaleState, on the device of the first loss
  std::shared_ptr<Storage> mirror_;  // pinned: the newest ScaleState that has reached the host
};

}  // namespace mantissa::optim
