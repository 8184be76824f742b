#pragma once
// The sum of exponentials of a row in one read, for softmax and cross entropy.

#include <cfloat>

#include "cuda/kernel.cuh"

namespace mantissa {

/// exp for values that a 16-bit type held: one multiplication and one instruction, relative error below 2^-22
/// |x|.
__device__ inline float exp_of_16_bit(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

template <class T> __device__ inline compute_t<T> exp_for(compute_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    return exp_of_16_bit(x);
  } else if constexpr (std::is_same_v<T, double>) {
    return ::exp(x);
  } else {
    return ::expf(x);
  }
}

/// sum of exp(x - max) with the maximum so far (Milakov and Gimelshein 2018). The maximum starts at the
/// lowest finite value, so that -inf adds 0 and NaN, or inf, makes the sum NaN.
template <class T> struct OnlineSum {
  using A = compute_t<T>;
  A max = std::is_same_v<A, double> ? A(-DBL_MAX) : A(-FLT_MAX), sum = 0;

  template <int V> __device__ void add(const Vec<T, V>& x) {
    A value[V];
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = widen(x.v[j]);
    A largest = value[0];
#pragma unroll
    for (int j = 1; j < V; ++j) largest = larger(largest, value[j]);
    if (largest > max) {
      sum *= exp_for<T>(max - largest);
      max = largest;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) sum += exp_for<T>(value[j] - max);
  }
  /// Joins the parts of a block (or of each warp).
  template <int kBlock> __device__ void join() {
    const A all = block_reduce<kBlock>(max, Larger{});
    sum = block_reduce<kBlock>(sum * exp_for<T>(max - all), SumOp{});
    max = all;
  }

 private:
  __device__ static A larger(A a, A b) {  // skips NaN; the sum meets it
    if constexpr (std::is_same_v<A, double>)
      return ::fmax(a, b);
    else
      return ::fmaxf(a, b);
  }
  struct Larger {
    __device__ A operator()(A a, A b) const { return larger(a, b); }
  };
};

}  // namespace mantissa
