// What a build without CUDA answers; with CUDA, the definitions in cuda/ take this file's place.
#include "core/backend.h"

namespace mantissa {

int cuda_device_count() { return 0; }
std::string cuda_unavailable_reason() {
  return "this build has no CUDA backend (configure with -DMANTISSA_CUDA=ON; docs/dependencies.md says what it needs)";
}
Backend& cuda_backend(int index) { MT_THROW(DeviceError, "cuda:", index, ": ", cuda_unavailable_reason()); }

}  // namespace mantissa
