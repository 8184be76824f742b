#pragma once
// Loops over several threads. How the work is divided never depends on their number, so neither do the
// results.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace mantissa {

/// Elements below which a second thread costs more than it brings.
inline constexpr std::int64_t kParallelGrain = 16384;

/// Carries the first exception out of a parallel region, where it must not leave on its own.
class FirstError {
 public:
  template <class F> void guard(F&& f) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      f();
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

/// Runs f(begin, end) over [0, n) in pieces of `grain`, on several threads when there is more than one piece.
/// The pieces do not depend on the number of threads.
template <class F> void parallel_for(std::int64_t n, std::int64_t grain, F&& f) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t pieces = (n - 1) / grain + 1;
  const auto run = [&](std::int64_t piece) { f(piece * grain, std::min(n, (piece + 1) * grain)); };
  if (pieces == 1 || omp_in_parallel()) {
    for (std::int64_t piece = 0; piece < pieces; ++piece) run(piece);
    return;
  }
  FirstError error;
#pragma omp parallel for schedule(static)
  for (std::int64_t piece = 0; piece < pieces; ++piece) error.guard([&] { run(piece); });
  error.rethrow();
}

/// Runs f(i) for large tasks of unequal cost.
template <class F> void parallel_tasks(std::int64_t n, F&& f) {
  FirstError error;
#pragma omp parallel for schedule(dynamic) if (n > 1)
  for (std::int64_t i = 0; i < n; ++i) error.guard([&] { f(i); });
  error.rethrow();
}

}  // namespace mantissa
