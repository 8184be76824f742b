#pragma once
// Checks of CUDA, cuBLAS and cuDNN calls: each throws a CudaError with the text of the call. An error after
// which the device is unusable (an illegal address, for one) is remembered: every later failure reports that
// first one.

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include "core/error.h"

namespace mantissa::detail {

[[noreturn]] void raise_cuda(cudaError_t status, const char* call, const char* file, int line);
[[noreturn]] void raise_library(const char* status, const char* call, const char* file, int line);

/// Shows the op as a range in profilers when MANTISSA_NVTX=1; else costs one test of a flag.
class OpRange {
 public:
  explicit OpRange(const char* op) : active_(enabled()) {
    if (active_) push(op);
  }
  ~OpRange() {
    if (active_) pop();
  }
  OpRange(const OpRange&) = delete;
  OpRange& operator=(const OpRange&) = delete;

 private:
  static bool enabled();
  static void push(const char* op);
  static void pop();
  bool active_;
};

}  // namespace mantissa::detail

#define MT_CUDA_CHECK(call)                                               \
  do {                                                                    \
    const cudaError_t status_ = (call);                                   \
    if (status_ != cudaSuccess) [[unlikely]]                              \
      ::mantissa::detail::raise_cuda(status_, #call, __FILE__, __LINE__); \
  } while (false)

#define MT_CUBLAS_CHECK(call)                                                                       \
  do {                                                                                              \
    const cublasStatus_t status_ = (call);                                                          \
    if (status_ != CUBLAS_STATUS_SUCCESS) [[unlikely]]                                              \
      ::mantissa::detail::raise_library(cublasLtGetStatusName(status_), #call, __FILE__, __LINE__); \
  } while (false)

#define MT_CUDNN_CHECK(call)                                                                      \
  do {                                                                                            \
    const cudnnStatus_t status_ = (call);                                                         \
    if (status_ != CUDNN_STATUS_SUCCESS) [[unlikely]]                                             \
      ::mantissa::detail::raise_library(cudnnGetErrorString(status_), #call, __FILE__, __LINE__); \
  } while (false)

/// After a kernel launch in a member of CudaBackend: reports a bad configuration at once; counts the launch.
#define MT_LAUNCHED() (++counters.launches, [] { MT_CUDA_CHECK(cudaGetLastError()); }())
