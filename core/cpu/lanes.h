#pragma once
// Sums and extremes of a run in independent lanes: they vectorise, and rounding errors grow slowly.

#include <cstdint>
#include <limits>

namespace mantissa {

template <class A> struct SumOf {
  static constexpr A start = 0;
  static A combine(A a, A b) { return a + b; }
};
// NaN wins. Without short-circuit evaluation, which would keep the loops from vectorising.
template <class A> struct MaxOf {
  static constexpr A start = -std::numeric_limits<A>::infinity();
  static A combine(A a, A b) { return static_cast<int>(a > b) | static_cast<int>(a != a) ? a : b; }
};
template <class A> struct MinOf {
  static constexpr A start = std::numeric_limits<A>::infinity();
  static A combine(A a, A b) { return static_cast<int>(a < b) | static_cast<int>(a != a) ? a : b; }
};

/// R::combine of f(0) ... f(n - 1).
template <class R, class A, class F> A lane_reduce(std::int64_t n, F f) {
  constexpr int kLanes = 32;
  A lanes[kLanes];
  for (A& lane : lanes) lane = R::start;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = R::combine(lanes[lane], static_cast<A>(f(i + lane)));
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] = R::combine(lanes[lane], static_cast<A>(f(i)));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] = R::combine(lanes[lane], lanes[lane + width]);
  return lanes[0];
}

template <class A, class F> A lane_sum(std::int64_t n, F f) { return lane_reduce<SumOf<A>, A>(n, f); }

/// Largest element; NaN when there is one.
template <class A> A row_max(const A* x, std::int64_t n) {
  return lane_reduce<MaxOf<A>, A>(n, [x](std::int64_t i) { return x[i]; });
}

}  // namespace mantissa
