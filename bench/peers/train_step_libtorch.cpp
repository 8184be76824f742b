// Times whole training steps with libtorch on the CPU, shaped like bench/train_step.cpp: same model, one JSON line.
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

namespace F = torch::nn::functional;

namespace {

struct Options {
  std::string model = "gpt";
  std::int64_t batch = 16, context = 128, width = 128, vocabulary = 256, layers = 4, heads = 4;
  int steps = 20, warmup = 4, threads = 0;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t h)
      : heads(h),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        proj(register_module("proj", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(torch::Tensor x, const torch::Tensor& mask) {
    const auto b = x.size(0), t = x.size(1), c = x.size(2);
    std::vector<torch::Tensor> parts = qkv(norm1(x)).split(c, 2);
    for (auto& part : parts) part = part.view({b, t, heads, c / heads}).transpose(1, 2);
    auto scores = torch::matmul(parts[0], parts[1].transpose(2, 3)) / std::sqrt(static_cast<double>(c / heads)) + mask;
    const auto y = torch::matmul(scores.softmax(-1), parts[2]).transpose(1, 2).reshape({b, t, c});
    x = x + proj(y);
    return x + down(F::gelu(up(norm2(x))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, proj, up, down;
};
TORCH_MODULE(Block);

struct GPT : torch::nn::Module {
  explicit GPT(const Options& o)
      : tokens(register_module("tokens", torch::nn::Embedding(o.vocabulary, o.width))),
        positions(register_module("positions", torch::nn::Embedding(o.context, o.width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))) {
    for (int i = 0; i < o.layers; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(o.width, o.heads)));
    mask = torch::full({o.context, o.context}, -INFINITY).triu(1);
  }
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& y) {
    auto h = tokens(x) + positions(torch::arange(x.size(1)));
    for (auto& block : blocks) h = block(h, mask);
    const auto logits = torch::matmul(norm(h), tokens->weight.t());
    return F::cross_entropy(logits.view({-1, logits.size(2)}), y.view({-1}));
  }
  torch::nn::Embedding tokens, positions;
  torch::nn::LayerNorm norm;
  std::vector<Block> blocks;
  torch::Tensor mask;
};

struct CNN : torch::nn::Module {
  CNN()
      : conv1(register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 32, 3).padding(1)))),
        conv2(register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 64, 3).padding(1)))),
        norm1(register_module("norm1", torch::nn::BatchNorm2d(32))),
        norm2(register_module("norm2", torch::nn::BatchNorm2d(64))),
        hidden(register_module("hidden", torch::nn::Linear(64 * 49, 128))),
        head(register_module("head", torch::nn::Linear(128, 10))) {}
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& y) {
    auto h = torch::relu(torch::max_pool2d(norm1(conv1(x)), 2));
    h = torch::relu(torch::max_pool2d(norm2(conv2(h)), 2));
    return F::cross_entropy(head(torch::dropout(torch::relu(hidden(h.flatten(1))), 0.25, true)), y);
  }
  torch::nn::Conv2d conv1, conv2;
  torch::nn::BatchNorm2d norm1, norm2;
  torch::nn::Linear hidden, head;
};

template <class Model>
void run(const Options& o, Model& model, const torch::Tensor& x, const torch::Tensor& y, bool clip) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
  std::vector<double> times;
  double value = 0;
  for (int i = 0; i < o.warmup + o.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    const auto loss = model.loss(x, y);
    loss.backward();
    if (clip) torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    if (i >= o.warmup)
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    value = loss.template item<double>();
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  std::printf(
      "{\"who\": \"libtorch %s\", \"model\": \"%s\", \"precision\": \"fp32\", \"batch\": %lld, \"ms\": %.4f, \"loss\": "
      "%.5f}\n",
      TORCH_VERSION, o.model.c_str(), static_cast<long long>(o.batch), times[times.size() / 2], value);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times training steps of libtorch on random data.");
  app.add_option("--model", o.model)->check(CLI::IsMember({"gpt", "cnn"}));
  app.add_option("--batch", o.batch);
  app.add_option("--context", o.context);
  app.add_option("--width", o.width);
  app.add_option("--layers", o.layers);
  app.add_option("--heads", o.heads);
  app.add_option("--vocabulary", o.vocabulary);
  app.add_option("--steps", o.steps);
  app.add_option("--warmup", o.warmup);
  app.add_option("--threads", o.threads);
  CLI11_PARSE(app, argc, argv);
  if (o.threads > 0) torch::set_num_threads(o.threads);
  if (o.model == "gpt") {
    GPT model(o);
    run(o, model, torch::randint(o.vocabulary, {o.batch, o.context}),
        torch::randint(o.vocabulary, {o.batch, o.context}), true);
  } else {
    CNN model;
    run(o, model, torch::randn({o.batch, 1, 28, 28}), torch::randint(10, {o.batch}), false);
  }
}
