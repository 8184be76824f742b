#pragma once
// Initialisers of the field. They draw on the CPU from the process-wide stream, so that a seed gives the same model on
// every device. fan_in and fan_out: for w[out, in, ...], in and out times the size of the window.

#include "core/tensor.h"

namespace mantissa::nn::init {

/// He et al. 2015: deviation gain / sqrt(fan_in); gain sqrt(2) suits relu.
Tensor kaiming_normal(const Shape& shape, double gain = 1.4142135623730951);
Tensor kaiming_uniform(const Shape& shape, double gain = 1.4142135623730951);
/// Glorot and Bengio 2010: deviation gain sqrt(2 / (fan_in + fan_out)).
Tensor xavier_normal(const Shape& shape, double gain = 1);
Tensor xavier_uniform(const Shape& shape, double gain = 1);
/// Uniform in +-1/sqrt(fan_in) with the fan of `weight`: what PyTorch's Linear and Conv2d start from.
Tensor fan_in_uniform(const Shape& shape, const Shape& weight);

}  // namespace mantissa::nn::init
