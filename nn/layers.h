#pragma once
// Layers. Each takes its sizes, then options, then the device; parameters are f32 and start as PyTorch's do.

#include "nn/module.h"

namespace mantissa::nn {

struct Linear : Module {
  struct Options {
    bool bias = true;
    Activation activation = Activation::none;  // fused into the product
  };
  Linear(std::int64_t in, std::int64_t out, Options options, Device device = {});
  Linear(std::int64_t in, std::int64_t out, Device device = {}) : Linear(in, out, Options{}, device) {}
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const { return linear(x, weight, bias, activation); }

  Tensor weight, bias;  // [out, in], [out]
  Activation activation;
};

struct Embedding : Module {
  Embedding(std::int64_t rows, std::int64_t size, Device device = {});
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& ids) const { return embedding(ids, weight); }

  Tensor weight;  // [rows, size], normal(0, 1)
};

struct LayerNorm : Module {
  explicit LayerNorm(std::int64_t size, double epsilon = 1e-5, Device device = {});
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const { return layer_norm(x, weight, bias, eps); }
  /// The norm of x + residual, and the sum itself.
  Normed operator()(const Tensor& x, const Tensor& residual) const {
    return add_layer_norm(x, residual, weight, bias, eps);
  }

  Tensor weight, bias;
  double eps;
};

struct RMSNorm : Module {
  explicit RMSNorm(std::int64_t size, double epsilon = 1e-6, Device device = {});
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const { return rms_norm(x, weight, eps); }
  Normed operator()(const Tensor& x, const Tensor& residual) const { return add_rms_norm(x, residual, weight, eps); }

  Tensor weight;
  double eps;
};

struct Conv2d : Module {
  struct Options {
    std::int64_t stride = 1, padding = 0, dilation = 1, groups = 1;
    bool bias = true;
  };
  Conv2d(std::int64_t in, std::int64_t out, std::int64_t kernel, Options options, Device device = {});
  Conv2d(std::int64_t in, std::int64_t out, std::int64_t kernel, Device device = {})
      : Conv2d(in, out, kernel, Options{}, device) {}
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const { return conv2d(x, weight, bias, options); }

  Tensor weight, bias;  // [out, in/groups, kernel, kernel] stored channels-last, [out]
  Conv2dOptions options;
};

struct BatchNorm2d : Module {
  explicit BatchNorm2d(std::int64_t channels, double momentum = 0.1, double eps = 1e-5, Device device = {});
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const {
    return batch_norm(x, weight, bias, running_mean, running_var, training(), momentum, eps);
  }

  Tensor weight, bias, running_mean, running_var;  // [channels]
  double momentum, eps;
};

struct Dropout : Module {
  explicit Dropout(double p = 0.5);
  void visit(Visitor&) override {}
  Tensor operator()(const Tensor& x) const { return dropout(x, p, training()); }

  double p;
};

struct MaxPool2d : Module {
  explicit MaxPool2d(std::int64_t kernel, std::int64_t stride = 0, std::int64_t padding = 0);
  void visit(Visitor&) override {}
  Tensor operator()(const Tensor& x) const { return max_pool2d(x, options); }

  Pool2dOptions options;
};

struct AvgPool2d : Module {
  explicit AvgPool2d(std::int64_t kernel, std::int64_t stride = 0, std::int64_t padding = 0);
  void visit(Visitor&) override {}
  Tensor operator()(const Tensor& x) const { return avg_pool2d(x, options); }

  Pool2dOptions options;
};

/// Causal self-attention of a transformer: one packed projection, fused attention, output projection.
struct SelfAttention : Module {
  SelfAttention(std::int64_t width, int heads, Device device = {});
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const { return proj(attention_qkv(qkv(x), heads, true)); }  // [B,T,width]

  Linear qkv, proj;
  int heads;
};

}  // namespace mantissa::nn
