#pragma once
// Scalar maths for elementwise ops, the same source for both devices. On the GPU these are the CUDA maths
// functions; on the CPU the float versions of exp, expm1, log, log1p, tanh and erf are branch-free so that
// compilers vectorise loops over them. Errors are at most 2 units in the last place; NaN propagates; 0 is
// exact, with its sign.

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/random.h"  // MT_HD

namespace mantissa::math {

#if !defined(__CUDA_ARCH__)
// A call that is left in a loop keeps it from vectorising.
#define MT_FORCE_INLINE [[gnu::always_inline]] inline

namespace detail {

/// 2^k for k in [-126, 127].
MT_FORCE_INLINE float power_of_two(std::int32_t k) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(k + 127) << 23);
}

/// x = n ln 2 + r with |r| <= ln 2 / 2 (n an integer), and e^r - 1 = r + r^2 q(r).
struct Reduced {
  std::int32_t n;
  float r, tail;  // tail = r^2 q(r)
};
MT_FORCE_INLINE Reduced reduce_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, n times the first is exact
  float q = 0.000199144153f;
  q = q * r + 0.00139411679f;
  q = q * r + 0.0083332723f;
  q = q * r + 0.0416663513f;
  q = q * r + 0.166666672f;
  q = q * r + 0.5f;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound);
  return {static_cast<std::int32_t>(bits), r, r * r * q};
}

MT_FORCE_INLINE float exp(float x) {
  x = x < -104.0f ? -104.0f : x;  // e^-104 rounds to 0, e^89 to infinity; NaN passes both comparisons
  x = x > 89.0f ? 89.0f : x;
  const Reduced s = reduce_exp(x);
  const std::int32_t half = s.n >> 1;  // in two factors, so that subnormal results round once
  return (1.0f + (s.r + s.tail)) * power_of_two(half) * power_of_two(s.n - half);
}

MT_FORCE_INLINE float expm1(float x) {
  const float clamped = x < -18.0f ? -18.0f : x > 89.0f ? 89.0f : x;
  const Reduced s = reduce_exp(clamped);
  const float scale = power_of_two(s.n - 1);  // half of 2^n, which may overflow on its own
  const float y = (scale * (s.r + s.tail) + (scale - 0.5f)) * 2.0f;
  return x < 0x1p-25f && x > -0x1p-25f ? x : y;  // keeps subnormals and the sign of 0
}

MT_FORCE_INLINE float log(float x) {
  const bool subnormal = x < 1.17549435e-38f;
  const float scaled = subnormal ? x * 8388608.0f : x;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(scaled),
                      above = bits - 0x3f3504f3u;  // from sqrt(1/2)
  const std::int32_t exponent = static_cast<std::int32_t>(above) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(exponent) << 23)) - 1.0f;
  const float e = static_cast<float>(exponent) - (subnormal ? 23.0f : 0.0f);
  float p = 0.0691554546f;
  p = p * f + -0.117898569f;
  p = p * f + 0.118729182f;
  p = p * f + -0.123843357f;
  p = p * f + 0.142186657f;
  p = p * f + -0.166692525f;
  p = p * f + 0.200022265f;
  p = p * f + -0.249999866f;
  p = p * f + 0.333333105f;
  const float square = f * f, low = square * f * p + e * -2.12194440e-4f;
  float y = (f + (low - 0.5f * square)) + e * 0.693359375f;
  y = x == std::bit_cast<float>(0x7f800000u) ? x : y;
  y = x == 0.0f ? std::bit_cast<float>(0xff800000u) : y;
  return x < 0.0f || x != x ? std::bit_cast<float>(0x7fc00000u) : y;
}

MT_FORCE_INLINE float log1p(float x) {
  const float u = 1.0f + x, lost = x - (u - 1.0f);  // what the sum dropped, to first order
  const float whole = log(u), y = whole + lost / u;
  return u == 1.0f ? x : u == 0.0f || u == std::bit_cast<float>(0x7f800000u) ? whole : y;
}

MT_FORCE_INLINE float tanh(float x) {
  const float a = x < 0.0f ? -x : x, z = x * x;
  float p = 0.00239899987f;
  p = p * z + -0.00841679424f;
  p = p * z + 0.0217837691f;
  p = p * z + -0.0539597906f;
  p = p * z + 0.133332953f;
  p = p * z + -0.333333313f;
  const float small = x + x * z * p;
  const float large = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return std::copysign(a < 0.55f ? small : large, x);
}

MT_FORCE_INLINE float erf(float x) {
  const float a = x < 0.0f ? -x : x, z = x * x;
  float p = -9.68014047e-06f;
  p = p * z + 0.000112705457f;
  p = p * z + -0.000848471187f;
  p = p * z + 0.00522107491f;
  p = p * z + -0.0268654451f;
  p = p * z + 0.112837829f;
  p = p * z + -0.376126379f;
  p = p * z + 0.128379166f;
  const float small = x + x * p;
  const float b = a > 4.0f ? 4.0f : a;  // erf(4) rounds to 1
  float q = 0.000187604572f;            // log erfc(b)
  q = q * b + -0.00296011195f;
  q = q * b + 0.0218896344f;
  q = q * b + -0.103218183f;
  q = q * b + -0.63801223f;
  q = q * b + -1.12717164f;
  q = q * b + -0.000320576335f;
  const float large = 1.0f - exp(q);
  return std::copysign(a < 1.0f ? small : large, x);
}

MT_FORCE_INLINE float normal_cdf(float x) {
  const float a = x < 0.0f ? -x : x, z = x * x;
  float p = -7.65420737e-06f;  // (Phi(x) - 1/2) / x
  p = p * z + 0.000113486371f;
  p = p * z + -0.00118632999f;
  p = p * z + 0.00997332297f;
  p = p * z + -0.0664903596f;
  p = p * z + 0.398942292f;
  const float t = 1.0f / (1.0f + 0.25f * a);
  float q = -0.0465272702f;  // Phi(-a) e^(a^2 / 2) / t
  q = q * t + 0.108625725f;
  q = q * t + -0.0216620062f;
  q = q * t + 0.0918739513f;
  q = q * t + 0.0736740157f;
  q = q * t + 0.0945911780f;
  q = q * t + 0.0996555686f;
  q = q * t + 0.0997374803f;
  const float tail = exp(-0.5f * z) * (t * q);
  return a < 1.0f ? 0.5f + x * p : x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace detail
#endif

#if defined(__CUDA_ARCH__)
MT_HD inline float exp(float x) { return ::expf(x); }
MT_HD inline float expm1(float x) { return ::expm1f(x); }
MT_HD inline float log(float x) { return ::logf(x); }
MT_HD inline float log1p(float x) { return ::log1pf(x); }
MT_HD inline float tanh(float x) { return ::tanhf(x); }
MT_HD inline float erf(float x) { return ::erff(x); }
MT_HD inline float normal_cdf(float x) { return ::normcdff(x); }
#else
MT_HD MT_FORCE_INLINE float exp(float x) { return detail::exp(x); }
MT_HD MT_FORCE_INLINE float expm1(float x) { return detail::expm1(x); }
MT_HD MT_FORCE_INLINE float log(float x) { return detail::log(x); }
MT_HD MT_FORCE_INLINE float log1p(float x) { return detail::log1p(x); }
MT_HD MT_FORCE_INLINE float tanh(float x) { return detail::tanh(x); }
MT_HD MT_FORCE_INLINE float erf(float x) { return detail::erf(x); }
/// Phi(x). Not 1/2 + erf / 2, which has no digits left below -5; the error grows with the exponent, to 1e-5 of the last
/// values.
MT_HD MT_FORCE_INLINE float normal_cdf(float x) { return detail::normal_cdf(x); }
#undef MT_FORCE_INLINE
#endif

MT_HD inline double exp(double x) { return ::exp(x); }
MT_HD inline double expm1(double x) { return ::expm1(x); }
MT_HD inline double log(double x) { return ::log(x); }
MT_HD inline double log1p(double x) { return ::log1p(x); }
MT_HD inline double tanh(double x) { return ::tanh(x); }
MT_HD inline double erf(double x) { return ::erf(x); }
MT_HD inline double normal_cdf(double x) { return 0.5 * ::erfc(x * -0.70710678118654752); }

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
template <class A> MT_HD A sigmoid(A x) {
  const A e = exp(-abs(x));
  return (x < A(0) ? e : A(1)) / (A(1) + e);
}

}  // namespace mantissa::math
