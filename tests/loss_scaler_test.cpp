// Conformance of the loss scaler: exact scales after scripted sequences of clean and bad steps, with the scenarios of
// PyTorch's and DeepSpeed's suites, and a model check of the rule against an independent specification in integers.

#include <algorithm>
#include <random>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::DynamicScale;
using optim::LossScaler;
using optim::SGD;
using optim::StaticScale;

constexpr LossScaler::Options kNeverStop{.enabled = true, .max_streak = 0};

/// One parameter, SGD and a scaler, driven by a script: '.' clean, 'i' inf, '-' -inf, 'n' NaN, 'z' zero gradient,
/// ' ' no gradient at all.
struct Rig {
  template <class Policy>
  Rig(Device device, const Policy& policy, LossScaler::Options options = kNeverStop)
      : w(leaf(zeros({3}, {DType::f32, device}))), sgd({w}, {.lr = 0.5}), scaler(policy, options) {}

  optim::StepResult step(char kind) {
    const double values[] = {1, kInf, -kInf, kNaN, 0};
    const auto which = std::string(".i-nz").find(kind);
    const Tensor g = which == std::string::npos ? Tensor{} : full({3}, values[which], {DType::f32, w.device()});
    scaler.backward(loss_with_gradients({w}, {g}));
    return scaler.step(sgd);
  }
  /// The scale after each step of the script.
  std::vector<double> run(const std::string& script) {
    std::vector<double> scales;
    for (const char kind : script) {
      step(kind);
      scales.push_back(scaler.scale());
    }
    return scales;
  }

  Tensor w;
  SGD sgd;
  LossScaler scaler;
};

using Scales = std::vector<double>;

class Scaler : public OnDevice {};
MT_ON_DEVICES(Scaler);

TEST_P(Scaler, GrowsOnExactlyTheNthCleanStep) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 1}).run("..."), (Scales{512, 1024, 2048}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 2}).run("....."), (Scales{256, 512, 512, 1024, 1024}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 5}).run("..........."),
            (Scales{256, 256, 256, 256, 512, 512, 512, 512, 512, 1024, 1024}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth = 8, .growth_interval = 2}).run(".."), (Scales{256, 2048}));
}

TEST_P(Scaler, AnOverflowHalvesTheScaleAndRestartsTheCount) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 3}).run("..i..."), (Scales{256, 256, 128, 128, 128, 256}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .backoff = 0.125, .growth_interval = 3}).run("i"), (Scales{32}));
}

TEST_P(Scaler, DefaultsArePyTorchs) {
  Rig rig(device(), DynamicScale{});
  EXPECT_EQ(rig.scaler.scale(), 65536);
  EXPECT_EQ(rig.scaler.rule().growth, 2);
  EXPECT_EQ(rig.scaler.rule().backoff, 0.5);
  EXPECT_EQ(rig.scaler.rule().growth_interval, 2000);
  rig.step('.');
  ScaleState state = rig.scaler.state();
  EXPECT_EQ(state.clean_steps, 1);
  state.clean_steps = 1997;
  rig.scaler.load_state(state);
  EXPECT_EQ(rig.run("...."), (Scales{65536, 65536, 131072, 131072}));
}

TEST_P(Scaler, HoldsAtFloorAndCap) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 4, .growth_interval = 9, .floor = 2}).run("iii"), (Scales{2, 2, 2}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 8, .backoff = 0.25, .growth_interval = 9, .floor = 4}).run("ii"), (Scales{4, 4}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 4, .growth_interval = 1, .cap = 16}).run("....i."), (Scales{8, 16, 16, 16, 8, 16}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 8, .growth = 4, .growth_interval = 1, .cap = 16}).run(".."), (Scales{16, 16}));
}

// ---- DeepSpeed's overflow list ------------------------------------------------------------------------------------------

TEST_P(Scaler, DeepSpeedNoOverflow) {
  Scales expected;
  for (int step = 1; step <= 10; ++step) expected.push_back(256.0 * (1 << (step / 2)));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 2}).run(".........."), expected);
}

TEST_P(Scaler, DeepSpeedAllOverflow) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 16}).run("i-nnnnnn"), (Scales{8, 4, 2, 1, 1, 1, 1, 1}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 16, .floor = 2}).run("i-nnnnnn"), (Scales{8, 4, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256}).run("i-nnnnnn"), (Scales{128, 64, 32, 16, 8, 4, 2, 1}));
}

TEST_P(Scaler, DeepSpeedSomeOverflow) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 2}).run("in...i"), (Scales{128, 64, 64, 128, 128, 64}));
}

TEST_P(Scaler, PyTorchEndToEnd) {  // 4 batches, inf in the second: 128 growth^3 backoff
  Rig rig(device(), DynamicScale{.initial = 128, .growth_interval = 1});
  EXPECT_EQ(rig.run(".i..").back(), 128 * 8 * 0.5);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-1.5, -1.5, -1.5}));
  EXPECT_EQ(rig.sgd.applied_steps(), 3);
}

// ---- hysteresis ---------------------------------------------------------------------------------------------------------

TEST_P(Scaler, HysteresisRefilledByEachCleanStep) {
  const DynamicScale policy{.initial = 256, .growth_interval = 100, .hysteresis = 2};
  EXPECT_EQ(Rig(device(), policy).run("i.i.i"), (Scales{256, 256, 256, 256, 256}));  // never two in a row
  EXPECT_EQ(Rig(device(), policy).run("ii.ii"), (Scales{256, 128, 128, 128, 64}));
  EXPECT_EQ(Rig(device(), policy).run("iiii"), (Scales{256, 128, 64, 32}));  // spent until a clean step comes
}

TEST_P(Scaler, HysteresisRefilledByGrowthOnly) {
  const DynamicScale policy{.initial = 256, .growth_interval = 3, .hysteresis = 2, .refill_hysteresis = false};
  EXPECT_EQ(Rig(device(), policy).run("i.i.i"), (Scales{256, 256, 128, 128, 64}));  // two far apart spend it
  EXPECT_EQ(Rig(device(), policy).run("ii...ii"), (Scales{256, 128, 128, 128, 256, 256, 128}));
}

TEST_P(Scaler, ABadStepWithinTheHysteresisIsSkippedAllTheSame) {
  Rig rig(device(), DynamicScale{.initial = 256, .hysteresis = 3});
  EXPECT_EQ(rig.step('i').verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(rig.step('n').verdict(), Verdict::skipped_nan);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(rig.scaler.scale(), 256);
}

// ---- what must not move the scale ---------------------------------------------------------------------------------------

TEST_P(Scaler, NoGradientAtAllIsNeutral) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 2});
  EXPECT_EQ(rig.run(". . "), (Scales{256, 256, 512, 512}));
  const ScaleState before = rig.scaler.state();
  const optim::StepResult result = rig.step(' ');
  EXPECT_EQ(result.verdict(), Verdict::nothing_to_do);
  EXPECT_FALSE(result.applied());
  const ScaleState after = rig.scaler.state();
  EXPECT_EQ(after.total, before.total);
  EXPECT_EQ(after.clean_steps, before.clean_steps);
  EXPECT_EQ(rig.sgd.applied_steps(), 2);
}

TEST_P(Scaler, StepBeforeAnyBackwardIsNeutral) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 1});
  EXPECT_EQ(rig.scaler.step(rig.sgd).verdict(), Verdict::nothing_to_do);
  EXPECT_EQ(rig.scaler.scale(), 256);
}

TEST_P(Scaler, StaticScaleNeverChanges) {
  Rig rig(device(), StaticScale{.scale = 1024});
  EXPECT_EQ(rig.run("...i.n.-"), Scales(8, 1024));
  EXPECT_EQ(rig.sgd.applied_steps(), 5);
  Rig odd(device(), StaticScale{.scale = 1000});  // not a power of two: the user asked for it
  EXPECT_EQ(odd.run(".i"), (Scales{1000, 1000}));
  EXPECT_NEAR(odd.w.to_vector()[0], -0.5, 1e-7);
}

TEST_P(Scaler, ZeroGradientsWithIntervalOneNeverReachInf) {
  for (const double cap : {16777216.0, 0x1p127}) {
    Rig rig(device(), DynamicScale{.growth_interval = 1, .cap = cap});
    for (int i = 0; i < 300; ++i) ASSERT_EQ(rig.step('z').verdict(), Verdict::applied);
    EXPECT_EQ(rig.scaler.scale(), cap);
    EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(rig.scaler.state().skipped, 0);
  }
}

TEST_P(Scaler, TheCapHoldsTheLargestScaleInF32) {  // PyTorch: initial 1e38, growth 16
  Rig rig(device(), DynamicScale{.initial = 0x1p126, .growth = 16, .growth_interval = 1, .cap = 0x1p127});
  EXPECT_EQ(rig.run("zz"), (Scales{0x1p127, 0x1p127}));
  EXPECT_EQ(rig.step('i').verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(rig.scaler.scale(), 0x1p126);
}

TEST_P(Scaler, TheSmallestFloorHasAFiniteReciprocal) {  // pytorch#99640: 1/scale was inf, every step an "overflow"
  Rig rig(device(), DynamicScale{.initial = 0x1p-125, .growth_interval = 9, .floor = 0x1p-126});
  EXPECT_EQ(rig.run("iii"), (Scales{0x1p-126, 0x1p-126, 0x1p-126}));
  EXPECT_EQ(rig.step('.').verdict(), Verdict::applied);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-0.5, -0.5, -0.5}));
}

// ---- persistent overflow ------------------------------------------------------------------------------------------------

TEST_P(Scaler, TwoHundredOverflowsHoldTheFloorAndRecover) {
  Rig rig(device(), DynamicScale{.growth_interval = 2});
  for (int i = 0; i < 200; ++i) {
    const Verdict verdict = rig.step(i % 2 ? 'i' : 'n').verdict();
    ASSERT_EQ(verdict, i < 16 ? (i % 2 ? Verdict::skipped_overflow : Verdict::skipped_nan) : Verdict::at_floor) << i;
    ASSERT_EQ(rig.scaler.scale(), std::max(1.0, std::ldexp(65536, -i - 1)));
  }
  const ScaleState state = rig.scaler.state();
  EXPECT_EQ(state.streak, 200);
  EXPECT_EQ(state.skipped, 200);
  EXPECT_EQ(rig.sgd.applied_steps(), 0);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(rig.run("...."), (Scales{1, 2, 2, 4}));
  EXPECT_EQ(rig.scaler.state().streak, 0);
}

TEST_P(Scaler, AStreakStopsTheRunWithAReason) {
  Rig rig(device(), DynamicScale{}, {.max_streak = 40});
  for (int i = 0; i < 40; ++i) rig.step('n').verdict();
  expect_error<NonFiniteError>([&] { rig.step('n'); }, {"LossScaler: 40 steps in a row were skipped", "skipped at the floor", "3 NaN",
                                                        "0 inf", "at scale 1", "floor 1", "not a scaling problem", "learning rate"});
}

TEST_P(Scaler, AfterTheStreakErrorACheckpointLetsTheRunGoOn) {
  Rig rig(device(), DynamicScale{.growth_interval = 100}, {.max_streak = 3});
  const ScaleState good = rig.scaler.state();
  const optim::StateDict checkpoint = rig.sgd.state_dict();
  for (int i = 0; i < 3; ++i) rig.step('i').verdict();
  rig.sgd.zero_grad();
  EXPECT_THROW(rig.scaler.step(rig.sgd), NonFiniteError);
  EXPECT_THROW(rig.scaler.step(rig.sgd), NonFiniteError) << "it does not go away by itself";
  rig.scaler.load_state(good);
  rig.sgd.load_state_dict(checkpoint);
  EXPECT_EQ(rig.step('.').verdict(), Verdict::applied);
  EXPECT_EQ(rig.scaler.scale(), 65536);
}

TEST_P(Scaler, AStreakOfAnyOptimizerStopsTheRun) {
  Tensor a = leaf(zeros({1}, on())), b = leaf(zeros({1}, on()));
  SGD first({a}, {.lr = 1}), second({b}, {.lr = 1});
  LossScaler scaler(DynamicScale{}, {.max_streak = 5});
  for (int i = 0; i < 6; ++i) {
    scaler.backward(loss_with_gradients({a, b}, {full({1}, kInf, on()), ones({1}, on())}));
    backend(device()).synchronize();  // the mirrors have arrived
    if (i == 5) {
      EXPECT_THROW(scaler.step({&first, &second}), NonFiniteError);
    } else if (i % 2 == 0) {
      scaler.step({&first, &second});
    } else {
      scaler.step(first);
      scaler.step(second);
    }
  }
}

// ---- several optimizers under one scale ---------------------------------------------------------------------------------

struct TwoOptimizers {
  explicit TwoOptimizers(Device device, DynamicScale policy = {.initial = 256, .growth_interval = 2})
      : a(leaf(zeros({2}, {DType::f32, device}))), b(leaf(zeros({2}, {DType::f32, device}))), first({a}, {.lr = 1}), second({b}, {.lr = 1}),
        scaler(policy, kNeverStop) {}
  /// Gradients of a and b; NaN stands for none.
  std::vector<Verdict> step(double ga, double gb, bool swapped = false) {
    const auto g = [&](double value) { return std::isnan(value) ? Tensor{} : full({2}, value, {DType::f32, a.device()}); };
    scaler.backward(loss_with_gradients({a, b}, {g(ga), g(gb)}));
    std::vector<Verdict> verdicts;
    for (const auto& result : swapped ? scaler.step({&second, &first}) : scaler.step({&first, &second})) verdicts.push_back(result.verdict());
    return verdicts;
  }
  Tensor a, b;
  SGD first, second;
  LossScaler scaler;
};

TEST_P(Scaler, EachOptimizerHasItsOwnVerdictAndTheScaleFallsOnce) {
  TwoOptimizers two(device());
  EXPECT_EQ(two.step(kInf, 1), (std::vector{Verdict::skipped_overflow, Verdict::applied}));
  EXPECT_EQ(two.scaler.scale(), 128);
  EXPECT_EQ(two.step(1, kInf), (std::vector{Verdict::applied, Verdict::skipped_overflow}));
  EXPECT_EQ(two.scaler.scale(), 64);
  EXPECT_EQ(two.step(kInf, -kInf), (std::vector{Verdict::skipped_overflow, Verdict::skipped_overflow}));
  EXPECT_EQ(two.scaler.scale(), 32);
  EXPECT_EQ(two.a.to_vector(), (std::vector<float>{-1, -1}));
  EXPECT_EQ(two.b.to_vector(), (std::vector<float>{-1, -1}));
}

TEST_P(Scaler, TwoOptimizersCountOneCleanStep) {
  TwoOptimizers two(device());
  two.step(1, 1);
  EXPECT_EQ(two.scaler.scale(), 256);
  two.step(1, 1);
  EXPECT_EQ(two.scaler.scale(), 512);
  EXPECT_EQ(two.scaler.state().total, 2);
}

TEST_P(Scaler, AnUnusedOptimizerIsNeutralInEitherPlace) {  // "No inf checks were recorded" elsewhere
  for (const bool swapped : {false, true}) {
    TwoOptimizers two(device());
    EXPECT_EQ(two.step(1, kNaN, swapped)[swapped ? 1 : 0], Verdict::applied);
    EXPECT_EQ(two.scaler.state().total, 1) << "swapped " << swapped;
    two.step(1, kNaN, swapped);
    EXPECT_EQ(two.scaler.scale(), 512) << "swapped " << swapped;
    two.step(kInf, kNaN, swapped);
    EXPECT_EQ(two.scaler.scale(), 256) << "swapped " << swapped;
    two.step(kNaN, kNaN, swapped);
    EXPECT_EQ(two.scaler.state().total, 3) << "swapped " << swapped;
    EXPECT_EQ(two.b.to_vector(), (std::vector<float>{0, 0}));
  }
}

// ---- where the bad value is ---------------------------------------------------------------------------------------------

TEST_P(Scaler, FindsOneBadElementAnywhere) {
  const std::vector<std::int64_t> sizes{5, 16384 * 2 + 3, 1, 1027};
  std::vector<Tensor> parameters, gradients;
  for (const std::int64_t n : sizes) {
    parameters.push_back(leaf(zeros({n}, on())));
    gradients.push_back(ones({n}, on()));
  }
  SGD sgd(parameters, {.lr = 1});
  LossScaler scaler(StaticScale{.scale = 8}, kNeverStop);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t n = sizes[i];
    for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 1, n - n % 8, n - n % 4, std::int64_t{16383}, std::int64_t{16384}}) {
      if (at >= n) continue;
      for (const double bad : {kInf, -kInf, kNaN}) {
        scaler.backward(loss_with_gradients(parameters, gradients));
        poke(parameters[i].grad(), at, bad);  // spoilt after backward: still found, the check reads what the update would use
        const Verdict verdict = scaler.step(sgd).verdict();
        ASSERT_EQ(verdict, Verdict::at_floor) << "tensor " << i << " element " << at << " value " << bad;
      }
    }
  }
  scaler.backward(loss_with_gradients(parameters, gradients));
  EXPECT_TRUE(scaler.step(sgd).applied());
  for (const Tensor& p : parameters)
    for (const float w : p.to_vector()) ASSERT_EQ(w, -1);
}

TEST_P(Scaler, TellsNaNFromOverflow) {
  Rig rig(device(), DynamicScale{.initial = 256});
  EXPECT_EQ(rig.step('i').verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(rig.step('-').verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(rig.step('n').verdict(), Verdict::skipped_nan);
  rig.scaler.backward(loss_with_gradients({rig.w}, {from_vector(std::vector<double>{kInf, 1, kNaN}, {3}, on())}));
  EXPECT_EQ(rig.scaler.step(rig.sgd).verdict(), Verdict::skipped_nan);
}

TEST_P(Scaler, AnOverflowMadeByTheScaleIsCured) {
  // The gradient 2^10 is fine, 2^10 * 2^120 is not: the scale falls until it is.
  Tensor w = leaf(zeros({1}, on()));
  SGD sgd({w}, {.lr = 0x1p-10});
  LossScaler scaler(DynamicScale{.initial = 0x1p120, .cap = 0x1p127}, kNeverStop);
  int skipped = 0;
  for (int i = 0; i < 10; ++i) {
    scaler.backward(loss_with_gradients({w}, {full({1}, 1024, on())}));
    skipped += scaler.step(sgd).applied() ? 0 : 1;
  }
  EXPECT_EQ(skipped, 3);  // 2^130, 2^129, 2^128 overflow
  EXPECT_EQ(scaler.scale(), 0x1p117);
  EXPECT_EQ(w.item(), -7);
}

TEST_P(Scaler, MicroBatchesAccumulateUnderOneScale) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 1});
  const auto micro = [&](double g) { rig.scaler.backward(loss_with_gradients({rig.w}, {full({3}, g, on())})); };
  micro(1);
  micro(2);
  micro(4);
  EXPECT_EQ(rig.w.grad().to_vector(), (std::vector<float>{1792, 1792, 1792}));  // 7 x 256
  EXPECT_EQ(rig.scaler.scale(), 256);
  EXPECT_TRUE(rig.scaler.step(rig.sgd).applied());
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-3.5, -3.5, -3.5}));
  EXPECT_EQ(rig.scaler.scale(), 512);  // one step, however many micro-batches
  micro(1);
  micro(kInf);  // one bad micro-batch spoils the window
  micro(1);
  EXPECT_EQ(rig.scaler.step(rig.sgd).verdict(), Verdict::skipped_overflow);
  EXPECT_EQ(rig.scaler.scale(), 256);
  micro(1);  // and nothing of it is left
  EXPECT_TRUE(rig.scaler.step(rig.sgd).applied());
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-4, -4, -4}));
}

TEST_P(Scaler, GradientsCarryTheScaleExactly) {
  Rig rig(device(), DynamicScale{});
  const std::vector<double> g{0x1p-130, 0.1f, -3};
  rig.scaler.backward(loss_with_gradients({rig.w}, {from_vector(g, {3}, on())}));
  EXPECT_EQ(rig.w.grad().to_vector<double>(), (Scales{0x1p-114, 0.1f * 65536.0, -196608}));
  const optim::StepResult result = rig.scaler.step(rig.sgd);
  EXPECT_NEAR(result.grad_norm(), std::sqrt(0.01 + 9), 1e-8);
  EXPECT_EQ(rig.w.to_vector()[1], -0.5f * 0.1f);
}

// ---- graphs that need no scale ------------------------------------------------------------------------------------------

TEST_P(Scaler, Bf16AndF32GraphsAreNotScaled) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    Rig rig(device(), DynamicScale{.growth_interval = 1});
    rig.scaler.backward(loss_with_gradients({rig.w}, {ones({3}, on())}, dtype));
    EXPECT_EQ(rig.w.grad().to_vector(), (std::vector<float>{1, 1, 1})) << dtype;
    EXPECT_TRUE(rig.scaler.step(rig.sgd).applied());
    EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-0.5, -0.5, -0.5})) << dtype;
    EXPECT_EQ(rig.scaler.scale(), 65536) << "no scale in use, none adapted";
    EXPECT_EQ(rig.scaler.state().total, 0);
    for (const double bad : {kInf, -kInf, kNaN}) {  // the check does not depend on scaling
      rig.scaler.backward(loss_with_gradients({rig.w}, {full({3}, bad, on())}, dtype));
      EXPECT_EQ(rig.scaler.step(rig.sgd).verdict(), std::isnan(bad) ? Verdict::skipped_nan : Verdict::skipped_overflow);
    }
    EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-0.5, -0.5, -0.5})) << dtype;
    EXPECT_EQ(rig.scaler.scale(), 65536);
  }
}

TEST_P(Scaler, AutocastToF16IsScaled) {
  for (const auto& [dtype, scaled] : {std::pair{DType::f16, true}, {DType::bf16, false}}) {
    Tensor w = leaf(ones({4, 4}, on()));
    SGD sgd({w}, {.lr = 1});
    LossScaler scaler(DynamicScale{.initial = 1024});
    const Autocast scope(dtype);
    scaler.backward(mean(linear(ones({2, 4}, on()), w)));
    EXPECT_EQ(w.grad().to_vector()[0], scaled ? 256 : 0.25f);
    EXPECT_TRUE(scaler.step(sgd).applied());
    EXPECT_EQ(w.to_vector()[0], 0.75f);
  }
}

TEST_P(Scaler, AnF16RegionHiddenInACheckpointIsScaled) {
  Tensor w = leaf(ones({4, 4}, on())), x = ones({2, 4}, on());
  SGD sgd({w}, {.lr = 1});
  LossScaler scaler(DynamicScale{.initial = 1024});
  const Autocast scope(DType::f16);
  // From outside only f32 goes in and comes out.
  scaler.backward(checkpoint([&](std::span<const Tensor> in) { return mean(linear(in[0], w)); }, {x}));
  EXPECT_EQ(w.grad().to_vector()[0], 256);
  EXPECT_TRUE(scaler.step(sgd).applied());
  EXPECT_EQ(w.to_vector()[0], 0.75f);
}

TEST_P(Scaler, DisabledDoesNothingButCheck) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 1}, {.enabled = false, .max_streak = 0});
  EXPECT_EQ(rig.run("...i."), Scales(5, 256));
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-2, -2, -2}));  // four unscaled steps, one skipped
  rig.scaler.backward(loss_with_gradients({rig.w}, {ones({3}, on())}));
  EXPECT_EQ(rig.w.grad().to_vector(), (std::vector<float>{1, 1, 1}));
  EXPECT_TRUE(rig.sgd.step().applied()) << "unscaled gradients need no scaler";
}

// ---- state --------------------------------------------------------------------------------------------------------------

void expect_same(const ScaleState& a, const ScaleState& b) {
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_EQ(a.hysteresis_left, b.hysteresis_left);
  EXPECT_EQ(a.clean_steps, b.clean_steps);
  EXPECT_EQ(a.streak, b.streak);
  EXPECT_EQ(a.skipped, b.skipped);
  EXPECT_EQ(a.total, b.total);
  EXPECT_EQ(a.bad_optimizers, b.bad_optimizers);
}

TEST_P(Scaler, ARestoredStateContinuesLikeAnUnbrokenRun) {
  const DynamicScale policy{.initial = 4096, .growth_interval = 3, .hysteresis = 2};
  const std::string before = "..i.....n.i", after = "i....ii...n.....";
  Rig unbroken(device(), policy);
  unbroken.run(before);
  const ScaleState saved = unbroken.scaler.state();
  const Scales expected = unbroken.run(after);
  const auto check = [&](Rig& resumed, const char* what) {
    EXPECT_EQ(resumed.run(after), expected) << what;
    expect_same(resumed.scaler.state(), unbroken.scaler.state());
  };
  Rig fresh(device(), policy);
  fresh.scaler.load_state(saved);  // before the first use
  expect_same(fresh.scaler.state(), saved);
  EXPECT_EQ(fresh.scaler.scale(), static_cast<double>(saved.scale));
  check(fresh, "loaded before the first use");
  Rig used(device(), policy);
  used.run("....i");
  used.scaler.load_state(saved);
  check(used, "loaded after use");
}

TEST_P(Scaler, StateBeforeTheFirstUseIsTheInitialOne) {
  const LossScaler scaler(DynamicScale{.initial = 512, .hysteresis = 3});
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_EQ(scaler.state().hysteresis_left, 3);
  expect_same(scaler.recent_state(), scaler.state());
}

TEST_P(Scaler, RecentStateIsTheNewestOneAfterAWait) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 2});
  rig.run(".i..");
  backend(device()).synchronize();
  expect_same(rig.scaler.recent_state(), rig.scaler.state());
}

TEST_P(Scaler, LoadStateRefusesWhatDoesNotFit) {
  LossScaler scaler(DynamicScale{.initial = 256, .hysteresis = 2, .floor = 2, .cap = 1024});
  const auto with = [&](auto change) {
    ScaleState state = scaler.state();
    change(state);
    return [&scaler, state] { scaler.load_state(state); };
  };
  for (const float bad : {0.0f, 1.0f, 2048.0f, -4.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    expect_error<ConfigError>(with([&](ScaleState& s) { s.scale = bad; }), {"LossScaler.load_state: scale", "outside [2, 1024]"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.clean_steps = -1; }), {"LossScaler.load_state: counters out of range", "-1 clean steps"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.hysteresis_left = 3; }), {"LossScaler.load_state", "hysteresis 3"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.hysteresis_left = -1; }), {"LossScaler.load_state", "hysteresis -1"});
  EXPECT_EQ(scaler.scale(), 256) << "a refused state changes nothing";
}

TEST_P(Scaler, ConstructorRefusesPoliciesThatCannotWork) {
  const auto make = [](DynamicScale policy) { return [policy] { const LossScaler scaler(policy); }; };
  expect_error<ConfigError>(make({.initial = 0}), {"LossScaler: initial must be positive and finite, got 0"});
  expect_error<ConfigError>(make({.initial = -2}), {"initial must be positive", "-2"});
  expect_error<ConfigError>(make({.initial = kInf}), {"initial must be positive and finite", "inf"});
  expect_error<ConfigError>(make({.initial = kNaN}), {"initial must be positive and finite", "nan"});
  expect_error<ConfigError>(make({.initial = 1000}), {"initial must be a power of two", "1000", "any_factor"});
  expect_error<ConfigError>(make({.growth = 1.5}), {"growth must be a power of two"});
  expect_error<ConfigError>(make({.growth = 0.5}), {"growth must be at least 1"});
  expect_error<ConfigError>(make({.backoff = 2}), {"backoff at most 1"});
  expect_error<ConfigError>(make({.backoff = 0}), {"backoff must be positive"});
  expect_error<ConfigError>(make({.growth_interval = 0}), {"growth_interval and hysteresis must be positive", "0 and 1"});
  expect_error<ConfigError>(make({.hysteresis = 0}), {"growth_interval and hysteresis must be positive"});
  expect_error<ConfigError>(make({.initial = 2, .floor = 4}), {"floor <= initial"});
  expect_error<ConfigError>(make({.initial = 4, .cap = 2}), {"initial <= cap"});
  expect_error<ConfigError>(make({.initial = 1, .floor = 0x1p-127}), {"2^-126 <= floor"});
  expect_error<ConfigError>(make({.cap = 0x1p128}), {"cap <= 2^127"});
  expect_error<ConfigError>([] { const LossScaler scaler(StaticScale{.scale = 0}); }, {"LossScaler: initial must be positive"});
  const LossScaler odd(DynamicScale{.initial = 1000, .growth = 1.5, .backoff = 0.7, .floor = 3, .cap = 1e5, .any_factor = true});
  EXPECT_EQ(odd.scale(), 1000);
}

TEST_P(Scaler, BackwardRefusesALossThatAScaleWouldSpoil) {
  LossScaler scaler;
  expect_error<AutogradError>([&] { scaler.backward({}); }, {"LossScaler.backward: the loss is undefined"});
  expect_error<DTypeError>([&] { scaler.backward(leaf(ones({}, on(DType::f16)))); }, {"LossScaler.backward: the loss must be f32", "f16[]@" + to_string(device())});
  expect_error<AutogradError>([&] { scaler.backward(ones({}, on())); }, {"backward: f32[]", "does not depend on a tensor that requires a gradient"});
  expect_error<ShapeError>([&] { scaler.backward(leaf(ones({2}, on()))); }, {"backward: the root must have one element", "f32[2]"});
}

// ---- model check --------------------------------------------------------------------------------------------------------

struct Setting {
  int exponent, interval, hysteresis;
  bool refill;
  int floor, cap;
};

/// The rule in integers, written from its description: scale = 2^exponent.
struct Specification {
  explicit Specification(const Setting& s) : set(s), exponent(s.exponent), patience(s.hysteresis) {}
  bool step(bool bad) {
    bool hopeless = false;
    if (bad) {
      run_of_clean = 0;
      ++run_of_bad;
      if (patience > 1) {
        --patience;
      } else {
        patience = 0;
        hopeless = exponent == set.floor;
        exponent = std::max(exponent - 1, set.floor);
      }
      return hopeless;
    }
    run_of_bad = 0;
    ++run_of_clean;
    const bool grows = run_of_clean == set.interval;
    if (grows) exponent = std::min(exponent + 1, set.cap);
    if (grows) run_of_clean = 0;
    if (grows || set.refill) patience = set.hysteresis;
    return false;
  }
  Setting set;
  int exponent, patience, run_of_clean = 0, run_of_bad = 0;
};

ScaleRule rule_of(const Setting& s) {
  return {.growth = 2, .backoff = 0.5, .growth_interval = s.interval, .hysteresis = s.hysteresis, .refill_hysteresis = s.refill,
          .floor = std::ldexp(1, s.floor), .cap = std::ldexp(1, s.cap)};
}
ScaleState state_of(const Setting& s) {
  ScaleState state;
  state.scale = std::ldexp(1.0f, s.exponent);
  state.hysteresis_left = s.hysteresis;
  return state;
}
bool agrees(const ScaleState& s, const Specification& m) {
  return s.scale == std::ldexp(1.0f, m.exponent) && s.clean_steps == m.run_of_clean && s.streak == m.run_of_bad && s.hysteresis_left == m.patience;
}

TEST(ScaleRuleModel, EverySequenceOfSixteenSteps) {
  std::vector<Setting> settings;
  for (const int interval : {1, 2, 3, 16, 17})
    for (const int hysteresis : {1, 2, 3})
      for (const bool refill : {true, false})
        for (const auto& [floor, cap] : {std::pair{0, 24}, {6, 10}, {8, 8}}) settings.push_back({8, interval, hysteresis, refill, floor, cap});
  std::int64_t steps = 0;
  for (const Setting& setting : settings) {
    const ScaleRule rule = rule_of(setting);
    for (unsigned sequence = 0; sequence < 65536; ++sequence) {
      ScaleState state = state_of(setting);
      Specification model(setting);
      for (int i = 0; i < 16; ++i, ++steps) {
        const bool bad = (sequence >> i & 1u) != 0;
        const bool floored = update_scale(rule, bad, state), hopeless = model.step(bad);
        ASSERT_TRUE(floored == hopeless && agrees(state, model))
            << "interval " << setting.interval << " hysteresis " << setting.hysteresis << " refill " << setting.refill << " floor " << setting.floor
            << " cap " << setting.cap << " sequence " << sequence << " step " << i << ": scale " << state.scale << ", expected 2^" << model.exponent;
      }
    }
  }
  std::printf("model check: %zu settings x 65536 sequences, %lld steps\n", settings.size(), static_cast<long long>(steps));
}

TEST(ScaleRuleModel, RandomLongSequences) {
  std::mt19937_64 random(seed());
  const auto draw = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); };
  for (int sequence = 0; sequence < 100000; ++sequence) {
    Setting setting{draw(-20, 20), draw(1, 12), draw(1, 5), draw(0, 1) == 1, 0, 0};
    setting.floor = draw(-30, setting.exponent);
    setting.cap = draw(setting.exponent, 30);
    const ScaleRule rule = rule_of(setting);
    ScaleState state = state_of(setting);
    Specification model(setting);
    const int odds = draw(1, 40);
    std::int64_t bad_steps = 0;
    for (int i = 0; i < 200; ++i) {
      const bool bad = draw(0, 40) >= odds;
      bad_steps += bad;
      ASSERT_TRUE(update_scale(rule, bad, state) == model.step(bad) && agrees(state, model)) << "sequence " << sequence << " step " << i;
    }
    ASSERT_EQ(state.skipped, bad_steps);
    ASSERT_EQ(state.total, 200);
  }
}

TEST_P(Scaler, TheWholeScalerAgreesWithTheSpecification) {
  std::mt19937_64 random(seed());
  for (const Setting& setting : {Setting{8, 3, 1, true, 0, 24}, {8, 2, 2, true, 6, 10}, {8, 2, 3, false, 5, 9}}) {
    Rig rig(device(), DynamicScale{.initial = std::ldexp(1, setting.exponent), .growth_interval = setting.interval, .hysteresis = setting.hysteresis,
                                   .refill_hysteresis = setting.refill, .floor = std::ldexp(1, setting.floor), .cap = std::ldexp(1, setting.cap)});
    Specification model(setting);
    std::int64_t applied = 0;
    for (int i = 0; i < 120; ++i) {
      const bool bad = random() % 3 == 0;
      const Verdict verdict = rig.step(bad ? "i-n"[random() % 3] : '.').verdict();
      const bool hopeless = model.step(bad);
      applied += bad ? 0 : 1;
      ASSERT_TRUE(agrees(rig.scaler.state(), model)) << "step " << i;
      ASSERT_EQ(verdict == Verdict::applied, !bad);
      ASSERT_EQ(verdict == Verdict::at_floor, hopeless);
      ASSERT_EQ(rig.w.to_vector()[0], -0.5f * static_cast<float>(applied));
    }
  }
}

}  // namespace
}  // namespace mantissa
