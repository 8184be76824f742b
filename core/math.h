#pragma once
// Scalar maths for elementwise ops, the same source for both devices. On the GPU these are the CUDA maths functions;
// on the CPU the float versions of exp, tanh and erf are branch-free so that compilers vectorise loops over them.

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/random.h"  // MT_HD

namespace mantissa::math {

MT_HD inline double exp(double x) { return ::exp(x); }
MT_HD inline double tanh(double x) { return ::tanh(x); }
MT_HD inline double erf(double x) { return ::erf(x); }
MT_HD inline float exp(float x) { return ::expf(x); }
MT_HD inline float tanh(float x) { return ::tanhf(x); }
MT_HD inline float erf(float x) { return ::erff(x); }

MT_HD inline double log(double x) { return ::log(x); }
MT_HD inline float log(float x) { return ::logf(x); }
MT_HD inline double log1p(double x) { return ::log1p(x); }
MT_HD inline float log1p(float x) { return ::log1pf(x); }
MT_HD inline double expm1(double x) { return ::expm1(x); }
MT_HD inline float expm1(float x) { return ::expm1f(x); }
MT_HD inline double sqrt(double x) { return ::sqrt(x); }
MT_HD inline float sqrt(float x) { return ::sqrtf(x); }
MT_HD inline double sin(double x) { return ::sin(x); }
MT_HD inline float sin(float x) { return ::sinf(x); }
MT_HD inline double cos(double x) { return ::cos(x); }
MT_HD inline float cos(float x) { return ::cosf(x); }
MT_HD inline double pow(double x, double y) { return ::pow(x, y); }
MT_HD inline float pow(float x, float y) { return ::powf(x, y); }
MT_HD inline double abs(double x) { return ::fabs(x); }
MT_HD inline float abs(float x) { return ::fabsf(x); }

/// 1 / (1 + exp(-x)), without overflow on either side.
template <class A>
MT_HD A sigmoid(A x) {
  return A(1) / (A(1) + exp(-x));
}

}  // namespace mantissa::math
