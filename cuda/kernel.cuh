#pragma once
// What kernels share: storage types and exact conversions, vector access, reductions over a warp or block.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/visit.h"

namespace mantissa {

// The 8-bit storage types of core/float_types.h, with conversions that agree with it bit for bit.
struct Float8E4M3 {
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

struct CudaTypes {
  using f16 = __half;
  using bf16 = __nv_bfloat16;
  using f8e4m3 = Float8E4M3;
  using f8e5m2 = Float8E5M2;
};

constexpr int kWarp = 32;
constexpr int kThreads = 256;  // of most kernels

// ---- conversions: exact when widening, rounded once to nearest even when narrowing ----

template <class T>
inline constexpr bool is_storage_float = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16> ||
                                         std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>;

/// double to float, rounded to odd: a second rounding to at most 22 bits then acts as if it were the only
/// one.
__device__ inline float round_to_odd(double x) {
  const float y = __double2float_rz(x);
  return static_cast<double>(y) == x ? y : __uint_as_float(__float_as_uint(y) | 1u);
}

/// float to an FP8 format of 7 magnitude bits. kLargest: bits of the largest finite value, kOverflow: of what
/// lies beyond.
template <int kFraction, int kBias, unsigned kLargest, unsigned kOverflow>
__device__ inline std::uint8_t narrow_to_8_bits(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 31 << 7, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  unsigned y;
  if (magnitude < static_cast<unsigned>(128 - kBias) << 23) {  // subnormal or zero: count units of the last place
    y = __float2uint_rn(__uint_as_float(magnitude) * static_cast<float>(1u << (kBias - 1 + kFraction)));
  } else {
    constexpr int kShift = 23 - kFraction;
    y = (magnitude + (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1u)) >> kShift;
    y -= static_cast<unsigned>(127 - kBias) << kFraction;
  }
  return static_cast<std::uint8_t>(sign | (y > kLargest ? kOverflow : y));
}

__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(Float8E5M2 x) {  // the upper byte of an f16
  return __half2float(__ushort_as_half(static_cast<unsigned short>(x.bits << 8)));
}
__device__ inline float to_float(Float8E4M3 x) {  // an f16 whose exponent is 8 too small
  const unsigned magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u | static_cast<unsigned>(x.bits & 0x80u) << 24);
  const auto half = static_cast<unsigned short>((x.bits & 0x80u) << 8 | magnitude << 7);
  return __half2float(__ushort_as_half(half)) * 256.0f;
}

template <class To, class From> __device__ inline To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (is_storage_float<From>) {
    return convert<To>(to_float(x));
  } else if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (!is_storage_float<To>) {
    return static_cast<To>(x);
  } else if constexpr (std::is_same_v<From, double>) {
    return convert<To>(round_to_odd(x));
  } else if constexpr (!std::is_same_v<From, float>) {
    return convert<To>(static_cast<double>(x));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<To, Float8E4M3>) {
    return {narrow_to_8_bits<3, 7, 0x7eu, 0x7fu>(x)};
  } else {
    return {narrow_to_8_bits<2, 15, 0x7bu, 0x7cu>(x)};
  }
}

/// The value in the type that kernels compute in.
template <class T> __device__ inline compute_t<T> widen(T x) { return convert<compute_t<T>>(x); }

// ---- vector access ----

template <class T, int V> struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Vec { T v[V]; };

/// The unsigned type that moves `bytes` in one instruction.
template <int kBytes>
using Word = std::conditional_t<
    kBytes >= 16, uint4,
    std::conditional_t<
        kBytes == 8, uint2,
        std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 2, unsigned short, unsigned char>>>>;

template <int V, class T> __device__ inline Vec<T, V> load(const T* p) {
  if constexpr (V == 1) return {*p};
  using W = Word<V * sizeof(T)>;
  constexpr int kWords = V * sizeof(T) / sizeof(W);
  Vec<T, V> x;
#pragma unroll
  for (int i = 0; i < kWords; ++i) reinterpret_cast<W*>(&x)[i] = reinterpret_cast<const W*>(p)[i];
  return x;
}
// In assembly, so that the compiler does not split the store (it does where it moves the elements' code
// around).
__device__ inline void store_word(uint4* p, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ inline void store_word(uint2* p, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}
template <class W> __device__ inline void store_word(W* p, W x) { *p = x; }

/// p in global memory.
template <int V, class T> __device__ inline void store(T* p, const Vec<T, V>& x) {
  if constexpr (V == 1) {
    *p = x.v[0];
  } else {
    using W = Word<V * sizeof(T)>;
    constexpr int kWords = V * sizeof(T) / sizeof(W);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(reinterpret_cast<W*>(p) + i, reinterpret_cast<const W*>(&x)[i]);
  }
}

/// Starts a copy from global to shared memory, both on 16-byte boundaries, that uses no registers.
template <class T> __device__ inline void copy_async(T* shared, const void* global) {
  static_assert(sizeof(T) % 16 == 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); i += 16) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared)) + i),
        "l"(__cvta_generic_to_global(global) + i)
        : "memory");
  }
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of the groups committed by this thread are on their way.
template <int kPending> __device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Elements of 16 bytes, for the type that a kernel mostly reads.
template <class T> inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

/// Calls f(i, vec) for the elements [0, n) of a row, split among `threads` threads: vectors of V from the
/// first aligned element on, four in flight, and single elements (vec of 1) at both ends. With V = 1, single
/// elements throughout.
template <int V, class T, class F>
__device__ inline void walk_row(const T* row, std::int64_t n, int thread, int threads, F&& f) {
  const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T) % V);
  std::int64_t head = misaligned == 0 ? 0 : V - misaligned;
  if (head > n) head = n;
  if (V > 1 && thread < head) f(static_cast<std::int64_t>(thread), load<1>(row + thread));
  const std::int64_t vectors = (n - head) / V;
  constexpr int kInFlight = 4;
  for (std::int64_t i = thread; i < vectors; i += kInFlight * threads) {
    Vec<T, V> x[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (i + u * threads < vectors) x[u] = load<V>(row + head + (i + u * threads) * V);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (i + u * threads < vectors) f(head + (i + u * threads) * V, x[u]);
  }
  const std::int64_t tail = head + vectors * V + thread;
  if (V > 1 && tail < n) f(tail, load<1>(row + tail));
}

/// Whether rows that start at the same element of each tensor are aligned alike, so that walk_row may use
/// vectors.
template <class... Pointers> bool aligned_alike(const Pointers*... p) {
  return ((reinterpret_cast<std::uintptr_t>(p) % 16 == 0) && ...);
}

// ---- reductions ----

struct SumOp {
  template <class A> __device__ A operator()(A a, A b) const { return a + b; }
  template <class A> __device__ static A identity() { return A(0); }
};
struct MaxOp {  // NaN wins
  template <class A> __device__ A operator()(A a, A b) const { return a > b || a != a ? a : b; }
  template <class A> __device__ static A identity() { return -static_cast<A>(__int_as_float(0x7f800000)); }
};
struct MinOp {
  template <class A> __device__ A operator()(A a, A b) const { return a < b || a != a ? a : b; }
  template <class A> __device__ static A identity() { return static_cast<A>(__int_as_float(0x7f800000)); }
};

/// Over groups of `kWidth` neighbouring lanes; every lane gets the result.
template <int kWidth = kWarp, class A, class Op> __device__ inline A warp_reduce(A x, Op op) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/// Over a one-dimensional block of kBlock threads (a power of two); every thread gets the result. With a warp
/// or less, over each group of kBlock lanes.
template <int kBlock, class A, class Op> __device__ inline A block_reduce(A x, Op op) {
  if constexpr (kBlock <= kWarp) {
    return warp_reduce<kBlock>(x, op);
  } else {
    constexpr int kWarps = kBlock / kWarp;
    __shared__ A partial[kWarps];
    x = warp_reduce(x, op);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = warp_reduce<kWarps>(partial[threadIdx.x % kWarps], op);
    __syncthreads();  // `partial` is free again
    return x;
  }
}

// ---- division of indices below 2^31 by a constant of the launch (Granlund and Montgomery 1994) ----

struct FastDivisor {
  std::uint32_t divisor = 1, magic = 1, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(std::uint32_t d) : divisor(d) {
    while ((std::uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<std::uint32_t>((((std::uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ std::uint32_t quotient(std::uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

constexpr std::int64_t kMaxUnits = std::int64_t{1} << 31;  // exclusive bound of what a FastDivisor divides

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace mantissa
