#pragma once
// Scratch memory of a kernel, from the caching allocator: uninitialised, and free of page faults after the
// first step.

#include <omp.h>

#include <cstddef>
#include <cstdint>

#include "core/backend.h"

namespace mantissa {

template <class T> class Scratch {
 public:
  explicit Scratch(std::int64_t n)
      : data_(static_cast<T*>(
            cpu_backend().allocator().allocate(static_cast<std::size_t>(n) * sizeof(T), MemoryCategory::workspace))) {}
  ~Scratch() { cpu_backend().allocator().release(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

/// The same for each thread of a parallel loop, taken before it: how much is held does not depend on the
/// schedule.
template <class T> class ThreadScratch {
 public:
  explicit ThreadScratch(std::int64_t n) : n_((n + 63) / 64 * 64), all_(n_ * omp_get_max_threads()) {}
  T* data() const { return all_.data() + n_ * omp_get_thread_num(); }

 private:
  std::int64_t n_;
  Scratch<T> all_;
};

}  // namespace mantissa
