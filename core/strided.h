#pragma once
// How to walk several operands of one shape at once: axes of size 1 dropped, the rest ordered by the output's strides
// and merged where they are contiguous for every operand, so that dense tensors of any layout become one flat loop.

#include <array>
#include <cstdint>
#include <utility>

#include "core/tensor.h"

namespace mantissa {

template <int N> struct StridedPlan {
  int rank = 0;  // axes left, outermost first
  std::int64_t sizes[kMaxRank] = {};
  std::int64_t strides[N][kMaxRank] = {};  // in elements; 0 where an operand is broadcast
  std::int64_t numel = 0;
  bool flat = false;  // one contiguous run in every operand

  std::int64_t inner() const { return rank > 0 ? sizes[rank - 1] : 1; }
  std::int64_t inner_stride(int operand) const { return rank > 0 ? strides[operand][rank - 1] : 1; }
  std::int64_t rows() const { return inner() > 0 ? numel / inner() : 0; }
  /// Offset of an operand at the beginning of a row.
  std::int64_t row_offset(int operand, std::int64_t row) const {
    std::int64_t offset = 0;
    for (int axis = rank - 2; axis >= 0; --axis) {
      offset += row % sizes[axis] * strides[operand][axis];
      row /= sizes[axis];
    }
    return offset;
  }
};

/// A plan over `shape`; operands broadcast to it, the last one is the output and orders the axes.
template <int N> StridedPlan<N> make_plan(const Shape& shape, const std::array<const Tensor*, N>& operands) {
  StridedPlan<N> plan;
  plan.numel = numel(shape);
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (shape[axis] == 1) continue;
    plan.sizes[plan.rank] = shape[axis];
    for (int k = 0; k < N; ++k) {
      const Tensor& x = *operands[static_cast<std::size_t>(k)];
      const int own = axis - (shape.rank() - x.rank());
      plan.strides[k][plan.rank] = own < 0 || x.shape()[own] == 1 ? 0 : x.strides()[own];
    }
    ++plan.rank;
  }
  const auto swap_axes = [&](int a, int b) {
    std::swap(plan.sizes[a], plan.sizes[b]);
    for (int k = 0; k < N; ++k) std::swap(plan.strides[k][a], plan.strides[k][b]);
  };
  for (int i = 1; i < plan.rank; ++i)
    for (int j = i; j > 0 && plan.strides[N - 1][j - 1] < plan.strides[N - 1][j]; --j) swap_axes(j - 1, j);
  int kept = 0;
  for (int axis = 1; axis < plan.rank; ++axis) {
    bool merges = true;
    for (int k = 0; k < N; ++k) merges = merges && plan.strides[k][kept] == plan.strides[k][axis] * plan.sizes[axis];
    if (merges) {
      plan.sizes[kept] *= plan.sizes[axis];
    } else {
      plan.sizes[++kept] = plan.sizes[axis];
    }
    for (int k = 0; k < N; ++k) plan.strides[k][kept] = plan.strides[k][axis];
  }
  plan.rank = plan.rank > 0 ? kept + 1 : 0;
  plan.flat = plan.rank <= 1;
  for (int k = 0; k < N; ++k) plan.flat = plan.flat && (plan.rank == 0 || plan.strides[k][0] == 1);
  return plan;
}

}  // namespace mantissa
