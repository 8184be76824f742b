// Conformance of the loss scaler: exact scales after scripted sequences of clean and bad steps, with the
// scenarios of PyTorch's and DeepSpeed's suites. The rule itself is model-checked in scale_rule_test.cpp.

#include <algorithm>

#include "scaler_rig.h"

namespace mantissa {
namespace {

using namespace testing;

class Scaler : public OnDevice {};
MT_ON_DEVICES(Scaler);

TEST_P(Scaler, GrowsOnExactlyTheNthCleanStep) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 1}).run("..."), (Scales{512, 1024, 2048}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 2}).run("....."),
            (Scales{256, 512, 512, 1024, 1024}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 5}).run("..........."),
            (Scales{256, 256, 256, 256, 512, 512, 512, 512, 512, 1024, 1024}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth = 8, .growth_interval = 2}).run(".."),
            (Scales{256, 2048}));
}

TEST_P(Scaler, AnOverflowHalvesTheScaleAndRestartsTheCount) {
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 3}).run("..i..."),
            (Scales{256, 256, 128, 128, 128, 256}));
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
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 8, .backoff = 0.25, .growth_interval = 9, .floor = 4}).run("ii"),
            (Scales{4, 4}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 4, .growth_interval = 1, .cap = 16}).run("....i."),
            (Scales{8, 16, 16, 16, 8, 16}));
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 8, .growth = 4, .growth_interval = 1, .cap = 16}).run(".."),
            (Scales{16, 16}));
}

// ---- DeepSpeed's overflow list
// ------------------------------------------------------------------------------------------

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
  EXPECT_EQ(Rig(device(), DynamicScale{.initial = 256, .growth_interval = 2}).run("in...i"),
            (Scales{128, 64, 64, 128, 128, 64}));
}

TEST_P(Scaler, PyTorchEndToEnd) {  // 4 batches, inf in the second: 128 growth^3 backoff
  Rig rig(device(), DynamicScale{.initial = 128, .growth_interval = 1});
  EXPECT_EQ(rig.run(".i..").back(), 128 * 8 * 0.5);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-1.5, -1.5, -1.5}));
  EXPECT_EQ(rig.sgd.applied_steps(), 3);
}

// ---- hysteresis
// ---------------------------------------------------------------------------------------------------------

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

// ---- what must not move the scale
// ---------------------------------------------------------------------------------------

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

TEST_P(Scaler,
       TheSmallestFloorHasAFiniteReciprocal) {  // pytorch#99640: 1/scale was inf, every step an "overflow"
  Rig rig(device(), DynamicScale{.initial = 0x1p-125, .growth_interval = 9, .floor = 0x1p-126});
  EXPECT_EQ(rig.run("iii"), (Scales{0x1p-126, 0x1p-126, 0x1p-126}));
  EXPECT_EQ(rig.step('.').verdict(), Verdict::applied);
  EXPECT_EQ(rig.w.to_vector(), (std::vector<float>{-0.5, -0.5, -0.5}));
}

// ---- persistent overflow
// ------------------------------------------------------------------------------------------------

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
  expect_error<NonFiniteError>([&] { rig.step('n'); },
                               {"LossScaler: 40 steps in a row were skipped", "skipped at the floor", "3 NaN", "0 inf",
                                "at scale 1", "floor 1", "not a scaling problem", "learning rate"});
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

// ---- several optimizers under one scale
// ---------------------------------------------------------------------------------

struct TwoOptimizers {
  explicit TwoOptimizers(Device device, DynamicScale policy = {.initial = 256, .growth_interval = 2})
      : a(leaf(zeros({2}, {DType::f32, device}))),
        b(leaf(zeros({2}, {DType::f32, device}))),
        first({a}, {.lr = 1}),
        second({b}, {.lr = 1}),
        scaler(policy, kNeverStop) {}
  /// Gradients of a and b; NaN stands for none.
  std::vector<Verdict> step(double ga, double gb, bool swapped = false) {
    const auto g = [&](double value) {
      return std::isnan(value) ? Tensor{} : full({2}, value, {DType::f32, a.device()});
    };
    scaler.backward(loss_with_gradients({a, b}, {g(ga), g(gb)}));
    std::vector<Verdict> verdicts;
    for (const auto& result : swapped ? scaler.step({&second, &first}) : scaler.step({&first, &second}))
      verdicts.push_back(result.verdict());
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

// ---- where the bad value is
// ---------------------------------------------------------------------------------------------

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
    for (const std::int64_t at :
         {std::int64_t{0}, n / 2, n - 1, n - n % 8, n - n % 4, std::int64_t{16383}, std::int64_t{16384}}) {
      if (at >= n) continue;
      for (const double bad : {kInf, -kInf, kNaN}) {
        scaler.backward(loss_with_gradients(parameters, gradients));
        poke(parameters[i].grad(), at,
             bad);  // spoilt after backward: still found, the check reads what the update would use
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

// ---- graphs that need no scale
// ------------------------------------------------------------------------------------------

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

}  // namespace
}  // namespace mantissa
