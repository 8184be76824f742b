#include "nn/models.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/graph.h"
#include "nn/init.h"

namespace mantissa::nn {

MLP::MLP(const std::vector<std::int64_t>& sizes, Device device) {
  MT_CHECK(ConfigError, sizes.size() >= 2, "MLP: need at least an input and an output size");
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i)
    layers.emplace_back(sizes[i], sizes[i + 1],
                        Linear::Options{.activation = i + 2 < sizes.size() ? Activation::relu : Activation::none},
                        device);
}

Tensor MLP::operator()(const Tensor& x) const {
  Tensor h = x.rank() > 2 ? x.reshape({x.size(0), -1}) : x;
  for (const Linear& layer : layers) h = layer(h);
  return h;
}

SmallCNN::SmallCNN(Options o, Device device)
    : conv1(o.channels, o.width, 3, {.padding = 1}, device),
      conv2(o.width, 2 * o.width, 3, {.padding = 1}, device),
      norm1(o.width, 0.1, 1e-5, device),
      norm2(2 * o.width, 0.1, 1e-5, device),
      drop(o.dropout),
      hidden(2 * o.width * 7 * 7, o.hidden, {.activation = Activation::relu}, device),
      head(o.hidden, o.classes, device) {}

void SmallCNN::visit(Visitor& v) {
  v("conv1", conv1);
  v("norm1", norm1);
  v("conv2", conv2);
  v("norm2", norm2);
  v("drop", drop);
  v("hidden", hidden);
  v("head", head);
}

Tensor SmallCNN::operator()(const Tensor& x) const {
  // Pooling first halves what batch norm's neighbour reads; relu and max commute.
  Tensor h = relu(pool(norm1(conv1(x))));
  h = relu(pool(norm2(conv2(h))));
  return head(drop(hidden(h.reshape({h.size(0), -1}))));
}

GPT::Block::Block(const GPTOptions& o, Device device)
    : norm1(o.width, 1e-5, device),
      norm2(o.width, 1e-5, device),
      attention(o.width, o.heads, device),
      up(o.width, 4 * o.width, {.activation = Activation::gelu_tanh}, device),
      down(4 * o.width, o.width, device) {}

void GPT::Block::visit(Visitor& v) {
  v("norm1", norm1);
  v("attention", attention);
  v("norm2", norm2);
  v("up", up);
  v("down", down);
}

GPT::GPT(const GPTOptions& o, Device device)
    : options(o),
      tokens(o.vocabulary, o.width, device),
      positions(o.context, o.width, device),
      norm(o.width, 1e-5, device) {
  MT_CHECK(ConfigError, o.layers > 0, "GPT: need at least one layer, got ", o.layers);
  blocks.reserve(static_cast<std::size_t>(o.layers));
  for (int i = 0; i < o.layers; ++i) blocks.emplace_back(o, device);
  // GPT-2's initialisation: deviation 0.02, and 0.02 / sqrt(2 layers) for what writes to the residual stream.
  const NoGrad no_grad;
  for (auto& [name, p] : named_parameters()) {
    if (name.ends_with("bias")) {
      p.fill_(0);
    } else if (name.find("norm") == std::string::npos) {
      const bool residual = name.ends_with("proj.weight") || name.ends_with("down.weight");
      p.copy_(mantissa::normal(p.shape(), 0, residual ? 0.02 / std::sqrt(2.0 * o.layers) : 0.02));
    }
  }
}

void GPT::visit(Visitor& v) {
  v("tokens", tokens);
  v("positions", positions);
  v("blocks", blocks);
  v("norm", norm);
}

Tensor GPT::operator()(const Tensor& ids) const {
  MT_CHECK(ShapeError, ids.rank() == 2 && ids.size(1) <= options.context,
           "GPT: expected tokens [batch, length <= ", options.context, "], got ", ids);
  const auto drop = [this](const Tensor& x) { return dropout(x, options.dropout, training()); };
  // Made once: an upload in every step would wait for the device.
  if (!places_.defined() || places_.device() != ids.device())
    places_ = arange(options.context, {DType::i64, ids.device()});
  Tensor residual = drop(tokens(ids) + positions(places_.slice(0, 0, ids.size(1))));
  Tensor x = blocks[0].norm1(residual);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    const LayerNorm& next = i + 1 < blocks.size() ? blocks[i + 1].norm1 : norm;
    // Each addition to the residual stream is fused with the norm that reads it next.
    // The lambdas outlive this call when they are checkpointed: they hold copies.
    const auto mix = [drop, &block](const Tensor& in) { return drop(block.attention(in)); };
    const auto feed_forward = [drop, &block](const Tensor& in) { return drop(block.down(block.up(in))); };
    const Tensor mixed =
        options.checkpoint_blocks ? checkpoint([mix](std::span<const Tensor> in) { return mix(in[0]); }, {x}) : mix(x);
    Normed sum = block.norm2(mixed, residual);
    const Tensor fed =
        options.checkpoint_blocks
            ? checkpoint([feed_forward](std::span<const Tensor> in) { return feed_forward(in[0]); }, {sum.y})
            : feed_forward(sum.y);
    sum = next(fed, sum.sum);
    x = sum.y;
    residual = sum.sum;
  }
  return linear(x, tokens.weight);
}

Tensor GPT::loss(const Tensor& ids, const Tensor& targets) const { return cross_entropy((*this)(ids), targets); }

double GPT::flops_per_token() {
  const double parameters = static_cast<double>(num_parameters() - positions.weight.numel());
  return 6 * parameters + 12.0 * options.layers * static_cast<double>(options.width * options.context);
}

std::vector<std::int64_t> GPT::generate(std::vector<std::int64_t> prompt, int count, double temperature, int top_k) {
  MT_CHECK(ConfigError, !prompt.empty(), "generate: the prompt is empty");
  MT_CHECK(ConfigError, temperature >= 0 && top_k >= 0, "generate: temperature and top_k must not be negative");
  const NoGrad no_grad;
  struct EvalMode {  // put back when sampling throws, too
    GPT& model;
    bool was_training = model.training();
    ~EvalMode() { model.train(was_training); }
  } const mode{*this};
  eval();
  const Device device = tokens.weight.device();
  for (int i = 0; i < count; ++i) {
    const auto length = std::min<std::size_t>(prompt.size(), static_cast<std::size_t>(options.context));
    const std::vector<std::int64_t> window(prompt.end() - static_cast<std::ptrdiff_t>(length), prompt.end());
    const auto size = static_cast<std::int64_t>(length);
    const Tensor logits = (*this)(from_vector(window, {1, size}, {DType::i64, device})).select(1, size - 1);
    std::vector<double> scores = logits.to_vector<double>();
    if (temperature == 0) {
      prompt.push_back(std::ranges::max_element(scores) - scores.begin());
      continue;
    }
    std::vector<std::size_t> order(scores.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto kept = static_cast<std::ptrdiff_t>(
        top_k > 0 ? std::min<std::size_t>(static_cast<std::size_t>(top_k), order.size()) : order.size());
    std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                      [&](auto a, auto b) { return scores[a] > scores[b]; });
    double total = 0;
    std::vector<double> cumulative;
    for (std::ptrdiff_t k = 0; k < kept; ++k) {
      total += std::exp((scores[order[static_cast<std::size_t>(k)]] - scores[order[0]]) / temperature);
      cumulative.push_back(total);
    }
    const PhiloxState state = reserve_random(1);
    const double u = total * static_cast<double>(uniform_from_bits(philox(state.seed, state.offset).lane[0]));
    const auto pick = std::ranges::upper_bound(cumulative, u) - cumulative.begin();
    prompt.push_back(
        static_cast<std::int64_t>(order[static_cast<std::size_t>(std::min<std::ptrdiff_t>(pick, kept - 1))]));
  }
  return prompt;
}

}  // namespace mantissa::nn
