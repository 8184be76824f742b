#include "nn/init.h"

#include <algorithm>
#include <cmath>

#include "autograd/ops.h"

namespace mantissa::nn::init {
namespace {

struct Fans {
  double in, out;
};

Fans fans(const Shape& shape) {
  MT_CHECK(ShapeError, shape.rank() >= 2, "init: fans need a weight of at least two axes, got ", shape);
  double window = 1;
  for (int i = 2; i < shape.rank(); ++i) window *= static_cast<double>(shape[i]);
  return {std::max(1.0, static_cast<double>(shape[1]) * window), std::max(1.0, static_cast<double>(shape[0]) * window)};
}

}  // namespace

Tensor kaiming_normal(const Shape& shape, double gain) { return normal(shape, 0, gain / std::sqrt(fans(shape).in)); }
Tensor kaiming_uniform(const Shape& shape, double gain) {
  const double bound = gain * std::sqrt(3 / fans(shape).in);
  return uniform(shape, -bound, bound);
}
Tensor xavier_normal(const Shape& shape, double gain) {
  const Fans f = fans(shape);
  return normal(shape, 0, gain * std::sqrt(2 / (f.in + f.out)));
}
Tensor xavier_uniform(const Shape& shape, double gain) {
  const Fans f = fans(shape);
  const double bound = gain * std::sqrt(6 / (f.in + f.out));
  return uniform(shape, -bound, bound);
}
Tensor fan_in_uniform(const Shape& shape, const Shape& weight) {
  const double bound = 1 / std::sqrt(fans(weight).in);
  return uniform(shape, -bound, bound);
}

}  // namespace mantissa::nn::init
