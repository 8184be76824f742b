#pragma once
// The cuDNN handle of a device, bound to its stream.

#include <cudnn.h>

#include "cuda/cuda_backend.h"

namespace mantissa {

/// Created at first use; makes the device current for the calling thread.
cudnnHandle_t cudnn_handle(const CudaBackend& backend);

}  // namespace mantissa
