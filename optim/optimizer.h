#pragma once
// Optimizers: they update f32 masters, and the 16-bit working copies in the same pass, in one launch for all
// parameters.
//
// A step reads its verdict, learning rate and clip factor from device memory and never waits for the device. A step
// whose gradients are not finite changes nothing. Gradients are consumed: after a step they count as absent.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/step.h"
#include "core/tensor.h"

namespace mantissa {
std::string to_string(Verdict verdict);  // "applied", "skipped: overflow", ...
}

namespace mantissa::optim {

using mantissa::Schedule;
using mantissa::Verdict;

/// Schedules of the field, functions of applied steps.
Schedule constant(double lr, std::int64_t warmup = 0);
Schedule linear_decay(double lr, std::int64_t total, std::int64_t warmup = 0, double final = 0);
Schedule cosine_decay(double lr, std::int64_t total, std::int64_t warmup = 0, double final = 0);
Schedule step_decay(double lr, std::int64_t every, double factor = 0.1, std::int64_t warmup = 0);

/// Parameters that share a factor on the learning rate and a weight decay.
struct ParamGroup {
  std::vector<Tensor> parameters;
  double lr_scale = 1;
  double weight_decay = 0;
};

using StateDict = std::vector<std::pair<std::string, Tensor>>;

/// What became of a step; lazy: only asking waits for the device. Ask before the optimizer's next step.
class StepResult {
 public:
  StepResult() = default;
  Verdict verdict() const;
  bool applied() const { return verdict() == Verdict::applied; }
  double grad_norm() const;      // of the unscaled gradients, before clipping
  double learning_rate() const;  // used by this step
  std::int64_t applied_steps() const;

 private:
  friend class Optimizer;
  friend class LossScaler;
  struct Source {
    Tensor state;                     // StepState on the device
    std::shared_ptr<Storage> mirror;  // pinned: the newest StepState that has reached the host
    std::int64_t ticket = 0;
  };
  StepState read() const;
  std::shared_ptr<Source> source_;
  std::int64_t ticket_ = 0;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Checks, clips, updates, and clears the gradients. Refuses gradients that carry a loss scale.
  StepResult step();
  void zero_grad();

  /// Clips the next step's unscaled gradients to a global norm (one factor in the update) or each element to +-value.
  void clip_grad_norm(double max_norm);
  void clip_grad_value(double max_value);

  /// The learning rate as a function of applied steps.
  void set_schedule(const Schedule& schedule);
  void set_lr(double lr) { set_schedule(constant(lr)); }
  const Schedule& schedule() const { return rules_.schedule; }

  /// What became of the newest step, a replayed one (train/captured_step.h) included.
  StepResult last_result() const;

  std::vector<ParamGroup>& groups() { return groups_; }
  std::vector<Tensor> parameters() const;
  std::int64_t applied_steps() const;  // waits for the device

  /// Moments by "state1.<i>" and "state2.<i>" in parameter order, and "applied" (i64). Copies.
  StateDict state_dict() const;
  /// The reverse; ConfigError naming every missing, extra or misshapen entry, and then nothing is changed.
  void load_state_dict(const StateDict& state);

 protected:
  Optimizer(std::vector<ParamGroup> groups, const Schedule& schedule, int moments);
  virtual void update(std::span<const UpdateTensor> tensors, const StepState* state) = 0;

 private:
  friend class LossScaler;
  struct Moments {
    const Node* parameter;  // whose they are
    Tensor first, second;
  };
  /// `scale` null: gradients must be unscaled; the scaler passes its state, where to mirror it, and its owner mark.
  StepResult step(ScaleState* scale, ScaleState* scale_mirror, const ScaleRule& rule, const void* owner,
                  bool update_scale);
  StepState* device_state() const;
  void reset_state(const StepState& state);
  struct Updated {
    const Tensor* parameter;
    bool working;  // its working copy is refreshed too
  };
  /// rules_ on the device.
  const StepRules* device_rules();
  /// What a replay of this step does on the host: notices what changed since, counts, bumps versions.
  void record_host_part(const std::vector<Updated>& updated);
  bool has_gradients_scaled_by(const void* owner) const;

  std::vector<ParamGroup> groups_;
  std::vector<Moments> moments_;  // in parameter order
  int moments_per_parameter_;
  StepRules rules_;
  Device device_;
  // The rules that the device reads; uploaded when they change, which in a steady step they do not.
  std::optional<StepRules> uploaded_;
  Tensor device_rules_;
  std::shared_ptr<StepResult::Source> source_ = std::make_shared<StepResult::Source>();
};

struct SGDOptions {
  double lr = 1e-2, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};

/// Stochastic gradient descent with PyTorch's momentum: buffer = momentum buffer + (1 - dampening) g.
class SGD final : public Optimizer {
 public:
  explicit SGD(std::vector<Tensor> parameters, const SGDOptions& options = {});
  SGD(std::vector<ParamGroup> groups, const SGDOptions& options);

 private:
  void update(std::span<const UpdateTensor> tensors, const StepState* state) override;
  SgdRule rule_;
};

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
};

/// Kingma and Ba 2015; weight decay is added to the gradient.
class Adam : public Optimizer {
 public:
  explicit Adam(std::vector<Tensor> parameters, const AdamOptions& options = {});
  Adam(std::vector<ParamGroup> groups, const AdamOptions& options);

 protected:
  Adam(std::vector<ParamGroup> groups, const AdamOptions& options, bool decoupled);

 private:
  void update(std::span<const UpdateTensor> tensors, const StepState* state) override;
  AdamRule rule_;
};

/// Loshchilov and Hutter 2019: decay is decoupled from the gradient, w -= lr weight_decay w.
/// Given plain parameters, decay applies to those of two or more axes only, as is usual.
class AdamW final : public Adam {
 public:
  explicit AdamW(const std::vector<Tensor>& parameters, const AdamOptions& options = {.weight_decay = 0.01});
  AdamW(std::vector<ParamGroup> groups, const AdamOptions& options);
};

}  // namespace mantissa::optim
