#pragma once
// What the forward and backward kernels of layer and RMS norm share.

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {

constexpr int kNormWidth = 8;  // columns that a thread handles at a time

/// Two values that are reduced together.
template <class A> struct Pair { A first, second; };
template <int kBlock, class A> __device__ inline Pair<A> block_sum(Pair<A> x) {
#pragma unroll
  for (int offset = (kBlock < kWarp ? kBlock : kWarp) / 2; offset > 0; offset /= 2) {
    x.first += __shfl_xor_sync(0xffffffffu, x.first, offset);
    x.second += __shfl_xor_sync(0xffffffffu, x.second, offset);
  }
  if constexpr (kBlock > kWarp) {
    constexpr int kWarps = kBlock / kWarp;
    __shared__ Pair<A> partial[kWarps];
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = partial[threadIdx.x % kWarps];
    __syncthreads();
#pragma unroll
    for (int offset = kWarps / 2; offset > 0; offset /= 2) {
      x.first += __shfl_xor_sync(0xffffffffu, x.first, offset);
      x.second += __shfl_xor_sync(0xffffffffu, x.second, offset);
    }
  }
  return x;
}

/// Parameters [i, i + V), or ones or zeros when there are none.
template <int V, class A> __device__ inline Vec<A, V> parameter(const A* p, std::int64_t i, A otherwise) {
  if (p != nullptr) return load<V>(p + i);
  Vec<A, V> x;
#pragma unroll
  for (int j = 0; j < V; ++j) x.v[j] = otherwise;
  return x;
}

/// f<kGroup, kItems>() such that kGroup threads hold a row in registers, kItems x kNormWidth columns each; a
/// group is a warp or a block. False when the row is too long for that.
template <class F> bool with_registers(std::int64_t columns, const F& f) {
  if (columns <= 256)
    f.template operator()<kWarp, 1>();
  else if (columns <= 512)
    f.template operator()<kWarp, 2>();
  else if (columns <= 768)
    f.template operator()<kWarp, 3>();
  else if (columns <= 1024)
    f.template operator()<128, 1>();
  else if (columns <= 2048)
    f.template operator()<256, 1>();
  else if (columns <= 4096)
    f.template operator()<512, 1>();
  else if (columns <= 8192)
    f.template operator()<512, 2>();
  else
    return false;
  return true;
}
template <int kGroup> inline constexpr int kNormBlock = kGroup == kWarp ? kThreads : kGroup;

template <class T> const T* data_or_null(const Tensor& x) {
  return x.defined() ? static_cast<const T*>(x.data()) : nullptr;
}

}  // namespace mantissa
