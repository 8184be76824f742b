// What optimizers keep: 16-bit working copies that are always the rounded masters, and moments that are saved
// and restored.

#include <algorithm>

#include "optimizer_problem.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::Adam;
using optim::AdamW;
using optim::Optimizer;
using optim::SGD;
using optim::SGDOptions;
using optim::StateDict;

class OptimizerState : public OnDevice {};
MT_ON_DEVICES(OptimizerState);

// ---- working copies
// -----------------------------------------------------------------------------------------------------

/// x rounded to nearest-even with `bits` fraction bits, least exponent `low`, and inf from `limit` on.
double rounded(double x, int bits, int low, double limit) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double quantum = std::ldexp(1, std::max(std::ilogb(x), low) - bits);
  const double y = std::nearbyint(x / quantum) * quantum;
  return std::abs(y) >= limit ? std::copysign(kInf, x) : std::copysign(y, x);
}

/// Whether every element of the working copy is the correctly rounded master.
::testing::AssertionResult is_rounded(const Tensor& master) {
  const Tensor& working = master.node()->leaf->working;
  if (!working.defined()) return ::testing::AssertionFailure() << "no working copy";
  const Values masters = master.to_vector<double>(), copies = working.to_vector<double>();
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const double expected =
        working.dtype() == DType::f16 ? rounded(masters[i], 10, -14, 65536) : rounded(masters[i], 7, -126, 0x1p128);
    if (copies[i] != expected || std::signbit(copies[i]) != std::signbit(expected))
      return ::testing::AssertionFailure() << working << " element " << i << ": " << masters[i] << " became "
                                           << copies[i] << ", expected " << expected;
  }
  return ::testing::AssertionSuccess();
}

TEST_P(OptimizerState, WorkingCopiesAreTheRoundedMastersWithoutACast) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool adam : {false, true}) {
      Problem problem(on());
      const auto make_copies = [&] {
        const Autocast scope(dtype);
        std::vector<Tensor> copies;
        for (const Tensor& p : problem.parameters) copies.push_back(autocast(Cast::low, p));
        return copies;
      };
      make_copies();
      const auto optimizer =
          adam ? std::unique_ptr<Optimizer>(new AdamW(problem.parameters, {.lr = 1e-3}))
               : std::unique_ptr<Optimizer>(new SGD(problem.parameters, {.lr = 1e-3, .momentum = 0.9}));
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < problem.parameters.size(); ++i) problem.give_gradient(i);
        const BackendCounters before = backend(device()).counters;
        const std::int64_t allocations = memory_stats(device()).source_allocations;
        const optim::StepResult result = optimizer->step();
        const std::vector<Tensor> copies = make_copies();  // up to date: nothing to do
        EXPECT_EQ(backend(device()).counters.casts, before.casts) << dtype;
        EXPECT_TRUE(step == 0 || memory_stats(device()).source_allocations == allocations);
        ASSERT_TRUE(result.applied());
        for (const Tensor& p : problem.parameters) ASSERT_TRUE(is_rounded(p)) << dtype << " step " << step;
        ASSERT_EQ(copies[0].dtype(), dtype);
      }
      const NoGrad off;
      problem.parameters[2].fill_(1.0 / 3);  // a change by anybody else is noticed
      make_copies();
      ASSERT_TRUE(is_rounded(problem.parameters[2]));
    }
  }
}

TEST_P(OptimizerState, RoundedCopiesReachTheEndsOfTheRange) {
  // Overflow to inf, the largest finite number, subnormals, halves to even, and both zeros.
  const Values masters{65519,   65520,   -65520,    65504,   1e30,  2048 + 1, 2048 + 3, 1 + 0x1p-11, 1 + 3 * 0x1p-11,
                       0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-26, 1e-30, 0.0,      -0.0,     3e38,        -1e-7};
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Tensor w = leaf(masters, on());
    {
      const Autocast scope(dtype);
      autocast(Cast::low, w);
    }
    SGD sgd({w}, {.lr = 1});
    w.set_grad(zeros({w.numel()}, on()));
    ASSERT_TRUE(sgd.step().applied());
    EXPECT_TRUE(is_rounded(w)) << dtype;
  }
}

TEST_P(OptimizerState,
       SmallUpdatesAreNotSwallowed) {  // bf16 weights at 1.0 with updates of 1e-3 never move without masters
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Tensor w = leaf(ones({768, 1}, on()));
    SGD sgd({w}, {.lr = 1e-3});
    const Tensor x = ones({1, 1}, on());
    for (int step = 0; step < 100; ++step) {
      const Autocast scope(dtype);
      backward(sum(linear(x, w)));
      ASSERT_TRUE(sgd.step().applied());
    }
    for (const float value : w.to_vector()) ASSERT_NEAR(value, 0.9, 1e-5) << dtype;
    EXPECT_TRUE(is_rounded(w));
  }
}

TEST_P(OptimizerState,
       AdamsEpsilonIsNotLostInSixteenBits) {  // 1e-8 is zero in f16: 0/0, or steps of any size
  Tensor w = leaf(ones({8, 1}, on()));
  AdamW adam({w}, {.lr = 1e-3, .weight_decay = 0});
  optim::LossScaler scaler(optim::DynamicScale{.initial = 1024});
  const Autocast scope(DType::f16);
  for (int step = 0; step < 3; ++step) {
    scaler.backward(sum(linear(full({1, 1}, step == 1 ? 0.0 : 1e-5, on()), w)));
    ASSERT_TRUE(scaler.step(adam).applied());
    for (const float value : w.to_vector()) ASSERT_TRUE(std::isfinite(value) && value <= 1 && value >= 0.996f) << value;
  }
  EXPECT_LT(w.to_vector()[0], 0.9995f) << "a gradient of 1e-5 moves the weight by about the rate";
}

// ---- saved state
// --------------------------------------------------------------------------------------------------------

template <class Make> void expect_round_trip(TensorOptions on, Make make) {
  Problem problem(on);
  auto optimizer = make(problem.parameters);
  const auto advance = [](Problem& p, Optimizer& o, int steps) {
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < p.parameters.size(); ++i) p.give_gradient(i);
      ASSERT_TRUE(o.step().applied());
    }
  };
  advance(problem, *optimizer, 3);
  Problem resumed(on);
  for (std::size_t i = 0; i < problem.parameters.size(); ++i) {
    const NoGrad off;
    resumed.parameters[i].copy_(problem.parameters[i]);
  }
  resumed.random = problem.random;
  const StateDict saved = optimizer->state_dict();
  advance(problem, *optimizer, 4);  // what was saved is a copy
  auto again = make(resumed.parameters);
  again->load_state_dict(saved);
  EXPECT_EQ(again->applied_steps(), 3);
  advance(resumed, *again, 4);
  for (std::size_t i = 0; i < problem.parameters.size(); ++i)
    ASSERT_EQ(bytes(resumed.parameters[i]), bytes(problem.parameters[i])) << i;
  const StateDict a = optimizer->state_dict(), b = again->state_dict();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    ASSERT_EQ(bytes(a[i].second), bytes(b[i].second)) << a[i].first;
  }
}

TEST_P(OptimizerState, ARestoredStateContinuesBitForBit) {
  using P = const std::vector<Tensor>&;
  expect_round_trip(on(), [](P p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.01}); });
  expect_round_trip(
      on(), [](P p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.5}); });
  expect_round_trip(on(), [](P p) { return std::make_unique<AdamW>(p); });
  expect_round_trip(on(), [](P p) {
    auto adam = std::make_unique<Adam>(p);
    adam->set_schedule(optim::cosine_decay(0.01, 6, 2));
    return adam;
  });
}

TEST_P(OptimizerState, StateNamesMomentsInParameterOrder) {
  Tensor a = leaf({1}, on()), b = leaf({1, 2}, on());
  const auto names = [](const Optimizer& o) {
    std::vector<std::string> all;
    for (const auto& [name, value] : o.state_dict()) all.push_back(name + " " + to_string(value));
    return all;
  };
  const std::string where = detail::message("@", device());
  EXPECT_EQ(names(SGD({a, b})), (std::vector<std::string>{"applied i64[]@cpu"}));
  EXPECT_EQ(names(SGD({a, b}, {.momentum = 0.5})),
            (std::vector<std::string>{"applied i64[]@cpu", "state1.0 f32[1]" + where, "state1.1 f32[2]" + where}));
  EXPECT_EQ(names(Adam({a, b})),
            (std::vector<std::string>{"applied i64[]@cpu", "state1.0 f32[1]" + where, "state2.0 f32[1]" + where,
                                      "state1.1 f32[2]" + where, "state2.1 f32[2]" + where}));
}

TEST_P(OptimizerState, AStateThatDoesNotFitIsRefusedAndChangesNothing) {
  Tensor a = leaf({1, 2}, on()), scalar = leaf(ones({}, on()));
  Adam adam({a, scalar}, {.lr = 0.1});
  a.set_grad(ones({2}, on()));
  scalar.set_grad(ones({}, on()));
  adam.step();
  const StateDict good = adam.state_dict();
  const auto snapshot = [&] {
    std::vector<Bytes> all;
    for (const auto& [name, value] : adam.state_dict()) all.push_back(bytes(value));
    return all;
  };
  const auto before = snapshot();
  const auto refuses = [&](StateDict bad, const std::vector<std::string>& parts) {
    expect_error<ConfigError>([&] { adam.load_state_dict(bad); }, parts);
    EXPECT_EQ(snapshot(), before) << parts[0];
  };
  const auto without = [&](const std::string& key) {
    StateDict bad = good;
    std::erase_if(bad, [&](const auto& entry) { return entry.first == key; });
    return bad;
  };
  const auto with = [&](const std::string& key, const Tensor& value) {
    StateDict bad = without(key);
    bad.emplace_back(key, value);
    return bad;
  };
  const std::string where = detail::message("@", device());
  refuses({}, {"load_state_dict: the state does not fit this optimizer", "missing applied", "missing state1.0",
               "missing state2.1"});
  refuses(without("applied"), {"missing applied"});
  refuses(without("state2.0"), {"missing state2.0"});
  refuses(with("state1.9", zeros({2})), {"unexpected state1.9"});
  refuses(with("momentum", zeros({2})), {"unexpected momentum"});
  refuses(with("state1.0", zeros({3})), {"state1.0 is f32[3]@cpu, expected f32[2]" + where});
  refuses(with("state2.1", zeros({1})), {"state2.1 is f32[1]@cpu, expected f32[]" + where});
  refuses(with("state1.0", {}), {"state1.0 is undefined"});
  refuses(with("state1.1", {}), {"state1.1 is undefined"});
  refuses(with("applied", {}), {"applied is undefined"});
  refuses(with("applied", zeros({2}, {DType::i64, cpu})), {"applied is i64[2]@cpu"});
  refuses(with("applied", from_vector(std::vector<std::int64_t>{-1}, {}, {DType::i64, cpu})), {"applied is -1"});
  StateDict many = with("state1.0", zeros({3}));
  many.emplace_back("extra", zeros({1}));
  std::erase_if(many, [](const auto& entry) { return entry.first == "state2.1"; });
  refuses(many, {"state1.0 is f32[3]@cpu", "unexpected extra", "missing state2.1"});
  adam.load_state_dict(good);
  EXPECT_EQ(snapshot(), before);
}

}  // namespace
}  // namespace mantissa
