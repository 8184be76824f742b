// Whole runs on synthetic data: the loss falls, a seed fixes every bit, mixed precision ends where f32 ends,
// and a steady step neither waits, nor allocates, nor casts a weight.

#include <algorithm>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
MT_ONE_THREAD;

/// A model with its data; forward() draws a batch that depends on the step alone.
struct Task {
  virtual ~Task() = default;
  virtual std::vector<Tensor> parameters() = 0;
  virtual Tensor loss(int step) = 0;
};

std::vector<double> noise(std::uint64_t stream, std::int64_t n) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(static_cast<double>(uniform_from_bits(philox(stream, static_cast<std::uint64_t>(i)).lane[0])) * 2 -
                     1);
  return values;
}

/// Points with the label of the largest of three fixed linear functions.
struct MlpTask : Task {
  explicit MlpTask(Device d) : device(d), model({8, 32, 3}, d) {}
  std::vector<Tensor> parameters() override { return model.parameters(); }
  Tensor loss(int step) override {
    const std::int64_t n = 64;
    const auto x = noise(1000 + static_cast<std::uint64_t>(step), n * 8), w = noise(5, 24);
    std::vector<std::int64_t> labels;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      double score[3] = {};
      for (std::size_t k = 0; k < 3; ++k)
        for (std::size_t j = 0; j < 8; ++j) score[k] += w[k * 8 + j] * x[i * 8 + j];
      labels.push_back(std::max_element(score, score + 3) - score);
    }
    return cross_entropy(model(from_vector(x, {n, 8}, {DType::f32, device})),
                         from_vector(labels, {n}, {DType::i64, device}));
  }
  Device device;
  nn::MLP model;
};

/// Images with a bright quadrant, whose number is the label.
struct CnnTask : Task {
  explicit CnnTask(Device d) : device(d), model({.width = 4, .hidden = 16, .classes = 4, .dropout = 0.1}, d) {}
  std::vector<Tensor> parameters() override { return model.parameters(); }
  Tensor loss(int step) override {
    const std::size_t n = 16;
    auto pixels = noise(2000 + static_cast<std::uint64_t>(step), static_cast<std::int64_t>(n) * 784);
    std::vector<std::int64_t> labels;
    for (std::size_t i = 0; i < n; ++i) {
      labels.push_back(static_cast<std::int64_t>((i * 7 + static_cast<std::size_t>(step) * 3) % 4));
      for (std::size_t y = 0; y < 14; ++y)
        for (std::size_t x = 0; x < 14; ++x)
          pixels[i * 784 + (y + 14 * static_cast<std::size_t>(labels[i] / 2)) * 28 + x +
                 14 * static_cast<std::size_t>(labels[i] % 2)] += 1;
    }
    return cross_entropy(model(from_vector(pixels, {static_cast<std::int64_t>(n), 1, 28, 28}, {DType::f32, device})),
                         from_vector(labels, {static_cast<std::int64_t>(n)}, {DType::i64, device}));
  }
  Device device;
  nn::SmallCNN model;
};

/// Sequences in which each token follows from the one before it.
struct GptTask : Task {
  explicit GptTask(Device d)
      : device(d), model({.vocabulary = 16, .context = 16, .width = 32, .layers = 2, .heads = 4}, d) {}
  std::vector<Tensor> parameters() override { return model.parameters(); }
  Tensor loss(int step) override {
    std::vector<std::int64_t> in, out;
    for (std::int64_t row = 0; row < 8; ++row) {
      std::int64_t token = (row * 5 + step * 3) % 16;
      for (int t = 0; t < 16; ++t) {
        in.push_back(token);
        token = (token * 5 + 3) % 16;
        out.push_back(token);
      }
    }
    return model.loss(from_vector(in, {8, 16}, {DType::i64, device}), from_vector(out, {8, 16}, {DType::i64, device}));
  }
  Device device;
  nn::GPT model;
};

struct History {
  std::vector<double> losses;
  std::vector<Bytes> parameters;
  std::int64_t applied = 0;
  double scale = 0;
  double last(std::size_t n) const {
    double sum = 0;
    for (std::size_t i = losses.size() - n; i < losses.size(); ++i) sum += losses[i] / static_cast<double>(n);
    return sum;
  }
};

template <class T> History train(Device device, DType precision, int steps, double lr, std::uint64_t s = 21) {
  manual_seed(s);
  T task(device);
  optim::AdamW adam(task.parameters(), {.lr = lr});
  adam.set_schedule(optim::cosine_decay(lr, steps + 5, 5, lr / 10));
  optim::LossScaler scaler(optim::DynamicScale{.growth_interval = 20});
  History run;
  for (int step = 0; step < steps; ++step) {
    {
      const Autocast scope(precision);
      const Tensor loss = task.loss(step);
      scaler.backward(loss);
      run.losses.push_back(loss.item());
    }
    adam.clip_grad_norm(1);
    scaler.step(adam);
  }
  run.applied = adam.applied_steps();
  run.scale = scaler.scale();
  for (const Tensor& p : task.parameters()) run.parameters.push_back(bytes(p));
  return run;
}

class Training : public OnDevice {};
MT_ON_DEVICES(Training);

/// Every precision learns, and ends within `margin` of f32.
template <class T>
void expect_learning(Device device, const char* name, int steps, double lr, double final, double margin) {
  const History full = train<T>(device, DType::f32, steps, lr);
  EXPECT_LT(full.last(10), final) << name;
  EXPECT_GT(full.losses[0], 3 * full.last(10)) << name;
  EXPECT_EQ(full.applied, steps);
  for (const DType precision : {DType::f16, DType::bf16}) {
    const History mixed = train<T>(device, precision, steps, lr);
    std::printf("%s %s-mixed: loss %.4f -> %.4f, f32 %.4f; %lld of %d steps applied, scale %g\n", name,
                to_string(precision).c_str(), mixed.losses[0], mixed.last(10), full.last(10),
                static_cast<long long>(mixed.applied), steps, mixed.scale);
    EXPECT_NEAR(mixed.losses[0], full.losses[0], precision == DType::f16 ? 2e-3 : 1e-2) << name;
    EXPECT_NEAR(mixed.last(10), full.last(10), margin) << name << " " << precision;
    EXPECT_GE(mixed.applied, steps - 10);
  }
}

TEST_P(Training, AnMlpLearnsInEveryPrecision) { expect_learning<MlpTask>(device(), "MLP", 150, 0.02, 0.2, 0.02); }
TEST_P(Training, ACnnLearnsInEveryPrecision) { expect_learning<CnnTask>(device(), "CNN", 60, 5e-3, 0.3, 0.1); }
TEST_P(Training, AGptLearnsInEveryPrecision) { expect_learning<GptTask>(device(), "GPT", 80, 0.01, 0.3, 0.05); }

template <class T> void expect_determinism(Device device, int steps) {
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    const History a = train<T>(device, precision, steps, 0.01), b = train<T>(device, precision, steps, 0.01),
                  other = train<T>(device, precision, steps, 0.01, 22);
    EXPECT_EQ(a.losses, b.losses) << precision;
    EXPECT_EQ(a.parameters, b.parameters) << precision;
    EXPECT_NE(a.losses, other.losses) << precision;
  }
}

TEST_P(Training, ASeedFixesEveryBit) {
  expect_determinism<MlpTask>(device(), 10);
  expect_determinism<CnnTask>(device(), 5);
  expect_determinism<GptTask>(device(), 5);
}

TEST_P(Training, TwoHalfBatchesEqualOneWhole) {
  manual_seed(8);
  nn::MLP model({6, 16, 3}, device());
  const Tensor x = randn({32, 6}, on());
  std::vector<std::int64_t> labels;
  for (int i = 0; i < 32; ++i) labels.push_back(i % 3);
  const Tensor y = from_vector(labels, {32}, on(DType::i64));
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    const auto gradients = [&](int pieces) {
      optim::LossScaler scaler(optim::StaticScale{.scale = 1024});
      for (const Tensor& p : model.parameters()) p.zero_grad();
      const Autocast scope(precision);
      for (int i = 0; i < pieces; ++i) {
        const std::int64_t n = 32 / pieces;
        scaler.backward(cross_entropy(model(x.slice(0, i * n, (i + 1) * n)), y.slice(0, i * n, (i + 1) * n)) *
                        (1.0 / pieces));
      }
      std::vector<double> all;
      for (const Tensor& p : model.parameters())
        for (const double g : p.grad().to_vector<double>()) all.push_back(g);
      return all;
    };
    const auto whole = gradients(1);
    double largest = 0;
    for (const double g : whole) largest = std::max(largest, std::abs(g));
    for (const int pieces : {2, 4}) {
      const auto split = gradients(pieces);
      double worst = 0;
      for (std::size_t i = 0; i < whole.size(); ++i) worst = std::max(worst, std::abs(split[i] - whole[i]) / largest);
      std::printf("%d micro-batches, %s: gradients differ by %.1e of the largest\n", pieces,
                  to_string(precision).c_str(), worst);
      // f32 sums in another order; in 16 bits the same activations and gradients are rounded, and summed in
      // f32.
      EXPECT_LT(worst, precision == DType::f32 ? 1e-6 : precision == DType::f16 ? 2e-3 : 1.6e-2) << pieces;
    }
  }
}

TEST_P(Training, MixedPrecisionUpdatesPointTheSameWay) {
  const auto gradient = [&](DType precision) {
    manual_seed(21);
    GptTask task(device());
    optim::LossScaler scaler(optim::StaticScale{.scale = 1024});
    const Autocast scope(precision);
    scaler.backward(task.loss(0));
    std::vector<double> all;
    for (const Tensor& p : task.parameters())
      for (const double g : p.grad().to_vector<double>()) all.push_back(g);
    return all;
  };
  const auto reference = gradient(DType::f32);
  for (const auto& [precision, least] : {std::pair{DType::f16, 0.999}, {DType::bf16, 0.99}}) {
    const auto mixed = gradient(precision);
    double dot = 0, a = 0, b = 0;
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      dot += mixed[i] * reference[i];
      a += mixed[i] * mixed[i];
      b += reference[i] * reference[i];
    }
    EXPECT_GT(dot / std::sqrt(a * b), least) << precision;
  }
}

TEST_P(Training, ASteadyMixedStepNeitherWaitsNorAllocatesNorCasts) {
  manual_seed(21);
  nn::GPT model({.vocabulary = 16, .context = 16, .width = 32, .layers = 2, .heads = 4}, device());
  nn::MLP classifier({8, 32, 3}, device());
  auto parameters = model.parameters();
  for (const Tensor& p : classifier.parameters()) parameters.push_back(p);
  optim::AdamW adam(parameters, {.lr = 1e-3});
  adam.set_schedule(optim::cosine_decay(1e-3, 100, 10));
  const Tensor tokens = zeros({4, 16}, on(DType::i64)), labels = zeros({5}, on(DType::i64));
  for (const DType precision : {DType::f16, DType::bf16}) {
    optim::LossScaler scaler(optim::DynamicScale{.initial = 1024});
    const Tensor x = ones({5, 8}, on(precision));
    const auto step = [&] {
      const Autocast scope(precision);
      scaler.backward(model.loss(tokens, tokens));
      scaler.backward(cross_entropy(classifier(x), labels));  // a second micro-batch
      adam.clip_grad_norm(1);
      return scaler.step(adam);
    };
    for (int i = 0; i < 4; ++i) step();
    backend(device()).synchronize();
    const BackendCounters before = backend(device()).counters;
    const std::int64_t allocations = memory_stats(device()).source_allocations;
    optim::StepResult last;
    const int steps = 10;
    for (int i = 0; i < steps; ++i) last = step();
    const BackendCounters after = backend(device()).counters;
    std::printf(
        "steady %s-mixed step on %s: %.1f launches, %lld waits, %lld casts, %.1f transfers, %lld source "
        "allocations in %d steps\n",
        to_string(precision).c_str(), to_string(device()).c_str(),
        static_cast<double>(after.launches - before.launches) / steps,
        static_cast<long long>(after.synchronizations - before.synchronizations),
        static_cast<long long>(after.casts - before.casts),
        static_cast<double>(after.transfers - before.transfers) / steps,
        static_cast<long long>(memory_stats(device()).source_allocations - allocations), steps);
    EXPECT_EQ(after.synchronizations, before.synchronizations);
    EXPECT_EQ(after.casts, before.casts);
    EXPECT_EQ(memory_stats(device()).source_allocations, allocations);
    EXPECT_TRUE(last.applied());
  }
}

TEST_P(Training, CpuAndGpuRunsAgree) {
  MT_NEEDS_GPU();
  if (device().is_cpu()) GTEST_SKIP() << "compared from the GPU's side";
  for (const auto& [precision, margin] : {std::pair{DType::f32, 1e-4}, {DType::f16, 0.02}, {DType::bf16, 0.05}}) {
    const History here = train<GptTask>(device(), precision, 20, 0.01),
                  there = train<GptTask>(cpu, precision, 20, 0.01);
    double worst = 0;
    for (std::size_t i = 0; i < here.losses.size(); ++i)
      worst = std::max(worst, std::abs(here.losses[i] - there.losses[i]));
    std::printf("%s: losses of 20 steps on GPU and CPU differ by at most %.1e\n", to_string(precision).c_str(), worst);
    EXPECT_LT(worst, margin);
  }
}

}  // namespace
}  // namespace mantissa
