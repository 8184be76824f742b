// The training step: gradient check, decision, updates. The formulas are in core/step.h, shared with the GPU.
#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/lanes.h"
#include "core/cpu/loops.h"
#include "core/step.h"

namespace mantissa {
namespace {

struct Check {
  double squares = 0;
  std::int64_t infs = 0, nans = 0;
};

template <class T> Check check_run(const T* x, std::int64_t n) {
  Check c;
  c.squares =
      lane_sum<double>(n, [x](std::int64_t i) { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
  if (!std::isfinite(c.squares)) {  // rare: count what made it so (a finite f64 gradient may have an infinite square)
    for (std::int64_t i = 0; i < n; ++i) {
      c.infs += std::isinf(x[i]) ? 1 : 0;
      c.nans += std::isnan(x[i]) ? 1 : 0;
    }
  }
  return c;
}

/// The gradient as the rule sees it: unscaled, then clipped; NaN stays.
template <class T> struct Gradient {
  T factor, limit;
  T operator()(T g) const {
    const T value = g * factor;
    return value < -limit ? -limit : value > limit ? limit : value;
  }
};

// Elements go through local copies: without stores under the rule's branches the loops vectorise.

template <class T>
void update_block(std::int64_t n, const Gradient<T> gradient, const SgdElement<T> rule, const T* __restrict g,
                  T* __restrict w, T* __restrict m, T*) {
  for (std::int64_t i = 0; m == nullptr && i < n; ++i) {
    T weight = w[i], none = 0;
    rule(gradient(g[i]), weight, none);
    w[i] = weight;
  }
  for (std::int64_t i = 0; m != nullptr && i < n; ++i) {
    T weight = w[i], buffer = m[i];
    rule(gradient(g[i]), weight, buffer);
    w[i] = weight;
    m[i] = buffer;
  }
}

template <class T>
void update_block(std::int64_t n, const Gradient<T> gradient, const AdamElement<T> rule, const T* __restrict g,
                  T* __restrict w, T* __restrict m, T* __restrict v) {
  for (std::int64_t i = 0; i < n; ++i) {
    T weight = w[i], first = m[i], second = v[i];
    rule(gradient(g[i]), weight, first, second);
    w[i] = weight;
    m[i] = first;
    v[i] = second;
  }
}

template <class T, class Rule> void update_tensor(const UpdateTensor& t, const StepState& s, const Rule& rule) {
  T* w = static_cast<T*>(t.parameter);
  const T* g = static_cast<const T*>(t.gradient);
  T *m = static_cast<T*>(t.state1), *v = static_cast<T*>(t.state2);
  const T limit = s.max_value > 0 ? static_cast<T>(s.max_value) : std::numeric_limits<T>::infinity();
  const Gradient<T> gradient{static_cast<T>(s.factor), limit};
  parallel_for(t.numel, kParallelGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kBlock) {
      const std::int64_t n = std::min(kBlock, end - i);
      update_block(n, gradient, rule, g + i, w + i, m ? m + i : nullptr, v ? v + i : nullptr);
      if constexpr (std::is_same_v<T, float>) {
        if (t.working == nullptr) continue;
        if (t.working_dtype == DType::f16) {
          narrow_block(w + i, static_cast<float16*>(t.working) + i, n);
        } else {
          narrow_block(w + i, static_cast<bfloat16*>(t.working) + i, n);
        }
      }
    }
  });
}

}  // namespace

void CpuBackend::check_gradients(std::span<const Tensor> gradients, StepState* state) {
  Check total;
  for (const Tensor& g : gradients) {
    const std::int64_t n = g.numel(), pieces = (n + kParallelGrain - 1) / kParallelGrain;
    std::vector<Check> parts(static_cast<std::size_t>(pieces));
    parallel_for(n, kParallelGrain, [&](std::int64_t begin, std::int64_t end) {
      parts[static_cast<std::size_t>(begin / kParallelGrain)] =
          g.dtype() == DType::f64 ? check_run(static_cast<const double*>(g.data()) + begin, end - begin)
                                  : check_run(static_cast<const float*>(g.data()) + begin, end - begin);
    });
    for (const Check& part : parts) {
      total.squares += part.squares;
      total.infs += part.infs;
      total.nans += part.nans;
    }
  }
  state->sum_of_squares = total.squares;
  state->infs = total.infs;
  state->nans = total.nans;
}

void CpuBackend::decide(const StepRules* rules, StepState* optimizer, ScaleState* scale, bool update_scale,
                        StepState* mirror, ScaleState* scale_mirror) {
  decide_step(*rules, *optimizer, scale, update_scale);
  if (mirror != nullptr) *mirror = *optimizer;
  if (scale != nullptr && scale_mirror != nullptr) *scale_mirror = *scale;
}

void CpuBackend::sgd_update(std::span<const UpdateTensor> tensors, const SgdRule& rule, const StepState* state) {
  if (state->verdict != Verdict::applied) return;
  for (const UpdateTensor& t : tensors) {
    const auto run = [&]<class T>() {
      const SgdElement<T> element{static_cast<T>(state->learning_rate * t.lr_scale),
                                  static_cast<T>(t.weight_decay),
                                  static_cast<T>(rule.momentum),
                                  static_cast<T>(rule.dampening),
                                  rule.nesterov,
                                  state->applied == 1};
      update_tensor<T>(t, *state, element);
    };
    t.dtype == DType::f64 ? run.template operator()<double>() : run.template operator()<float>();
  }
}

void CpuBackend::adam_update(std::span<const UpdateTensor> tensors, const AdamRule& rule, const StepState* state) {
  if (state->verdict != Verdict::applied) return;
  const auto t_applied = static_cast<double>(state->applied);
  const double correction1 = 1 - std::pow(rule.beta1, t_applied), correction2 = 1 - std::pow(rule.beta2, t_applied);
  for (const UpdateTensor& t : tensors) {
    const auto run = [&]<class T>() {
      const AdamElement<T> element{static_cast<T>(state->learning_rate * t.lr_scale),
                                   static_cast<T>(t.weight_decay),
                                   static_cast<T>(rule.beta1),
                                   static_cast<T>(rule.beta2),
                                   static_cast<T>(1 - rule.beta1),
                                   static_cast<T>(1 - rule.beta2),
                                   static_cast<T>(rule.eps),
                                   static_cast<T>(correction1),
                                   static_cast<T>(correction2),
                                   rule.decoupled};
      update_tensor<T>(t, *state, element);
    };
    t.dtype == DType::f64 ? run.template operator()<double>() : run.template operator()<float>();
  }
}

void CpuBackend::restore_if_skipped(const Tensor& source, const StepState* state, Tensor& target) {
  const bool skipped = state->verdict != Verdict::applied && state->verdict != Verdict::nothing_to_do;
  if (skipped) copy(source, target);
}

}  // namespace mantissa
