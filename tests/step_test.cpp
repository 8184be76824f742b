// One training step as a transaction: a skipped one changes nothing at all, an applied one is what f32 would
// have done.

#include <algorithm>
#include <random>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::AdamW;
using optim::DynamicScale;
using optim::LossScaler;
using optim::SGD;
using optim::StaticScale;

constexpr LossScaler::Options kNeverStop{.enabled = true, .max_streak = 0};

class Step : public OnDevice {};
MT_ON_DEVICES(Step);

/// A small CNN with batch norm under mixed precision: every kind of state that a step may change.
struct Training {
  explicit Training(Device device, DType dtype = DType::f16) : precision(dtype) {
    manual_seed(7);
    model = std::make_unique<nn::SmallCNN>(nn::SmallCNN::Options{.width = 2, .hidden = 5, .classes = 3, .dropout = 0},
                                           device);
    images = rand({4, 1, 28, 28}, {DType::f32, device});
    labels = from_vector(std::vector<std::int64_t>{0, 2, 1, 2}, {4}, {DType::i64, device});
    optimizer = std::make_unique<AdamW>(model->parameters(), optim::AdamOptions{.lr = 1e-3, .weight_decay = 0.01});
    optimizer->set_schedule(optim::linear_decay(1e-3, 100, 10));
  }
  Tensor backward(const Tensor& x) {
    const Autocast scope(precision);
    const Tensor loss = cross_entropy((*model)(x), labels);
    scaler.backward(loss);
    return loss;
  }
  Tensor backward() { return backward(images); }
  /// Every byte that a step could change, by name.
  std::vector<std::pair<std::string, Bytes>> snapshot() {
    std::vector<std::pair<std::string, Bytes>> all;
    for (const auto& [name, p] : model->named_parameters()) {
      all.emplace_back(name, bytes(p));
      if (const Tensor& working = p.node()->leaf->working; working.defined())
        all.emplace_back(name + " (working copy)", bytes(working));
    }
    for (const auto& [name, b] : model->named_buffers()) all.emplace_back(name, bytes(b));
    for (const auto& [name, value] : optimizer->state_dict()) all.emplace_back(name, bytes(value));
    return all;
  }
  DType precision;
  std::unique_ptr<nn::SmallCNN> model;
  Tensor images, labels;
  std::unique_ptr<AdamW> optimizer;
  LossScaler scaler{StaticScale{.scale = 256}, kNeverStop};
};

template <class Snapshot>
void expect_unchanged(const Snapshot& before, const Snapshot& after, const std::string& what) {
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i)
    ASSERT_EQ(before[i], after[i]) << what << " changed " << before[i].first;
}

// ---- a skipped step changes nothing
// ----------------------------------------------------------------------------------------

TEST_P(Step, OneBadElementAnywhereLeavesEveryByteAlone) {
  for (const DType precision : {DType::f16, DType::bf16}) {
    Training run(device(), precision), control(device(), precision);
    for (int i = 0; i < 2; ++i) {
      for (Training* t : {&run, &control}) {
        t->backward();
        ASSERT_TRUE(t->scaler.step(*t->optimizer).applied());
      }
    }
    const auto before = run.snapshot();
    expect_unchanged(before, control.snapshot(), "the control");
    int injections = 0;
    const auto parameters = run.model->named_parameters();
    for (const auto& [name, p] : parameters) {
      for (const std::int64_t at : {std::int64_t{0}, p.numel() / 2, p.numel() - 1}) {
        for (const double bad : {kInf, -kInf, kNaN}) {
          run.backward();  // moves the running statistics as well
          poke(p.grad(), at, bad);
          const std::string what = detail::message(bad, " in element ", at, " of ", name);
          const optim::StepResult result = run.scaler.step(*run.optimizer);
          ASSERT_FALSE(result.applied()) << what;
          if (precision == DType::bf16) {
            ASSERT_EQ(result.verdict(), std::isnan(bad) ? Verdict::skipped_nan : Verdict::skipped_overflow) << what;
          }
          expect_unchanged(before, run.snapshot(), what);
          for (const Tensor& q : run.optimizer->parameters())
            ASSERT_FALSE(q.grad().defined()) << "gradients are consumed";
          ++injections;
        }
      }
    }
    std::printf("%d injections into %zu tensors left every byte alone\n", injections, parameters.size());
    for (int i = 0; i < 3; ++i) {  // and the run goes on as if they had never been
      for (Training* t : {&run, &control}) {
        t->backward();
        const optim::StepResult result = t->scaler.step(*t->optimizer);
        ASSERT_TRUE(result.applied());
        EXPECT_NEAR(result.learning_rate(), 1e-4 * (i + 3), 1e-10) << "the schedule counts applied steps";
      }
      expect_unchanged(control.snapshot(), run.snapshot(), "the run after its skipped steps");
    }
  }
}

TEST_P(Step, ABadBatchDoesNotSpoilTheRunningStatistics) {  // pytorch#88474
  for (const double bad : {kInf, kNaN}) {
    Training run(device());
    run.backward();
    ASSERT_TRUE(run.scaler.step(*run.optimizer).applied());
    const auto before = run.snapshot();
    Tensor spoilt = run.images.clone();
    poke(spoilt, 100, bad);
    run.backward(spoilt);
    EXPECT_FALSE(run.scaler.step(*run.optimizer).applied());
    expect_unchanged(before, run.snapshot(), "a bad batch");
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(std::isfinite(run.backward().item()));
      ASSERT_TRUE(run.scaler.step(*run.optimizer).applied());
    }
    run.model->eval();
    for (const float y : (*run.model)(run.images).to_vector()) EXPECT_TRUE(std::isfinite(y));
  }
}

TEST_P(Step, AppliedStepsDoMoveTheRunningStatistics) {
  Training run(device());
  const auto buffers = [&] {
    std::vector<Bytes> all;
    for (const auto& [name, b] : run.model->named_buffers()) all.push_back(bytes(b));
    return all;
  };
  const auto before = buffers();
  run.backward();
  run.backward();  // two micro-batches, one step
  const auto moved = buffers();
  ASSERT_TRUE(run.scaler.step(*run.optimizer).applied());
  const auto after = buffers();
  EXPECT_EQ(after, moved);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NE(before[i], after[i]);
}

TEST_P(Step, ASkippedWindowRestoresTheStatisticsFromBeforeIt) {
  Training run(device());
  const auto before = run.snapshot();
  run.backward();
  run.backward();
  poke(run.optimizer->parameters()[0].grad(), 0, kInf);
  ASSERT_FALSE(run.scaler.step(*run.optimizer).applied());
  const auto after = run.snapshot();
  for (const auto& entry : before) {  // the working copies are new, all else is as it was
    EXPECT_NE(std::find(after.begin(), after.end(), entry), after.end()) << entry.first;
  }
}

TEST_P(Step, TheFirstStepMayOverflow) {  // loss x 1e8: the schedule must not advance
  Training run(device());
  LossScaler scaler(DynamicScale{.initial = 0x1p32, .cap = 0x1p32});
  int skipped = 0;
  double rate = 0;
  for (int i = 0; i < 40 && rate == 0; ++i) {
    {
      const Autocast scope(DType::f16);
      scaler.backward(cross_entropy((*run.model)(run.images), run.labels));
    }
    const optim::StepResult result = scaler.step(*run.optimizer);
    if (!result.applied()) ++skipped;
    if (result.applied()) rate = result.learning_rate();
  }
  EXPECT_GT(skipped, 3);
  EXPECT_EQ(scaler.scale(), std::ldexp(1, 32 - skipped));
  EXPECT_NEAR(rate, 1e-4, 1e-10) << "the first applied step uses the first rate of the warm-up";
  EXPECT_EQ(run.optimizer->applied_steps(), 1);
}

TEST_P(Step,
       HugeFiniteGradientsAreNotSkipped) {  // their sum of squares overflows f32, and that is no overflow
  Tensor w = leaf(zeros({3}, on()));
  SGD sgd({w}, {.lr = 1e-30});
  const double g = static_cast<double>(1e30f);
  w.set_grad(full({3}, g, on()));
  optim::StepResult result = sgd.step();
  EXPECT_TRUE(result.applied());
  EXPECT_NEAR(result.grad_norm() / (g * std::sqrt(3.0)), 1, 1e-12);
  EXPECT_NEAR(w.to_vector()[0], -1, 1e-6);
  sgd.clip_grad_norm(1);  // clipping works as well: 1 / 1.7e30 is a normal f32
  sgd.set_lr(1);
  w.set_grad(full({3}, g, on()));
  EXPECT_TRUE(sgd.step().applied());
  EXPECT_NEAR(w.to_vector()[0], -1 - 1 / std::sqrt(3.0), 1e-6);
  w.set_grad(full({3}, 3.4e38, on()));
  EXPECT_TRUE(sgd.step().applied());
}

TEST_P(Step, TinyGradientsKeepTheirNorm) {  // and underflow of the squares is no zero norm
  Tensor w = leaf(zeros({2}, on()));
  SGD sgd({w}, {.lr = 1});
  w.set_grad(full({2}, 1e-30, on()));
  EXPECT_NEAR(sgd.step().grad_norm() / (1e-30 * std::sqrt(2.0)), 1, 1e-6);
}

TEST_P(Step, WithoutAScalerTheCheckIsTheSame) {
  Tensor w = leaf({1, 2}, on());
  AdamW adam({w});
  for (const double bad : {kInf, -kInf, kNaN}) {
    w.set_grad(from_vector(std::vector<double>{1, bad}, {2}, on()));
    EXPECT_EQ(adam.step().verdict(), std::isnan(bad) ? Verdict::skipped_nan : Verdict::skipped_overflow);
  }
  EXPECT_EQ(w.to_vector(), (std::vector<float>{1, 2}));
  EXPECT_EQ(adam.applied_steps(), 0);
  EXPECT_EQ(adam.step().verdict(), Verdict::nothing_to_do);
  EXPECT_EQ(to_string(Verdict::skipped_nan), "skipped: NaN");
  EXPECT_EQ(to_string(Verdict::nothing_to_do), "nothing to do");
}

TEST_P(Step, IgnoredTargetsChargeNobody) {  // 0/0 elsewhere, and the scale halves
  Tensor w = leaf(ones({3, 4}, on()));
  SGD sgd({w}, {.lr = 1});
  LossScaler scaler(DynamicScale{.initial = 256, .growth_interval = 1});
  const Tensor ignored = full({2}, -100, on(DType::i64));
  const Autocast scope(DType::f16);
  const Tensor loss = cross_entropy(linear(ones({2, 4}, on()), w), ignored);
  scaler.backward(loss);
  EXPECT_EQ(loss.item(), 0);
  EXPECT_TRUE(scaler.step(sgd).applied());
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_EQ(w.to_vector(), std::vector<float>(12, 1));
}

// ---- clipping is on unscaled gradients
// ----------------------------------------------------------------------------------

/// A step of SGD with the same gradients, clipped in f32 by hand.
std::vector<double> clipped_by_hand(const std::vector<double>& w, std::vector<double> g, double max_norm,
                                    double max_value) {
  double norm = 0;
  for (const double x : g) norm += x * x;
  norm = std::sqrt(norm);
  std::vector<double> out;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (max_norm > 0 && norm > max_norm) g[i] *= max_norm / (norm + 1e-6);
    if (max_value > 0) g[i] = std::clamp(g[i], -max_value, max_value);
    out.push_back(w[i] - g[i]);
  }
  return out;
}

TEST_P(Step, ClippingEqualsTheUnscaledResult) {
  struct Case {
    std::vector<double> g;
    double max_norm, max_value;
  };
  const std::vector<double> start{1, -2, 0.5};
  for (const Case& c :
       {Case{{0.1, 0.1, 0.1}, 1, 0},  // with S = 65536 the scaled norm is far above the limit
        Case{{3, -4, 12}, 1, 0}, Case{{3, -4, 12}, 13, 0}, Case{{3, -4, 12}, 100, 0}, Case{{3, -0.25, 12}, 0, 0.5},
        Case{{3, -4, 12}, 6.5, 1.75}, Case{{1e-20, 0, 0}, 1e-25, 0}, Case{{0, 0, 0}, 1, 1}}) {
    for (const bool before : {false, true}) {
      for (const double scale : {0.0, 1.0, 65536.0, 0x1p24}) {
        Tensor w = leaf(start, on());
        SGD sgd({w}, {.lr = 1});
        const auto clip = [&] {
          if (c.max_norm > 0) sgd.clip_grad_norm(c.max_norm);
          if (c.max_value > 0) sgd.clip_grad_value(c.max_value);
        };
        if (before) clip();  // the order of the calls does not matter
        const Tensor loss =
            loss_with_gradients({w}, {from_vector(c.g, {3}, on())}, scale > 0 ? DType::f16 : DType::f32);
        optim::StepResult result;
        if (scale > 0) {
          LossScaler scaler(StaticScale{.scale = scale});
          scaler.backward(loss);
          if (!before) clip();
          result = scaler.step(sgd);
        } else {
          backward(loss);
          if (!before) clip();
          result = sgd.step();
        }
        ASSERT_TRUE(result.applied());
        const auto expected = clipped_by_hand(start, c.g, c.max_norm, c.max_value), got = w.to_vector<double>();
        for (std::size_t i = 0; i < 3; ++i)
          EXPECT_NEAR(got[i], expected[i], 2e-7 * (1 + std::abs(expected[i])))
              << "norm " << c.max_norm << " value " << c.max_value << " scale " << scale;
        double norm = 0;
        for (const double x : c.g) norm += x * x;
        EXPECT_NEAR(result.grad_norm(), std::sqrt(norm), 1e-6 * std::sqrt(norm))
            << "of the unscaled gradients, before clipping";
      }
    }
  }
}

TEST_P(Step, TheScaleDoesNotChangeAClippedStepByOneBit) {
  const auto run = [&](double scale) {
    Tensor w = leaf({1, -2, 0.5}, on());
    SGD sgd({w}, {.lr = 0.1});
    LossScaler scaler(StaticScale{.scale = scale});
    scaler.backward(loss_with_gradients({w}, {from_vector(std::vector<double>{0.3, -0.7, 1.1}, {3}, on())}));
    sgd.clip_grad_norm(1);
    EXPECT_TRUE(scaler.step(sgd).applied());
    return bytes(w);
  };
  const auto plain = run(1);
  for (const double scale : {2.0, 256.0, 65536.0, 0x1p24}) EXPECT_EQ(run(scale), plain) << scale;
}

TEST_P(Step, AClipLastsForOneStep) {
  Tensor w = leaf({0}, on());
  SGD sgd({w}, {.lr = 1});
  sgd.clip_grad_norm(0.5);
  for (const double expected : {-0.5, -10.5}) {
    w.set_grad(full({1}, 10, on()));
    sgd.step();
    EXPECT_NEAR(w.item(), expected, 1e-6);
  }
}

TEST_P(Step, AnInfiniteNormIsASkipNotAZeroTimesInf) {
  Tensor w = leaf({1, 2}, on());
  SGD sgd({w}, {.lr = 1});
  w.set_grad(from_vector(std::vector<double>{0, kInf}, {2}, on()));
  sgd.clip_grad_norm(1);
  EXPECT_EQ(sgd.step().verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(w.to_vector(), (std::vector<float>{1, 2}));
}

// ---- refusals
// -----------------------------------------------------------------------------------------------------------

TEST_P(Step, ScaledGradientsAreRefusedByAPlainStep) {
  Tensor w = leaf({1}, on());
  SGD sgd({w}, {.lr = 1});
  LossScaler scaler;
  scaler.backward(loss_with_gradients({w}, {ones({1}, on())}));
  expect_error<AutogradError>([&] { sgd.step(); },
                              {"optimizer: the gradients carry a loss scale", "scaler.step(optimizer)"});
  EXPECT_EQ(w.item(), 1);
  EXPECT_TRUE(scaler.step(sgd).applied()) << "nothing was lost by the refusal";
  EXPECT_EQ(w.item(), 0);
}

TEST_P(Step, GradientsOfAnotherScalerAreRefused) {
  Tensor w = leaf({1}, on());
  SGD sgd({w}, {.lr = 1});
  LossScaler scaler, other;
  scaler.backward(loss_with_gradients({w}, {ones({1}, on())}));
  expect_error<AutogradError>([&] { other.step(sgd); },
                              {"optimizer: the gradients carry a loss scale", "of the scaler that scaled them"});
  expect_error<AutogradError>([&] { other.backward(loss_with_gradients({w}, {ones({1}, on())})); },
                              {"a gradient scaled by one scaler can not be added"});
}

TEST_P(Step, ScaledAndUnscaledGradientsDoNotMix) {
  Tensor a = leaf({1}, on()), b = leaf({1}, on());
  SGD sgd({a, b}, {.lr = 1});
  LossScaler scaler;
  scaler.backward(loss_with_gradients({a}, {ones({1}, on())}));
  backward(loss_with_gradients({b}, {ones({1}, on())}));
  expect_error<AutogradError>([&] { scaler.step(sgd); }, {"scaler.step: some gradients are scaled and some are not"});
  EXPECT_EQ(a.item(), 1);
  // Nor in one buffer, in either order.
  expect_error<AutogradError>([&] { backward(loss_with_gradients({a}, {ones({1}, on())})); },
                              {"a gradient scaled by one scaler can not be added", "zero_grad()"});
  expect_error<AutogradError>([&] { scaler.backward(loss_with_gradients({b}, {ones({1}, on())})); },
                              {"a gradient scaled by one scaler can not be added"});
  sgd.zero_grad();
  backward(loss_with_gradients({a, b}, {ones({1}, on()), ones({1}, on())}));
  EXPECT_TRUE(sgd.step().applied());
}

TEST_P(Step, UnscaledGradientsMayGoThroughAScaler) {
  Tensor w = leaf({1}, on());
  SGD sgd({w}, {.lr = 1});
  LossScaler scaler(DynamicScale{.growth_interval = 1});
  backward(loss_with_gradients({w}, {full({1}, 0.25, on())}));
  EXPECT_TRUE(scaler.step(sgd).applied());
  EXPECT_EQ(w.item(), 0.75);
  scaler.backward(loss_with_gradients({w}, {full({1}, 0.25, on())}));
  EXPECT_TRUE(scaler.step(sgd).applied());
  EXPECT_EQ(w.item(), 0.5);
  w.set_grad(full({1}, 0.25, on()));  // after a scaled window too
  EXPECT_TRUE(scaler.step(sgd).applied());
  EXPECT_EQ(w.item(), 0.25);
  EXPECT_EQ(scaler.scale(), 131072) << "only the scaled step counted";
}

TEST_P(Step, AMixOfScaledAndUnscaledOptimizersUnderOneScaler) {
  Tensor a = leaf({1}, on()), b = leaf({1}, on());
  SGD first({a}, {.lr = 1}), second({b}, {.lr = 1});
  LossScaler scaler(DynamicScale{.initial = 256, .growth_interval = 1});
  // Two losses, one of them without any f16: each optimizer divides by what its own gradients carry.
  scaler.backward(loss_with_gradients({a}, {ones({1}, on())}, DType::f16));
  scaler.backward(loss_with_gradients({b}, {ones({1}, on())}, DType::f32));
  for (const auto& result : scaler.step({&first, &second})) EXPECT_TRUE(result.applied());
  EXPECT_EQ(a.item(), 0);
  EXPECT_EQ(b.item(), 0);
  EXPECT_EQ(scaler.scale(), 512);
}

TEST_P(Step, AResultIsReadBeforeTheNextStep) {
  Tensor w = leaf({0}, on());
  SGD sgd({w}, {.lr = 1});
  const auto step = [&] {
    w.set_grad(ones({1}, on()));
    return sgd.step();
  };
  const optim::StepResult first = step();
  EXPECT_TRUE(first.applied());
  EXPECT_TRUE(first.applied()) << "reading twice is fine";
  const optim::StepResult second = step();
  expect_error<AutogradError>([&] { first.verdict(); }, {"StepResult: read too late"});
  expect_error<AutogradError>([&] { first.grad_norm(); }, {"StepResult: read too late"});
  EXPECT_EQ(second.applied_steps(), 2);
  sgd.load_state_dict(sgd.state_dict());
  EXPECT_THROW(second.verdict(), AutogradError);
  expect_error<AutogradError>([] { optim::StepResult().learning_rate(); }, {"StepResult: empty"});
}

TEST_P(Step, AResultOutlivesItsOptimizer) {
  optim::StepResult result;
  {
    Tensor w = leaf({0}, on());
    SGD sgd({w}, {.lr = 1});
    w.set_grad(ones({1}, on()));
    result = sgd.step();
  }
  EXPECT_TRUE(result.applied());
  EXPECT_EQ(result.grad_norm(), 1);
}

TEST_P(Step, ParametersMayNotBeAddedToAnOptimizerInUse) {
  Tensor a = leaf({1}, on()), b = leaf({1}, on());
  SGD sgd({a}, {.lr = 1, .momentum = 0.9});
  sgd.groups()[0].parameters.push_back(b);
  a.set_grad(ones({1}, on()));
  b.set_grad(ones({1}, on()));
  expect_error<ConfigError>([&] { sgd.step(); },
                            {"optimizer: the parameters of its groups have changed", "make a new optimizer"});
  EXPECT_EQ(b.item(), 1);
}

TEST_P(Step, AnUpdateInvalidatesOlderGraphs) {
  Tensor w = leaf(ones({2, 2}, on())), x = leaf(ones({2, 2}, on()));
  SGD sgd({w}, {.lr = 1});
  const Tensor stale = sum(linear(x, w));
  w.set_grad(ones({2, 2}, on()));
  sgd.step();
  expect_error<AutogradError>([&] { backward(stale); }, {"linear: a tensor that backward needs, f32[2,2]",
                                                         "was changed in place", "an optimizer step is one"});
}

// ---- accumulation
// -------------------------------------------------------------------------------------------------------

TEST_P(Step, GradientsAreConsumedAndTheirMemoryIsReused) {
  Tensor w = leaf(ones({1000}, on()));
  SGD sgd({w}, {.lr = 0});
  const void* buffer = nullptr;
  for (int i = 0; i < 3; ++i) {
    backward(loss_with_gradients({w}, {full({1000}, i + 1, on())}));
    EXPECT_EQ(w.grad().to_vector()[0], static_cast<float>(i + 1)) << "not added to the last step's";
    EXPECT_TRUE(i == 0 || w.grad().data() == buffer);
    buffer = w.grad().data();
    EXPECT_TRUE(sgd.step().applied());
    EXPECT_FALSE(w.grad().defined());
  }
}

}  // namespace
}  // namespace mantissa
