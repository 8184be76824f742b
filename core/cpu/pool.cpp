// Pooling of channels-last images.
#include <limits>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/lanes.h"
#include "core/cpu/loops.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

struct Window {
  std::int64_t n, c, h, w, oh, ow;
  Pool2dOptions o;
  Window(const Shape& x, const Shape& y, const Pool2dOptions& options)
      : n(x[0]), c(x[1]), h(x[2]), w(x[3]), oh(y[2]), ow(y[3]), o(options) {}

  /// f(offset of the pixel's channels) for the pixels of one window that lie inside the image, in row-major
  /// order.
  template <class F> void pixels(std::int64_t row, std::int64_t column, F f) const {
    const std::int64_t y0 = row * o.stride[0] - o.padding[0], x0 = column * o.stride[1] - o.padding[1];
    for (std::int64_t i = std::max<std::int64_t>(y0, 0); i < std::min(y0 + o.kernel[0], h); ++i)
      for (std::int64_t j = std::max<std::int64_t>(x0, 0); j < std::min(x0 + o.kernel[1], w); ++j) f((i * w + j) * c);
  }
  /// What an average divides by: the window within the padded image, or only the pixels inside.
  std::int64_t divisor(std::int64_t row, std::int64_t column) const {
    const std::int64_t y0 = row * o.stride[0] - o.padding[0], x0 = column * o.stride[1] - o.padding[1];
    if (o.count_include_pad)
      return (std::min(y0 + o.kernel[0], h + o.padding[0]) - y0) * (std::min(x0 + o.kernel[1], w + o.padding[1]) - x0);
    return (std::min(y0 + o.kernel[0], h) - std::max<std::int64_t>(y0, 0)) *
           (std::min(x0 + o.kernel[1], w) - std::max<std::int64_t>(x0, 0));
  }
};

template <class A, class T>
void pool_window(Pooling kind, const Window& s, const T* image, std::int64_t row, std::int64_t column,
                 A* __restrict result, A* buffer) {
  std::fill_n(result, s.c, kind == Pooling::max ? MaxOf<A>::start : A(0));
  s.pixels(row, column, [&](std::int64_t at) {
    const A* __restrict v = load_block<A>(image + at, 1, s.c, buffer);
    if (kind == Pooling::max) {
      for (std::int64_t ch = 0; ch < s.c; ++ch) result[ch] = MaxOf<A>::combine(result[ch], v[ch]);
    } else {
      for (std::int64_t ch = 0; ch < s.c; ++ch) result[ch] += v[ch];
    }
  });
  if (kind == Pooling::average) {
    const A scale = A(1) / static_cast<A>(s.divisor(row, column));
    for (std::int64_t ch = 0; ch < s.c; ++ch) result[ch] *= scale;
  }
}

/// Adds a window's gradient to the first of its pixels that equals the maximum.
template <class A, class T>
void max_gradient(const Window& s, const T* image, std::int64_t row, std::int64_t column, const A* __restrict g,
                  const A* __restrict best, A* sums, A* buffer, std::int32_t* __restrict taken) {
  std::fill_n(taken, s.c, 0);
  s.pixels(row, column, [&](std::int64_t at) {
    const A* __restrict v = load_block<A>(image + at, 1, s.c, buffer);
    A* __restrict target = sums + at;
    for (std::int64_t ch = 0; ch < s.c; ++ch) {  // without branches, so that it vectorises; both are NaN or both equal
      const int equal = static_cast<int>(v[ch] == best[ch]) |
                        (static_cast<int>(v[ch] != v[ch]) & static_cast<int>(best[ch] != best[ch]));
      const int hit = equal & ~taken[ch];
      target[ch] += hit ? g[ch] : A(0);
      taken[ch] |= hit;
    }
  });
}

}  // namespace

void CpuBackend::pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Window s(x.shape(), y.shape(), options);
  visit_float<CpuTypes>("pool2d", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    const ThreadScratch<A> scratch(2 * s.c);
    parallel_for(s.n * s.oh, std::max<std::int64_t>(1, kParallelGrain / (s.ow * s.c)),
                 [&](std::int64_t begin, std::int64_t end) {
                   A* buffer = scratch.data();
                   for (std::int64_t r = begin; r < end; ++r)
                     for (std::int64_t column = 0; column < s.ow; ++column) {
                       T* out = py + (r * s.ow + column) * s.c;
                       A* result = result_block<A>(out, 1, buffer + s.c);
                       pool_window(kind, s, px + r / s.oh * s.h * s.w * s.c, r % s.oh, column, result, buffer);
                       store_block<A>(result, out, 1, s.c);
                     }
                 });
  });
}

void CpuBackend::pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y,
                             const Pool2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const Window s(gx.shape(), g.shape(), options);
  visit_float<CpuTypes>("pool2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data()),
            *py = static_cast<const T*>(y.data());
    T* pgx = static_cast<T*>(gx.data());
    const std::int64_t size = s.h * s.w * s.c;
    const ThreadScratch<A> scratch(size + 3 * s.c);
    const ThreadScratch<std::int32_t> flags(s.c);
    parallel_for(s.n, std::max<std::int64_t>(1, kParallelGrain / size), [&](std::int64_t begin, std::int64_t end) {
      A* buffer = scratch.data();
      for (std::int64_t image = begin; image < end; ++image) {
        A* sums = result_block<A>(pgx + image * size, 1, buffer + 3 * s.c);
        std::fill_n(sums, size, A(0));
        for (std::int64_t row = 0; row < s.oh; ++row)
          for (std::int64_t column = 0; column < s.ow; ++column) {
            const std::int64_t out = ((image * s.oh + row) * s.ow + column) * s.c;
            const A* __restrict vg = load_block<A>(pg + out, 1, s.c, buffer);
            if (kind == Pooling::max) {
              const A* best = load_block<A>(py + out, 1, s.c, buffer + s.c);
              max_gradient(s, px + image * size, row, column, vg, best, sums, buffer + 2 * s.c, flags.data());
              continue;
            }
            const A scale = A(1) / static_cast<A>(s.divisor(row, column));
            s.pixels(row, column, [&](std::int64_t at) {
              A* __restrict target = sums + at;
              for (std::int64_t ch = 0; ch < s.c; ++ch) target[ch] += vg[ch] * scale;
            });
          }
        store_block<A>(sums, pgx + image * size, 1, size);
      }
    });
  });
}

}  // namespace mantissa
