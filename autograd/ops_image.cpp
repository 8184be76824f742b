// Convolution and pooling: logical [N,C,H,W], stored channels-last.
#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {
constexpr OpInfo kConv2d{"conv2d", Cast::low}, kMaxPool{"max_pool2d", Cast::keep}, kAvgPool{"avg_pool2d", Cast::keep};
constexpr OpInfo kTable[] = {kConv2d, kMaxPool, kAvgPool};

Tensor empty_channels_last(const Shape& shape, const Tensor& like) {
  return empty(shape, {like.dtype(), like.device()}).view(shape, channels_last_strides(shape), 0);
}

std::int64_t output_size(const char* op, const Tensor& x, std::int64_t in, std::int64_t kernel, std::int64_t stride,
                         std::int64_t padding, std::int64_t dilation) {
  MT_CHECK(ConfigError, kernel > 0 && stride > 0 && padding >= 0 && dilation > 0, op,
           ": kernel, stride and dilation must be positive and padding not negative; got ", kernel, ", ", stride, ", ",
           dilation, ", ", padding);
  const std::int64_t reach = dilation * (kernel - 1) + 1;
  MT_CHECK(ShapeError, in + 2 * padding >= reach, op, ": a window of ", reach, " does not fit ", x, " with padding ",
           padding);
  return (in + 2 * padding - reach) / stride + 1;
}

Tensor pool(const OpInfo& op, Pooling kind, const Tensor& x, const Pool2dOptions& o) {
  const OpScope scope(op.name);
  check_float(op.name, x);
  MT_CHECK(ShapeError, x.rank() == 4, op.name, ": expected [N,C,H,W], got ", x);
  MT_CHECK(ConfigError, 2 * o.padding[0] <= o.kernel[0] && 2 * o.padding[1] <= o.kernel[1], op.name,
           ": padding must be at most half of the kernel");
  const Shape shape{x.size(0), x.size(1), output_size(op.name, x, x.size(2), o.kernel[0], o.stride[0], o.padding[0], 1),
                    output_size(op.name, x, x.size(3), o.kernel[1], o.stride[1], o.padding[1], 1)};
  const Tensor data = channels_last_data(x);
  Tensor y = empty_channels_last(shape, x);
  backend(x).pool2d(kind, data, o, y);
  const bool reads = kind == Pooling::max;
  return record(op, y, {x},
                [kind, o, x = save(reads ? data : Tensor{}), y = save(reads ? y : Tensor{}), shape = x.shape()](
                    Grads g, GradOut& out) {
                  Tensor gx = empty_channels_last(shape, g[0]);
                  backend(gx).pool2d_grad(kind, channels_last_data(g[0]), x.get(), y.get(), o, gx);
                  out.set(0, gx);
                });
}
}  // namespace

std::span<const OpInfo> image_ops() { return kTable; }

Tensor channels_last_data(const Tensor& x) {
  const Strides wanted = channels_last_strides(x.shape());
  bool matches = true;
  for (int i = 0; i < 4; ++i) matches = matches && (x.shape()[i] == 1 || x.strides()[i] == wanted[i]);
  if (matches) return x.view(x.shape(), wanted, x.offset());
  Tensor y = empty_channels_last(x.shape(), x);
  backend(x).copy(x, y);
  return y;
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias, Conv2dOptions o) {
  const OpScope scope("conv2d");
  check_float("conv2d", input);
  check_float("conv2d", weight);
  check_same_device("conv2d", input, weight);
  MT_CHECK(ShapeError, input.rank() == 4 && weight.rank() == 4,
           "conv2d: expected x[N,C,H,W] and w[O,C/groups,KH,KW], got x ", input, ", w ", weight);
  MT_CHECK(ConfigError, o.groups > 0 && input.size(1) % o.groups == 0 && weight.size(0) % o.groups == 0,
           "conv2d: ", o.groups, " groups do not divide the channels of x ", input, ", w ", weight);
  MT_CHECK(ShapeError, input.size(1) == weight.size(1) * o.groups, "conv2d: channels differ: x is ", input, ", w is ",
           weight, ", groups ", o.groups);
  const Tensor x = autocast(kConv2d.cast, input), w = autocast(kConv2d.cast, weight);
  MT_CHECK(DTypeError, x.dtype() == w.dtype(), "conv2d: dtypes differ: x is ", x, ", w is ", w,
           "; use Autocast or .to(dtype)");
  const Shape shape{x.size(0), w.size(0),
                    output_size("conv2d", x, x.size(2), w.size(2), o.stride[0], o.padding[0], o.dilation[0]),
                    output_size("conv2d", x, x.size(3), w.size(3), o.stride[1], o.padding[1], o.dilation[1])};
  const Tensor xd = channels_last_data(x), wd = channels_last_data(w);
  Tensor y = empty_channels_last(shape, x);
  backend(x).conv2d(xd, wd, o, y);
  y = record(kConv2d, y, {x, w}, [x = save(xd), w = save(wd), o](Grads grads, GradOut& out) {
    const Tensor g = channels_last_data(grads[0]);
    if (out.wanted(0)) {
      Tensor gx = empty_like(x.get());
      backend(g).conv2d_grad_input(g, w.get(), o, gx);
      out.set(0, gx);
    }
    out.write(1, [&](Tensor& gw, bool accumulate) {
      if (gw.strides() == channels_last_strides(gw.shape())) {
        backend(g).conv2d_grad_weight(g, x.get(), o, accumulate, gw);
        return;
      }
      Tensor product = empty_channels_last(gw.shape(), gw);
      backend(g).conv2d_grad_weight(g, x.get(), o, false, product);
      accumulate ? backend(g).accumulate(product, gw) : backend(g).copy(product, gw);
    });
  });
  if (!bias.defined()) return y;
  MT_CHECK(ShapeError, bias.rank() == 1 && bias.size(0) == weight.size(0), "conv2d: b is ", bias, ", w is ", weight);
  return y + autocast(kConv2d.cast, bias).reshape({1, -1, 1, 1});
}

Tensor max_pool2d(const Tensor& x, Pool2dOptions options) { return pool(kMaxPool, Pooling::max, x, options); }
Tensor avg_pool2d(const Tensor& x, Pool2dOptions options) { return pool(kAvgPool, Pooling::average, x, options); }

}  // namespace mantissa
