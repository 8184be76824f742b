#pragma once
// What the kernels over the last axis share.

#include "core/cpu/block.h"
#include "core/cpu/lanes.h"
#include "core/cpu/parallel.h"

namespace mantissa {

/// Rows that make a piece of work for one thread.
inline std::int64_t row_grain(std::int64_t columns) {
  return std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(columns, 1));
}

/// Calls f(values, first, count) for blocks of a row in the compute type.
template <class A, class T, class F> void for_each_block(const T* x, std::int64_t n, F f) {
  alignas(64) A buffer[kBlock];
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t count = std::min(kBlock, n - first);
    f(load_block<A>(x + first, 1, count, buffer), first, count);
  }
}

/// Sum of f(values, i) over the elements of a row.
template <class A, class T, class F> A row_sum(const T* x, std::int64_t n, F f) {
  A total = 0;
  for_each_block<A>(x, n, [&](const A* v, std::int64_t, std::int64_t count) {
    total += lane_sum<A>(count, [&](std::int64_t i) { return f(v[i]); });
  });
  return total;
}

}  // namespace mantissa
