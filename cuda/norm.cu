// Layer and RMS norm over the last axis, with an optional residual added first.
#include "core/math.h"
#include "cuda/norm.cuh"

namespace mantissa {
namespace {

template <class T> struct NormArguments {
  using A = compute_t<T>;
  const T *x, *residual;
  const A *w, *b;
  A eps, share;  // share: 1 / columns
  bool centred;  // layer norm
  T *sum, *y;
  A *mean, *rstd;
  std::int64_t rows, columns;
};

// Bytes: x (and residual) once, y (and sum) once; floor = those / bandwidth. A row stays in registers, so
// that mean and variance are two exact passes. Squares are divided by the number of columns before they are
// added: no overflow at 1e18.
template <int kGroup, int kItems, class T>
__global__ void __launch_bounds__(kNormBlock<kGroup>) norm_kernel(NormArguments<T> p) {
  constexpr int V = kNormWidth;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kNormBlock<kGroup> / kGroup) + threadIdx.x / kGroup;
  if (row >= p.rows) return;
  const int columns = static_cast<int>(p.columns), first = static_cast<int>(threadIdx.x % kGroup) * V;
  const std::int64_t base = row * p.columns;
  Vec<T, V> in[kItems] = {};  // zeros beyond the last column
#pragma unroll
  for (int k = 0; k < kItems; ++k)
    if (const int i = first + k * kGroup * V; i < columns) in[k] = load<V>(p.x + base + i);
  if (p.residual != nullptr) {
    Vec<T, V> other[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (const int i = first + k * kGroup * V; i < columns) other[k] = load<V>(p.residual + base + i);
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (const int i = first + k * kGroup * V; i < columns) {
#pragma unroll
        for (int j = 0; j < V; ++j) in[k].v[j] = convert<T>(widen(in[k].v[j]) + widen(other[k].v[j]));
        store(p.sum + base + i, in[k]);
      }
  }
  float value[kItems][V];
  float total = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      value[k][j] = widen(in[k].v[j]);
      total += value[k][j];
    }
  }
  const float share = p.share;
  const float mean = p.centred ? block_reduce<kGroup>(total, SumOp{}) * share : 0.0f;
  float variance = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (first + k * kGroup * V >= columns) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      value[k][j] -= mean;
      variance += value[k][j] * share * value[k][j];
    }
  }
  const float rstd = ::rsqrtf(block_reduce<kGroup>(variance, SumOp{}) + p.eps);
  if (first == 0) {
    if (p.centred) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int i = first + k * kGroup * V;
    if (i >= columns) continue;
    const Vec<float, V> w = parameter<V>(p.w, i, 1.0f), b = parameter<V>(p.b, i, 0.0f);
    Vec<T, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.v[j] = convert<T>(value[k][j] * rstd * w.v[j] + b.v[j]);
    store(p.y + base + i, out);
  }
}

// Rows of any length: reads them three times, from a cache unless they are very long. Each thread meets the
// same elements in every pass, so that it may read back what it wrote to `sum`.
template <int kGroup, int V, class T> __global__ void __launch_bounds__(kThreads) norm_long_kernel(NormArguments<T> p) {
  using A = compute_t<T>;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= p.rows) return;
  const std::int64_t base = row * p.columns, first = static_cast<std::int64_t>(threadIdx.x % kGroup) * V;
  const T* x = (p.residual != nullptr ? p.sum : p.x) + base;
  if (p.residual != nullptr) {
    for (std::int64_t i = first; i < p.columns; i += kGroup * V) {
      Vec<T, V> a = load<V>(p.x + base + i);
      const Vec<T, V> other = load<V>(p.residual + base + i);
#pragma unroll
      for (int j = 0; j < V; ++j) a.v[j] = convert<T>(widen(a.v[j]) + widen(other.v[j]));
      store(p.sum + base + i, a);
    }
  }
  const A share = p.share;
  A mean = 0;
  if (p.centred) {
    for (std::int64_t i = first; i < p.columns; i += kGroup * V) {
      const Vec<T, V> a = load<V>(x + i);
#pragma unroll
      for (int j = 0; j < V; ++j) mean += widen(a.v[j]);
    }
    mean = block_reduce<kGroup>(mean, SumOp{}) * share;
  }
  A variance = 0;
  for (std::int64_t i = first; i < p.columns; i += kGroup * V) {
    const Vec<T, V> a = load<V>(x + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A d = widen(a.v[j]) - mean;
      variance += d * share * d;
    }
  }
  const A rstd = A(1) / math::sqrt(block_reduce<kGroup>(variance, SumOp{}) + p.eps);
  if (first == 0) {
    if (p.centred) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  for (std::int64_t i = first; i < p.columns; i += kGroup * V) {
    const Vec<T, V> a = load<V>(x + i);
    const Vec<A, V> w = parameter<V>(p.w, i, A(1)), b = parameter<V>(p.b, i, A(0));
    Vec<T, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.v[j] = convert<T>((widen(a.v[j]) - mean) * rstd * w.v[j] + b.v[j]);
    store(p.y + base + i, out);
  }
}

}  // namespace

void CudaBackend::norm(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b,
                       double eps, Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd) {
  const detail::OpRange range("norm");
  if (x.numel() == 0) return;
  visit_float<CudaTypes>("norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const std::int64_t columns = x.size(-1), rows = x.numel() / columns;
    const NormArguments<T> p{data_or_null<T>(x),
                             data_or_null<T>(residual),
                             data_or_null<A>(w),
                             data_or_null<A>(b),
                             static_cast<A>(eps),
                             A(1) / static_cast<A>(columns),
                             kind == NormKind::layer,
                             static_cast<T*>(sum.data()),
                             static_cast<T*>(y.data()),
                             static_cast<A*>(mean.data()),
                             static_cast<A*>(rstd.data()),
                             rows,
                             columns};
    const auto blocks = [&](int rows_a_block) { return static_cast<unsigned>(ceil_div(rows, rows_a_block)); };
    const bool vectors = columns % kNormWidth == 0 && aligned_alike(p.x, p.residual, p.w, p.b, p.sum, p.y);
    bool done = false;
    if constexpr (!std::is_same_v<T, double>) {
      done = vectors && with_registers(columns, [&]<int kGroup, int kItems>() {
               constexpr int kBlock = kNormBlock<kGroup>;
               norm_kernel<kGroup, kItems><<<blocks(kBlock / kGroup), kBlock, 0, stream()>>>(p);
             });
    }
    if (!done && vectors) {
      norm_long_kernel<kThreads, kNormWidth><<<blocks(1), kThreads, 0, stream()>>>(p);
    } else if (!done && columns > 1024) {
      norm_long_kernel<kThreads, 1><<<blocks(1), kThreads, 0, stream()>>>(p);
    } else if (!done) {
      norm_long_kernel<kWarp, 1><<<blocks(kThreads / kWarp), kThreads, 0, stream()>>>(p);
    }
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
