#pragma once
// A skipped step changes nothing, buffers that the forward pass updates (batch-norm statistics) included: before the
// first change since the last step a buffer is copied, and an optimizer step that is skipped puts the copy back, on the
// device and without waiting.

#include "core/step.h"
#include "core/tensor.h"

namespace mantissa {

/// Call before changing a buffer outside the optimizer. Per thread; cheap when already protected.
void protect_buffer(const Tensor& buffer);
/// Called by the optimizer step: restores the protected buffers of `device` if `state` says skipped, and forgets them.
void finish_buffers(Device device, const StepState* state);

}  // namespace mantissa
