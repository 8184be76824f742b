#pragma once
// What several op files share: argument checks and the reverse of broadcasting.

#include "autograd/graph.h"
#include "core/backend.h"

namespace mantissa {

inline void check_defined(const char* op, const Tensor& x) {
  MT_CHECK(AutogradError, x.defined(), op, ": an operand is undefined");
}
inline void check_float(const char* op, const Tensor& x) {
  check_defined(op, x);
  MT_CHECK(DTypeError, is_float(x.dtype()), op, ": expected f64, f32, f16 or bf16, got ", x);
}
inline void check_index(const char* op, const Tensor& x) {
  check_defined(op, x);
  MT_CHECK(DTypeError, x.dtype() == DType::i64 || x.dtype() == DType::i32, op, ": indices must be i64 or i32, got ", x);
}
inline void check_same_device(const char* op, const Tensor& a, const Tensor& b) {
  check_defined(op, a);
  check_defined(op, b);
  MT_CHECK(DeviceError, a.device() == b.device(), op, ": operands are on different devices: ", a, " and ", b,
           "; move one with .to(device)");
}

/// Sums `g` over the axes along which an operand of `shape` was broadcast, into the gradient of `input`.
void sum_to(const Tensor& g, const Shape& shape, GradOut& out, int input);
/// Strides that view x, of fewer axes or with size-1 axes, in the broadcast rank `kept`.
Strides broadcast_view_strides(const Tensor& x, const Shape& kept);

/// A row-major version of x outside the graph: x itself when it is already.
Tensor contiguous_data(const Tensor& x);
/// [N,C,H,W] stored channels-last, outside the graph: x itself when it is already.
Tensor channels_last_data(const Tensor& x);
/// Checks index values on the CPU always, on the GPU when set_check_indices is on.
void check_index_range(const char* op, const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored);

}  // namespace mantissa
