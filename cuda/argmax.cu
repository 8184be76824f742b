// The index of the first largest element along an axis; NaN counts as largest.
#include <climits>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/row_major.cuh"

namespace mantissa {
namespace {

template <class A> struct Candidate {
  A value;
  long long index;
  __device__ bool beats(const Candidate& other) const {
    const bool nan = value != value, other_nan = other.value != other.value;
    if (nan != other_nan) return nan;
    if (!nan && value != other.value) return value > other.value;
    return index < other.index;
  }
};

template <int kWidth, class A> __device__ inline Candidate<A> best_of_lanes(Candidate<A> best) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    const Candidate<A> other{__shfl_xor_sync(0xffffffffu, best.value, offset),
                             __shfl_xor_sync(0xffffffffu, best.index, offset)};
    if (other.beats(best)) best = other;
  }
  return best;
}

// Bytes: x once. kGroup threads a result: one, a warp or a block.
template <int kGroup, class T>
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const T* x, std::int64_t results, std::int64_t n, std::int64_t stride, RowMajor x_at, RowMajor y_at,
                  std::int64_t* y) {
  using A = compute_t<T>;
  const std::int64_t result = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (result >= results) return;
  x += x_at(result);
  Candidate<A> best{-static_cast<A>(__int_as_float(0x7f800000)), LLONG_MAX};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x % kGroup; i < n; i += kGroup) {
    const Candidate<A> here{widen(x[i * stride]), i};
    if (here.beats(best)) best = here;
  }
  if constexpr (kGroup > 1) best = best_of_lanes<kWarp>(best);
  if constexpr (kGroup > kWarp) {
    constexpr int kWarps = kGroup / kWarp;
    __shared__ Candidate<A> shared[kWarps];
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = best;
    __syncthreads();
    best = best_of_lanes<kWarps>(shared[threadIdx.x % kWarps]);
  }
  if (threadIdx.x % kGroup == 0) y[y_at(result)] = best.index;
}

}  // namespace

void CudaBackend::argmax(const Tensor& x, int axis, Tensor& y) {
  const detail::OpRange range("argmax");
  const std::int64_t results = y.numel(), n = x.shape()[axis], stride = x.strides()[axis];
  if (results == 0 || n == 0) return;
  const RowMajor x_at(x.view(y.shape(), x.strides(), x.offset())), y_at(y);
  visit_float<CudaTypes>("argmax", x.dtype(), [&]<class T>() {
    const auto launch = [&]<int kGroup>() {
      argmax_kernel<kGroup><<<static_cast<unsigned>(ceil_div(results, kThreads / kGroup)), kThreads, 0, stream()>>>(
          static_cast<const T*>(x.data()), results, n, stride, x_at, y_at, static_cast<std::int64_t*>(y.data()));
    };
    if (n <= 8 || (stride != 1 && results >= 4096)) {
      launch.template operator()<1>();
    } else if (n <= 2048) {
      launch.template operator()<kWarp>();
    } else {
      launch.template operator()<kThreads>();
    }
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
