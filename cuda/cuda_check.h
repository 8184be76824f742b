#pragma once
// Checks of CUDA, cuBLAS and cuDNN calls: each throws a typed error with the text of the call.

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include "core/error.h"

#define MT_CUDA_CHECK(call)                                                                                        \
  do {                                                                                                             \
    const cudaError_t status_ = (call);                                                                            \
    if (status_ != cudaSuccess) [[unlikely]]                                                                       \
      MT_THROW(CudaError, #call ": ", cudaGetErrorName(status_), ": ", cudaGetErrorString(status_));              \
  } while (false)

#define MT_CUBLAS_CHECK(call)                                                                  \
  do {                                                                                         \
    const cublasStatus_t status_ = (call);                                                     \
    if (status_ != CUBLAS_STATUS_SUCCESS) [[unlikely]]                                         \
      MT_THROW(CudaError, #call ": ", cublasGetStatusName(status_));                          \
  } while (false)

#define MT_CUDNN_CHECK(call)                                                                   \
  do {                                                                                         \
    const cudnnStatus_t status_ = (call);                                                      \
    if (status_ != CUDNN_STATUS_SUCCESS) [[unlikely]]                                          \
      MT_THROW(CudaError, #call ": ", cudnnGetErrorString(status_));                          \
  } while (false)

/// After a kernel launch: reports a bad configuration at once; counts the launch.
#define MT_LAUNCHED() (++counters.launches, [] { MT_CUDA_CHECK(cudaGetLastError()); }())
