// Max and average pooling of channels-last images: a thread a value, neighbouring threads neighbouring channels.
#include <algorithm>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {
namespace {

struct Window {
  std::int64_t n, c, h, w, oh, ow;
  Pool2dOptions o;
  Window(const Shape& x, const Shape& y, const Pool2dOptions& options) : n(x[0]), c(x[1]), h(x[2]), w(x[3]), oh(y[2]), ow(y[3]), o(options) {}

  __device__ std::int64_t top(std::int64_t row) const { return row * o.stride[0] - o.padding[0]; }
  __device__ std::int64_t left(std::int64_t column) const { return column * o.stride[1] - o.padding[1]; }
  /// What an average divides by: the window within the padded image, or only the pixels inside.
  __device__ std::int64_t divisor(std::int64_t row, std::int64_t column) const {
    const std::int64_t y = top(row), x = left(column);
    if (o.count_include_pad) return (min(y + o.kernel[0], h + o.padding[0]) - y) * (min(x + o.kernel[1], w + o.padding[1]) - x);
    return (min(y + o.kernel[0], h) - max(y, std::int64_t{0})) * (min(x + o.kernel[1], w) - max(x, std::int64_t{0}));
  }
};

// Bytes: x once (windows overlap in the cache), y once.
template <class T, bool kMax>
__global__ void __launch_bounds__(kThreads) pool_kernel(Window s, const T* x, T* y, std::int64_t total) {
  using A = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= total) return;
  const std::int64_t channel = i % s.c, column = i / s.c % s.ow, row = i / s.c / s.ow % s.oh, image = i / s.c / s.ow / s.oh;
  const std::int64_t y0 = s.top(row), x0 = s.left(column);
  A result = kMax ? MaxOp::identity<A>() : A(0);
  for (std::int64_t p = max(y0, std::int64_t{0}); p < min(y0 + s.o.kernel[0], s.h); ++p)
    for (std::int64_t q = max(x0, std::int64_t{0}); q < min(x0 + s.o.kernel[1], s.w); ++q) {
      const A v = widen(x[((image * s.h + p) * s.w + q) * s.c + channel]);
      result = kMax ? (v > result || v != v ? v : result) : result + v;
    }
  if (!kMax) result *= A(1) / static_cast<A>(s.divisor(row, column));
  y[i] = convert<T>(result);
}

/// Whether pixel (p, q) is the first in its window that equals the window's maximum.
template <class T>
__device__ bool takes(const Window& s, const T* x, compute_t<T> best, std::int64_t image, std::int64_t row, std::int64_t column, std::int64_t channel,
                      std::int64_t p, std::int64_t q) {
  const std::int64_t y0 = s.top(row), x0 = s.left(column);
  for (std::int64_t i = max(y0, std::int64_t{0}); i < min(y0 + s.o.kernel[0], s.h); ++i)
    for (std::int64_t j = max(x0, std::int64_t{0}); j < min(x0 + s.o.kernel[1], s.w); ++j) {
      const compute_t<T> v = widen(x[((image * s.h + i) * s.w + j) * s.c + channel]);
      if (v == best || (v != v && best != best)) return i == p && j == q;
    }
  return false;
}

// Bytes: g, gx (and x, y for max) once. A thread gathers from the windows that hold its pixel, in order: no atomics.
template <class T, bool kMax>
__global__ void __launch_bounds__(kThreads) pool_grad_kernel(Window s, const T* g, const T* x, const T* y, T* gx, std::int64_t total) {
  using A = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= total) return;
  const std::int64_t channel = i % s.c, q = i / s.c % s.w, p = i / s.c / s.w % s.h, image = i / s.c / s.w / s.h;
  const std::int64_t py = p + s.o.padding[0], qx = q + s.o.padding[1];
  const std::int64_t first_row = py < s.o.kernel[0] ? 0 : (py - s.o.kernel[0]) / s.o.stride[0] + 1, last_row = min(py / s.o.stride[0], s.oh - 1);
  const std::int64_t first_column = qx < s.o.kernel[1] ? 0 : (qx - s.o.kernel[1]) / s.o.stride[1] + 1, last_column = min(qx / s.o.stride[1], s.ow - 1);
  A sum = 0;
  for (std::int64_t row = first_row; row <= last_row; ++row)
    for (std::int64_t column = first_column; column <= last_column; ++column) {
      const std::int64_t out = ((image * s.oh + row) * s.ow + column) * s.c + channel;
      const A value = widen(g[out]);
      if constexpr (kMax) {
        if (takes(s, x, widen(y[out]), image, row, column, channel, p, q)) sum += value;
      } else {
        sum += value * (A(1) / static_cast<A>(s.divisor(row, column)));
      }
    }
  gx[i] = convert<T>(sum);
}

unsigned blocks_for(std::int64_t n) { return static_cast<unsigned>(ceil_div(n, kThreads)); }

}  // namespace

void CudaBackend::pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("pool2d");
  const Window s(x.shape(), y.shape(), options);
  const cudaStream_t on = stream();
  visit_float<CudaTypes>("pool2d", x.dtype(), [&]<class T>() {
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    if (kind == Pooling::max) {
      pool_kernel<T, true><<<blocks_for(y.numel()), kThreads, 0, on>>>(s, px, py, y.numel());
    } else {
      pool_kernel<T, false><<<blocks_for(y.numel()), kThreads, 0, on>>>(s, px, py, y.numel());
    }
  });
  MT_LAUNCHED();
}

void CudaBackend::pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y, const Pool2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const detail::OpRange range("pool2d_grad");
  const Window s(gx.shape(), g.shape(), options);
  const cudaStream_t on = stream();
  visit_float<CudaTypes>("pool2d", g.dtype(), [&]<class T>() {
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data()), *py = static_cast<const T*>(y.data());
    T* pgx = static_cast<T*>(gx.data());
    if (kind == Pooling::max) {
      pool_grad_kernel<T, true><<<blocks_for(gx.numel()), kThreads, 0, on>>>(s, pg, px, py, pgx, gx.numel());
    } else {
      pool_grad_kernel<T, false><<<blocks_for(gx.numel()), kThreads, 0, on>>>(s, pg, px, py, pgx, gx.numel());
    }
  });
  MT_LAUNCHED();
}

}  // namespace mantissa
