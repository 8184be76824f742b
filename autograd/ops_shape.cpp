// Views, copies and conversions.
#include <algorithm>

#include "autograd/op_checks.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {

/// A view of x whose gradient is `back` applied to the incoming one.
template <class F> Tensor view_op(const char* name, const Tensor& x, Tensor y, F back) {
  return record({name, Cast::keep}, std::move(y), {x}, [back](Grads g, GradOut& out) { out.set(0, back(g[0])); });
}

/// A view that shows part of x, or repeats of it: the gradient is written through the same view of zeros.
Tensor window_op(const char* name, const Tensor& x, const Shape& shape, const Strides& strides, std::int64_t offset) {
  const Tensor y = x.view(shape, strides, offset);
  if (!needs_grad({x})) return y;
  // The window in row-major terms, since the gradient buffer is row-major.
  const Strides plain = contiguous_strides(x.shape());
  Strides window = shape;
  std::int64_t begin = offset - x.offset();
  std::int64_t row_major_begin = 0;
  for (int i = 0; i < x.rank(); ++i)
    window[i] = x.strides()[i] != 0 ? strides[i] / x.strides()[i] * plain[i] : plain[i];
  // offset - x.offset() is a sum of index * stride; recover the indices from the largest stride down.
  std::vector<int> axes(static_cast<std::size_t>(x.rank()));
  for (int i = 0; i < x.rank(); ++i) axes[static_cast<std::size_t>(i)] = i;
  std::ranges::sort(axes, [&](int a, int b) { return x.strides()[a] > x.strides()[b]; });
  for (const int i : axes) {
    if (x.strides()[i] == 0) continue;
    row_major_begin += begin / x.strides()[i] * plain[i];
    begin %= x.strides()[i];
  }
  return record({name, Cast::keep}, y, {x}, [full = x.shape(), shape, window, row_major_begin](Grads g, GradOut& out) {
    const Tensor gx = zeros(full, {g[0].dtype(), g[0].device()});
    Tensor part = gx.view(shape, window, row_major_begin);
    backend(gx).copy(g[0], part);
    out.set(0, gx);
  });
}

}  // namespace

Tensor contiguous_data(const Tensor& x) {
  if (x.is_contiguous()) return x.detach();
  Tensor y = empty(x.shape(), {x.dtype(), x.device()});
  backend(x).copy(x, y);
  return y;
}

Tensor Tensor::contiguous() const {
  const OpScope scope("contiguous");
  check_defined("contiguous", *this);
  if (is_contiguous()) return *this;
  return view_op("contiguous", *this, contiguous_data(*this), [](const Tensor& g) { return g; });
}

Tensor Tensor::clone() const {
  const OpScope scope("clone");
  check_defined("clone", *this);
  Tensor y = empty_like(*this);
  backend(y).copy(*this, y);
  return view_op("clone", *this, y, [](const Tensor& g) { return g; });
}

Tensor Tensor::reshape(const Shape& requested) const {
  const OpScope scope("reshape");
  check_defined("reshape", *this);
  Shape shape = requested;
  std::int64_t known = 1;
  int inferred = -1;
  for (int i = 0; i < shape.rank(); ++i) {
    MT_CHECK(ShapeError, shape[i] >= -1 && !(shape[i] == -1 && inferred >= 0),
             "reshape: at most one size may be -1 and none less, got ", requested);
    if (shape[i] == -1) {
      inferred = i;
    } else {
      known *= shape[i];
    }
  }
  if (inferred >= 0) {
    MT_CHECK(ShapeError, known > 0 && numel_ % known == 0, "reshape: ", *this, " does not fit ", requested);
    shape[inferred] = numel_ / known;
  }
  MT_CHECK(ShapeError, mantissa::numel(shape) == numel_, "reshape: ", *this, " has ", numel_, " elements, ", shape,
           " has ", mantissa::numel(shape));
  if (shape == shape_) return *this;
  const Tensor source = contiguous_data(*this);
  return view_op("reshape", *this, source.view(shape, contiguous_strides(shape), source.offset()),
                 [old = shape_](const Tensor& g) { return g.reshape(old); });
}

Tensor Tensor::permute(const Shape& axes) const {
  check_defined("permute", *this);
  Shape shape = shape_, inverse = shape_;
  Strides strides = strides_;
  unsigned seen = 0;
  MT_CHECK(ShapeError, axes.rank() == rank(), "permute: ", axes, " does not name every axis of ", *this);
  for (int i = 0; i < rank(); ++i) {
    const int axis = normalize_axis("permute", static_cast<int>(axes[i]), rank());
    MT_CHECK(ShapeError, (seen >> axis & 1u) == 0, "permute: axis ", axis, " appears twice in ", axes);
    seen |= 1u << axis;
    shape[i] = shape_[axis];
    strides[i] = strides_[axis];
    inverse[axis] = i;
  }
  return view_op("permute", *this, view(shape, strides, offset_),
                 [inverse](const Tensor& g) { return g.permute(inverse); });
}

Tensor Tensor::transpose(int a, int b) const {
  check_defined("transpose", *this);
  Shape axes = shape_;
  for (int i = 0; i < rank(); ++i) axes[i] = i;
  std::swap(axes[normalize_axis("transpose", a, rank())], axes[normalize_axis("transpose", b, rank())]);
  return permute(axes);
}

Tensor Tensor::slice(int axis, std::int64_t begin, std::int64_t end, std::int64_t step) const {
  check_defined("slice", *this);
  axis = normalize_axis("slice", axis, rank());
  const std::int64_t n = shape_[axis];
  const std::int64_t from = begin < 0 ? begin + n : begin, to = end < 0 ? end + n : end;
  MT_CHECK(ShapeError, step > 0 && from >= 0 && from <= to && to <= n, "slice: [", begin, ", ", end, ") step ", step,
           " is not within axis ", axis, " of ", *this);
  Shape shape = shape_;
  Strides strides = strides_;
  shape[axis] = (to - from + step - 1) / step;
  strides[axis] = strides_[axis] * step;
  return window_op("slice", *this, shape, strides, offset_ + (shape[axis] > 0 ? from * strides_[axis] : 0));
}

Tensor Tensor::select(int axis, std::int64_t index) const {
  check_defined("select", *this);
  axis = normalize_axis("select", axis, rank());
  const std::int64_t at = index < 0 ? index + shape_[axis] : index;
  MT_CHECK(ShapeError, at >= 0 && at < shape_[axis], "select: index ", index, " is out of range for axis ", axis,
           " of ", *this);
  return slice(axis, at, at + 1).squeeze(axis);
}

Tensor Tensor::expand(const Shape& shape) const {
  check_defined("expand", *this);
  MT_CHECK(ShapeError, broadcast_shapes("expand", shape_, shape) == shape, "expand: ", *this, " does not broadcast to ",
           shape);
  if (shape == shape_) return *this;
  Strides strides = shape;
  const int lead = shape.rank() - rank();
  for (int i = 0; i < shape.rank(); ++i)
    strides[i] = i < lead || (shape_[i - lead] == 1 && shape[i] != 1) ? 0 : strides_[i - lead];
  return record({"expand", Cast::keep}, view(shape, strides, offset_), {*this},
                [old = shape_](Grads g, GradOut& out) { sum_to(g[0], old, out, 0); });
}

Tensor Tensor::squeeze(int axis) const {
  check_defined("squeeze", *this);
  axis = normalize_axis("squeeze", axis, rank());
  MT_CHECK(ShapeError, shape_[axis] == 1, "squeeze: axis ", axis, " of ", *this, " does not have size 1");
  Shape shape = shape_;
  Strides strides = strides_;
  shape.erase(axis);
  strides.erase(axis);
  return view_op("squeeze", *this, view(shape, strides, offset_),
                 [axis](const Tensor& g) { return g.unsqueeze(axis); });
}

Tensor Tensor::unsqueeze(int axis) const {
  check_defined("unsqueeze", *this);
  axis = normalize_axis("unsqueeze", axis, rank() + 1);
  Shape shape = shape_;
  Strides strides = strides_;
  strides.insert(axis, axis < rank() ? strides_[axis] * shape_[axis] : 1);
  shape.insert(axis, 1);
  return view_op("unsqueeze", *this, view(shape, strides, offset_),
                 [axis](const Tensor& g) { return g.squeeze(axis); });
}

Tensor Tensor::to(DType dtype) const { return dtype == dtype_ && defined() ? *this : cast(*this, dtype); }

Tensor Tensor::to(Device target) const {
  const OpScope scope("to");
  check_defined("to", *this);
  const Device from = device();
  if (target == from) return *this;
  MT_CHECK(DeviceError, target.is_cpu() || from.is_cpu(), "to: copies between GPUs go through the CPU; got ", *this,
           " to ", target);
  const Tensor source = is_dense() ? detach() : contiguous_data(*this);
  const Tensor y = empty(shape_, {dtype_, target}).view(shape_, source.strides(), 0);  // keeps the layout
  if (target.is_cpu()) {
    backend(from).copy_to_host(source.view({numel_}, {1}, source.offset()), y.data());
  } else {
    Tensor flat = y.view({numel_}, {1}, 0);
    backend(target).copy_from_host(source.data(), flat);
    backend(target).synchronize();  // the source is pageable and may go away
  }
  return view_op("to", *this, y, [from](const Tensor& g) { return g.to(from); });
}

void Tensor::fill_(double value) const {
  check_defined("fill_", *this);
  MT_CHECK(AutogradError, !grad_enabled() || !requires_grad(), "fill_: ", *this,
           " requires a gradient; do it under NoGrad");
  Tensor target = detach();
  backend(*this).fill(value, target);
  bump_version();
}

void Tensor::copy_(const Tensor& source) const {
  check_defined("copy_", *this);
  check_defined("copy_", source);
  MT_CHECK(AutogradError, !grad_enabled() || !requires_grad(), "copy_: ", *this,
           " requires a gradient; do it under NoGrad");
  MT_CHECK(ShapeError, broadcast_shapes("copy_", source.shape(), shape_) == shape_, "copy_: ", source,
           " does not broadcast to ", *this);
  const NoGrad no_grad;
  const Tensor here = source.to(device());
  Tensor target = detach();
  backend(*this).copy(here, target);
  bump_version();
}

Tensor concat(const std::vector<Tensor>& inputs, int axis) {
  const OpScope scope("concat");
  MT_CHECK(ShapeError, !inputs.empty(), "concat: nothing to concatenate");
  DType dtype = inputs[0].dtype();
  for (const Tensor& x : inputs) {
    check_same_device("concat", inputs[0], x);
    if (x.dtype() != dtype) {
      check_float("concat", inputs[0]);
      check_float("concat", x);
      dtype = widest(dtype, x.dtype());
    }
  }
  axis = normalize_axis("concat", axis, inputs[0].rank());
  Shape shape = inputs[0].shape();
  shape[axis] = 0;
  std::vector<Tensor> parts;
  for (const Tensor& input : inputs) {
    parts.push_back(input.to(dtype));
    Shape expected = input.shape();
    MT_CHECK(ShapeError, expected.rank() == shape.rank(), "concat: ranks differ: ", inputs[0], " and ", input);
    expected[axis] = shape[axis];
    MT_CHECK(ShapeError, expected == shape, "concat: sizes off axis ", axis, " differ: ", inputs[0], " and ", input);
    shape[axis] += input.shape()[axis];
  }
  Tensor y = empty(shape, {dtype, inputs[0].device()});
  std::vector<std::int64_t> begins;
  std::int64_t begin = 0;
  for (const Tensor& part : parts) {
    begins.push_back(begin);
    Tensor window = y.view(part.shape(), y.strides(), begin * y.strides()[axis]);
    backend(y).copy(part, window);
    begin += part.shape()[axis];
  }
  Tensor* outputs[] = {&y};
  const std::vector<TensorRef> references(parts.begin(), parts.end());
  record({"concat", Cast::widest}, outputs, references, [begins, axis, total = begin](Grads g, GradOut& out) {
    for (std::size_t i = 0; i < begins.size(); ++i)
      out.set(static_cast<int>(i), g[0].slice(axis, begins[i], i + 1 < begins.size() ? begins[i + 1] : total));
  });
  return y;
}

Tensor stack(const std::vector<Tensor>& parts, int axis) {
  MT_CHECK(ShapeError, !parts.empty(), "stack: nothing to stack");
  std::vector<Tensor> raised;
  for (const Tensor& part : parts) raised.push_back(part.unsqueeze(normalize_axis("stack", axis, part.rank() + 1)));
  return concat(raised, normalize_axis("stack", axis, raised[0].rank()));
}

std::vector<Tensor> split(const Tensor& x, std::int64_t size, int axis) {
  check_defined("split", x);
  axis = normalize_axis("split", axis, x.rank());
  MT_CHECK(ShapeError, size > 0, "split: the size must be positive, got ", size);
  std::vector<Tensor> parts;
  for (std::int64_t begin = 0; begin < x.shape()[axis]; begin += size)
    parts.push_back(x.slice(axis, begin, std::min(begin + size, x.shape()[axis])));
  return parts;
}

}  // namespace mantissa
