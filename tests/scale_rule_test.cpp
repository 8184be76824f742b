// Model check: the rule of the loss scale against an independent specification in integers, alone and through
// the whole scaler on every device.

#include <random>

#include "scaler_rig.h"

namespace mantissa {
namespace {

using namespace testing;

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
  return {.growth = 2,
          .backoff = 0.5,
          .growth_interval = s.interval,
          .hysteresis = s.hysteresis,
          .refill_hysteresis = s.refill,
          .floor = std::ldexp(1, s.floor),
          .cap = std::ldexp(1, s.cap)};
}
ScaleState state_of(const Setting& s) {
  ScaleState state;
  state.scale = std::ldexp(1.0f, s.exponent);
  state.hysteresis_left = s.hysteresis;
  return state;
}
bool agrees(const ScaleState& s, const Specification& m) {
  return s.scale == std::ldexp(1.0f, m.exponent) && s.clean_steps == m.run_of_clean && s.streak == m.run_of_bad &&
         s.hysteresis_left == m.patience;
}

TEST(ScaleRuleModel, EverySequenceOfSixteenSteps) {
  std::vector<Setting> settings;
  for (const int interval : {1, 2, 3, 16, 17})
    for (const int hysteresis : {1, 2, 3})
      for (const bool refill : {true, false})
        for (const auto& [floor, cap] : {std::pair{0, 24}, {6, 10}, {8, 8}})
          settings.push_back({8, interval, hysteresis, refill, floor, cap});
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
            << "interval " << setting.interval << " hysteresis " << setting.hysteresis << " refill " << setting.refill
            << " floor " << setting.floor << " cap " << setting.cap << " sequence " << sequence << " step " << i
            << ": scale " << state.scale << ", expected 2^" << model.exponent;
      }
    }
  }
  std::printf("model check: %zu settings x 65536 sequences, %lld steps\n", settings.size(),
              static_cast<long long>(steps));
}

TEST(ScaleRuleModel, RandomLongSequences) {
  std::mt19937_64 random(seed());
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
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
      ASSERT_TRUE(update_scale(rule, bad, state) == model.step(bad) && agrees(state, model))
          << "sequence " << sequence << " step " << i;
    }
    ASSERT_EQ(state.skipped, bad_steps);
    ASSERT_EQ(state.total, 200);
  }
}

class ScaleRuleOnDevice : public OnDevice {};
MT_ON_DEVICES(ScaleRuleOnDevice);

TEST_P(ScaleRuleOnDevice, TheWholeScalerAgreesWithTheSpecification) {
  std::mt19937_64 random(seed());
  for (const Setting& setting : {Setting{8, 3, 1, true, 0, 24}, {8, 2, 2, true, 6, 10}, {8, 2, 3, false, 5, 9}}) {
    Rig rig(device(), DynamicScale{.initial = std::ldexp(1, setting.exponent),
                                   .growth_interval = setting.interval,
                                   .hysteresis = setting.hysteresis,
                                   .refill_hysteresis = setting.refill,
                                   .floor = std::ldexp(1, setting.floor),
                                   .cap = std::ldexp(1, setting.cap)});
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
