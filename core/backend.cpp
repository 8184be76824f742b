#include "core/backend.h"

#include <omp.h>

#include <atomic>

namespace mantissa {

namespace {
std::atomic<Float32Matmul> float32_mode{Float32Matmul::full};
}

Backend& backend(Device device) { return device.is_cpu() ? cpu_backend() : cuda_backend(device.index); }

void set_float32_matmul(Float32Matmul mode) { float32_mode = mode; }
Float32Matmul float32_matmul() { return float32_mode; }

void set_num_threads(int n) {
  MT_CHECK(ConfigError, n > 0, "set_num_threads: need at least one thread, got ", n);
  omp_set_num_threads(n);
}
int num_threads() { return omp_get_max_threads(); }

}  // namespace mantissa
