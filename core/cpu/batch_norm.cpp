// Batch norm of channels-last images: rows of channels, taken in chunks whose extent depends on the shape
// alone.
#include <cmath>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

struct Rows {
  std::int64_t rows, c, chunk;  // a chunk of f32 rows fills 128 KiB
  explicit Rows(const Tensor& x) : rows(x.size(1) > 0 ? x.numel() / x.size(1) : 0), c(x.size(1)) {
    chunk = std::max<std::int64_t>(16, (std::int64_t{1} << 15) / std::max<std::int64_t>(c, 1));
  }
  std::int64_t chunks() const { return (rows + chunk - 1) / chunk; }
  std::int64_t rows_of(std::int64_t k) const { return std::min(chunk, rows - k * chunk); }
  std::int64_t elements() const { return std::min(chunk, rows) * c; }

  /// f(chunk, first element, rows) for each chunk, on several threads.
  template <class F> void for_each_chunk(F f) const {
    parallel_for(chunks(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) f(k, k * chunk * c, rows_of(k));
    });
  }
};

constexpr double kDown = 0x1p-10;  // squares are summed this much smaller: deviations of 1e18 do not overflow f32

/// Mean and sum of squared deviations (times kDown) of each channel within a chunk that is in the cache.
template <class A>
void chunk_moments(const A* x, std::int64_t rows, std::int64_t c, A* __restrict mean, A* __restrict squares) {
  std::fill_n(mean, c, A(0));
  std::fill_n(squares, c, A(0));
  for (std::int64_t row = 0; row < rows; ++row) {
    const A* __restrict v = x + row * c;
    for (std::int64_t ch = 0; ch < c; ++ch) mean[ch] += v[ch];
  }
  for (std::int64_t ch = 0; ch < c; ++ch) mean[ch] /= static_cast<A>(rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    const A* __restrict v = x + row * c;
    for (std::int64_t ch = 0; ch < c; ++ch) {
      const A d = v[ch] - mean[ch];
      squares[ch] += d * d * static_cast<A>(kDown);
    }
  }
}

/// Mean and biased variance over all rows, the chunks combined in order (Chan, Golub and LeVeque 1979).
template <class A, class T> void moments(const T* px, const Rows& r, A* mean, std::vector<double>& variance) {
  const std::int64_t c = r.c, chunks = r.chunks();
  const Scratch<A> parts(2 * chunks * c);
  const ThreadScratch<A> wide(r.elements());
  r.for_each_chunk([&](std::int64_t k, std::int64_t first, std::int64_t rows) {
    A* part = parts.data() + 2 * k * c;
    chunk_moments(load_block<A>(px + first, 1, rows * c, wide.data()), rows, c, part, part + c);
  });
  std::vector<double> total(static_cast<std::size_t>(c));
  const auto weight = [&](std::int64_t k) { return static_cast<double>(r.rows_of(k)) / static_cast<double>(r.rows); };
  for (std::int64_t k = 0; k < chunks; ++k)
    for (std::int64_t ch = 0; ch < c; ++ch)
      total[static_cast<std::size_t>(ch)] += weight(k) * static_cast<double>(parts.data()[2 * k * c + ch]);
  for (std::int64_t k = 0; k < chunks; ++k)
    for (std::int64_t ch = 0; ch < c; ++ch) {
      const double d = static_cast<double>(parts.data()[2 * k * c + ch]) - total[static_cast<std::size_t>(ch)];
      variance[static_cast<std::size_t>(ch)] +=
          weight(k) * d * d +
          static_cast<double>(parts.data()[(2 * k + 1) * c + ch]) / kDown / static_cast<double>(r.rows);
    }
  for (std::int64_t ch = 0; ch < c; ++ch) mean[ch] = static_cast<A>(total[static_cast<std::size_t>(ch)]);
}

}  // namespace

void CpuBackend::batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum,
                            bool training, Tensor& running_mean, Tensor& running_var, Tensor& y, Tensor& mean,
                            Tensor& rstd) {
  const Rows r(x);
  const std::int64_t c = r.c;
  visit_float<CpuTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    const A *pw = static_cast<const A*>(w.data()), *pb = static_cast<const A*>(b.data());
    A *rm = static_cast<A*>(running_mean.data()), *rv = static_cast<A*>(running_var.data());
    A *pm = static_cast<A*>(mean.data()), *pr = static_cast<A*>(rstd.data());
    if (training && r.rows > 0) {
      std::vector<double> variance(static_cast<std::size_t>(c));
      moments<A>(px, r, pm, variance);
      const double unbiased = static_cast<double>(r.rows) / static_cast<double>(std::max<std::int64_t>(r.rows - 1, 1));
      for (std::int64_t ch = 0; ch < c; ++ch) {
        const double v = variance[static_cast<std::size_t>(ch)];
        pr[ch] = static_cast<A>(1 / std::sqrt(v + eps));
        rm[ch] = static_cast<A>((1 - momentum) * static_cast<double>(rm[ch]) + momentum * static_cast<double>(pm[ch]));
        rv[ch] = static_cast<A>((1 - momentum) * static_cast<double>(rv[ch]) + momentum * v * unbiased);
      }
    } else {
      for (std::int64_t ch = 0; ch < c; ++ch) {
        pm[ch] = rm[ch];
        pr[ch] = static_cast<A>(1 / std::sqrt(static_cast<double>(rv[ch]) + eps));
      }
    }
    const Scratch<A> scales(c);
    for (std::int64_t ch = 0; ch < c; ++ch) scales.data()[ch] = pr[ch] * pw[ch];
    const ThreadScratch<A> wide(2 * r.elements());
    r.for_each_chunk([&](std::int64_t, std::int64_t first, std::int64_t rows) {
      const A* v = load_block<A>(px + first, 1, rows * c, wide.data());
      A* out = result_block<A>(py + first, 1, wide.data() + r.elements());
      for (std::int64_t row = 0; row < rows; ++row) {
        const A* __restrict from = v + row * c;
        A* __restrict to = out + row * c;
        const A* __restrict scale = scales.data();
        for (std::int64_t ch = 0; ch < c; ++ch) to[ch] = (from[ch] - pm[ch]) * scale[ch] + pb[ch];
      }
      store_block<A>(out, py + first, 1, rows * c);
    });
  });
}

void CpuBackend::batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean,
                                 const Tensor& rstd, bool training, Tensor& gx, Tensor& gw, Tensor& gb) {
  const Rows r(x);
  const std::int64_t c = r.c, chunks = r.chunks();
  visit_float<CpuTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A *pw = static_cast<const A*>(w.data()), *pm = static_cast<const A*>(mean.data()),
            *pr = static_cast<const A*>(rstd.data());
    A *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    const Scratch<A> parts(2 * chunks * c), factors(3 * c);
    const ThreadScratch<A> wide(3 * r.elements());
    r.for_each_chunk([&](std::int64_t k, std::int64_t first, std::int64_t rows) {
      const A *vg = load_block<A>(pg + first, 1, rows * c, wide.data()),
              *vx = load_block<A>(px + first, 1, rows * c, wide.data() + r.elements());
      A* __restrict sum_w = parts.data() + 2 * k * c, * __restrict sum_b = sum_w + c;
      std::fill_n(sum_w, c, A(0));
      std::fill_n(sum_b, c, A(0));
      for (std::int64_t row = 0; row < rows; ++row) {
        const A* __restrict gr = vg + row * c, * __restrict xr = vx + row * c;
        for (std::int64_t ch = 0; ch < c; ++ch) {
          sum_w[ch] += gr[ch] * ((xr[ch] - pm[ch]) * pr[ch]);
          sum_b[ch] += gr[ch];
        }
      }
    });
    std::vector<double> totals(static_cast<std::size_t>(2 * c));
    for (std::int64_t k = 0; k < chunks; ++k)
      for (std::int64_t i = 0; i < 2 * c; ++i)
        totals[static_cast<std::size_t>(i)] += static_cast<double>(parts.data()[2 * k * c + i]);
    // gx = w rstd (g - mean(g) - (x - mean) rstd mean(g normed)); with fixed statistics the two means are 0.
    const double inverse = training && r.rows > 0 ? 1 / static_cast<double>(r.rows) : 0;
    A *scale = factors.data(), *mean_g = scale + c, *slope = mean_g + c;
    for (std::int64_t ch = 0; ch < c; ++ch) {
      const double total_w = totals[static_cast<std::size_t>(ch)], total_b = totals[static_cast<std::size_t>(c + ch)];
      pgw[ch] = static_cast<A>(total_w);
      pgb[ch] = static_cast<A>(total_b);
      scale[ch] = pw[ch] * pr[ch];
      mean_g[ch] = static_cast<A>(inverse * total_b);
      slope[ch] = static_cast<A>(inverse * total_w * static_cast<double>(pr[ch]));
    }
    r.for_each_chunk([&](std::int64_t, std::int64_t first, std::int64_t rows) {
      const A *vg = load_block<A>(pg + first, 1, rows * c, wide.data()),
              *vx = load_block<A>(px + first, 1, rows * c, wide.data() + r.elements());
      A* out = result_block<A>(pgx + first, 1, wide.data() + 2 * r.elements());
      for (std::int64_t row = 0; row < rows; ++row) {
        const A* __restrict gr = vg + row * c, * __restrict xr = vx + row * c;
        A* __restrict to = out + row * c;
        const A* __restrict s = scale, * __restrict m = mean_g, * __restrict l = slope;
        if (training) {
          for (std::int64_t ch = 0; ch < c; ++ch) to[ch] = s[ch] * (gr[ch] - m[ch] - (xr[ch] - pm[ch]) * l[ch]);
        } else {  // x has no say, even where it is not finite
          for (std::int64_t ch = 0; ch < c; ++ch) to[ch] = s[ch] * gr[ch];
        }
      }
      store_block<A>(out, pgx + first, 1, rows * c);
    });
  });
}

}  // namespace mantissa
