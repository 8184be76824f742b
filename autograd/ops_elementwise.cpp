// Elementwise ops: everything about them is in core/elementwise.h; this is the generic code around the lists.
#include "autograd/op_checks.h"
#include "autograd/ops.h"

namespace mantissa {

Tensor unary(const UnaryOp& variant, const Tensor& input) {
  return std::visit(
      [&](auto op) {
        const OpScope scope(op.name);
        check_float(op.name, input);
        const Tensor x = autocast(op.cast, input);
        Tensor y = empty_like(x);
        backend(x).unary(op, x, y);
        if (!needs_grad({x})) return y;
        const Saved saved = op.needs == Needs::input ? save(x) : op.needs == Needs::output ? save(y) : Saved{};
        return record({op.name, op.cast}, y, {x}, [op, saved](Grads g, GradOut& out) {
          const Tensor& s = saved.defined() ? saved.get() : Tensor{};
          Tensor gx = empty_like(saved.defined() ? s : g[0]);
          backend(gx).unary_grad(op, g[0], s, gx);
          out.set(0, gx);
        });
      },
      variant);
}

Tensor binary(const BinaryOp& variant, const Tensor& left, const Tensor& right) {
  return std::visit(
      [&](auto op) {
        const OpScope scope(op.name);
        check_float(op.name, left);
        check_float(op.name, right);
        check_same_device(op.name, left, right);
        Tensor a = autocast(op.cast, left), b = autocast(op.cast, right);
        const DType dtype = widest(a.dtype(), b.dtype());
        a = a.to(dtype);
        b = b.to(dtype);
        const Shape shape = broadcast_shapes(op.name, a.shape(), b.shape());
        Tensor y = a.shape() == shape   ? empty_like(a)
                   : b.shape() == shape ? empty_like(b)
                                        : empty(shape, {dtype, a.device()});
        backend(y).binary(op, a, b, y);
        if (!needs_grad({a, b})) return y;
        const Saved sa = op.reads_operands ? save(a) : Saved{}, sb = op.reads_operands ? save(b) : Saved{};
        return record({op.name, op.cast}, y, {a, b},
                      [op, sa, sb, shapes = std::pair(a.shape(), b.shape())](Grads g, GradOut& out) {
                        for (int i = 0; i < 2; ++i) {
                          if (!out.wanted(i)) continue;
                          Tensor gx = g[0];
                          // The gradient of an addition is the incoming one: no kernel.
                          if (!(std::is_same_v<decltype(op), Add> || (std::is_same_v<decltype(op), Sub> && i == 0))) {
                            gx = empty_like(g[0]);
                            backend(gx).binary_grad(op, i, g[0], sa.get(), sb.get(), gx);
                          }
                          sum_to(gx, i == 0 ? shapes.first : shapes.second, out, i);
                        }
                      });
      },
      variant);
}

void sum_to(const Tensor& g, const Shape& shape, GradOut& out, int input) {
  if (g.shape() == shape) return out.set(input, g);
  Shape kept = g.shape();  // with size 1 where the operand was broadcast
  const int lead = g.rank() - shape.rank();
  for (int i = 0; i < g.rank(); ++i)
    if (i < lead || shape[i - lead] == 1) kept[i] = 1;
  out.write(input, [&](Tensor& gx, bool accumulate) {
    Tensor target = gx.view(kept, broadcast_view_strides(gx, kept), gx.offset());
    backend(g).reduce(ReduceOp::sum, g, accumulate, target);
  });
}

Strides broadcast_view_strides(const Tensor& x, const Shape& kept) {
  Strides strides = kept;
  const int lead = kept.rank() - x.rank();
  for (int i = 0; i < kept.rank(); ++i) strides[i] = i < lead ? 1 : x.strides()[i - lead];
  return strides;
}

Tensor compare(CompareOp op, const Tensor& a, const Tensor& b) {
  const OpScope scope("compare");
  check_same_device("compare", a, b);
  MT_CHECK(DTypeError, a.dtype() == b.dtype(), "compare: dtypes differ: ", a, " and ", b);
  Tensor y = empty(broadcast_shapes("compare", a.shape(), b.shape()), {DType::boolean, a.device()});
  backend(y).compare(op, a, b, y);
  return y;
}

Tensor where(const Tensor& condition, const Tensor& left, const Tensor& right) {
  const OpScope scope("where");
  check_float("where", left);
  check_float("where", right);
  check_same_device("where", left, right);
  check_same_device("where", condition, left);
  MT_CHECK(DTypeError, condition.dtype() == DType::boolean, "where: the condition must be bool, got ", condition);
  const DType dtype = widest(left.dtype(), right.dtype());
  const Tensor a = left.to(dtype), b = right.to(dtype);
  const Shape shape = broadcast_shapes("where", condition.shape(), broadcast_shapes("where", a.shape(), b.shape()));
  Tensor y = empty(shape, {dtype, a.device()});
  backend(y).where(condition, a, b, y);
  return record({"where", Cast::widest}, y, {a, b},
                [c = save(condition), sa = a.shape(), sb = b.shape()](Grads g, GradOut& out) {
                  const Tensor zero = zeros({}, {g[0].dtype(), g[0].device()});
                  for (int i = 0; i < 2; ++i) {
                    if (!out.wanted(i)) continue;
                    Tensor gx = empty_like(g[0]);
                    backend(gx).where(c.get(), i == 0 ? g[0] : zero, i == 0 ? zero : g[0], gx);
                    sum_to(gx, i == 0 ? sa : sb, out, i);
                  }
                });
}

Tensor cast(const Tensor& x, DType dtype) {
  const OpScope scope("cast");
  MT_CHECK(AutogradError, x.defined(), "cast: the tensor is undefined");
  if (x.dtype() == dtype) return x;
  Tensor y = empty_like(x, dtype);
  backend(x).copy(x, y);
  if (!is_float(dtype) || !is_float(x.dtype())) return y;
  return record({"cast", Cast::keep}, y, {x}, [from = x.dtype()](Grads g, GradOut& out) {
    Tensor gx = empty_like(g[0], from);
    backend(gx).copy(g[0], gx);
    out.set(0, gx);
  });
}

namespace {
/// Dropout of x's elements in the memory order of `layout`, so that forward and backward draw the same numbers.
Tensor dropped(const Tensor& x, const Strides& layout, double p, PhiloxState state) {
  const Tensor y = empty(x.shape(), {x.dtype(), x.device()}).view(x.shape(), layout, 0);
  Tensor source = x;
  if (!(x.strides() == layout)) {
    source = empty(x.shape(), {x.dtype(), x.device()}).view(x.shape(), layout, 0);
    backend(x).copy(x, source);
  }
  const auto flat = [](const Tensor& t) { return t.view({t.numel()}, {1}, t.offset()); };
  Tensor target = flat(y);
  backend(x).dropout(flat(source), p, state, target);
  return y;
}
}  // namespace

Tensor dropout(const Tensor& x, double p, bool training) {
  const OpScope scope("dropout");
  check_float("dropout", x);
  MT_CHECK(ConfigError, p >= 0 && p <= 1, "dropout: the probability must lie in [0, 1], got ", p);
  if (!training || p == 0) return x;
  const PhiloxState state = reserve_random(x.numel());
  const Strides layout = x.is_dense() ? x.strides() : contiguous_strides(x.shape());
  return record({"dropout", Cast::keep}, dropped(x, layout, p, state), {x},
                [p, state, layout](Grads g, GradOut& out) { out.set(0, dropped(g[0], layout, p, state)); });
}

namespace {
Tensor draw(RandomKind kind, double a, double b, const Shape& shape, TensorOptions options) {
  const OpScope scope("random");
  Tensor y = empty(shape, options);
  check_float("random", y);
  backend(y).random(kind, a, b, reserve_random(y.numel()), y);
  return y;
}
}  // namespace

Tensor uniform(const Shape& shape, double low, double high, TensorOptions options) {
  MT_CHECK(ConfigError, low <= high, "uniform: empty interval [", low, ", ", high, ")");
  return draw(RandomKind::uniform, low, high, shape, options);
}
Tensor normal(const Shape& shape, double mean, double deviation, TensorOptions options) {
  MT_CHECK(ConfigError, deviation >= 0, "normal: negative deviation ", deviation);
  return draw(RandomKind::normal, mean, deviation, shape, options);
}
Tensor bernoulli(const Shape& shape, double p, TensorOptions options) {
  MT_CHECK(ConfigError, p >= 0 && p <= 1, "bernoulli: the probability must lie in [0, 1], got ", p);
  return draw(RandomKind::bernoulli, p, 0, shape, options);
}
Tensor rand(const Shape& shape, TensorOptions options) { return uniform(shape, 0, 1, options); }
Tensor randn(const Shape& shape, TensorOptions options) { return normal(shape, 0, 1, options); }

}  // namespace mantissa
