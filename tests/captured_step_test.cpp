// A captured step gives the bits of eager steps: parameters, losses, scale, verdicts; and says so where it can not.
// On the CPU a captured step runs as it is, so there the same cases check only that nothing else changes.

#include "train/captured_step.h"
#include "optimizer_problem.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::AdamW;
using optim::DynamicScale;
using optim::LossScaler;
using train::CapturedStep;

struct CapturedStepTest : OnDevice {};
MT_ON_DEVICES(CapturedStepTest);

/// Everything that one training run consists of, made anew from one seed.
struct Training {
  explicit Training(Device device, DType compute = f16)
      : dtype(compute),
        model((manual_seed(seed()),
               nn::GPTOptions{.vocabulary = 32, .context = 16, .width = 32, .layers = 2, .heads = 2, .dropout = 0.1}),
              device),
        optimizer(model.parameters(), {.lr = 1e-2, .weight_decay = 0.1}),
        scaler(DynamicScale{.initial = 1024, .growth_interval = 5}) {
    optimizer.set_schedule(optim::cosine_decay(1e-2, 40, 3));
  }
  /// `poison` multiplies the loss: inf and NaN make the step skip.
  Tensor step(const Tensor& ids, const Tensor& targets, const Tensor& poison) {
    Tensor loss;
    {
      const Autocast scope(dtype);
      loss = model.loss(ids, targets) * poison;
    }
    scaler.backward(loss);
    optimizer.clip_grad_norm(1.0);
    scaler.step(optimizer);
    return loss;
  }
  std::vector<Bytes> state() {
    std::vector<Bytes> all;
    for (const Tensor& p : model.parameters()) all.push_back(bytes(p));
    for (const auto& [name, x] : optimizer.state_dict()) all.push_back(bytes(x));
    return all;
  }
  DType dtype;
  nn::GPT model;
  AdamW optimizer;
  LossScaler scaler;
};

struct Batch {
  Tensor ids, targets, poison;
};
Batch batch(int step, Device device, std::int64_t rows = 4) {
  const auto draw = [&](std::uint64_t stream) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < rows * 16; ++i)
      ids.push_back(philox(stream, static_cast<std::uint64_t>(step * 1000 + i)).lane[0] % 32);
    return from_vector(ids, {rows, 16}, {i64, device});
  };
  const double poison = step == 4 || step == 11 ? kInf : step == 17 ? kNaN : 1;
  return {draw(seed()), draw(seed() + 1), full({}, poison, {f32, device})};
}

CapturedStep capture(Training& run) {
  return CapturedStep([&run](const Tensor& a, const Tensor& b, const Tensor& c) { return run.step(a, b, c); });
}

TEST_P(CapturedStepTest, GivesTheBitsOfEagerStepsWithOverflowsDropoutAndSchedule) {
  for (const DType dtype : {f16, bf16, f32}) {
    Training eager(device(), dtype);
    std::vector<Bytes> losses;
    std::vector<double> rates;
    for (int i = 0; i < 24; ++i) {
      const Batch b = batch(i, device());
      losses.push_back(bytes(eager.step(b.ids, b.targets, b.poison)));
      rates.push_back(eager.optimizer.last_result().learning_rate());
    }
    const auto expected = eager.state();
    const PhiloxState random = random_state();

    Training run(device(), dtype);
    CapturedStep step = capture(run);
    for (int i = 0; i < 24; ++i) {
      const Batch b = batch(i, device());
      EXPECT_EQ(bytes(step(b.ids, b.targets, b.poison)), losses[static_cast<std::size_t>(i)]) << "step " << i;
      EXPECT_EQ(run.optimizer.last_result().learning_rate(), rates[static_cast<std::size_t>(i)]) << "step " << i;
      // Memory that others use between replays is not that of the recording.
      std::vector<Tensor> garbage;
      for (int k = 0; k < 40; ++k) garbage.push_back(full({1 + 997 * k}, kNaN, on()));
    }
    EXPECT_EQ(run.state(), expected) << name(dtype);
    EXPECT_EQ(run.scaler.state().skipped, eager.scaler.state().skipped);
    EXPECT_EQ(run.scaler.scale(), eager.scaler.scale());
    EXPECT_EQ(random_state().offset, random.offset);
    EXPECT_EQ(step.replays(), device().is_cpu() ? 0 : 23);
  }
}

TEST_P(CapturedStepTest, FollowsTheLearningRateAndWritesToParameters) {
  const auto run_with = [&](bool captured) {
    Training run(device());
    CapturedStep step = capture(run);
    for (int i = 0; i < 12; ++i) {
      if (i == 5) run.optimizer.set_lr(3e-3);
      if (i == 8) {
        const NoGrad no_grad;
        run.model.parameters()[2].fill_(0.125);
      }
      const Batch b = batch(20 + i, device());
      captured ? step(b.ids, b.targets, b.poison) : run.step(b.ids, b.targets, b.poison);
    }
    return run.state();
  };
  EXPECT_EQ(run_with(true), run_with(false));
}

TEST_P(CapturedStepTest, RecordsAnewForOtherShapes) {
  const auto run_with = [&](bool captured) {
    Training run(device());
    CapturedStep step = capture(run);
    for (int i = 0; i < 12; ++i) {
      const Batch b = batch(20 + i, device(), i % 3 == 2 ? 3 : 4);
      captured ? step(b.ids, b.targets, b.poison) : run.step(b.ids, b.targets, b.poison);
    }
    EXPECT_EQ(step.replays(), captured && !device().is_cpu() ? 10 : 0);
    return run.state();
  };
  EXPECT_EQ(run_with(true), run_with(false));
}

TEST_P(CapturedStepTest, KeepsBatchNormStatisticsOfSkippedSteps) {
  const auto run_with = [&](bool captured) {
    manual_seed(seed());
    nn::SmallCNN model({.width = 4, .hidden = 16, .classes = 4, .dropout = 0.2}, device());
    AdamW optimizer(model.parameters(), {.lr = 1e-3});
    LossScaler scaler;
    const auto eager = [&](const Tensor& x, const Tensor& y) {
      Tensor loss;
      {
        const Autocast scope(f16);
        loss = cross_entropy(model(x), y);
      }
      scaler.backward(loss);
      scaler.step(optimizer);
      return loss;
    };
    CapturedStep step(eager);
    std::vector<Bytes> all;
    for (int i = 0; i < 8; ++i) {
      std::vector<double> pixels;
      for (std::uint64_t k = 0; k < 6 * 784; ++k)
        pixels.push_back(i == 5 && k == 7 ? kInf
                                          : static_cast<double>(uniform_from_bits(
                                                philox(seed() + static_cast<std::uint64_t>(i), k).lane[0])));
      const Tensor x = from_vector(pixels, {6, 1, 28, 28}, on()),
                   y = from_vector(std::vector<std::int64_t>{0, 1, 2, 3, 1, 2}, {6}, {i64, device()});
      all.push_back(bytes(captured ? step(x, y) : eager(x, y)));
      for (const Tensor& b : {model.norm1.running_mean, model.norm2.running_var}) all.push_back(bytes(b));
    }
    for (const Tensor& p : model.parameters()) all.push_back(bytes(p));
    return all;
  };
  EXPECT_EQ(run_with(true), run_with(false));
}

TEST_P(CapturedStepTest, RefusesWhatItCanNotReplay) {
  Training run(device());
  const Batch b = batch(20, device());
  CapturedStep step = capture(run);
  EXPECT_NE(error_text<ShapeError>([&] { step(b.ids, b.targets); }).find("takes 3 inputs"), std::string::npos);
  EXPECT_NE(error_text<AutogradError>([&] { step(b.ids, b.targets, Tensor{}); }).find("undefined"), std::string::npos);
  EXPECT_NE(
      error_text<AutogradError>([&] { step(b.ids, b.targets, leaf(ones({}, on()))); }).find("requires a gradient"),
      std::string::npos);
  if (device().is_cpu()) return;
  EXPECT_NE(error_text<DeviceError>([&] { step(b.ids, b.targets, ones({})); }).find("inputs on"), std::string::npos);

  // A step that waits says so; nothing has changed, and both kinds of step go on.
  CapturedStep waits([&](const Tensor& x) {
    const Tensor y = sum(x);
    y.item();
    return y;
  });
  const Tensor x = ones({100}, on());
  EXPECT_EQ(waits(x).item(), 100);
  const PhiloxState random = random_state();
  EXPECT_NE(error_text<AutogradError>([&] { waits(x); }).find("waits for the device"), std::string::npos);
  EXPECT_FALSE(backend(device()).recording());
  EXPECT_EQ(random_state().offset, random.offset);
  for (int i = 0; i < 4; ++i) step(b.ids, b.targets, b.poison);
  EXPECT_EQ(step.replays(), 3);
  run.step(b.ids, b.targets, b.poison);
  step(b.ids, b.targets, b.poison);

  const auto stale = run.optimizer.last_result();
  step(b.ids, b.targets, b.poison);
  EXPECT_NE(error_text<AutogradError>([&] { stale.verdict(); }).find("too late"), std::string::npos);

  run.optimizer.groups()[0].weight_decay = 0.5;
  EXPECT_NE(error_text<ConfigError>([&] { step(b.ids, b.targets, b.poison); }).find("reset()"), std::string::npos);
  step.reset();
  for (int i = 0; i < 3; ++i) step(b.ids, b.targets, b.poison);
}

TEST_P(CapturedStepTest, GivesItsMemoryBack) {
  Training run(device());
  const Batch b = batch(20, device());
  run.step(b.ids, b.targets, b.poison);
  const auto held = [&] { return memory_stats(device()).total; };
  const std::int64_t before = held();
  {
    CapturedStep step = capture(run);
    for (int i = 0; i < 3; ++i) step(b.ids, b.targets, b.poison);
  }
  EXPECT_EQ(held(), before);
  const std::int64_t allocations = memory_stats(device()).source_allocations;
  for (int i = 0; i < 3; ++i) run.step(b.ids, b.targets, b.poison);
  {
    const Tensor once = empty({1 << 18}, on());  // fits in what the recording had
  }
  EXPECT_EQ(memory_stats(device()).source_allocations, allocations);
}

}  // namespace
}  // namespace mantissa
