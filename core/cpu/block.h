#pragma once
// Blocks: what every elementwise loop is made of. Elements are loaded into a buffer of the compute type, a
// plain loop that the compiler vectorises works on it, and the result is rounded once on the way back.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/float_types.h"
#include "core/visit.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace mantissa {

struct CpuTypes {
  using f16 = float16;
  using bf16 = bfloat16;
  using f8e4m3 = float8_e4m3;
  using f8e5m2 = float8_e5m2;
};

inline constexpr std::int64_t kBlock = 1024;  // elements of a block: 4 KiB in f32

inline void widen_block(const float16* x, float* y, std::int64_t n) {
  std::int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < n; ++i) y[i] = static_cast<float>(x[i]);
}

inline void narrow_block(const float* x, float16* y, std::int64_t n) {
  std::int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; ++i) y[i] = float16(x[i]);
}

inline void widen_block(const bfloat16* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = std::bit_cast<float>(static_cast<std::uint32_t>(x[i].bits) << 16);
}

inline void narrow_block(const float* x, bfloat16* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(x[i]);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    y[i].bits = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

/// n elements from x (stride in elements) as the compute type A: x itself when it already is a contiguous run
/// of A.
template <class A, class T> const A* load_block(const T* x, std::int64_t stride, std::int64_t n, A* buffer) {
  if (stride == 1) {
    if constexpr (std::is_same_v<T, A>) {
      return x;
    } else if constexpr (std::is_same_v<A, float> && (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>)) {
      widen_block(x, buffer, n);
      return buffer;
    }
  }
  if (stride == 0) {
    std::fill_n(buffer, n, static_cast<A>(*x));
    return buffer;
  }
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = static_cast<A>(x[i * stride]);
  return buffer;
}

/// Where results of a block go: y itself when it is a contiguous run of A, else the buffer, for store_block
/// afterwards.
template <class A, class T> A* result_block(T* y, std::int64_t stride, A* buffer) {
  if constexpr (std::is_same_v<T, A>)
    if (stride == 1) return y;
  return buffer;
}

template <class A, class T> void store_block(const A* result, T* y, std::int64_t stride, std::int64_t n) {
  if constexpr (std::is_same_v<T, A>)
    if (result == y) return;
  if constexpr (std::is_same_v<A, float> && (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>)) {
    if (stride == 1) {
      narrow_block(result, y, n);
      return;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) y[i * stride] = static_cast<T>(result[i]);
}

}  // namespace mantissa
