#pragma once
// Host functions around kernels that several files of the backend share.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace mantissa {

/// Whether this build has machine code for the current device.
bool kernels_run_here();

/// Sorts n keys below 2^bits, carrying `values`, stably; all four buffers are overwritten, the result is in
/// keys_out and values_out. With scratch = nullptr nothing runs and `scratch_bytes` is set.
void sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint32_t* keys, std::uint32_t* keys_out,
                const std::uint32_t* values, std::uint32_t* values_out, std::int64_t n, int bits, cudaStream_t stream);
void sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* keys, std::uint64_t* keys_out,
                const std::uint32_t* values, std::uint32_t* values_out, std::int64_t n, int bits, cudaStream_t stream);

}  // namespace mantissa
