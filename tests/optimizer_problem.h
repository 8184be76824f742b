#pragma once
// Parameters and gradients for the tests of optimizers.

#include <random>

#include "step_support.h"

namespace mantissa::testing {

using Values = std::vector<double>;

/// Parameters of awkward sizes, one of them stored channels-last, with fresh gradients for each step.
struct Problem {
  explicit Problem(TensorOptions options, std::uint64_t s = seed()) : random(s), on(options) {
    for (const Shape& shape : {Shape{1}, Shape{5}, Shape{3, 7}, Shape{1027}, Shape{2, 3, 5, 4}, Shape{16384 + 7}}) {
      Tensor x = empty(shape, on);
      if (shape.rank() == 4) x = x.view(shape, channels_last_strides(shape), 0);
      x.copy_(from_vector(draw(x.numel()), shape, {on.dtype, cpu}));
      parameters.push_back(leaf(x));
    }
  }
  Values draw(std::int64_t n) {
    std::normal_distribution<double> normal;
    Values values(static_cast<std::size_t>(n));
    for (double& x : values) x = static_cast<double>(static_cast<float>(normal(random)));
    return values;
  }
  Values give_gradient(std::size_t i) {
    const Values g = draw(parameters[i].numel());
    parameters[i].set_grad(from_vector(g, parameters[i].shape(), on));
    return g;
  }
  std::mt19937_64 random;
  TensorOptions on;
  std::vector<Tensor> parameters;
};

}  // namespace mantissa::testing
