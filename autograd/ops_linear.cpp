// Matrix products and attention.
#include <cmath>

#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {

constexpr OpInfo kMatmul{"matmul", Cast::low}, kLinear{"linear", Cast::low}, kAttention{"attention", Cast::low},
    kAttentionQkv{"attention_qkv", Cast::low};
constexpr OpInfo kTable[] = {kMatmul, kLinear, kAttention, kAttentionQkv};

/// Whether one of the last two axes is contiguous, as the backend's products need it.
bool is_matrix(const Tensor& x) {
  const std::int64_t rows = x.size(-2), columns = x.size(-1);
  const bool row_major = x.stride(-1) == 1 && x.stride(-2) >= std::max<std::int64_t>(1, columns);
  const bool column_major = x.stride(-2) == 1 && x.stride(-1) >= std::max<std::int64_t>(1, rows);
  return row_major || column_major;
}

Tensor operand(const Tensor& x) { return is_matrix(x) ? x.detach() : contiguous_data(x); }

Tensor transposed(const Tensor& x) {
  Shape shape = x.shape();
  Strides strides = x.strides();
  std::swap(shape[x.rank() - 1], shape[x.rank() - 2]);
  std::swap(strides[x.rank() - 1], strides[x.rank() - 2]);
  return x.view(shape, strides, x.offset());
}

Tensor with_batch(const Tensor& x, const Shape& batch) {
  Shape shape = batch;
  shape.push_back(x.size(-2));
  shape.push_back(x.size(-1));
  const NoGrad no_grad;
  return x.detach().expand(shape);
}

void multiply(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y) {
  backend(y).matmul(operand(a), operand(b), options, y);
}

/// y = or += a b for a gradient buffer of any layout.
void multiply_into(const Tensor& a, const Tensor& b, bool accumulate, Tensor& y) {
  if (is_matrix(y)) return multiply(a, b, {.accumulate = accumulate}, y);
  Tensor product = empty(y.shape(), {y.dtype(), y.device()});
  multiply(a, b, {}, product);
  accumulate ? backend(y).accumulate(product, y) : backend(y).copy(product, y);
}

Tensor batched_matmul(const Tensor& a, const Tensor& b) {
  Shape batch_a, batch_b;
  for (int i = 0; i + 2 < a.rank(); ++i) batch_a.push_back(a.shape()[i]);
  for (int i = 0; i + 2 < b.rank(); ++i) batch_b.push_back(b.shape()[i]);
  const Shape batch = broadcast_shapes("matmul", batch_a, batch_b);
  Shape shape = batch;
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  Tensor y = empty(shape, {a.dtype(), a.device()});
  multiply(with_batch(a, batch), with_batch(b, batch), {}, y);
  return record(kMatmul, y, {a, b}, [a = save(a), b = save(b), batch](Grads g, GradOut& out) {
    for (int i = 0; i < 2; ++i) {
      if (!out.wanted(i)) continue;
      const Tensor& x = i == 0 ? a.get() : b.get();
      const Tensor other = transposed(with_batch(i == 0 ? b.get() : a.get(), batch));
      const auto product = [&](bool accumulate, Tensor& gx) {
        multiply_into(i == 0 ? g[0] : other, i == 0 ? other : g[0], accumulate, gx);
      };
      if (x.rank() - 2 == batch.rank() && with_batch(x, batch).shape() == x.shape()) {
        out.write(i, [&](Tensor& gx, bool accumulate) { product(accumulate, gx); });
        continue;
      }
      Shape full = batch;
      full.push_back(x.size(-2));
      full.push_back(x.size(-1));
      Tensor gx = empty(full, {compute_dtype(x.dtype()), x.device()});  // f32: it is summed over the batch next
      product(false, gx);
      sum_to(gx, x.shape(), out, i);
    }
  });
}

}  // namespace

std::span<const OpInfo> linear_ops() { return kTable; }

Tensor matmul(const Tensor& left, const Tensor& right) {
  const OpScope scope("matmul");
  check_float("matmul", left);
  check_float("matmul", right);
  check_same_device("matmul", left, right);
  MT_CHECK(ShapeError, left.rank() > 0 && right.rank() > 0, "matmul: scalars have no product; a is ", left, ", b is ",
           right);
  MT_CHECK(ShapeError, left.size(-1) == right.size(right.rank() == 1 ? 0 : -2),
           "matmul: inner dimensions differ: a is ", left, ", b is ", right);
  Tensor a = autocast(kMatmul.cast, left), b = autocast(kMatmul.cast, right);
  const DType dtype = widest(a.dtype(), b.dtype());
  a = a.to(dtype);
  b = b.to(dtype);
  if (a.rank() == 1) return matmul(a.unsqueeze(0), b).squeeze(b.rank() == 1 ? 0 : -2);
  if (b.rank() == 1) return matmul(a, b.unsqueeze(1)).squeeze(-1);
  if (b.rank() == 2 && a.rank() > 2) {  // one large product instead of a batch of small ones
    Shape shape = a.shape();
    shape[a.rank() - 1] = b.size(-1);
    return batched_matmul(a.reshape({-1, a.size(-1)}), b).reshape(shape);
  }
  return batched_matmul(a, b);
}

Tensor linear(const Tensor& input, const Tensor& weight, const Tensor& bias, Activation activation) {
  const OpScope scope("linear");
  check_float("linear", input);
  check_float("linear", weight);
  check_same_device("linear", input, weight);
  MT_CHECK(ShapeError, weight.rank() == 2 && input.rank() >= 1 && input.size(-1) == weight.size(1),
           "linear: inner dimensions differ: x is ", input, ", w is ", weight, " (w is [out, in])");
  if (bias.defined()) {
    check_same_device("linear", input, bias);
    MT_CHECK(ShapeError, bias.rank() == 1 && bias.size(0) == weight.size(0), "linear: b is ", bias, ", w is ", weight);
  }
  const Tensor x = autocast(kLinear.cast, input), w = autocast(kLinear.cast, weight), b = autocast(kLinear.cast, bias);
  MT_CHECK(DTypeError, x.dtype() == w.dtype() && (!b.defined() || b.dtype() == w.dtype()),
           "linear: dtypes differ: x is ", x, ", w is ", w, ", b is ", b, "; use Autocast or .to(dtype)");
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < x.rank(); ++i) rows *= x.shape()[i];
  const std::int64_t in = w.size(1), features = w.size(0);
  const Tensor x2 = contiguous_data(x).view({rows, in}, {in, 1}, x.is_contiguous() ? x.offset() : 0);
  Shape shape = x.shape();
  shape[x.rank() - 1] = features;
  Tensor y = empty(shape, {x.dtype(), x.device()});
  Tensor y2 = y.view({rows, features}, {features, 1}, 0), pre;
  const Tensor b_data = b.defined() ? contiguous_data(b) : Tensor{};
  MatmulOptions options{.bias = b.defined() ? &b_data : nullptr, .activation = activation};
  if (activation == Activation::gelu_tanh && needs_grad({x, w, b})) {
    pre = empty_like(y2);
    options.pre_activation = &pre;
  }
  multiply(x2, transposed(w), options, y2);
  const Saved kept = activation == Activation::relu ? save(y2) : save(pre);
  y = record(
      kLinear, y, {x, w, b}, [x = save(x2), w = save(w), kept, activation, rows, features](Grads grads, GradOut& out) {
        Tensor g = contiguous_data(grads[0]);
        g = g.view({rows, features}, {features, 1}, g.offset());
        if (activation != Activation::none && !out.take_differentiated()) {
          Tensor inner = empty_like(g);
          backend(g).unary_grad(activation == Activation::relu ? UnaryOp(Relu{}) : UnaryOp(GeluTanh{}), g, kept.get(),
                                inner);
          g = inner;
        }
        const auto by_rows = [&](const Tensor& t) {
          return t.view({rows, w.get().size(1)}, {w.get().size(1), 1}, t.offset());
        };
        out.write(0, [&](Tensor& gx, bool accumulate) {
          if (gx.is_contiguous()) {
            Tensor flat = by_rows(gx);
            const Node::Activated* inner = out.take_activation(0);  // x = activation(z): write the gradient of z
            if (inner == nullptr) return multiply_into(g, w.get(), accumulate, flat);
            const Tensor kept_inner = by_rows(inner->kept.get());
            return multiply(g, w.get(), {.grad_activation = inner->kind, .grad_input = &kept_inner}, flat);
          }
          const Tensor product = empty(gx.shape(), {gx.dtype(), gx.device()});
          Tensor flat = by_rows(product);
          multiply(g, w.get(), {}, flat);
          accumulate ? backend(gx).accumulate(product, gx) : backend(gx).copy(product, gx);
        });
        out.write(1, [&](Tensor& gw, bool accumulate) { multiply_into(transposed(g), x.get(), accumulate, gw); });
        out.write(2, [&](Tensor& gb, bool accumulate) {
          Tensor row = gb.view({1, features}, {features, 1}, gb.offset());
          backend(g).reduce(ReduceOp::sum, g, accumulate, row);
        });
      });
  if (pre.defined() && y.requires_grad())
    y.node()->activated = std::make_unique<Node::Activated>(activation, save(pre));
  return y;
}

// ---- attention
// ----------------------------------------------------------------------------------------------------------

namespace {

Tensor heads_operand(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x.detach() : contiguous_data(x); }

/// [B,H,T,D] stored as [B,T,H,D], so that merging the heads is a view.
Tensor empty_heads(const Shape& s, const Tensor& like) {
  return empty({s[0], s[2], s[1], s[3]}, {like.dtype(), like.device()})
      .view(s, {s[1] * s[2] * s[3], s[3], s[1] * s[3], 1}, 0);
}

}  // namespace

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
                 std::optional<double> scale) {
  const OpScope scope("attention");
  for (const Tensor* x : {&query, &key, &value}) {
    check_float("attention", *x);
    check_same_device("attention", query, *x);
    MT_CHECK(ShapeError, x->rank() == 4, "attention: expected [batch, heads, length, head size], got ", *x);
  }
  const Tensor q = autocast(kAttention.cast, query), k = autocast(kAttention.cast, key),
               v = autocast(kAttention.cast, value);
  MT_CHECK(DTypeError, q.dtype() == k.dtype() && k.dtype() == v.dtype(), "attention: dtypes differ: q is ", q,
           ", k is ", k, ", v is ", v);
  MT_CHECK(ShapeError,
           k.shape() == v.shape() && q.size(0) == k.size(0) && q.size(3) == k.size(3) && k.size(1) > 0 &&
               q.size(1) % k.size(1) == 0,
           "attention: shapes do not fit: q is ", q, ", k is ", k, ", v is ", v,
           "; k and v must be equal, and their heads divide q's");
  MT_CHECK(ShapeError, !causal || k.size(2) >= q.size(2),
           "attention: causal needs at least as many keys as queries: q is ", q, ", k is ", k);
  const AttentionOptions options{causal, scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))};
  const Tensor qd = heads_operand(q), kd = heads_operand(k), vd = heads_operand(v);
  Tensor y = empty_heads(q.shape(), q),
         lse = empty({q.size(0), q.size(1), q.size(2)}, {compute_dtype(q.dtype()), q.device()});
  backend(q).attention(qd, kd, vd, options, y, lse);
  return record(
      kAttention, y, {q, k, v},
      [q = save(qd), k = save(kd), v = save(vd), y = save(y), lse = save(lse), options](Grads grads, GradOut& out) {
        const Tensor g = heads_operand(grads[0]);
        Tensor gq = empty_heads(q.get().shape(), g), gk = empty_heads(k.get().shape(), g),
               gv = empty_heads(v.get().shape(), g);
        backend(g).attention_grad(g, q.get(), k.get(), v.get(), y.get(), lse.get(), options, gq, gk, gv);
        out.set(0, gq);
        out.set(1, gk);
        out.set(2, gv);
      });
}

Tensor attention_qkv(const Tensor& packed, int heads, bool causal) {
  const OpScope scope("attention_qkv");
  check_float("attention_qkv", packed);
  MT_CHECK(ShapeError, packed.rank() == 3 && heads > 0 && packed.size(2) % (3 * heads) == 0,
           "attention_qkv: expected [batch, length, 3 x heads x head size] with ", heads, " heads, got ", packed);
  const Tensor qkv = autocast(kAttentionQkv.cast, packed), data = contiguous_data(qkv);
  const std::int64_t batch = qkv.size(0), length = qkv.size(1), width = qkv.size(2) / 3, head = width / heads;
  const Shape shape{batch, heads, length, head};
  const auto part = [=](const Tensor& x, int i) {  // q, k and v are strided views of the projection
    return x.view(shape, {length * 3 * width, head, 3 * width, 1}, x.offset() + i * width);
  };
  const AttentionOptions options{causal, 1 / std::sqrt(static_cast<double>(head))};
  const Tensor merged = empty({batch, length, width}, {qkv.dtype(), qkv.device()});
  const auto by_heads = [=](const Tensor& x) { return x.view(shape, {length * width, head, width, 1}, x.offset()); };
  Tensor y = by_heads(merged), lse = empty({batch, heads, length}, {compute_dtype(qkv.dtype()), qkv.device()});
  backend(qkv).attention(part(data, 0), part(data, 1), part(data, 2), options, y, lse);
  return record(kAttentionQkv, merged, {qkv},
                [=, x = save(data), kept = save(merged), lse = save(lse)](Grads grads, GradOut& out) {
                  const Tensor g = contiguous_data(grads[0]), gx = empty_like(x.get());
                  Tensor gq = part(gx, 0), gk = part(gx, 1), gv = part(gx, 2);
                  backend(g).attention_grad(by_heads(g), part(x.get(), 0), part(x.get(), 1), part(x.get(), 2),
                                            by_heads(kept.get()), lse.get(), options, gq, gk, gv);
                  out.set(0, gx);
                });
}

}  // namespace mantissa
