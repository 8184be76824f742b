// Sums, means and extrema.
#include <algorithm>

#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {

constexpr OpInfo kSum{"sum", Cast::full}, kMean{"mean", Cast::full}, kVar{"var", Cast::full}, kMax{"max", Cast::keep},
    kMin{"min", Cast::keep}, kArgmax{"argmax", Cast::keep};
constexpr OpInfo kTable[] = {kSum, kMean, kVar, kMax, kMin, kArgmax};

/// The shape with size 1 on the reduced axes (all axes when none is named).
Shape reduced_shape(const char* op, const Tensor& x, const std::vector<int>& axes) {
  Shape kept = x.shape();
  if (axes.empty()) std::ranges::fill(kept, 1);
  for (const int axis : axes) kept[normalize_axis(op, axis, x.rank())] = 1;
  return kept;
}

Tensor drop_axes(const char* op, const Tensor& y, const std::vector<int>& axes) {
  Shape shape;
  for (int i = 0; i < y.rank(); ++i) {
    const bool reduced =
        axes.empty() || std::ranges::any_of(axes, [&](int a) { return normalize_axis(op, a, y.rank()) == i; });
    if (!reduced) shape.push_back(y.shape()[i]);
  }
  return y.reshape(shape);
}

Tensor reduce(const OpInfo& op, ReduceOp kind, const Tensor& input, const std::vector<int>& axes, bool keepdims) {
  const OpScope scope(op.name);
  check_float(op.name, input);
  const Tensor x = autocast(op.cast, input);
  const Shape kept = reduced_shape(op.name, x, axes);
  const std::int64_t outputs = numel(kept), count = outputs > 0 ? x.numel() / outputs : 0;
  Tensor y = empty(kept, {x.dtype(), x.device()});
  backend(x).reduce(kind, x, false, y);
  y = record(op, y, {x}, [shape = x.shape(), kind, count](Grads g, GradOut& out) {
    Tensor gx = g[0];
    if (kind == ReduceOp::mean) gx = gx * (1.0 / static_cast<double>(count));
    out.set(0, gx.expand(shape));
  });
  return keepdims ? y : drop_axes(op.name, y, axes);
}

Tensor extremum(const OpInfo& op, const Tensor& x, int axis, bool keepdims) {
  const OpScope scope(op.name);
  check_float(op.name, x);
  axis = normalize_axis(op.name, axis, x.rank());
  MT_CHECK(ShapeError, x.shape()[axis] > 0, op.name, ": axis ", axis, " of ", x, " is empty");
  const bool is_max = op.name == kMax.name;
  const Tensor index = argmax(is_max ? x.detach() : -x.detach(), axis, true);
  const Tensor y = gather(x, axis, index);
  return keepdims ? y : y.squeeze(axis);
}

}  // namespace

std::span<const OpInfo> reduce_ops() { return kTable; }

Tensor sum(const Tensor& x, std::vector<int> axes, bool keepdims) {
  return reduce(kSum, ReduceOp::sum, x, axes, keepdims);
}
Tensor mean(const Tensor& x, std::vector<int> axes, bool keepdims) {
  return reduce(kMean, ReduceOp::mean, x, axes, keepdims);
}

Tensor var(const Tensor& input, std::vector<int> axes, bool keepdims, int correction) {
  const OpScope scope("var");
  check_float("var", input);
  const Tensor x = input.to(compute_dtype(input.dtype()));
  const Tensor deviation = x - mean(x, axes, true);
  const Tensor squares = sum(square(deviation), axes, keepdims);
  const std::int64_t outputs = numel(reduced_shape("var", x, axes)), count = outputs > 0 ? x.numel() / outputs : 0;
  const Tensor y = squares * (1.0 / static_cast<double>(count - correction));
  return autocast_state().enabled ? y : y.to(input.dtype());
}

Tensor max(const Tensor& x, int axis, bool keepdims) { return extremum(kMax, x, axis, keepdims); }
Tensor min(const Tensor& x, int axis, bool keepdims) { return extremum(kMin, x, axis, keepdims); }

Tensor argmax(const Tensor& x, int axis, bool keepdims) {
  const OpScope scope("argmax");
  check_float("argmax", x);
  axis = normalize_axis("argmax", axis, x.rank());
  MT_CHECK(ShapeError, x.shape()[axis] > 0, "argmax: axis ", axis, " of ", x, " is empty");
  Shape shape = x.shape();
  shape[axis] = 1;
  Tensor y = empty(shape, {DType::i64, x.device()});
  backend(x).argmax(x, axis, y);
  return keepdims ? y : y.squeeze(axis);
}

}  // namespace mantissa
