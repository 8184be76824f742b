// The loss scaler's saved state, and the policies and losses that it refuses.

#include "scaler_rig.h"

namespace mantissa {
namespace {

using namespace testing;

class ScalerState : public OnDevice {};
MT_ON_DEVICES(ScalerState);

void expect_same(const ScaleState& a, const ScaleState& b) {
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_EQ(a.hysteresis_left, b.hysteresis_left);
  EXPECT_EQ(a.clean_steps, b.clean_steps);
  EXPECT_EQ(a.streak, b.streak);
  EXPECT_EQ(a.skipped, b.skipped);
  EXPECT_EQ(a.total, b.total);
  EXPECT_EQ(a.bad_optimizers, b.bad_optimizers);
}

TEST_P(ScalerState, ARestoredStateContinuesLikeAnUnbrokenRun) {
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

TEST_P(ScalerState, StateBeforeTheFirstUseIsTheInitialOne) {
  const LossScaler scaler(DynamicScale{.initial = 512, .hysteresis = 3});
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_EQ(scaler.state().hysteresis_left, 3);
  expect_same(scaler.recent_state(), scaler.state());
}

TEST_P(ScalerState, RecentStateIsTheNewestOneAfterAWait) {
  Rig rig(device(), DynamicScale{.initial = 256, .growth_interval = 2});
  rig.run(".i..");
  backend(device()).synchronize();
  expect_same(rig.scaler.recent_state(), rig.scaler.state());
}

TEST_P(ScalerState, LoadStateRefusesWhatDoesNotFit) {
  LossScaler scaler(DynamicScale{.initial = 256, .hysteresis = 2, .floor = 2, .cap = 1024});
  const auto with = [&](auto change) {
    ScaleState state = scaler.state();
    change(state);
    return [&scaler, state] { scaler.load_state(state); };
  };
  for (const float bad :
       {0.0f, 1.0f, 2048.0f, -4.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    expect_error<ConfigError>(with([&](ScaleState& s) { s.scale = bad; }),
                              {"LossScaler.load_state: scale", "outside [2, 1024]"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.clean_steps = -1; }),
                            {"LossScaler.load_state: counters out of range", "-1 clean steps"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.hysteresis_left = 3; }),
                            {"LossScaler.load_state", "hysteresis 3"});
  expect_error<ConfigError>(with([](ScaleState& s) { s.hysteresis_left = -1; }),
                            {"LossScaler.load_state", "hysteresis -1"});
  EXPECT_EQ(scaler.scale(), 256) << "a refused state changes nothing";
}

TEST_P(ScalerState, ConstructorRefusesPoliciesThatCannotWork) {
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
  expect_error<ConfigError>(make({.growth_interval = 0}),
                            {"growth_interval and hysteresis must be positive", "0 and 1"});
  expect_error<ConfigError>(make({.hysteresis = 0}), {"growth_interval and hysteresis must be positive"});
  expect_error<ConfigError>(make({.initial = 2, .floor = 4}), {"floor <= initial"});
  expect_error<ConfigError>(make({.initial = 4, .cap = 2}), {"initial <= cap"});
  expect_error<ConfigError>(make({.initial = 1, .floor = 0x1p-127}), {"2^-126 <= floor"});
  expect_error<ConfigError>(make({.cap = 0x1p128}), {"cap <= 2^127"});
  expect_error<ConfigError>([] { const LossScaler scaler(StaticScale{.scale = 0}); },
                            {"LossScaler: initial must be positive"});
  const LossScaler odd(
      DynamicScale{.initial = 1000, .growth = 1.5, .backoff = 0.7, .floor = 3, .cap = 1e5, .any_factor = true});
  EXPECT_EQ(odd.scale(), 1000);
}

TEST_P(ScalerState, BackwardRefusesALossThatAScaleWouldSpoil) {
  LossScaler scaler;
  expect_error<AutogradError>([&] { scaler.backward({}); }, {"LossScaler.backward: the loss is undefined"});
  expect_error<DTypeError>([&] { scaler.backward(leaf(ones({}, on(DType::f16)))); },
                           {"LossScaler.backward: the loss must be f32", "f16[]@" + to_string(device())});
  expect_error<AutogradError>([&] { scaler.backward(ones({}, on())); },
                              {"backward: f32[]", "does not depend on a tensor that requires a gradient"});
  expect_error<ShapeError>([&] { scaler.backward(leaf(ones({2}, on()))); },
                           {"backward: the root must have one element", "f32[2]"});
}

}  // namespace
}  // namespace mantissa
