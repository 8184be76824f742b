// Softmax and its logarithm over the last axis, rows of any length.
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/rows.cuh"

namespace mantissa {
namespace {

// A group of kGroup threads a row: a warp (several rows a block) or a whole block.
template <int kGroup> inline constexpr int kBlockOf = kGroup < kThreads ? kThreads : kGroup;

// Two reads (the second from a cache for all but the longest rows) and one write; floor = (x + y bytes) /
// bandwidth.
template <int kGroup, int V, class T, class Out>
__global__ void __launch_bounds__(kBlockOf<kGroup>)
    softmax_kernel(const T* x, Out* y, std::int64_t rows, std::int64_t columns, bool log) {
  using A = compute_t<T>;
  constexpr int kRows = kBlockOf<kGroup> / kGroup;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  if (row >= rows) return;  // a whole group
  x += row * columns;
  y += row * columns;
  const int thread = threadIdx.x % kGroup;
  OnlineSum<T> total;
  walk_row<V>(x, columns, thread, kGroup, [&](std::int64_t, const auto& v) { total.add(v); });
  total.template join<kGroup>();
  const A factor = A(1) / total.sum, shift = log ? A(::log(total.sum)) : A(0);
  walk_row<V>(x, columns, thread, kGroup, [&](std::int64_t i, const auto& v) {
    constexpr int kWidth = sizeof(v.v) / sizeof(T);
    Vec<Out, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const A d = widen(v.v[j]) - total.max;
      result.v[j] = convert<Out>(log ? d - shift : exp_for<T>(d) * factor);
    }
    store(y + i, result);
  });
}

// g and y twice, gx once; the second time from a cache but for the longest rows.
template <int kGroup, int V, class T>
__global__ void __launch_bounds__(kBlockOf<kGroup>)
    softmax_grad_kernel(const T* g, const T* y, T* gx, std::int64_t rows, std::int64_t columns, bool log) {
  using A = compute_t<T>;
  constexpr int kRows = kBlockOf<kGroup> / kGroup;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  if (row >= rows) return;
  g += row * columns;
  y += row * columns;
  gx += row * columns;
  const int thread = threadIdx.x % kGroup;
  A sum = 0;  // of g y, or of g for the logarithm
  walk_row<V>(g, columns, thread, kGroup, [&](std::int64_t i, const auto& v) {
    constexpr int kWidth = sizeof(v.v) / sizeof(T);
    const Vec<T, kWidth> w = load<kWidth>(y + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += log ? widen(v.v[j]) : widen(v.v[j]) * widen(w.v[j]);
  });
  sum = block_reduce<kGroup>(sum, SumOp{});
  walk_row<V>(g, columns, thread, kGroup, [&](std::int64_t i, const auto& v) {
    constexpr int kWidth = sizeof(v.v) / sizeof(T);
    const Vec<T, kWidth> w = load<kWidth>(y + i);
    Vec<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const A a = widen(v.v[j]), b = widen(w.v[j]);
      result.v[j] = convert<T>(log ? a - exp_for<T>(b) * sum : b * (a - sum));
    }
    store(gx + i, result);
  });
}

/// f<kGroup, V>() for the row length and alignment.
template <class T, class F> void with_group(std::int64_t columns, bool vectors, F&& f) {
  if (!vectors) return columns <= 1024 ? f.template operator()<kWarp, 1>() : f.template operator()<1024, 1>();
  if (columns <= 2048) return f.template operator()<kWarp, kVector<T>>();
  if (columns <= 16384) return f.template operator()<kThreads, kVector<T>>();
  return f.template operator()<1024, kVector<T>>();
}

template <int kGroup> unsigned blocks_for(std::int64_t rows) {
  return static_cast<unsigned>(ceil_div(rows, kBlockOf<kGroup> / kGroup));
}

}  // namespace

void CudaBackend::softmax(const Tensor& x, bool log, Tensor& y) {
  const detail::OpRange range("softmax");
  if (x.numel() == 0) return;
  const std::int64_t columns = x.size(-1), rows = x.numel() / columns;
  visit_float<CudaTypes>("softmax", x.dtype(), [&]<class T>() {
    const auto run = [&]<class Out>() {
      const auto* from = static_cast<const T*>(x.data());
      auto* to = static_cast<Out*>(y.data());
      with_group<T>(columns, aligned_alike(from, to), [&]<int kGroup, int V>() {
        softmax_kernel<kGroup, V>
            <<<blocks_for<kGroup>(rows), kBlockOf<kGroup>, 0, stream()>>>(from, to, rows, columns, log);
        MT_LAUNCHED();
      });
    };
    if (x.dtype() == y.dtype()) return run.template operator()<T>();
    MT_ASSERT(is_low_precision(x.dtype()) && y.dtype() == DType::f32, "softmax of ", x, " into ", y);
    if constexpr (sizeof(T) == 2) run.template operator()<float>();
  });
}

void CudaBackend::softmax_grad(const Tensor& g, const Tensor& y, bool log, Tensor& gx) {
  const detail::OpRange range("softmax_grad");
  if (g.numel() == 0) return;
  const std::int64_t columns = g.size(-1), rows = g.numel() / columns;
  visit_float<CudaTypes>("softmax_grad", y.dtype(), [&]<class T>() {
    const auto *grad = static_cast<const T*>(g.data()), *output = static_cast<const T*>(y.data());
    auto* to = static_cast<T*>(gx.data());
    with_group<T>(columns, aligned_alike(grad, output, to), [&]<int kGroup, int V>() {
      softmax_grad_kernel<kGroup, V>
          <<<blocks_for<kGroup>(rows), kBlockOf<kGroup>, 0, stream()>>>(grad, output, to, rows, columns, log);
      MT_LAUNCHED();
    });
  });
}

}  // namespace mantissa
