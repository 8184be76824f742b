#pragma once
// Offsets of elements by their row-major index, for kernels whose result depends on it.

#include "core/tensor.h"
#include "cuda/kernel.cuh"

namespace mantissa {

/// Maps the row-major index of a shape to offsets under given strides; indices may exceed 32 bits.
struct RowMajor {
  int rank = 0;
  bool small = true;  // every index fits a FastDivisor
  FastDivisor divisor[kMaxRank];
  std::int64_t size[kMaxRank] = {}, stride[kMaxRank] = {};

  RowMajor() = default;
  explicit RowMajor(const Tensor& x) {
    for (int d = 0; d < x.rank(); ++d)
      if (x.shape()[d] != 1) push(x.shape()[d], x.strides()[d]);
    finish();
  }
  /// Adds the next inner axis.
  void push(std::int64_t extent, std::int64_t step) {
    size[rank] = extent;
    stride[rank++] = step;
  }
  void finish() {
    if (rank == 0) push(1, 0);
    small = count() < kMaxUnits;
    for (int d = 0; small && d < rank; ++d)
      divisor[d] = FastDivisor(static_cast<std::uint32_t>(size[d] > 0 ? size[d] : 1));
  }
  std::int64_t count() const {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= size[d];
    return n;
  }

  __device__ std::int64_t operator()(std::int64_t index) const {
    std::int64_t offset = 0;
    if (rank > 1 && small) {
      auto i = static_cast<std::uint32_t>(index);
#pragma unroll 1
      for (int d = rank - 1; d > 0; --d) {
        const std::uint32_t q = divisor[d].quotient(i);
        offset += static_cast<std::int64_t>(i - q * divisor[d].divisor) * stride[d];
        i = q;
      }
      index = i;
    } else if (rank > 1) {
#pragma unroll 1
      for (int d = rank - 1; d > 0; --d) {
        offset += index % size[d] * stride[d];
        index /= size[d];
      }
    }
    return offset + index * stride[0];
  }
};

}  // namespace mantissa
