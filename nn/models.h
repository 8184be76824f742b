#pragma once
// The model zoo: MLP, a small CNN, GPT.

#include "nn/layers.h"

namespace mantissa::nn {

/// Fully connected layers with relu in between: sizes {in, hidden..., out}.
struct MLP : Module {
  explicit MLP(const std::vector<std::int64_t>& sizes, Device device = {});
  void visit(Visitor& v) override { v("layers", layers); }
  Tensor operator()(const Tensor& x) const;  // [N, in] or [N, ...] with in elements a row -> [N, out]

  std::vector<Linear> layers;
};

/// Two convolutions with batch norm, relu and pooling, then two fully connected layers: 28 x 28 images, 10 classes.
struct SmallCNN : Module {
  struct Options {
    std::int64_t channels = 1, width = 32, hidden = 128, classes = 10;
    double dropout = 0.25;
  };
  explicit SmallCNN(Options options, Device device = {});
  explicit SmallCNN(Device device = {}) : SmallCNN(Options{}, device) {}
  void visit(Visitor& v) override;
  Tensor operator()(const Tensor& x) const;  // [N, channels, 28, 28] -> [N, classes]

  Conv2d conv1, conv2;
  BatchNorm2d norm1, norm2;
  MaxPool2d pool{2};
  Dropout drop;
  Linear hidden, head;
};

struct GPTOptions {
  std::int64_t vocabulary = 50304, context = 1024, width = 768;
  int layers = 12, heads = 12;
  double dropout = 0;
  bool checkpoint_blocks = false;  // recompute each block in backward
};

/// A GPT-2 style decoder (Radford et al. 2019): learned positions, pre-norm blocks, tied head, GELU in its tanh form.
struct GPT : Module {
  struct Block : Module {
    Block(const GPTOptions& o, Device device);
    void visit(Visitor& v) override;
    LayerNorm norm1, norm2;
    SelfAttention attention;
    Linear up, down;
  };

  explicit GPT(const GPTOptions& options = {}, Device device = {});
  void visit(Visitor& v) override;
  /// tokens[B,T] i32/i64 -> logits [B,T,vocabulary].
  Tensor operator()(const Tensor& tokens) const;
  /// Mean cross entropy of the next token; targets[B,T].
  Tensor loss(const Tensor& tokens, const Tensor& targets) const;
  /// Appends `count` sampled tokens to `prompt`; temperature 0 takes the most likely, top_k 0 considers all.
  std::vector<std::int64_t> generate(std::vector<std::int64_t> prompt, int count, double temperature = 1,
                                     int top_k = 0);
  /// Floating-point operations of one forward and backward pass over one token (6 N plus attention).
  double flops_per_token();

  GPTOptions options;
  Embedding tokens, positions;
  std::vector<Block> blocks;
  LayerNorm norm;

 private:
  mutable Tensor places_;  // 0, 1, ..., context - 1
};

}  // namespace mantissa::nn
