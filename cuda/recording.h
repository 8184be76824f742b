#pragma once
// A recorded step as a CUDA graph.

#include "core/random.h"
#include "cuda/cuda_backend.h"

namespace mantissa {

class CudaRecording final : public Recording {
 public:
  /// Waits for the device and begins.
  CudaRecording(CudaBackend& backend, std::shared_ptr<PinnedPool> pinned);
  ~CudaRecording() override;
  void finish();
  CudaBackend::RandomStart random_start(PhiloxState state);

 private:
  void launch() override;
  void close_pools() noexcept;

  CudaBackend& backend_;
  std::shared_ptr<PinnedPool> pinned_;
  int pool_ = 0;
  bool capturing_ = true;
  cudaGraphExec_t executable_ = nullptr;
  // The random numbers of a replay start where the process-wide stream stands then.
  PhiloxState random_from_;         // when the recording began
  std::uint64_t random_drawn_ = 0;  // counters that a replay uses
  bool random_used_ = false;        // by the device
  Tensor random_base_;              // PhiloxState
};

/// cuda/cuda_backend.cpp: freed blocks wait while the stream records.
void hold_pinned(PinnedPool& pool, bool recording) noexcept;
/// cuda/random.cu: *base = state, in stream order.
void set_random_base(CudaBackend& backend, PhiloxState state, PhiloxState* base);

}  // namespace mantissa
