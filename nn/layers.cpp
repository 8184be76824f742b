#include "nn/layers.h"

#include "nn/init.h"

namespace mantissa::nn {
namespace {

void check_sizes(const char* layer, std::initializer_list<std::int64_t> sizes) {
  for (const std::int64_t n : sizes) MT_CHECK(ConfigError, n > 0, layer, ": sizes must be positive, got ", n);
}
Shape one_axis(const char* layer, std::int64_t size) {
  check_sizes(layer, {size});
  return {size};
}

Pool2dOptions pool_options(const char* layer, std::int64_t kernel, std::int64_t stride, std::int64_t padding) {
  check_sizes(layer, {kernel});
  Pool2dOptions o;
  for (int i = 0; i < 2; ++i) {
    o.kernel[i] = kernel;
    o.stride[i] = stride > 0 ? stride : kernel;
    o.padding[i] = padding;
  }
  return o;
}

Tensor channels_last(const Tensor& w) {
  Tensor y = empty(w.shape()).view(w.shape(), channels_last_strides(w.shape()), 0);
  y.copy_(w);
  return y;
}

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, Options options, Device device) : activation(options.activation) {
  check_sizes("Linear", {in, out});
  weight = parameter(init::fan_in_uniform({out, in}, {out, in}), device);
  if (options.bias) bias = parameter(init::fan_in_uniform({out}, {out, in}), device);
}
void Linear::visit(Visitor& v) {
  v("weight", weight);
  if (bias.defined()) v("bias", bias);
}

Embedding::Embedding(std::int64_t rows, std::int64_t size, Device device) {
  check_sizes("Embedding", {rows, size});
  weight = parameter(randn({rows, size}), device);
}
void Embedding::visit(Visitor& v) { v("weight", weight); }

LayerNorm::LayerNorm(std::int64_t size, double epsilon, Device device)
    : weight(parameter(mantissa::ones(one_axis("LayerNorm", size)), device)),
      bias(parameter(mantissa::zeros({size}), device)),
      eps(epsilon) {}
void LayerNorm::visit(Visitor& v) {
  v("weight", weight);
  v("bias", bias);
}

RMSNorm::RMSNorm(std::int64_t size, double epsilon, Device device)
    : weight(parameter(mantissa::ones(one_axis("RMSNorm", size)), device)), eps(epsilon) {}
void RMSNorm::visit(Visitor& v) { v("weight", weight); }

Conv2d::Conv2d(std::int64_t in, std::int64_t out, std::int64_t kernel, Options o, Device device) {
  check_sizes("Conv2d", {in, out, kernel, o.stride, o.dilation, o.groups});
  MT_CHECK(ConfigError, in % o.groups == 0 && out % o.groups == 0, "Conv2d: ", o.groups, " groups do not divide ", in,
           " and ", out, " channels");
  const Shape shape{out, in / o.groups, kernel, kernel};
  weight = parameter(channels_last(init::fan_in_uniform(shape, shape)), device);
  if (o.bias) bias = parameter(init::fan_in_uniform({out}, shape), device);
  for (int i = 0; i < 2; ++i) {
    options.stride[i] = o.stride;
    options.padding[i] = o.padding;
    options.dilation[i] = o.dilation;
  }
  options.groups = o.groups;
}
void Conv2d::visit(Visitor& v) {
  v("weight", weight);
  if (bias.defined()) v("bias", bias);
}

BatchNorm2d::BatchNorm2d(std::int64_t channels, double m, double e, Device device)
    : weight(parameter(mantissa::ones(one_axis("BatchNorm2d", channels)), device)),
      bias(parameter(mantissa::zeros({channels}), device)),
      running_mean(buffer(mantissa::zeros({channels}), device)),
      running_var(buffer(mantissa::ones({channels}), device)),
      momentum(m),
      eps(e) {}
void BatchNorm2d::visit(Visitor& v) {
  v("weight", weight);
  v("bias", bias);
  v.buffer("running_mean", running_mean);
  v.buffer("running_var", running_var);
}

Dropout::Dropout(double probability) : p(probability) {
  MT_CHECK(ConfigError, p >= 0 && p <= 1, "Dropout: the probability must lie in [0, 1], got ", p);
}

MaxPool2d::MaxPool2d(std::int64_t kernel, std::int64_t stride, std::int64_t padding)
    : options(pool_options("MaxPool2d", kernel, stride, padding)) {}
AvgPool2d::AvgPool2d(std::int64_t kernel, std::int64_t stride, std::int64_t padding)
    : options(pool_options("AvgPool2d", kernel, stride, padding)) {}

SelfAttention::SelfAttention(std::int64_t width, int head_count, Device device)
    : qkv(width, 3 * width, device), proj(width, width, device), heads(head_count) {
  MT_CHECK(ConfigError, heads > 0 && width % heads == 0, "SelfAttention: ", heads, " heads do not divide width ",
           width);
}
void SelfAttention::visit(Visitor& v) {
  v("qkv", qkv);
  v("proj", proj);
}

}  // namespace mantissa::nn
