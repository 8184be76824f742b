// Layer and RMS norm over the last axis.
#include <cmath>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/rows.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

/// A whole row in the compute type: x itself or a widened copy.
template <class A, class T> const A* load_row(const T* x, std::int64_t n, A* buffer) {
  return load_block<A>(x, 1, n, buffer);
}

template <class A> struct Statistics { A mean, rstd; };

template <class A> Statistics<A> statistics(NormKind kind, const A* v, std::int64_t n, A eps) {
  const A count = static_cast<A>(n);
  A mean = 0;
  if (kind == NormKind::layer) {
    mean = lane_sum<A>(n, [=](std::int64_t i) { return v[i]; }) / count;
    mean += lane_sum<A>(n, [=](std::int64_t i) { return v[i] - mean; }) / count;  // what rounding lost
  }
  A squares = lane_sum<A>(n, [=](std::int64_t i) { return (v[i] - mean) * (v[i] - mean); }) / count;
  if (squares < A(1e30)) return {mean, A(1) / std::sqrt(squares + eps)};
  // Rare: squares may have overflowed. Scaled by the largest deviation, and eps no longer matters.
  const A largest = lane_reduce<MaxOf<A>, A>(n, [=](std::int64_t i) { return math::abs(v[i] - mean); });
  const A down = A(1) / largest;
  squares = lane_sum<A>(n, [=](std::int64_t i) { return (v[i] - mean) * down * ((v[i] - mean) * down); }) / count;
  return {mean, down / std::sqrt(squares)};
}

/// y = (v - mean) rstd w + b; w and b may be null.
template <class A>
void normalise(const A* __restrict v, std::int64_t n, Statistics<A> s, const A* __restrict w, const A* __restrict b,
               A* __restrict y) {
  if (w != nullptr && b != nullptr) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = (v[i] - s.mean) * s.rstd * w[i] + b[i];
  } else if (w != nullptr) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = (v[i] - s.mean) * s.rstd * w[i];
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i] = (v[i] - s.mean) * s.rstd + (b != nullptr ? b[i] : A(0));
  }
}

/// Sums of the rows of `parts` [chunks, n], into or onto `target`.
template <class A> void combine(const A* parts, std::int64_t chunks, std::int64_t n, bool accumulate, A* target) {
  parallel_for(n, std::max<std::int64_t>(16, kParallelGrain / std::max<std::int64_t>(chunks, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 alignas(64) A sums[kBlock];
                 for (std::int64_t first = begin; first < end; first += kBlock) {
                   const std::int64_t count = std::min(kBlock, end - first);
                   std::fill_n(sums, count, A(0));
                   for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
                     for (std::int64_t i = 0; i < count; ++i) sums[i] += parts[chunk * n + first + i];
                   for (std::int64_t i = 0; i < count; ++i)
                     target[first + i] = accumulate ? target[first + i] + sums[i] : sums[i];
                 }
               });
}

}  // namespace

void CpuBackend::norm(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b,
                      double eps, Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd) {
  if (x.numel() == 0) return;
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  visit_float<CpuTypes>("norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *px = static_cast<const T*>(x.data()), *pr = static_cast<const T*>(residual.data());
    T *psum = static_cast<T*>(sum.data()), *py = static_cast<T*>(y.data());
    const A *pw = static_cast<const A*>(w.data()), *pb = static_cast<const A*>(b.data());
    A *pmean = static_cast<A*>(mean.data()), *prstd = static_cast<A*>(rstd.data());
    const ThreadScratch<A> scratch(2 * n);
    parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      A *buffer = scratch.data(), *other = buffer + n;
      for (std::int64_t row = begin; row < end; ++row) {
        const A* v = load_row(px + row * n, n, buffer);
        if (pr != nullptr) {
          const A* added = load_row(pr + row * n, n, other);
          A* r = result_block<A>(psum + row * n, 1, other);
          for (std::int64_t i = 0; i < n; ++i) r[i] = v[i] + added[i];
          store_block<A>(r, psum + row * n, 1, n);
          v = load_row(psum + row * n, n, buffer);  // as rounded: backward sees these values
        }
        const Statistics<A> s = statistics(kind, v, n, static_cast<A>(eps));
        if (pmean != nullptr) pmean[row] = s.mean;
        prstd[row] = s.rstd;
        A* r = result_block<A>(py + row * n, 1, other);
        normalise(v, n, s, pw, pb, r);
        store_block<A>(r, py + row * n, 1, n);
      }
    });
  });
}

void CpuBackend::norm_grad(NormKind kind, const Tensor& g, const Tensor& g_sum, const Tensor& x, const Tensor& w,
                           const Tensor& mean, const Tensor& rstd, bool accumulate, Tensor& gx, Tensor& gw,
                           Tensor& gb) {
  const std::int64_t n = x.size(-1), rows = n > 0 ? x.numel() / n : 0;
  visit_float<CpuTypes>("norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *pgs = static_cast<const T*>(g_sum.data()),
            *px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A *pw = static_cast<const A*>(w.data()), *pmean = static_cast<const A*>(mean.data()),
            *prstd = static_cast<const A*>(rstd.data());
    A *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    // Partial sums of the parameters' gradients over a fixed number of rows each, so that threads do not
    // matter.
    constexpr std::int64_t kChunk = 64;
    const std::int64_t chunks = (rows + kChunk - 1) / kChunk;
    const Scratch<A> parts_w(pgw ? chunks * n : 0), parts_b(pgb ? chunks * n : 0);
    const ThreadScratch<A> scratch(5 * n);
    parallel_for(chunks, std::max<std::int64_t>(1, row_grain(n) / kChunk), [&](std::int64_t begin, std::int64_t end) {
      A *buffer_g = scratch.data(), *buffer_x = buffer_g + n, *buffer_s = buffer_x + n;
      A* __restrict xn = buffer_s + n, * __restrict gn = xn + n;
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        A* __restrict sums_w = pgw ? parts_w.data() + chunk * n : nullptr, * __restrict sums_b =
                                                                               pgb ? parts_b.data() + chunk * n
                                                                                   : nullptr;
        if (sums_w) std::fill_n(sums_w, n, A(0));
        if (sums_b) std::fill_n(sums_b, n, A(0));
        for (std::int64_t row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) {
          const A *vg = load_row(pg + row * n, n, buffer_g), *vx = load_row(px + row * n, n, buffer_x);
          const A m = pmean ? pmean[row] : A(0), rs = prstd[row];
          for (std::int64_t i = 0; i < n; ++i) xn[i] = (vx[i] - m) * rs;
          if (sums_w)
            for (std::int64_t i = 0; i < n; ++i) sums_w[i] += vg[i] * xn[i];
          if (sums_b)
            for (std::int64_t i = 0; i < n; ++i) sums_b[i] += vg[i];
          const A* weighted = vg;
          if (pw != nullptr) {
            for (std::int64_t i = 0; i < n; ++i) gn[i] = vg[i] * pw[i];
            weighted = gn;
          }
          const A mean_g = kind == NormKind::layer
                               ? lane_sum<A>(n, [=](std::int64_t i) { return weighted[i]; }) / static_cast<A>(n)
                               : A(0);
          const A mean_gx = lane_sum<A>(n, [=](std::int64_t i) { return weighted[i] * xn[i]; }) / static_cast<A>(n);
          A* r = result_block<A>(pgx + row * n, 1, buffer_x);
          for (std::int64_t i = 0; i < n; ++i) r[i] = rs * (weighted[i] - mean_g - xn[i] * mean_gx);
          if (pgs != nullptr) {
            const A* s = load_row(pgs + row * n, n, buffer_s);
            for (std::int64_t i = 0; i < n; ++i) r[i] += s[i];
          }
          store_block<A>(r, pgx + row * n, 1, n);
        }
      }
    });
    if (pgw) combine(parts_w.data(), chunks, n, accumulate, pgw);
    if (pgb) combine(parts_b.data(), chunks, n, accumulate, pgb);
  });
}

}  // namespace mantissa
