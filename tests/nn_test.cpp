// Modules: names, modes, devices, initial values, seeds; the models' shapes, checkpointing and generation.

#include <algorithm>
#include <map>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
MT_ONE_THREAD;

class Nn : public OnDevice {};
MT_ON_DEVICES(Nn);

std::map<std::string, std::string> shapes_of(const nn::NamedTensors& tensors) {
  std::map<std::string, std::string> all;
  for (const auto& [name, x] : tensors) all[name] = to_string(x.shape());
  return all;
}
std::vector<Bytes> bytes_of(nn::Module& module) {
  std::vector<Bytes> all;
  for (const Tensor& p : module.parameters()) all.push_back(bytes(p));
  for (const auto& [name, b] : module.named_buffers()) all.push_back(bytes(b));
  return all;
}

nn::GPTOptions tiny(bool checkpoint = false, double dropout = 0) {
  return {.vocabulary = 13,
          .context = 8,
          .width = 12,
          .layers = 2,
          .heads = 3,
          .dropout = dropout,
          .checkpoint_blocks = checkpoint};
}

// ---- modules
// --------------------------------------------------------------------------------------------------------------

/// A module of every kind of part, as a user would write it.
struct Composite : nn::Module {
  explicit Composite(Device device)
      : first(4, 3, device), table(5, 4, device), norm(3, 1e-5, device), batch(2, 0.1, 1e-5, device) {
    for (int i = 0; i < 2; ++i) tail.emplace_back(3, 3, nn::Linear::Options{.bias = false}, device);
    maybe = std::make_unique<nn::RMSNorm>(3, 1e-6, device);
    temperature = nn::parameter(mantissa::ones({}), device);
  }
  void visit(Visitor& v) override {
    v("first", first);
    v("table", table);
    v("norm", norm);
    v("batch", batch);
    v("drop", drop);
    v("tail", tail);
    v("maybe", maybe);
    v("absent", absent);
    v("temperature", temperature);
  }
  nn::Linear first;
  nn::Embedding table;
  nn::LayerNorm norm;
  nn::BatchNorm2d batch;
  nn::Dropout drop{0.5};
  std::vector<nn::Linear> tail;
  std::unique_ptr<nn::RMSNorm> maybe, absent;
  Tensor temperature;
};

TEST_P(Nn, EveryParameterHasItsName) {
  Composite m(device());
  EXPECT_EQ(shapes_of(m.named_parameters()), (std::map<std::string, std::string>{{"first.weight", "[3,4]"},
                                                                                 {"first.bias", "[3]"},
                                                                                 {"table.weight", "[5,4]"},
                                                                                 {"norm.weight", "[3]"},
                                                                                 {"norm.bias", "[3]"},
                                                                                 {"batch.weight", "[2]"},
                                                                                 {"batch.bias", "[2]"},
                                                                                 {"tail.0.weight", "[3,3]"},
                                                                                 {"tail.1.weight", "[3,3]"},
                                                                                 {"maybe.weight", "[3]"},
                                                                                 {"temperature", "[]"}}));
  EXPECT_EQ(shapes_of(m.named_buffers()),
            (std::map<std::string, std::string>{{"batch.running_mean", "[2]"}, {"batch.running_var", "[2]"}}));
  EXPECT_EQ(m.num_parameters(), 12 + 3 + 20 + 3 + 3 + 2 + 2 + 9 + 9 + 3 + 1);
  EXPECT_EQ(m.named_parameters()[0].first, "first.weight") << "in the order of visit()";
  for (const Tensor& p : m.parameters()) {
    EXPECT_TRUE(p.requires_grad() && p.is_leaf());
    EXPECT_EQ(p.dtype(), DType::f32);
    EXPECT_EQ(p.device(), device());
  }
  for (const auto& [name, b] : m.named_buffers()) EXPECT_FALSE(b.requires_grad()) << name;
}

TEST_P(Nn, TrainAndEvalReachEveryChild) {
  Composite m(device());
  const auto all = [&](bool on) {
    return m.training() == on && m.first.training() == on && m.drop.training() == on && m.batch.training() == on &&
           m.tail[1].training() == on && m.maybe->training() == on;
  };
  EXPECT_TRUE(all(true)) << "modules start in training mode";
  m.eval();
  EXPECT_TRUE(all(false));
  const Tensor x = ones({100}, on());
  EXPECT_EQ(m.drop(x).to_vector(), std::vector<float>(100, 1)) << "dropout is off";
  m.train();
  EXPECT_TRUE(all(true));
  EXPECT_NE(m.drop(x).to_vector(), std::vector<float>(100, 1));
}

TEST_P(Nn, BatchNormUsesItsStatisticsInEvalOnly) {
  nn::BatchNorm2d norm(2, 0.1, 1e-5, device());
  manual_seed(1);
  const Tensor x = normal({8, 2, 5, 5}, 3, 2, on());
  norm(x);
  const auto mean = norm.running_mean.to_vector(), var = norm.running_var.to_vector();
  EXPECT_NEAR(mean[0], 0.3, 0.1);
  EXPECT_NEAR(var[0], 0.9 + 0.1 * 4, 0.1);
  norm.eval();
  const Tensor y = norm(x);
  EXPECT_EQ(norm.running_mean.to_vector(), mean) << "eval changes nothing";
  const std::vector<double> in = x.contiguous().to_vector<double>(), out = y.contiguous().to_vector<double>();
  EXPECT_NEAR(out[0], (in[0] - mean[0]) / std::sqrt(var[0] + 1e-5), 1e-5);
}

TEST_P(Nn, ToMovesEverythingAndKeepsValues) {
  Composite m(cpu);
  m.table.weight.set_requires_grad(false);
  const auto before = bytes_of(m);
  m.to(device());
  EXPECT_EQ(bytes_of(m), before);
  for (const auto& [name, p] : m.named_parameters()) {
    EXPECT_EQ(p.device(), device()) << name;
    EXPECT_TRUE(p.is_leaf());
    EXPECT_EQ(p.requires_grad(), name != "table.weight") << name;
  }
  for (const auto& [name, b] : m.named_buffers()) EXPECT_EQ(b.device(), device()) << name;
  EXPECT_EQ(m.first(ones({2, 4}, on())).device(), device());
  nn::Conv2d conv(3, 4, 3, cpu);
  conv.to(device());
  EXPECT_EQ(conv.weight.strides(), channels_last_strides(conv.weight.shape())) << "the layout goes along";
}

TEST_P(Nn, ASeedGivesTheSameModelOnEveryDevice) {
  const auto make = [](std::uint64_t s, Device d) {
    manual_seed(s);
    nn::SmallCNN cnn({.width = 4, .hidden = 8}, d);
    nn::GPT gpt(tiny(), d);
    auto all = bytes_of(cnn);
    for (auto& b : bytes_of(gpt)) all.push_back(b);
    return all;
  };
  const auto here = make(11, device());
  EXPECT_EQ(here, make(11, device()));
  EXPECT_EQ(here, make(11, cpu));
  EXPECT_NE(here, make(12, device()));
}

TEST_P(Nn, LinearFusesItsActivation) {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
    manual_seed(2);
    nn::Linear layer(7, 5, {.activation = activation}, device());
    const Tensor x = randn({3, 7}, on()), plain = linear(x, layer.weight, layer.bias);
    const Tensor expected = activation == Activation::relu        ? relu(plain)
                            : activation == Activation::gelu_tanh ? gelu_tanh(plain)
                                                                  : plain;
    const auto a = layer(x).to_vector(), b = expected.to_vector();
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6);
  }
}

// ---- initialisers
// ---------------------------------------------------------------------------------------------------------

struct Moments {
  double mean = 0, deviation = 0, low = INFINITY, high = -INFINITY;
  explicit Moments(const Tensor& x) {
    const auto values = x.to_vector<double>();
    const auto n = static_cast<double>(values.size());
    for (const double v : values) {
      mean += v / n;
      low = std::min(low, v);
      high = std::max(high, v);
    }
    for (const double v : values) deviation += (v - mean) * (v - mean) / n;
    deviation = std::sqrt(deviation);
  }
};

TEST(Init, MomentsAreThoseOfTheirPapers) {
  manual_seed(seed());
  const Shape matrix{300, 200}, kernel{64, 32, 5, 3};  // fan in 200 and 32 * 15, fan out 300 and 64 * 15
  struct Case {
    const char* name;
    Tensor x;
    double deviation;
    bool uniform;
  };
  const std::vector<Case> cases{
      {"kaiming_normal", nn::init::kaiming_normal(matrix), std::sqrt(2.0 / 200), false},
      {"kaiming_normal, gain 1", nn::init::kaiming_normal(matrix, 1), std::sqrt(1.0 / 200), false},
      {"kaiming_normal, kernel", nn::init::kaiming_normal(kernel), std::sqrt(2.0 / 480), false},
      {"kaiming_uniform", nn::init::kaiming_uniform(matrix), std::sqrt(2.0 / 200), true},
      {"xavier_normal", nn::init::xavier_normal(matrix), std::sqrt(2.0 / 500), false},
      {"xavier_normal, kernel", nn::init::xavier_normal(kernel, 2), 2 * std::sqrt(2.0 / (480 + 960)), false},
      {"xavier_uniform", nn::init::xavier_uniform(matrix), std::sqrt(2.0 / 500), true},
      {"fan_in_uniform", nn::init::fan_in_uniform({30000}, matrix), std::sqrt(1.0 / 600), true}};
  for (const Case& c : cases) {
    const Moments m(c.x);
    const double n = static_cast<double>(c.x.numel());
    EXPECT_LT(std::abs(m.mean), 5 * c.deviation / std::sqrt(n)) << c.name;
    EXPECT_NEAR(m.deviation / c.deviation, 1, 5 / std::sqrt(2 * n)) << c.name;
    const double bound = std::sqrt(3.0) * c.deviation;
    if (c.uniform) {
      EXPECT_GE(m.low, -bound * (1 + 1e-6)) << c.name;
      EXPECT_LE(m.high, bound * (1 + 1e-6)) << c.name;
      EXPECT_GT(m.high, 0.99 * bound) << c.name;
    } else {
      EXPECT_GT(m.high, 3 * c.deviation) << c.name << ": a normal has tails";
    }
  }
}

TEST(Init, LayersStartAsPyTorchsDo) {
  manual_seed(seed());
  const nn::Linear linear(400, 300);
  EXPECT_NEAR(Moments(linear.weight).deviation, 0.05 / std::sqrt(3.0), 5e-4);
  EXPECT_LE(Moments(linear.weight).high, 0.05 * (1 + 1e-6));
  EXPECT_LE(Moments(linear.bias).high, 0.05 * (1 + 1e-6)) << "the bias has the weight's fan";
  const nn::Conv2d conv(16, 32, 5);
  EXPECT_LE(Moments(conv.weight).high, 0.05 * (1 + 1e-6));
  EXPECT_GT(Moments(conv.weight).high, 0.0495);
  EXPECT_NEAR(Moments(nn::Embedding(500, 100).weight).deviation, 1, 0.02);
  EXPECT_EQ(Moments(nn::LayerNorm(10).weight).low, 1);
  EXPECT_EQ(Moments(nn::LayerNorm(10).bias).high, 0);
  const nn::BatchNorm2d norm(3);
  EXPECT_EQ(norm.running_mean.to_vector(), std::vector<float>(3, 0));
  EXPECT_EQ(norm.running_var.to_vector(), std::vector<float>(3, 1));
}

TEST(Init, GptStartsAsGpt2Does) {
  manual_seed(seed());
  nn::GPT gpt({.vocabulary = 500, .context = 64, .width = 128, .layers = 3, .heads = 4});
  for (const auto& [name, p] : gpt.named_parameters()) {
    const Moments m(p);
    if (name.ends_with("bias")) {
      EXPECT_EQ(m.low, 0) << name;
      EXPECT_EQ(m.high, 0) << name;
    } else if (name.find("norm") != std::string::npos) {
      EXPECT_EQ(m.low, 1) << name;
    } else {
      const bool residual = name.ends_with("proj.weight") || name.ends_with("down.weight");
      const double expected = residual ? 0.02 / std::sqrt(6.0) : 0.02;
      EXPECT_NEAR(m.deviation / expected, 1, 0.05) << name;
    }
  }
}

// ---- models
// ---------------------------------------------------------------------------------------------------------------

TEST_P(Nn, MlpShapes) {
  nn::MLP mlp({12, 7, 5, 3}, device());
  EXPECT_EQ(shapes_of(mlp.named_parameters()), (std::map<std::string, std::string>{{"layers.0.weight", "[7,12]"},
                                                                                   {"layers.0.bias", "[7]"},
                                                                                   {"layers.1.weight", "[5,7]"},
                                                                                   {"layers.1.bias", "[5]"},
                                                                                   {"layers.2.weight", "[3,5]"},
                                                                                   {"layers.2.bias", "[3]"}}));
  EXPECT_EQ(mlp(ones({4, 12}, on())).shape(), (Shape{4, 3}));
  EXPECT_EQ(mlp(ones({4, 1, 3, 4}, on())).shape(), (Shape{4, 3})) << "images are flattened";
  EXPECT_EQ(mlp(ones({0, 12}, on())).shape(), (Shape{0, 3})) << "an empty batch";
  EXPECT_EQ(mlp.layers[1].activation, Activation::relu);
  EXPECT_EQ(mlp.layers[2].activation, Activation::none);
}

TEST_P(Nn, SmallCnnShapes) {
  nn::SmallCNN cnn({.channels = 2, .width = 4, .hidden = 6, .classes = 5}, device());
  EXPECT_EQ(shapes_of(cnn.named_parameters()), (std::map<std::string, std::string>{{"conv1.weight", "[4,2,3,3]"},
                                                                                   {"conv1.bias", "[4]"},
                                                                                   {"norm1.weight", "[4]"},
                                                                                   {"norm1.bias", "[4]"},
                                                                                   {"conv2.weight", "[8,4,3,3]"},
                                                                                   {"conv2.bias", "[8]"},
                                                                                   {"norm2.weight", "[8]"},
                                                                                   {"norm2.bias", "[8]"},
                                                                                   {"hidden.weight", "[6,392]"},
                                                                                   {"hidden.bias", "[6]"},
                                                                                   {"head.weight", "[5,6]"},
                                                                                   {"head.bias", "[5]"}}));
  EXPECT_EQ(cnn.named_buffers().size(), 4u);
  EXPECT_EQ(cnn(ones({3, 2, 28, 28}, on())).shape(), (Shape{3, 5}));
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Autocast scope(dtype);
    const Tensor y = cnn(rand({3, 2, 28, 28}, on()));
    EXPECT_EQ(y.dtype(), dtype);
    for (const float value : y.to_vector()) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(Nn, GptShapes) {
  nn::GPT gpt(tiny(), device());
  const auto shapes = shapes_of(gpt.named_parameters());
  EXPECT_EQ(shapes.size(), 2u + 2 * 12 + 2);
  for (const auto& [name, shape] : std::map<std::string, std::string>{{"tokens.weight", "[13,12]"},
                                                                      {"positions.weight", "[8,12]"},
                                                                      {"norm.weight", "[12]"},
                                                                      {"blocks.0.norm1.weight", "[12]"},
                                                                      {"blocks.0.attention.qkv.weight", "[36,12]"},
                                                                      {"blocks.1.attention.proj.bias", "[12]"},
                                                                      {"blocks.1.up.weight", "[48,12]"},
                                                                      {"blocks.1.down.weight", "[12,48]"}})
    EXPECT_EQ(shapes.at(name), shape) << name;
  const Tensor tokens = from_vector(std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}, {2, 3}, on(DType::i64));
  EXPECT_EQ(gpt(tokens).shape(), (Shape{2, 3, 13}));
  EXPECT_EQ(gpt(from_vector(std::vector<std::int32_t>{1, 2}, {1, 2}, on(DType::i32))).shape(), (Shape{1, 2, 13}));
  EXPECT_NEAR(gpt.loss(tokens, tokens).item(), std::log(13.0), 0.3) << "an untrained model knows nothing";
  EXPECT_EQ(gpt.flops_per_token(), 6.0 * static_cast<double>(gpt.num_parameters() - 8 * 12) + 12.0 * 2 * 12 * 8);
}

TEST_P(Nn, Gpt2HasItsPublishedSize) {
  const std::int64_t width = 768, layers = 12, vocabulary = 50257, context = 1024;
  nn::GPT one({.vocabulary = 17, .context = 5, .width = 768, .layers = 1, .heads = 12}, device());
  const std::int64_t block = one.num_parameters() - (17 + 5) * width - 2 * width;
  EXPECT_EQ((vocabulary + context) * width + layers * block + 2 * width, 124439808) << "the head is tied";
}

TEST_P(Nn, GptIsCausal) {
  manual_seed(4);
  nn::GPT gpt(tiny(), device());
  const std::vector<std::int64_t> base{1, 2, 3, 4, 5, 6, 7, 8};
  const auto logits = [&](std::vector<std::int64_t> ids) {
    return gpt(from_vector(ids, {1, 8}, on(DType::i64))).to_vector();
  };
  const auto original = logits(base);
  for (int position : {3, 7}) {
    auto changed = base;
    changed[static_cast<std::size_t>(position)] = 0;
    const auto got = logits(changed);
    for (int i = 0; i < position * 13; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_NEAR(got[at], original[at], 1e-6) << "the past does not see the future";
    }
    EXPECT_NE(got[static_cast<std::size_t>(position * 13)], original[static_cast<std::size_t>(position * 13)]);
  }
}

TEST_P(Nn, CheckpointedBlocksGiveIdenticalGradients) {
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    for (const double dropout : {0.0, 0.2}) {
      const auto run = [&](bool checkpoint) {
        manual_seed(9);
        nn::GPT gpt(tiny(checkpoint, dropout), device());
        const Tensor tokens =
            from_vector(std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {2, 5}, on(DType::i64));
        optim::LossScaler scaler(optim::StaticScale{.scale = 64});
        std::map<std::string, Bytes> all;
        {
          const Autocast scope(precision);
          const Tensor loss = gpt.loss(tokens, tokens);
          all["loss"] = bytes(loss);
          scaler.backward(loss);
        }
        for (const auto& [name, p] : gpt.named_parameters()) all[name] = bytes(p.grad());
        return std::pair(all, random_state().offset);
      };
      const auto with = run(true), without = run(false);
      for (const auto& [name, b] : without.first)
        EXPECT_EQ(with.first.at(name), b) << name << ", " << precision << ", dropout " << dropout;
      EXPECT_EQ(with.second, without.second) << "and the random stream stands where it would have";
    }
  }
}

TEST_P(Nn, CheckpointingSavesMemory) {
  const auto peak = [&](bool checkpoint) {
    manual_seed(9);
    nn::GPT gpt(
        {.vocabulary = 16, .context = 64, .width = 64, .layers = 6, .heads = 4, .checkpoint_blocks = checkpoint},
        device());
    const Tensor tokens = zeros({4, 64}, on(DType::i64));
    gpt.loss(tokens, tokens).backward();  // gradients exist from here on
    for (const Tensor& p : gpt.parameters()) p.zero_grad();
    reset_peak_memory(device());
    const std::int64_t before = memory_stats(device()).total;
    gpt.loss(tokens, tokens).backward();
    return memory_stats(device()).peak - before;
  };
  const std::int64_t without = peak(false), with = peak(true);
  std::printf("activations of a 6-layer GPT: %.1f MiB, checkpointed %.1f MiB\n",
              static_cast<double>(without) / (1 << 20), static_cast<double>(with) / (1 << 20));
  EXPECT_LT(with, 0.6 * static_cast<double>(without));
}

TEST_P(Nn, GenerateIsDeterministic) {
  manual_seed(6);
  nn::GPT gpt(tiny(false, 0.5), device());
  const std::vector<std::int64_t> prompt{1, 2, 3};
  const auto sample = [&](std::uint64_t s, double temperature, int top_k) {
    manual_seed(s);
    return gpt.generate(prompt, 20, temperature, top_k);
  };
  const auto greedy = sample(1, 0, 0);
  EXPECT_EQ(greedy.size(), 23u) << "beyond the context too";
  EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), greedy.begin()));
  EXPECT_EQ(greedy, sample(2, 0, 0)) << "greedy draws nothing, and dropout is off";
  EXPECT_EQ(greedy, sample(3, 1, 1)) << "the best of one";
  EXPECT_EQ(sample(4, 1, 5), sample(4, 1, 5));
  EXPECT_NE(sample(4, 1, 0), sample(5, 1, 0));
  EXPECT_EQ(sample(4, 1, 0), sample(4, 1, 1000)) << "top_k beyond the vocabulary is all of it";
  for (const std::int64_t token : sample(7, 5, 0)) EXPECT_TRUE(token >= 0 && token < 13);
  EXPECT_TRUE(gpt.training()) << "the mode is put back";
  EXPECT_EQ(gpt.generate(prompt, 0), prompt);
  for (const Tensor& p : gpt.parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST_P(Nn, GenerateLeavesTheModeAloneWhenItFails) {
  nn::GPT gpt(tiny(), device());
  backend(device()).allocator().fail_after(5);
  EXPECT_THROW(gpt.generate({1}, 3), OutOfMemoryError);
  EXPECT_TRUE(gpt.training());
  EXPECT_TRUE(grad_enabled());
}

TEST_P(Nn, GenerateTakesTheMostLikelyToken) {
  manual_seed(6);
  nn::GPT gpt(tiny(), device());
  gpt.eval();
  std::vector<std::int64_t> tokens{1};
  for (int i = 0; i < 4; ++i) {
    const auto length = static_cast<std::int64_t>(tokens.size());
    const auto scores = gpt(from_vector(tokens, {1, length}, on(DType::i64))).select(1, length - 1).to_vector();
    tokens.push_back(std::ranges::max_element(scores) - scores.begin());
  }
  EXPECT_EQ(gpt.generate({1}, 4, 0), tokens);
}

TEST_P(Nn, AForwardWithoutGradientsDoesNotSpoilTheNextOne) {  // pytorch#48049: a cast cached under no-grad
                                                              // has no graph
  nn::MLP mlp({4, 3, 2}, device());
  const Tensor x = ones({2, 4}, on());
  const Autocast scope(DType::f16);
  {
    const NoGrad off;
    EXPECT_FALSE(mlp(x).requires_grad());
  }
  sum(mlp(x)).backward();
  for (const auto& [name, p] : mlp.named_parameters()) EXPECT_TRUE(p.grad().defined()) << name;
}

}  // namespace
}  // namespace mantissa
