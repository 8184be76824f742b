// Losses.
#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {
constexpr OpInfo kCrossEntropy{"cross_entropy", Cast::keep}, kMse{"mse_loss", Cast::full};
constexpr OpInfo kTable[] = {kCrossEntropy, kMse};
}  // namespace

std::span<const OpInfo> loss_ops() { return kTable; }

Tensor cross_entropy(const Tensor& x, const Tensor& targets, CrossEntropyOptions options) {
  const OpScope scope("cross_entropy");
  check_float("cross_entropy", x);
  check_index("cross_entropy", targets);
  check_same_device("cross_entropy", x, targets);
  MT_CHECK(ShapeError, x.rank() >= 1 && x.size(-1) > 0, "cross_entropy: expected [..., classes], got ", x);
  MT_CHECK(ConfigError, options.label_smoothing >= 0 && options.label_smoothing <= 1,
           "cross_entropy: label_smoothing must lie in [0, 1], got ", options.label_smoothing);
  Shape rows_shape = x.shape();
  rows_shape.erase(x.rank() - 1);
  MT_CHECK(ShapeError, targets.shape() == rows_shape, "cross_entropy: x is ", x, ", so targets must be ", rows_shape,
           ", got ", targets);
  const std::int64_t classes = x.size(-1), rows = x.numel() / classes;
  check_index_range("cross_entropy", targets, 0, classes, options.ignore_index);
  const DType accumulate = compute_dtype(x.dtype());
  Tensor data = contiguous_data(x);
  data = data.view({rows, classes}, {classes, 1}, data.offset());
  Tensor labels = contiguous_data(targets);
  labels = labels.view({rows}, {1}, labels.offset());
  Tensor loss = empty({}, {accumulate, x.device()}), count = empty({}, {accumulate, x.device()}),
         lse = empty({rows}, {accumulate, x.device()});
  backend(x).cross_entropy(data, labels, options, loss, lse, count);
  return record(kCrossEntropy, loss, {x},
                [x = save(data), labels = save(labels), lse = save(lse), count = save(count), options,
                 shape = x.shape()](Grads g, GradOut& out) {
                  // The logits are the largest tensor of a language model: their gradient takes their place when nobody
                  // else reads them.
                  Tensor gx = x.sole_owner() && out.may_consume() ? x.get() : empty_like(x.get());
                  backend(gx).cross_entropy_grad(g[0], x.get(), labels.get(), options, lse.get(), count.get(), gx);
                  out.set(0, gx.view(shape, contiguous_strides(shape), gx.offset()));
                });
}

Tensor mse_loss(const Tensor& x, const Tensor& target) {
  const OpScope scope("mse_loss");
  check_float("mse_loss", x);
  check_float("mse_loss", target);
  MT_CHECK(ShapeError, x.shape() == target.shape(), "mse_loss: x is ", x, ", target is ", target);
  // Always in f32, like cross entropy: a 16-bit gradient of a mean over many elements would underflow.
  const DType wide = widest(compute_dtype(x.dtype()), compute_dtype(target.dtype()));
  return mean(square(x.to(wide) - target.to(wide)));
}

}  // namespace mantissa
