// Normalisations and softmax. Their kernels take statistics in f32 whatever the input type.
#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"
#include "autograd/transaction.h"

namespace mantissa {
namespace {

constexpr OpInfo kSoftmax{"softmax", Cast::full}, kLogSoftmax{"log_softmax", Cast::full},
    kLayerNorm{"layer_norm", Cast::keep}, kRmsNorm{"rms_norm", Cast::keep}, kAddLayerNorm{"add_layer_norm", Cast::keep},
    kAddRmsNorm{"add_rms_norm", Cast::keep}, kBatchNorm{"batch_norm", Cast::keep};
constexpr OpInfo kTable[] = {kSoftmax, kLogSoftmax, kLayerNorm, kRmsNorm, kAddLayerNorm, kAddRmsNorm, kBatchNorm};

Tensor softmax_last(const OpInfo& op, const Tensor& input, bool log) {
  const Tensor x = autocast(op.cast, input);
  Tensor y = empty(x.shape(), {x.dtype(), x.device()});
  backend(x).softmax(contiguous_data(x), log, y);
  return record(op, y, {x}, [y = save(y), log](Grads g, GradOut& out) {
    Tensor gx = empty_like(y.get());
    backend(gx).softmax_grad(contiguous_data(g[0]), y.get(), log, gx);
    out.set(0, gx);
  });
}

Tensor softmax_along(const OpInfo& op, const Tensor& x, int axis, bool log) {
  const OpScope scope(op.name);
  check_float(op.name, x);
  MT_CHECK(ShapeError, x.rank() > 0, op.name, ": expected at least one axis, got ", x);
  axis = normalize_axis(op.name, axis, x.rank());
  if (axis == x.rank() - 1) return softmax_last(op, x, log);
  return softmax_last(op, x.transpose(axis, -1), log).transpose(axis, -1);
}

/// Weight or bias of a norm in the compute dtype, contiguous.
Tensor norm_parameter(const OpInfo& op, const char* what, const Tensor& p, const Tensor& x, std::int64_t size) {
  if (!p.defined()) return p;
  check_float(op.name, p);
  check_same_device(op.name, x, p);
  MT_CHECK(ShapeError, p.rank() == 1 && p.size(0) == size, op.name, ": ", what, " is ", p, ", expected [", size,
           "] for x ", x);
  return p.to(compute_dtype(x.dtype()));
}

Normed norm(const OpInfo& op, NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& weight,
            const Tensor& bias, double eps) {
  const OpScope scope(op.name);
  check_float(op.name, x);
  MT_CHECK(ShapeError, x.rank() > 0, op.name, ": expected at least one axis, got ", x);
  const std::int64_t columns = x.size(-1), rows = columns > 0 ? x.numel() / columns : 0;
  const Tensor w = norm_parameter(op, "w", weight, x, columns), b = norm_parameter(op, "b", bias, x, columns);
  const bool adds = residual.defined();
  Tensor r = residual;
  if (adds) {
    check_same_device(op.name, x, r);
    MT_CHECK(ShapeError, r.shape() == x.shape(), op.name, ": x is ", x, ", residual is ", r);
    MT_CHECK(DTypeError, r.dtype() == x.dtype(), op.name, ": dtypes differ: x is ", x, ", residual is ", r);
  }
  const DType statistics = compute_dtype(x.dtype());
  const Tensor xd = contiguous_data(x), rd = adds ? contiguous_data(r) : Tensor{};
  Tensor y = empty(x.shape(), {x.dtype(), x.device()}), sum = adds ? empty_like(y) : Tensor{};
  Tensor mean = kind == NormKind::layer ? empty({rows}, {statistics, x.device()}) : Tensor{};
  Tensor rstd = empty({rows}, {statistics, x.device()});
  const auto plain = [](const Tensor& p) { return p.defined() ? contiguous_data(p) : Tensor{}; };
  backend(x).norm(kind, xd, rd, plain(w), plain(b), eps, sum, y, mean, rstd);
  Tensor* outputs[] = {&y, &sum};
  const TensorRef inputs[] = {x, r, w, b};
  record(op, std::span(outputs, adds ? 2 : 1), inputs,
         [kind, adds, x = save(adds ? sum : xd), w = save(plain(w)), mean = save(mean), rstd = save(rstd)](
             Grads grads, GradOut& out) {
           const Tensor g_sum = adds && grads[1].defined() ? contiguous_data(grads[1]) : Tensor{};
           if (!grads[0].defined()) {  // only the sum was used
             out.set(0, g_sum);
             out.set(1, g_sum);
             return;
           }
           const Tensor g = contiguous_data(grads[0]);
           Tensor gx = empty_like(x.get()), none;
           const auto run = [&](Tensor& gw, bool keep_w, Tensor& gb, bool keep_b) {
             const bool accumulate = keep_w || keep_b;
             // The kernel adds to both or to none; a buffer that is to be overwritten starts at zero then.
             if (accumulate && gw.defined() && !keep_w) backend(gw).fill(0, gw);
             if (accumulate && gb.defined() && !keep_b) backend(gb).fill(0, gb);
             backend(g).norm_grad(kind, g, g_sum, x.get(), w.get(), mean.get(), rstd.get(), accumulate, gx, gw, gb);
           };
           bool done = false;
           const auto with_bias = [&](Tensor& gw, bool keep_w) {
             done = true;
             if (!out.wanted(3)) return run(gw, keep_w, none, false);
             out.write(3, [&](Tensor& gb, bool keep_b) { run(gw, keep_w, gb, keep_b); });
           };
           out.write(2, with_bias);
           if (!done) with_bias(none, false);
           out.set(0, gx);
           out.set(1, gx);
         });
  return {y, sum};
}

}  // namespace

std::span<const OpInfo> norm_ops() { return kTable; }

Tensor softmax(const Tensor& x, int axis) { return softmax_along(kSoftmax, x, axis, false); }
Tensor log_softmax(const Tensor& x, int axis) { return softmax_along(kLogSoftmax, x, axis, true); }

Tensor layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  return norm(kLayerNorm, NormKind::layer, x, {}, w, b, eps).y;
}
Tensor rms_norm(const Tensor& x, const Tensor& w, double eps) {
  return norm(kRmsNorm, NormKind::rms, x, {}, w, {}, eps).y;
}

Normed add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b, double eps) {
  check_defined(kAddLayerNorm.name, residual);
  return norm(kAddLayerNorm, NormKind::layer, x, residual, w, b, eps);
}
Normed add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& w, double eps) {
  check_defined(kAddRmsNorm.name, residual);
  return norm(kAddRmsNorm, NormKind::rms, x, residual, w, {}, eps);
}

Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
                  const Tensor& running_var, bool training, double momentum, double eps) {
  const OpScope scope("batch_norm");
  check_float("batch_norm", x);
  MT_CHECK(ShapeError, x.rank() == 4, "batch_norm: expected [N,C,H,W], got ", x);
  const std::int64_t channels = x.size(1);
  const DType statistics = compute_dtype(x.dtype());
  const Tensor w = norm_parameter(kBatchNorm, "w", weight, x, channels),
               b = norm_parameter(kBatchNorm, "b", bias, x, channels);
  MT_CHECK(ShapeError, !training || x.numel() / std::max<std::int64_t>(channels, 1) > 1,
           "batch_norm: training needs more than one value per channel, got ", x);
  for (const Tensor* running : {&running_mean, &running_var}) {
    check_same_device("batch_norm", x, *running);
    MT_CHECK(DTypeError, running->dtype() == statistics, "batch_norm: running statistics must be ", statistics,
             ", got ", *running);
    MT_CHECK(ShapeError, running->rank() == 1 && running->size(0) == channels && running->is_contiguous(),
             "batch_norm: running statistics are ", *running, ", expected [", channels, "]");
  }
  MT_CHECK(AutogradError, w.defined() && b.defined(), "batch_norm: w and b must be given");
  Tensor mean = empty({channels}, {statistics, x.device()}), rstd = empty_like(mean);
  Tensor running_m = running_mean.detach(), running_v = running_var.detach();
  if (training) {
    protect_buffer(running_mean);
    protect_buffer(running_var);
  }
  const Tensor data = channels_last_data(x), wd = contiguous_data(w), bd = contiguous_data(b);
  Tensor y = empty_like(data);
  backend(x).batch_norm(data, wd, bd, eps, momentum, training, running_m, running_v, y, mean, rstd);
  if (training) {
    running_mean.bump_version();
    running_var.bump_version();
  }
  return record(kBatchNorm, y, {x, w, b},
                [x = save(data), w = save(wd), mean = save(mean), rstd = save(rstd), training](Grads g, GradOut& out) {
                  Tensor gx = empty_like(x.get()), gw = empty_like(w.get()), gb = empty_like(w.get());
                  backend(gx).batch_norm_grad(channels_last_data(g[0]), x.get(), w.get(), mean.get(), rstd.get(),
                                              training, gx, gw, gb);
                  out.set(0, gx);
                  out.set(1, gw);
                  out.set(2, gb);
                });
}

}  // namespace mantissa
