// Kernels over the last axis: softmax, cross entropy, layer and RMS norm. One row at a time, statistics in the compute type.
#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

std::int64_t row_grain(std::int64_t columns) { return std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(columns, 1)); }

/// Sum of f(i) over [0, n) in 16 lanes, then pairwise: vectorises, and its error grows slowly.
template <class A, class F>
A lane_sum(std::int64_t n, F f) {
  A lanes[16] = {};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += f(i + lane);
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += f(i);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

/// Largest element; NaN when there is one.
template <class A>
A row_max(const A* x, std::int64_t n) {
  A largest = -std::numeric_limits<A>::infinity();
  bool nan = false;
  for (std::int64_t i = 0; i < n; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    nan |= x[i] != x[i];
  }
  return nan ? std::numeric_limits<A>::quiet_NaN() : largest;
}

/// A whole row in the compute type: x itself or a widened copy.
template <class A, class T>
const A* load_row(const T* x, std::int64_t n, std::vector<A>& buffer) {
  buffer.resize(static_cast<std::size_t>(std::max<std::int64_t>(n, 1)));
  return load_block<A>(x, 1, n, buffer.data());
}

}  // namespace

void CpuBackend::softmax(const Tensor& x, bool log, Tensor& y) {
  if (x.numel() == 0) return;
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  visit_float<CpuTypes>("softmax", x.dtype(), [&]<class TX>() {
    using A = compute_t<TX>;
    const auto with = [&]<class TY>() {
      const TX* px = static_cast<const TX*>(x.data());
      TY* py = static_cast<TY*>(y.data());
      parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
        std::vector<A> buffer, result(static_cast<std::size_t>(n));
        for (std::int64_t row = begin; row < end; ++row) {
          const A* v = load_row<A>(px + row * n, n, buffer);
          const A largest = row_max(v, n);
          A* r = result.data();
          for (std::int64_t i = 0; i < n; ++i) r[i] = math::exp(v[i] - largest);
          const A total = lane_sum<A>(n, [&](std::int64_t i) { return r[i]; });
          if (log) {
            const A shift = std::log(total);
            for (std::int64_t i = 0; i < n; ++i) r[i] = v[i] - largest - shift;
          } else {
            const A scale = A(1) / total;
            for (std::int64_t i = 0; i < n; ++i) r[i] *= scale;
          }
          store_block<A>(r, py + row * n, 1, n);
        }
      });
    };
    if (y.dtype() == x.dtype()) return with.template operator()<TX>();
    with.template operator()<A>();
  });
}

void CpuBackend::softmax_grad(const Tensor& g, const Tensor& y, bool log, Tensor& gx) {
  if (y.numel() == 0) return;
  const std::int64_t n = y.size(-1), rows = y.numel() / n;
  visit_float<CpuTypes>("softmax", y.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *py = static_cast<const T*>(y.data());
    T* pgx = static_cast<T*>(gx.data());
    parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer_g, buffer_y, result(static_cast<std::size_t>(n));
      for (std::int64_t row = begin; row < end; ++row) {
        const A *vg = load_row<A>(pg + row * n, n, buffer_g), *vy = load_row<A>(py + row * n, n, buffer_y);
        A* r = result.data();
        if (log) {
          const A total = lane_sum<A>(n, [&](std::int64_t i) { return vg[i]; });
          for (std::int64_t i = 0; i < n; ++i) r[i] = vg[i] - math::exp(vy[i]) * total;
        } else {
          const A dot = lane_sum<A>(n, [&](std::int64_t i) { return vg[i] * vy[i]; });
          for (std::int64_t i = 0; i < n; ++i) r[i] = vy[i] * (vg[i] - dot);
        }
        store_block<A>(r, pgx + row * n, 1, n);
      }
    });
  });
}

void CpuBackend::cross_entropy(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options, Tensor& loss, Tensor& lse, Tensor& count) {
  const std::int64_t classes = x.size(-1), rows = x.size(0);
  visit_float<CpuTypes>("cross_entropy", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    A* plse = static_cast<A*>(lse.data());
    std::vector<A> losses(static_cast<std::size_t>(rows));
    visit_index("cross_entropy", targets.dtype(), [&]<class I>() {
      const I* pt = static_cast<const I*>(targets.data());
      const A smoothing = static_cast<A>(options.label_smoothing);
      parallel_for(rows, row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        std::vector<A> buffer;
        for (std::int64_t row = begin; row < end; ++row) {
          const A* v = load_row<A>(px + row * classes, classes, buffer);
          const A largest = row_max(v, classes);
          plse[row] = largest + std::log(lane_sum<A>(classes, [&](std::int64_t i) { return math::exp(v[i] - largest); }));
          if (pt[row] == options.ignore_index) continue;
          A value = plse[row] - v[pt[row]];
          if (smoothing > A(0)) {
            const A mean = lane_sum<A>(classes, [&](std::int64_t i) { return plse[row] - v[i]; }) / static_cast<A>(classes);
            value = (A(1) - smoothing) * value + smoothing * mean;
          }
          losses[static_cast<std::size_t>(row)] = value;
        }
      });
      std::int64_t counted = 0;
      for (std::int64_t row = 0; row < rows; ++row) counted += pt[row] != options.ignore_index ? 1 : 0;
      const A total = lane_sum<A>(rows, [&](std::int64_t i) { return losses[static_cast<std::size_t>(i)]; });
      *static_cast<A*>(loss.data()) = counted > 0 ? total / static_cast<A>(counted) : A(0);
      *static_cast<A*>(count.data()) = static_cast<A>(counted);
    });
  });
}

void CpuBackend::cross_entropy_grad(const Tensor& g, const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options, const Tensor& lse,
                                    const Tensor& count, Tensor& gx) {
  const std::int64_t classes = x.size(-1), rows = x.size(0);
  visit_float<CpuTypes>("cross_entropy", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A* plse = static_cast<const A*>(lse.data());
    const A counted = *static_cast<const A*>(count.data());
    const A factor = counted > A(0) ? *static_cast<const A*>(g.data()) / counted : A(0);
    const A smoothing = static_cast<A>(options.label_smoothing), floor = smoothing / static_cast<A>(classes);
    visit_index("cross_entropy", targets.dtype(), [&]<class I>() {
      const I* pt = static_cast<const I*>(targets.data());
      parallel_for(rows, row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        std::vector<A> buffer, result(static_cast<std::size_t>(classes));
        for (std::int64_t row = begin; row < end; ++row) {
          A* r = result.data();
          if (pt[row] == options.ignore_index) {
            std::fill_n(r, classes, A(0));
          } else {
            const A* v = load_row<A>(px + row * classes, classes, buffer);
            for (std::int64_t i = 0; i < classes; ++i) r[i] = factor * (math::exp(v[i] - plse[row]) - floor);
            const A p = math::exp(v[pt[row]] - plse[row]);
            r[pt[row]] = factor * (p - floor - (A(1) - smoothing));
          }
          store_block<A>(r, pgx + row * classes, 1, classes);
        }
      });
    });
  });
}

void CpuBackend::norm(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b, double eps, Tensor& sum, Tensor& y,
                      Tensor& mean, Tensor& rstd) {
  if (x.numel() == 0) return;
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  visit_float<CpuTypes>("norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *px = static_cast<const T*>(x.data()), *pr = static_cast<const T*>(residual.data());
    T *psum = static_cast<T*>(sum.data()), *py = static_cast<T*>(y.data());
    const A *pw = static_cast<const A*>(w.data()), *pb = static_cast<const A*>(b.data());
    A *pmean = static_cast<A*>(mean.data()), *prstd = static_cast<A*>(rstd.data());
    parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer, other, result(static_cast<std::size_t>(n));
      for (std::int64_t row = begin; row < end; ++row) {
        const A* v = load_row<A>(px + row * n, n, buffer);
        A* r = result.data();
        if (pr != nullptr) {
          const A* added = load_row<A>(pr + row * n, n, other);
          for (std::int64_t i = 0; i < n; ++i) r[i] = v[i] + added[i];
          store_block<A>(r, psum + row * n, 1, n);
          v = load_row<A>(psum + row * n, n, buffer);  // as rounded: backward sees these values
        }
        const A inverse = A(1) / static_cast<A>(n);
        const A m = kind == NormKind::layer ? lane_sum<A>(n, [&](std::int64_t i) { return v[i] * inverse; }) : A(0);
        // Scaled by the largest deviation, so that squares of 1e30 do not overflow.
        A largest = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          const A d = math::abs(v[i] - m);
          largest = d > largest ? d : largest;
        }
        const bool scale = largest > A(1e15) && largest < std::numeric_limits<A>::infinity();
        const A down = scale ? A(1) / largest : A(1);
        const A squares = lane_sum<A>(n, [&](std::int64_t i) { return (v[i] - m) * down * ((v[i] - m) * down); }) * inverse;
        const A rs = down / std::sqrt(squares + static_cast<A>(eps) * down * down);
        if (pmean != nullptr) pmean[row] = m;
        prstd[row] = rs;
        for (std::int64_t i = 0; i < n; ++i) r[i] = (v[i] - m) * rs;
        if (pw != nullptr)
          for (std::int64_t i = 0; i < n; ++i) r[i] *= pw[i];
        if (pb != nullptr)
          for (std::int64_t i = 0; i < n; ++i) r[i] += pb[i];
        store_block<A>(r, py + row * n, 1, n);
      }
    });
  });
}

void CpuBackend::norm_grad(NormKind kind, const Tensor& g, const Tensor& g_sum, const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd,
                           bool accumulate, Tensor& gx, Tensor& gw, Tensor& gb) {
  const std::int64_t n = x.size(-1), rows = n > 0 ? x.numel() / n : 0;
  visit_float<CpuTypes>("norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *pgs = static_cast<const T*>(g_sum.data()), *px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A *pw = static_cast<const A*>(w.data()), *pmean = static_cast<const A*>(mean.data()), *prstd = static_cast<const A*>(rstd.data());
    A *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    // Partial sums of the parameters' gradients over a fixed number of rows each, so that threads do not matter.
    constexpr std::int64_t kChunk = 64;
    const std::int64_t chunks = (rows + kChunk - 1) / kChunk;
    std::vector<A> parts_w(pgw ? static_cast<std::size_t>(chunks * n) : 0), parts_b(pgb ? static_cast<std::size_t>(chunks * n) : 0);
    parallel_for(chunks, std::max<std::int64_t>(1, row_grain(n) / kChunk), [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> buffer_g, buffer_x, buffer_s, result(static_cast<std::size_t>(n)), normed(static_cast<std::size_t>(n)), weighted(static_cast<std::size_t>(n));
      for (std::int64_t row = begin * kChunk; row < std::min(rows, end * kChunk); ++row) {
        const A *vg = load_row<A>(pg + row * n, n, buffer_g), *vx = load_row<A>(px + row * n, n, buffer_x);
        const A m = pmean ? pmean[row] : A(0), rs = prstd[row];
        A *xn = normed.data(), *gn = weighted.data(), *r = result.data();
        for (std::int64_t i = 0; i < n; ++i) xn[i] = (vx[i] - m) * rs;
        for (std::int64_t i = 0; i < n; ++i) gn[i] = pw ? vg[i] * pw[i] : vg[i];
        const A inverse = A(1) / static_cast<A>(n);
        const A mean_g = kind == NormKind::layer ? lane_sum<A>(n, [&](std::int64_t i) { return gn[i]; }) * inverse : A(0);
        const A mean_gx = lane_sum<A>(n, [&](std::int64_t i) { return gn[i] * xn[i]; }) * inverse;
        for (std::int64_t i = 0; i < n; ++i) r[i] = rs * (gn[i] - mean_g - xn[i] * mean_gx);
        if (pgs != nullptr) {
          const A* s = load_row<A>(pgs + row * n, n, buffer_s);
          for (std::int64_t i = 0; i < n; ++i) r[i] += s[i];
        }
        store_block<A>(r, pgx + row * n, 1, n);
        const std::int64_t chunk = row / kChunk;
        if (pgw != nullptr)
          for (std::int64_t i = 0; i < n; ++i) parts_w[static_cast<std::size_t>(chunk * n + i)] += vg[i] * xn[i];
        if (pgb != nullptr)
          for (std::int64_t i = 0; i < n; ++i) parts_b[static_cast<std::size_t>(chunk * n + i)] += vg[i];
      }
    });
    const auto combine = [&](const std::vector<A>& parts, A* target) {
      if (target == nullptr) return;
      for (std::int64_t i = 0; i < n; ++i) {
        A total = 0;
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) total += parts[static_cast<std::size_t>(chunk * n + i)];
        target[i] = accumulate ? target[i] + total : total;
      }
    };
    combine(parts_w, pgw);
    combine(parts_b, pgb);
  });
}

}  // namespace mantissa
