// Stable sorting of index pairs, for reductions whose order must not depend on timing.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/cuda_check.h"
#include "cuda/kernels.h"

namespace mantissa {

void sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* keys, std::uint64_t* keys_out,
                const std::uint32_t* values, std::uint32_t* values_out, std::int64_t n, int bits, cudaStream_t stream) {
  MT_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, keys, keys_out, values, values_out, n, 0, bits, stream));
}

void sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint32_t* keys, std::uint32_t* keys_out,
                const std::uint32_t* values, std::uint32_t* values_out, std::int64_t n, int bits, cudaStream_t stream) {
  MT_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, keys, keys_out, values, values_out, n, 0, bits, stream));
}

}  // namespace mantissa
