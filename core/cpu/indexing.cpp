// Embedding, gather and scatter. Sums run in a fixed order: over the rows of the input, for each column on
// its own.
#include <atomic>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {

void CpuBackend::embedding(const Tensor& ids, const Tensor& w, Tensor& y) {
  const std::int64_t columns = w.size(1), n = ids.numel();
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * size_of(w.dtype());
  visit_index("embedding", ids.dtype(), [&]<class I>() {
    const I* pi = static_cast<const I*>(ids.data());
    const auto* pw = static_cast<const std::byte*>(w.data());
    auto* py = static_cast<std::byte*>(y.data());
    if (row_bytes == 0) return;
    parallel_for(n, std::max<std::int64_t>(1, kParallelGrain / columns), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        std::memcpy(py + static_cast<std::size_t>(i) * row_bytes, pw + static_cast<std::size_t>(pi[i]) * row_bytes,
                    row_bytes);
    });
  });
}

void CpuBackend::embedding_grad(const Tensor& g, const Tensor& ids, bool accumulate, Tensor& gw) {
  const std::int64_t columns = gw.size(1), n = ids.numel();
  if (!accumulate) fill(0, gw);
  visit_float<CpuTypes>("embedding", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    visit_index("embedding", ids.dtype(), [&]<class I>() {
      const I* pi = static_cast<const I*>(ids.data());
      const T* pg = static_cast<const T*>(g.data());
      A* pw = static_cast<A*>(gw.data());
      constexpr std::int64_t kColumns = 32;  // a thread owns whole columns, so that nobody shares a sum
      parallel_for(columns, std::max(kColumns, n > 0 ? kParallelGrain / n : columns),
                   [&](std::int64_t begin, std::int64_t end) {
                     A buffer[kBlock];
                     for (std::int64_t first = begin; first < end; first += kBlock) {
                       const std::int64_t count = std::min(kBlock, end - first);
                       for (std::int64_t i = 0; i < n; ++i) {
                         const A* values = load_block<A>(pg + i * columns + first, 1, count, buffer);
                         A* sums = pw + static_cast<std::int64_t>(pi[i]) * columns + first;
                         for (std::int64_t c = 0; c < count; ++c) sums[c] += values[c];
                       }
                     }
                   });
    });
  });
}

namespace {

/// Calls f(address in the indexed tensor, address in the one shaped like index) for each index, in row-major
/// order.
template <class T, class U, class F>
void for_each_indexed(const Tensor& indexed, int axis, const Tensor& index, const Tensor& plain, const char* op, F f) {
  T* pi = static_cast<T*>(indexed.data());
  U* pp = static_cast<U*>(plain.data());
  visit_index(op, index.dtype(), [&]<class I>() {
    const I* px = static_cast<const I*>(index.data());
    const int rank = index.rank();
    // Every axis but the indexed one may run on several threads: they touch different elements.
    std::int64_t outer = 1;
    for (int a = 0; a < rank; ++a)
      if (a != axis) outer *= index.shape()[a];
    const std::int64_t length = index.shape()[axis];
    parallel_for(outer, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(length, 1)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t o = begin; o < end; ++o) {
                     std::int64_t rest = o, at_index = 0, at_plain = 0, at_indexed = 0;
                     for (int a = rank - 1; a >= 0; --a) {
                       if (a == axis) continue;
                       const std::int64_t i = rest % index.shape()[a];
                       rest /= index.shape()[a];
                       at_index += i * index.strides()[a];
                       at_plain += i * plain.strides()[a];
                       at_indexed += i * indexed.strides()[a];
                     }
                     for (std::int64_t k = 0; k < length; ++k) {
                       const auto target = static_cast<std::int64_t>(px[at_index + k * index.strides()[axis]]);
                       f(pi[at_indexed + target * indexed.strides()[axis]], pp[at_plain + k * plain.strides()[axis]]);
                     }
                   }
                 });
  });
}

}  // namespace

void CpuBackend::gather(const Tensor& x, int axis, const Tensor& index, Tensor& y) {
  if (index.numel() == 0) return;
  visit_float<CpuTypes>("gather", x.dtype(), [&]<class T>() {
    for_each_indexed<T, T>(x, axis, index, y, "gather", [](const T& from, T& to) { to = from; });
  });
}

void CpuBackend::scatter_add(const Tensor& x, int axis, const Tensor& index, Tensor& y) {
  if (index.numel() == 0) return;
  visit_float<CpuTypes>("scatter_add", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    for_each_indexed<A, T>(y, axis, index, x, "scatter_add", [](A& to, const T& from) { to += static_cast<A>(from); });
  });
}

bool CpuBackend::indices_in_range(const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored) {
  std::atomic<bool> good{true};
  const auto plan = make_plan<1>(index.shape(), {&index});
  visit_index("index", index.dtype(), [&]<class I>() {
    const I* p = static_cast<const I*>(index.data());
    for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
      bool ok = true;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto v = static_cast<std::int64_t>(p[at[0] + i * plan.inner_stride(0)]);
        ok &= (v >= low && v < high) || v == ignored;
      }
      if (!ok) good = false;
    });
  });
  return good;
}

}  // namespace mantissa
