#pragma once
// Analytic against numeric derivatives, in f64; public, because users write ops too.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace mantissa {

struct GradcheckOptions {
  double eps = 6e-6;  // step of the central difference: about the cube root of f64's rounding unit
  double rtol = 1e-6, atol = 1e-8;
  std::uint64_t seed = 1;  // of the random weights that make a scalar of the output
};

struct GradcheckReport {
  bool passed = true;
  double worst = 0;     // largest |analytic - numeric| / (atol + rtol |numeric|)
  std::string message;  // the first mismatch: input, element, both values
  explicit operator bool() const { return passed; }
};

/// Compares backward with central differences of <v, fn(inputs)> for every element of every input, v random.
/// Inputs are f64 leaves on any device; those that do not require a gradient are left alone.
GradcheckReport gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn, std::vector<Tensor> inputs,
                          const GradcheckOptions& options = {});

}  // namespace mantissa
