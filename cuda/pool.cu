// Max and average pooling of channels-last images: a thread takes up to 16 bytes of channels of one pixel,
// neighbouring threads neighbouring channels.
#include <algorithm>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {
namespace {

/// Quotients by a constant of the launch; 64-bit division is slow, so indices below 2^31 avoid it.
struct Divisor {
  std::int64_t by;
  FastDivisor fast;
  explicit Divisor(std::int64_t d) : by(d), fast(static_cast<std::uint32_t>(d < kMaxUnits ? d : 1)) {}
  __device__ std::int64_t quotient(std::int64_t n, bool small) const {
    return small ? fast.quotient(static_cast<std::uint32_t>(n)) : n / by;
  }
};

struct Place {
  std::int64_t image, row, column, channel;
};

/// The elements [image, row, column, channel] of the tensor that a kernel writes, V channels a unit.
struct Pixels {
  std::int64_t units;
  int vector;
  bool small;  // of units, and of padded coordinates
  Divisor channels, columns, rows;

  Pixels(const Tensor& x, const Pool2dOptions& o, int v)
      : units(x.numel() / v),
        vector(v),
        small(units < kMaxUnits && x.size(2) + o.padding[0] < kMaxUnits && x.size(3) + o.padding[1] < kMaxUnits &&
              o.stride[0] < kMaxUnits && o.stride[1] < kMaxUnits),
        channels(x.size(1) / v),
        columns(x.size(3)),
        rows(x.size(2)) {}
  __device__ Place at(std::int64_t unit) const {
    const std::int64_t pixel = channels.quotient(unit, small), line = columns.quotient(pixel, small),
                       image = rows.quotient(line, small);
    return {image, line - image * rows.by, pixel - line * columns.by, (unit - pixel * channels.by) * vector};
  }
};

struct Range {
  std::int64_t begin, end;
};

/// One spatial axis: windows of `kernel` pixels at every `stride`-th pixel of the padded image.
struct Axis {
  std::int64_t in, out, kernel, padding;
  Divisor stride;
  Axis(std::int64_t x, std::int64_t y, const Pool2dOptions& o, int axis)
      : in(x), out(y), kernel(o.kernel[axis]), padding(o.padding[axis]), stride(o.stride[axis]) {}

  __device__ std::int64_t start(std::int64_t window) const { return window * stride.by - padding; }
  /// Pixels of a window inside the image.
  __device__ Range pixels(std::int64_t window) const {
    const std::int64_t first = start(window);
    return {max(first, std::int64_t{0}), min(first + kernel, in)};
  }
  /// Windows that hold a pixel.
  __device__ Range windows(std::int64_t pixel, bool small) const {
    const std::int64_t p = pixel + padding;
    return {p < kernel ? 0 : stride.quotient(p - kernel, small) + 1, min(stride.quotient(p, small) + 1, out)};
  }
  /// The extent that an average counts: within the padded image, or only the pixels inside.
  __device__ std::int64_t extent(std::int64_t window, bool with_padding) const {
    const Range inside = pixels(window);
    if (!with_padding) return inside.end - inside.begin;
    return min(start(window) + kernel, in + padding) - start(window);
  }
};

struct Pooled {
  std::int64_t channels;
  Axis rows, columns;
  bool count_include_pad;
  Pooled(const Tensor& x, const Tensor& y, const Pool2dOptions& o)
      : channels(x.size(1)),
        rows(x.size(2), y.size(2), o, 0),
        columns(x.size(3), y.size(3), o, 1),
        count_include_pad(o.count_include_pad) {}

  __device__ std::int64_t input(const Place& at, std::int64_t row, std::int64_t column) const {
    return ((at.image * rows.in + row) * columns.in + column) * channels + at.channel;
  }
  __device__ std::int64_t output(const Place& at, std::int64_t row, std::int64_t column) const {
    return ((at.image * rows.out + row) * columns.out + column) * channels + at.channel;
  }
  template <class A> __device__ A scale(std::int64_t row, std::int64_t column) const {
    return A(1) / static_cast<A>(rows.extent(row, count_include_pad) * columns.extent(column, count_include_pad));
  }
};

// Bytes: x once (windows overlap in the cache), y once; floor = those / bandwidth.
template <bool kMax, int V, class T>
__global__ void __launch_bounds__(kThreads) pool_kernel(Pixels pixels, Pooled s, const T* x, T* y) {
  using A = compute_t<T>;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= pixels.units) return;
  const Place at = pixels.at(unit);
  const Range rows = s.rows.pixels(at.row), columns = s.columns.pixels(at.column);
  A result[V];
#pragma unroll
  for (int j = 0; j < V; ++j) result[j] = kMax ? MaxOp::identity<A>() : A(0);
  for (std::int64_t p = rows.begin; p < rows.end; ++p)
    for (std::int64_t q = columns.begin; q < columns.end; ++q) {
      const Vec<T, V> v = load<V>(x + s.input(at, p, q));
#pragma unroll
      for (int j = 0; j < V; ++j) result[j] = kMax ? MaxOp()(result[j], widen(v.v[j])) : result[j] + widen(v.v[j]);
    }
  const A scale = kMax ? A(1) : s.scale<A>(at.row, at.column);
  Vec<T, V> rounded;
#pragma unroll
  for (int j = 0; j < V; ++j) rounded.v[j] = convert<T>(result[j] * scale);
  store(y + unit * V, rounded);
}

/// The channels, as bits, at which x is the maximum that y holds: equal to it, or NaN like it.
template <int V, class T> __device__ unsigned matches(const Vec<T, V>& x, const Vec<T, V>& y) {
  unsigned bits = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const compute_t<T> a = widen(x.v[j]), b = widen(y.v[j]);
    bits |= (a == b || (a != a && b != b) ? 1u : 0u) << j;
  }
  return bits;
}

/// Of the channels `mine`, those in which no pixel of the window before (row, column) is the maximum.
template <int V, class T>
__device__ unsigned without_earlier(const Pooled& s, const Place& at, const Range& rows, const Range& columns,
                                    const T* x, const Vec<T, V>& best, unsigned mine) {
  for (std::int64_t p = rows.begin; p <= at.row; ++p) {
    const std::int64_t end = p == at.row ? at.column : columns.end;
    for (std::int64_t q = columns.begin; q < end && mine != 0; ++q)
      mine &= ~matches<V>(load<V>(x + s.input(at, p, q)), best);
  }
  return mine;
}

// Bytes: g and gx, for max also x and y, once; floor = those / bandwidth. A thread gathers from the windows
// that hold its pixel, in order: no atomics.
template <bool kMax, int V, class T>
__global__ void __launch_bounds__(kThreads)
    pool_grad_kernel(Pixels pixels, Pooled s, const T* g, const T* x, const T* y, T* gx) {
  using A = compute_t<T>;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= pixels.units) return;
  const Place at = pixels.at(unit);
  const Range rows = s.rows.windows(at.row, pixels.small), columns = s.columns.windows(at.column, pixels.small);
  A sum[V] = {};
  Vec<T, V> own;
  if constexpr (kMax) own = load<V>(x + unit * V);
  for (std::int64_t row = rows.begin; row < rows.end; ++row)
    for (std::int64_t column = columns.begin; column < columns.end; ++column) {
      const std::int64_t out = s.output(at, row, column);
      const Vec<T, V> value = load<V>(g + out);
      if constexpr (kMax) {
        const Vec<T, V> best = load<V>(y + out);
        unsigned mine = matches<V>(own, best);
        if (mine != 0) mine = without_earlier<V>(s, at, s.rows.pixels(row), s.columns.pixels(column), x, best, mine);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += (mine >> j & 1u) != 0 ? widen(value.v[j]) : A(0);
      } else {
        const A scale = s.scale<A>(row, column);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += widen(value.v[j]) * scale;
      }
    }
  Vec<T, V> rounded;
#pragma unroll
  for (int j = 0; j < V; ++j) rounded.v[j] = convert<T>(sum[j]);
  store(gx + unit * V, rounded);
}

/// f<kMax, V>() for the kind, and the widest vector that the channels and addresses allow.
template <class T, class F, class... Pointers>
void with_variant(Pooling kind, std::int64_t channels, const F& f, const Pointers*... p) {
  const bool vectors = channels % kVector<T> == 0 && aligned_alike(p...);
  if (kind == Pooling::max)
    vectors ? f.template operator()<true, kVector<T>>() : f.template operator()<true, 1>();
  else
    vectors ? f.template operator()<false, kVector<T>>() : f.template operator()<false, 1>();
}

unsigned blocks_for(const Pixels& pixels) { return static_cast<unsigned>(ceil_div(pixels.units, kThreads)); }

}  // namespace

void CudaBackend::pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("pool2d");
  visit_float<CudaTypes>("pool2d", x.dtype(), [&]<class T>() {
    const auto* px = static_cast<const T*>(x.data());
    auto* py = static_cast<T*>(y.data());
    const auto launch = [&]<bool kMax, int V>() {
      const Pixels pixels(y, options, V);
      pool_kernel<kMax, V><<<blocks_for(pixels), kThreads, 0, stream()>>>(pixels, Pooled(x, y, options), px, py);
      MT_LAUNCHED();
    };
    with_variant<T>(kind, x.size(1), launch, px, py);
  });
}

void CudaBackend::pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y,
                              const Pool2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const detail::OpRange range("pool2d_grad");
  visit_float<CudaTypes>("pool2d", g.dtype(), [&]<class T>() {
    const auto *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data()),
               *py = static_cast<const T*>(y.data());  // x and y are undefined for averages
    auto* pgx = static_cast<T*>(gx.data());
    const auto launch = [&]<bool kMax, int V>() {
      const Pixels pixels(gx, options, V);
      pool_grad_kernel<kMax, V>
          <<<blocks_for(pixels), kThreads, 0, stream()>>>(pixels, Pooled(gx, g, options), pg, px, py, pgx);
      MT_LAUNCHED();
    };
    with_variant<T>(kind, gx.size(1), launch, pg, px, py, pgx);
  });
}

}  // namespace mantissa
