// Pooling and batch norm of channels-last images.
#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

struct Window {
  std::int64_t n, c, h, w, oh, ow;
  Pool2dOptions o;
  Window(const Shape& x, const Shape& y, const Pool2dOptions& options) : n(x[0]), c(x[1]), h(x[2]), w(x[3]), oh(y[2]), ow(y[3]), o(options) {}

  /// f(offset of the pixel's channels) for the pixels of one window that lie inside the image, in row-major order.
  template <class F>
  void pixels(std::int64_t image, std::int64_t row, std::int64_t column, F f) const {
    const std::int64_t y0 = row * o.stride[0] - o.padding[0], x0 = column * o.stride[1] - o.padding[1];
    for (std::int64_t i = std::max<std::int64_t>(y0, 0); i < std::min(y0 + o.kernel[0], h); ++i)
      for (std::int64_t j = std::max<std::int64_t>(x0, 0); j < std::min(x0 + o.kernel[1], w); ++j) f(((image * h + i) * w + j) * c);
  }
  /// What an average divides by: the window within the padded image, or only the pixels inside.
  std::int64_t divisor(std::int64_t row, std::int64_t column) const {
    const std::int64_t y0 = row * o.stride[0] - o.padding[0], x0 = column * o.stride[1] - o.padding[1];
    if (o.count_include_pad) return (std::min(y0 + o.kernel[0], h + o.padding[0]) - y0) * (std::min(x0 + o.kernel[1], w + o.padding[1]) - x0);
    return (std::min(y0 + o.kernel[0], h) - std::max<std::int64_t>(y0, 0)) * (std::min(x0 + o.kernel[1], w) - std::max<std::int64_t>(x0, 0));
  }
};

}  // namespace

void CpuBackend::pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Window s(x.shape(), y.shape(), options);
  visit_float<CpuTypes>("pool2d", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    parallel_for(s.n * s.oh, std::max<std::int64_t>(1, kParallelGrain / (s.ow * s.c)), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> result(static_cast<std::size_t>(s.c)), buffer(static_cast<std::size_t>(s.c));
      for (std::int64_t r = begin; r < end; ++r)
        for (std::int64_t column = 0; column < s.ow; ++column) {
          std::fill(result.begin(), result.end(), kind == Pooling::max ? -std::numeric_limits<A>::infinity() : A(0));
          s.pixels(r / s.oh, r % s.oh, column, [&](std::int64_t at) {
            const A* v = load_block<A>(px + at, 1, s.c, buffer.data());
            A* best = result.data();
            if (kind == Pooling::max) {
              for (std::int64_t ch = 0; ch < s.c; ++ch) best[ch] = v[ch] > best[ch] || v[ch] != v[ch] ? v[ch] : best[ch];
            } else {
              for (std::int64_t ch = 0; ch < s.c; ++ch) best[ch] += v[ch];
            }
          });
          if (kind == Pooling::average) {
            const A scale = A(1) / static_cast<A>(s.divisor(r % s.oh, column));
            for (A& value : result) value *= scale;
          }
          store_block<A>(result.data(), py + (r * s.ow + column) * s.c, 1, s.c);
        }
    });
  });
}

void CpuBackend::pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y, const Pool2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const Window s(gx.shape(), g.shape(), options);
  visit_float<CpuTypes>("pool2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data()), *py = static_cast<const T*>(y.data());
    T* pgx = static_cast<T*>(gx.data());
    const std::int64_t image_size = s.h * s.w * s.c;
    parallel_for(s.n, std::max<std::int64_t>(1, kParallelGrain / image_size), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> sums(static_cast<std::size_t>(image_size)), bg(static_cast<std::size_t>(s.c));
      std::vector<unsigned char> taken(static_cast<std::size_t>(s.c));
      for (std::int64_t image = begin; image < end; ++image) {
        std::fill(sums.begin(), sums.end(), A(0));
        for (std::int64_t row = 0; row < s.oh; ++row)
          for (std::int64_t column = 0; column < s.ow; ++column) {
            const std::int64_t out = ((image * s.oh + row) * s.ow + column) * s.c;
            const A* vg = load_block<A>(pg + out, 1, s.c, bg.data());
            const A scale = kind == Pooling::average ? A(1) / static_cast<A>(s.divisor(row, column)) : A(1);
            std::fill(taken.begin(), taken.end(), static_cast<unsigned char>(0));
            s.pixels(image, row, column, [&](std::int64_t at) {
              A* target = sums.data() + (at - image * image_size);
              if (kind == Pooling::average) {
                for (std::int64_t ch = 0; ch < s.c; ++ch) target[ch] += vg[ch] * scale;
                return;
              }
              for (std::int64_t ch = 0; ch < s.c; ++ch) {  // the first pixel that equals the maximum
                const A v = static_cast<A>(px[at + ch]), best = static_cast<A>(py[out + ch]);
                const bool hit = !taken[static_cast<std::size_t>(ch)] && (v == best || (v != v && best != best));
                target[ch] += hit ? vg[ch] : A(0);
                taken[static_cast<std::size_t>(ch)] |= static_cast<unsigned char>(hit);
              }
            });
          }
        store_block<A>(sums.data(), pgx + image * image_size, 1, image_size);
      }
    });
  });
}

void CpuBackend::batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum, bool training, Tensor& running_mean,
                            Tensor& running_var, Tensor& y, Tensor& mean, Tensor& rstd) {
  const std::int64_t c = x.size(1), rows = c > 0 ? x.numel() / c : 0;
  visit_float<CpuTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    const A *pw = static_cast<const A*>(w.data()), *pb = static_cast<const A*>(b.data());
    A *rm = static_cast<A*>(running_mean.data()), *rv = static_cast<A*>(running_var.data()), *pm = static_cast<A*>(mean.data()), *pr = static_cast<A*>(rstd.data());
    const auto size = static_cast<std::size_t>(c);
    if (training && rows > 0) {
      // Two passes over fixed chunks of rows, combined in order.
      constexpr std::int64_t kChunk = 512;
      const std::int64_t chunks = (rows + kChunk - 1) / kChunk;
      std::vector<A> partials(static_cast<std::size_t>(chunks) * size);
      const auto column_means = [&](A* target, auto term) {
        std::fill(partials.begin(), partials.end(), A(0));
        parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t end) {
          std::vector<A> buffer(size);
          for (std::int64_t row = begin * kChunk; row < std::min(rows, end * kChunk); ++row) {
            const A* v = load_block<A>(px + row * c, 1, c, buffer.data());
            A* sums = partials.data() + static_cast<std::size_t>(row / kChunk) * size;
            for (std::int64_t ch = 0; ch < c; ++ch) sums[ch] += term(v[ch], ch);
          }
        });
        for (std::int64_t ch = 0; ch < c; ++ch) {
          double total = 0;
          for (std::int64_t chunk = 0; chunk < chunks; ++chunk) total += static_cast<double>(partials[static_cast<std::size_t>(chunk * c + ch)]);
          target[ch] = static_cast<A>(total / static_cast<double>(rows));
        }
      };
      std::vector<A> variance(size);
      column_means(pm, [](A v, std::int64_t) { return v; });
      column_means(variance.data(), [&](A v, std::int64_t ch) { return (v - pm[ch]) * (v - pm[ch]); });
      const A m = static_cast<A>(momentum), unbiased = static_cast<A>(static_cast<double>(rows) / static_cast<double>(std::max<std::int64_t>(rows - 1, 1)));
      for (std::int64_t ch = 0; ch < c; ++ch) {
        pr[ch] = A(1) / std::sqrt(variance[static_cast<std::size_t>(ch)] + static_cast<A>(eps));
        rm[ch] = (A(1) - m) * rm[ch] + m * pm[ch];
        rv[ch] = (A(1) - m) * rv[ch] + m * variance[static_cast<std::size_t>(ch)] * unbiased;
      }
    } else {
      for (std::int64_t ch = 0; ch < c; ++ch) {
        pm[ch] = rm[ch];
        pr[ch] = A(1) / std::sqrt(rv[ch] + static_cast<A>(eps));
      }
    }
    parallel_for(rows, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(c, 1)), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer(size), result(size);
      for (std::int64_t row = begin; row < end; ++row) {
        const A* v = load_block<A>(px + row * c, 1, c, buffer.data());
        A* r = result.data();
        for (std::int64_t ch = 0; ch < c; ++ch) r[ch] = (v[ch] - pm[ch]) * pr[ch] * pw[ch] + pb[ch];
        store_block<A>(r, py + row * c, 1, c);
      }
    });
  });
}

void CpuBackend::batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd, bool training, Tensor& gx,
                                 Tensor& gw, Tensor& gb) {
  const std::int64_t c = x.size(1), rows = c > 0 ? x.numel() / c : 0;
  visit_float<CpuTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A *pw = static_cast<const A*>(w.data()), *pm = static_cast<const A*>(mean.data()), *pr = static_cast<const A*>(rstd.data());
    A *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    const auto size = static_cast<std::size_t>(c);
    constexpr std::int64_t kChunk = 512;
    const std::int64_t chunks = (rows + kChunk - 1) / kChunk;
    std::vector<A> parts(static_cast<std::size_t>(chunks) * size * 2);
    parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer_g(size), buffer_x(size);
      for (std::int64_t row = begin * kChunk; row < std::min(rows, end * kChunk); ++row) {
        const A *vg = load_block<A>(pg + row * c, 1, c, buffer_g.data()), *vx = load_block<A>(px + row * c, 1, c, buffer_x.data());
        A *sum_w = parts.data() + static_cast<std::size_t>(row / kChunk) * size * 2, *sum_b = sum_w + c;
        for (std::int64_t ch = 0; ch < c; ++ch) sum_w[ch] += vg[ch] * ((vx[ch] - pm[ch]) * pr[ch]);
        for (std::int64_t ch = 0; ch < c; ++ch) sum_b[ch] += vg[ch];
      }
    });
    for (std::int64_t ch = 0; ch < c; ++ch) {
      double total_w = 0, total_b = 0;
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        total_w += static_cast<double>(parts[static_cast<std::size_t>(chunk * 2 * c + ch)]);
        total_b += static_cast<double>(parts[static_cast<std::size_t>(chunk * 2 * c + c + ch)]);
      }
      pgw[ch] = static_cast<A>(total_w);
      pgb[ch] = static_cast<A>(total_b);
    }
    const A inverse = training && rows > 0 ? A(1) / static_cast<A>(rows) : A(0);  // fixed statistics pass no gradient
    parallel_for(rows, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(c, 1)), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer_g(size), buffer_x(size), result(size);
      for (std::int64_t row = begin; row < end; ++row) {
        const A *vg = load_block<A>(pg + row * c, 1, c, buffer_g.data()), *vx = load_block<A>(px + row * c, 1, c, buffer_x.data());
        A* r = result.data();
        for (std::int64_t ch = 0; ch < c; ++ch) r[ch] = pw[ch] * pr[ch] * (vg[ch] - inverse * (pgb[ch] + (vx[ch] - pm[ch]) * pr[ch] * pgw[ch]));
        store_block<A>(r, pgx + row * c, 1, c);
      }
    });
  });
}

}  // namespace mantissa
