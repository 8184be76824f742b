#pragma once
// What decides a training step, on the device: one formula for CPU and GPU. No host code reads these while a step runs;
// StepResult and mirrors copy them back.

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/random.h"  // MT_HD

namespace mantissa {

/// A learning-rate schedule as a function of *applied* steps t = 0, 1, ...: linear warm-up, then a decay.
struct Schedule {
  enum class Decay : std::uint8_t { constant, linear, cosine, step };
  double base = 1e-3;       // the rate after warm-up
  double final = 0;         // linear, cosine: the rate at and after `total`
  std::int64_t warmup = 0;  // rate base (t + 1) / warmup for t < warmup
  std::int64_t total = 0;   // linear, cosine: the step at which `final` is reached
  std::int64_t every = 1;   // step: multiply by `factor` each so many steps
  double factor = 0.1;
  Decay decay = Decay::constant;

  bool operator==(const Schedule&) const = default;
  MT_HD double operator()(std::int64_t t) const {
    if (t < warmup) return base * static_cast<double>(t + 1) / static_cast<double>(warmup);
    if (decay == Decay::constant) return base;
    if (decay == Decay::step) return base * ::pow(factor, static_cast<double>((t - warmup) / every));
    if (t >= total) return final;
    const double x = static_cast<double>(t - warmup) / static_cast<double>(total - warmup);
    if (decay == Decay::linear) return base + (final - base) * x;
    return final + 0.5 * (base - final) * (1 + ::cos(3.14159265358979323846 * x));
  }
};

enum class Verdict : std::int32_t {
  pending,           // not decided yet
  applied,           // parameters were updated
  skipped_overflow,  // inf in the gradients (no NaN): nothing changed
  skipped_nan,       // NaN in the gradients: nothing changed
  at_floor,          // skipped, and the scale already stands at its floor: scaling cannot help
  nothing_to_do      // no parameter had a gradient
};

/// Dynamic loss scaling with PyTorch's semantics, hysteresis, floor and cap. Static scaling is growth = backoff = 1.
struct ScaleRule {
  double growth = 2, backoff = 0.5;
  std::int64_t growth_interval = 2000;  // clean steps in a row; growth on exactly the N-th
  std::int64_t hysteresis = 1;       // the scale falls at the n-th bad step, and at every one after it until a refill
  bool refill_hysteresis = true;     // true: refilled by each clean step ("consecutive"); false: only by growth
  double floor = 1, cap = 16777216;  // the scale stays within [floor, cap]
  bool operator==(const ScaleRule&) const = default;
};

/// The state of a scaler; part of the checkpoint.
struct ScaleState {
  float scale = 65536;
  std::int32_t hysteresis_left = 1;
  std::int64_t clean_steps = 0;  // since the last growth or overflow
  std::int64_t streak = 0;       // bad steps in a row
  std::int64_t skipped = 0, total = 0;
  std::int64_t bad_optimizers = 0;  // of those decided since the scale last changed: several may share one scale
};

/// The scale after one step; returns true when an overflow met the floor.
MT_HD inline bool update_scale(const ScaleRule& rule, bool overflow, ScaleState& s) {
  ++s.total;
  if (overflow) {
    ++s.streak;
    ++s.skipped;
    s.clean_steps = 0;
    if (s.hysteresis_left > 0) --s.hysteresis_left;
    if (s.hysteresis_left > 0) return false;
    const bool at_floor = static_cast<double>(s.scale) <= rule.floor;
    const double lowered = static_cast<double>(s.scale) * rule.backoff;
    s.scale = static_cast<float>(lowered > rule.floor ? lowered : rule.floor);
    return at_floor;
  }
  s.streak = 0;
  if (rule.refill_hysteresis) s.hysteresis_left = static_cast<std::int32_t>(rule.hysteresis);
  if (++s.clean_steps >= rule.growth_interval) {
    s.clean_steps = 0;
    s.hysteresis_left = static_cast<std::int32_t>(rule.hysteresis);
    const double grown = static_cast<double>(s.scale) * rule.growth;
    s.scale = static_cast<float>(grown < rule.cap ? grown : rule.cap);
  }
  return false;
}

/// How one optimizer step is decided.
struct StepRules {
  Schedule schedule;
  double max_norm = 0;   // clip to this global norm of the unscaled gradients; 0: do not clip
  double max_value = 0;  // clip each unscaled element to [-max_value, max_value]; 0: do not
  bool scaled = false;   // the gradients carry ScaleState::scale
  bool check = true;     // skip on a non-finite gradient
  bool empty = false;    // no parameter has a gradient
  ScaleRule scale_rule;
  bool operator==(const StepRules&) const = default;
};

/// The state of an optimizer on its device. The counters are part of the checkpoint; the rest is rewritten each step.
struct StepState {
  // check_gradients writes these
  double sum_of_squares = 0;  // of the gradients as they are (scaled)
  std::int64_t infs = 0, nans = 0;
  std::int64_t blocks_done = 0;  // of the kernel that is about to write them; 0 between steps
  // decide writes these
  std::int64_t applied = 0;  // steps applied so far, this one included
  std::int64_t skipped = 0;  // steps skipped so far
  std::int64_t streak = 0;   // skipped steps in a row
  Verdict verdict = Verdict::pending;
  float factor = 1;  // what the update multiplies each gradient by: unscale and clip in one
  float max_value = 0;
  float learning_rate = 0;  // of this step; update kernels multiply it by the group's lr_scale
  double grad_norm = 0;     // of the unscaled gradients, before clipping
  float scale = 1;          // that this step's gradients carried
};

/// The one decision that both devices run.
MT_HD inline void decide_step(const StepRules& rules, StepState& s, ScaleState* scale, bool update) {
  const float in_force = rules.scaled && scale ? scale->scale : 1.0f;
  s.scale = in_force;
  if (rules.empty) {  // neutral for the scale
    s.verdict = Verdict::nothing_to_do;
    return;
  }
  const bool bad = rules.check && (s.infs > 0 || s.nans > 0);
  const double unscale = 1.0 / static_cast<double>(in_force);
  s.grad_norm = ::sqrt(s.sum_of_squares) * unscale;
  double factor = unscale;
  if (rules.max_norm > 0 && s.grad_norm > rules.max_norm) factor *= rules.max_norm / (s.grad_norm + 1e-6);
  s.factor = static_cast<float>(factor);
  s.max_value = static_cast<float>(rules.max_value);
  bool floored = false;
  if (rules.scaled && scale) {
    scale->bad_optimizers += bad ? 1 : 0;
    if (update) {
      floored = update_scale(rules.scale_rule, scale->bad_optimizers > 0, *scale);
      scale->bad_optimizers = 0;
    }
  }
  if (bad) {
    s.verdict = floored ? Verdict::at_floor : s.nans > 0 ? Verdict::skipped_nan : Verdict::skipped_overflow;
    ++s.skipped;
    ++s.streak;
    return;
  }
  s.learning_rate = static_cast<float>(rules.schedule(s.applied));
  ++s.applied;
  s.streak = 0;
  s.verdict = Verdict::applied;
}

/// One parameter of a multi-tensor update: dense buffers of the same layout, `numel` elements.
struct UpdateTensor {
  void* parameter = nullptr;       // f32 master (or f64 on the CPU)
  const void* gradient = nullptr;  // of the parameter's dtype
  void* state1 = nullptr;          // first moment, or momentum; may be null when the rule has none
  void* state2 = nullptr;          // second moment
  void* working = nullptr;         // 16-bit working copy to refresh; may be null
  std::int64_t numel = 0;
  DType dtype = DType::f32, working_dtype = DType::f16;
  float lr_scale = 1, weight_decay = 0;
};

struct SgdRule {
  double momentum = 0, dampening = 0;
  bool nesterov = false;
};

struct AdamRule {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  bool decoupled = true;  // AdamW: decay the weights; else add weight_decay * w to the gradient
};

// One element of an update, shared by the devices. A is float or double; g is already unscaled and clipped.

template <class A> struct SgdElement {
  A lr, weight_decay, momentum, dampening;
  bool nesterov, first;  // first: the momentum buffer starts as the gradient
  MT_HD void operator()(A g, A& w, A& buffer) const {
    g += weight_decay * w;
    if (momentum != A(0)) {
      buffer = first ? g : momentum * buffer + (A(1) - dampening) * g;
      g = nesterov ? g + momentum * buffer : buffer;
    }
    w -= lr * g;
  }
};

template <class A> struct AdamElement {
  A lr, weight_decay, beta1, beta2;
  A rest1, rest2;                   // 1 - beta_i, subtracted in f64: 1 - 0.999f is off by 1e-5
  A eps, correction1, correction2;  // correction_i = 1 - beta_i^t
  bool decoupled;
  MT_HD void operator()(A g, A& w, A& m, A& v) const {
    if (decoupled) {
      w -= lr * weight_decay * w;
    } else {
      g += weight_decay * w;
    }
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
    w -= lr * (m / correction1) / (math_sqrt(v / correction2) + eps);
  }
  MT_HD static float math_sqrt(float x) { return ::sqrtf(x); }
  MT_HD static double math_sqrt(double x) { return ::sqrt(x); }
};

}  // namespace mantissa
