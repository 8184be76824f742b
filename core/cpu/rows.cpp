// Softmax and cross entropy. One row at a time in blocks, statistics in the compute type.
#include "core/cpu/rows.h"

#include <cmath>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

/// Largest element of a row; NaN when there is one.
template <class A, class T> A largest_of(const T* x, std::int64_t n) {
  A largest = MaxOf<A>::start;
  for_each_block<A>(x, n, [&](const A* v, std::int64_t, std::int64_t count) {
    largest = MaxOf<A>::combine(largest, row_max(v, count));
  });
  return largest;
}

/// Sum of exp(x - largest).
template <class A, class T> A sum_of_exponentials(const T* x, std::int64_t n, A largest) {
  alignas(64) A e[kBlock];
  A total = 0;
  for_each_block<A>(x, n, [&](const A* v, std::int64_t, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) e[i] = math::exp(v[i] - largest);
    total += lane_sum<A>(count, [&](std::int64_t i) { return e[i]; });
  });
  return total;
}

template <class A, class TX, class TY> void softmax_row(const TX* x, std::int64_t n, bool log, TY* y, A* exponentials) {
  const A largest = largest_of<A>(x, n);
  alignas(64) A buffer[kBlock];
  if (log) {
    const A shift = std::log(sum_of_exponentials(x, n, largest));
    for_each_block<A>(x, n, [&](const A* v, std::int64_t first, std::int64_t count) {
      A* r = result_block<A>(y + first, 1, buffer);
      for (std::int64_t i = 0; i < count; ++i) r[i] = v[i] - largest - shift;
      store_block<A>(r, y + first, 1, count);
    });
    return;
  }
  A total = 0;
  for_each_block<A>(x, n, [&](const A* v, std::int64_t first, std::int64_t count) {
    A* e = exponentials + first;
    for (std::int64_t i = 0; i < count; ++i) e[i] = math::exp(v[i] - largest);
    total += lane_sum<A>(count, [e](std::int64_t i) { return e[i]; });
  });
  const A scale = A(1) / total;
  for_each_block<A>(exponentials, n, [&](const A* e, std::int64_t first, std::int64_t count) {
    A* r = result_block<A>(y + first, 1, buffer);
    for (std::int64_t i = 0; i < count; ++i) r[i] = e[i] * scale;
    store_block<A>(r, y + first, 1, count);
  });
}

template <class A, class T> void softmax_grad_row(const T* g, const T* y, std::int64_t n, bool log, T* gx) {
  alignas(64) A buffer_g[kBlock], buffer_y[kBlock], buffer[kBlock];
  A total = 0;  // of g, or of g y
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t count = std::min(kBlock, n - first);
    const A *vg = load_block<A>(g + first, 1, count, buffer_g), *vy = load_block<A>(y + first, 1, count, buffer_y);
    total += log ? lane_sum<A>(count, [=](std::int64_t i) { return vg[i]; })
                 : lane_sum<A>(count, [=](std::int64_t i) { return vg[i] * vy[i]; });
  }
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t count = std::min(kBlock, n - first);
    const A *vg = load_block<A>(g + first, 1, count, buffer_g), *vy = load_block<A>(y + first, 1, count, buffer_y);
    A* r = result_block<A>(gx + first, 1, buffer);
    if (log) {
      for (std::int64_t i = 0; i < count; ++i) r[i] = vg[i] - math::exp(vy[i]) * total;
    } else {
      for (std::int64_t i = 0; i < count; ++i) r[i] = vy[i] * (vg[i] - total);
    }
    store_block<A>(r, gx + first, 1, count);
  }
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
      const ThreadScratch<A> exponentials(log ? 0 : n);
      parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
          softmax_row<A>(px + row * n, n, log, py + row * n, exponentials.data());
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
    const T *pg = static_cast<const T*>(g.data()), *py = static_cast<const T*>(y.data());
    T* pgx = static_cast<T*>(gx.data());
    parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        softmax_grad_row<compute_t<T>>(pg + row * n, py + row * n, n, log, pgx + row * n);
    });
  });
}

void CpuBackend::cross_entropy(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options, Tensor& loss,
                               Tensor& lse, Tensor& count) {
  const std::int64_t classes = x.size(-1), rows = x.size(0);
  visit_float<CpuTypes>("cross_entropy", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    A* plse = static_cast<A*>(lse.data());
    const Scratch<A> losses(rows);
    A* each = losses.data();
    visit_index("cross_entropy", targets.dtype(), [&]<class I>() {
      const I* pt = static_cast<const I*>(targets.data());
      const A smoothing = static_cast<A>(options.label_smoothing);
      parallel_for(rows, row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          const T* v = px + row * classes;
          const A largest = largest_of<A>(v, classes), log_sum = std::log(sum_of_exponentials(v, classes, largest));
          plse[row] = largest + log_sum;
          each[row] = 0;
          if (pt[row] == options.ignore_index) continue;
          // Differences to the largest, so that large logits do not cost digits.
          const A own = log_sum - (static_cast<A>(v[pt[row]]) - largest);
          each[row] = own;
          if (smoothing > A(0)) {
            const A mean = log_sum - row_sum<A>(v, classes, [largest](A value) { return value - largest; }) /
                                         static_cast<A>(classes);
            each[row] = (A(1) - smoothing) * own + smoothing * mean;
          }
        }
      });
      std::int64_t counted = 0;
      for (std::int64_t row = 0; row < rows; ++row) counted += pt[row] != options.ignore_index ? 1 : 0;
      const A total = row_sum<A>(each, rows, [](A value) { return value; });
      *static_cast<A*>(loss.data()) = counted > 0 ? total / static_cast<A>(counted) : A(0);
      *static_cast<A*>(count.data()) = static_cast<A>(counted);
    });
  });
}

void CpuBackend::cross_entropy_grad(const Tensor& g, const Tensor& x, const Tensor& targets,
                                    const CrossEntropyOptions& options, const Tensor& lse, const Tensor& count,
                                    Tensor& gx) {
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
        alignas(64) A buffer[kBlock];
        for (std::int64_t row = begin; row < end; ++row) {
          T* to = pgx + row * classes;
          if (pt[row] == options.ignore_index) {
            std::fill_n(to, classes, T(0.0f));
            continue;
          }
          const A shift = plse[row],
                  own = static_cast<A>(px[row * classes + pt[row]]);  // read before gx, which may be x
          for_each_block<A>(px + row * classes, classes, [&](const A* v, std::int64_t first, std::int64_t n) {
            A* r = result_block<A>(to + first, 1, buffer);
            for (std::int64_t i = 0; i < n; ++i) r[i] = factor * (math::exp(v[i] - shift) - floor);
            store_block<A>(r, to + first, 1, n);
          });
          // p - 1 of the target by expm1, which keeps its digits when p is nearly 1.
          to[pt[row]] = static_cast<T>(factor * (math::expm1(own - shift) - floor + smoothing));
        }
      });
    });
  });
}

}  // namespace mantissa
