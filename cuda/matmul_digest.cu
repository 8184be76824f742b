// Whether two algorithms give the same bits: a hash of a result, the same in whatever order elements are
// added.
#include <algorithm>

#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"
#include "cuda/matmul_plan.h"

namespace mantissa {
namespace {

/// Every bit of the result depends on every bit of x (the finaliser of splitmix64).
__device__ std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// Bytes: y once; runs only while algorithms are compared. Sums of integers do not depend on their order.
template <class Bits>
__global__ void __launch_bounds__(kThreads)
    digest_kernel(const Bits* y, std::int64_t batch, std::int64_t stride, std::int64_t rows, std::int64_t ld,
                  std::int64_t columns, unsigned long long* digest) {
  std::uint64_t sum = 0;
  for (std::int64_t line = blockIdx.x; line < batch * rows; line += gridDim.x) {
    const Bits* row = y + line / rows * stride + line % rows * ld;
    for (std::int64_t i = threadIdx.x; i < columns; i += kThreads)
      sum += mixed(mixed(static_cast<std::uint64_t>(line * columns + i)) + static_cast<std::uint64_t>(row[i]));
  }
  sum = block_reduce<kThreads>(sum, SumOp{});
  if (threadIdx.x == 0) atomicAdd(digest, static_cast<unsigned long long>(sum));
}

}  // namespace

void add_digest(CudaBackend& backend, const void* y, std::size_t element_bytes, std::int64_t batch, std::int64_t stride,
                std::int64_t rows, std::int64_t ld, std::int64_t columns, std::uint64_t* digest) {
  BackendCounters& counters = backend.counters;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(batch * rows, 4096));
  const auto run = [&]<class Bits>() {
    digest_kernel<<<blocks, kThreads, 0, backend.stream()>>>(static_cast<const Bits*>(y), batch, stride, rows, ld,
                                                             columns, reinterpret_cast<unsigned long long*>(digest));
    MT_LAUNCHED();
  };
  if (element_bytes == 8) return run.template operator()<std::uint64_t>();
  if (element_bytes == 4) return run.template operator()<std::uint32_t>();
  run.template operator()<std::uint16_t>();
}

}  // namespace mantissa
