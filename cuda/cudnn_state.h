#pragma once
// What the backend keeps of cuDNN for one device. Attention needs only cudnn_handle().

#include <memory>
#include <mutex>

#include "cuda/cudnn_handle.h"

namespace mantissa {

struct ConvolutionPlans;  // cuda/conv.cpp

struct CudnnState {
  cudnnHandle_t handle = nullptr;  // bound to the backend's stream
  std::mutex mutex;                // guards the plans
  std::shared_ptr<ConvolutionPlans> convolutions;
};

/// Created at first use, kept as long as the process; makes the device current for the calling thread.
CudnnState& cudnn_state(const CudaBackend& backend);

}  // namespace mantissa
