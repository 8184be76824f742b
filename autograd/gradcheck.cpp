#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "autograd/op_checks.h"
#include "autograd/ops.h"

namespace mantissa {

GradcheckReport gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn, std::vector<Tensor> inputs,
                          const GradcheckOptions& options) {
  for (const Tensor& x : inputs)
    MT_CHECK(DTypeError, !x.requires_grad() || (x.dtype() == DType::f64 && x.is_leaf()),
             "gradcheck: inputs must be f64 leaves, got ", x);
  const Tensor y = fn(inputs);
  const PhiloxState state{options.seed, 0};
  Tensor weights = empty(y.shape(), {y.dtype(), y.device()});
  backend(y).random(RandomKind::uniform, -1, 1, state, weights);
  const auto value = [&] {
    const NoGrad no_grad;
    return sum(fn(inputs).to(DType::f64) * weights.to(DType::f64)).item();
  };
  for (const Tensor& x : inputs) x.zero_grad();
  backward(y, {.seed = weights});
  GradcheckReport report;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    const Tensor gradient = inputs[i].grad().defined() ? inputs[i].grad() : zeros_like(inputs[i].detach());
    const std::vector<double> analytic = gradient.to_vector<double>(), original = inputs[i].to_vector<double>();
    for (std::size_t j = 0; j < original.size(); ++j) {
      const auto at = [&](double v) {
        std::vector<double> changed = original;
        changed[j] = v;
        const NoGrad no_grad;
        inputs[i].copy_(from_vector(changed, inputs[i].shape(), {DType::f64, cpu}));
        return value();
      };
      const double h = options.eps * std::max(1.0, std::abs(original[j]));
      const double numeric = (at(original[j] + h) - at(original[j] - h)) / (2 * h);
      const double ratio = std::abs(analytic[j] - numeric) / (options.atol + options.rtol * std::abs(numeric));
      report.worst = std::max(report.worst, ratio);
      if (ratio <= 1 || !report.passed) continue;  // NaN fails
      report.passed = false;
      report.message = detail::message("gradcheck: input ", i, " ", inputs[i], ", element ", j, ": analytic ",
                                       analytic[j], ", numeric ", numeric);
    }
    const NoGrad no_grad;
    inputs[i].copy_(from_vector(original, inputs[i].shape(), {DType::f64, cpu}));
  }
  return report;
}

}  // namespace mantissa
