// Optimizers against independent loops in f64, schedules against their formulas, working copies, saved state.

#include <algorithm>
#include <random>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;
using optim::Adam;
using optim::AdamOptions;
using optim::AdamW;
using optim::Optimizer;
using optim::ParamGroup;
using optim::SGD;
using optim::SGDOptions;
using optim::StateDict;

using Values = std::vector<double>;

/// What one parameter should become, in f64, straight from the papers' update rules.
struct Reference {
  explicit Reference(Values start, double scale = 1, double weight_decay = 0)
      : w(std::move(start)), m(w.size()), v(w.size()), lr_scale(scale), decay(weight_decay) {}

  void sgd(const Values& g, const SGDOptions& o, double lr) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      double d = g[i] + decay * w[i];
      if (o.momentum > 0) {
        m[i] = steps == 0 ? d : o.momentum * m[i] + (1 - o.dampening) * d;
        d = o.nesterov ? d + o.momentum * m[i] : m[i];
      }
      w[i] -= lr * lr_scale * d;
    }
    ++steps;
  }
  void adam(const Values& g, const AdamOptions& o, double lr, int t, bool decoupled) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      if (decoupled) w[i] *= 1 - lr * lr_scale * decay;
      const double d = decoupled ? g[i] : g[i] + decay * w[i];
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * d;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * d * d;
      const double mean = m[i] / (1 - std::pow(o.beta1, t)), square = v[i] / (1 - std::pow(o.beta2, t));
      w[i] -= lr * lr_scale * mean / (std::sqrt(square) + o.eps);
    }
  }
  Values w, m, v;
  double lr_scale, decay;
  int steps = 0;
};

/// Parameters of awkward sizes, one of them stored channels-last, with fresh gradients for each step.
struct Problem {
  explicit Problem(TensorOptions options, std::uint64_t s = seed()) : random(s), on(options) {
    for (const Shape& shape : {Shape{1}, Shape{5}, Shape{3, 7}, Shape{1027}, Shape{2, 3, 5, 4}, Shape{16384 + 7}}) {
      Tensor x = empty(shape, on);
      if (shape.rank() == 4) x = x.view(shape, channels_last_strides(shape), 0);
      x.copy_(from_vector(draw(x.numel()), shape, {on.dtype, cpu}));
      parameters.push_back(leaf(x));
    }
  }
  Values draw(std::int64_t n) {
    std::normal_distribution<double> normal;
    Values values(static_cast<std::size_t>(n));
    for (double& x : values) x = static_cast<double>(static_cast<float>(normal(random)));
    return values;
  }
  Values give_gradient(std::size_t i) {
    const Values g = draw(parameters[i].numel());
    parameters[i].set_grad(from_vector(g, parameters[i].shape(), on));
    return g;
  }
  std::mt19937_64 random;
  TensorOptions on;
  std::vector<Tensor> parameters;
};

void expect_close(const std::vector<Tensor>& parameters, const std::vector<Reference>& references, double tolerance, const std::string& what) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Values got = parameters[i].to_vector<double>();
    for (std::size_t j = 0; j < got.size(); ++j)
      ASSERT_LE(std::abs(got[j] - references[i].w[j]), tolerance * (1 + std::abs(references[i].w[j])))
          << what << ", parameter " << i << ", element " << j << ": " << got[j] << ", expected " << references[i].w[j];
  }
}

class Optimizers : public OnDevice {
 protected:
  static std::vector<DType> dtypes() { return device().is_cpu() ? std::vector{DType::f32, DType::f64} : std::vector{DType::f32}; }
  static double tolerance(DType dtype) { return dtype == DType::f64 ? 1e-13 : 2e-6; }
};
MT_ON_DEVICES(Optimizers);

/// The parameters dealt into two groups with their own factors.
std::vector<ParamGroup> two_groups(const std::vector<Tensor>& p) { return {{{p[0], p[2], p[4]}, 0.5, 0.25}, {{p[1], p[3], p[5]}, 2, 0.0625}}; }
std::vector<Tensor> in_order(const std::vector<ParamGroup>& groups) {
  std::vector<Tensor> all;
  for (const ParamGroup& group : groups) all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  return all;
}
std::vector<Reference> references_of(const std::vector<ParamGroup>& groups) {
  std::vector<Reference> all;
  for (const ParamGroup& group : groups)
    for (const Tensor& p : group.parameters) all.emplace_back(p.to_vector<double>(), group.lr_scale, group.weight_decay);
  return all;
}

// Rates and decays are dyadic, so that they are the same number in f32 and f64.
TEST_P(Optimizers, SgdFollowsItsRule) {
  for (const DType dtype : dtypes()) {
    for (const SGDOptions& o : {SGDOptions{.lr = 0.0625}, SGDOptions{.lr = 0.0625, .momentum = 0.9}, SGDOptions{.lr = 0.0625, .momentum = 0.5, .dampening = 0.25},
                                SGDOptions{.lr = 0.0625, .momentum = 0.9, .nesterov = true}}) {
      Problem problem(on(dtype));
      const auto groups = two_groups(problem.parameters);
      problem.parameters = in_order(groups);
      auto references = references_of(groups);
      SGD sgd(groups, o);
      for (int step = 0; step < 12; ++step) {
        for (std::size_t i = 0; i < references.size(); ++i) references[i].sgd(problem.give_gradient(i), o, o.lr);
        ASSERT_TRUE(sgd.step().applied());
      }
      expect_close(problem.parameters, references, tolerance(dtype), detail::message("SGD ", dtype, " momentum ", o.momentum, " nesterov ", o.nesterov));
    }
  }
}

TEST_P(Optimizers, AdamAndAdamWFollowTheirRules) {
  for (const DType dtype : dtypes()) {
    for (const bool decoupled : {false, true}) {
      for (const AdamOptions& o : {AdamOptions{.lr = 0.015625}, AdamOptions{.lr = 0.015625, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.0625}, AdamOptions{.lr = 0.015625, .beta1 = 0}}) {
        Problem problem(on(dtype));
        const auto groups = two_groups(problem.parameters);
        problem.parameters = in_order(groups);
        auto references = references_of(groups);
        const auto adam = decoupled ? std::unique_ptr<Optimizer>(new AdamW(groups, o)) : std::unique_ptr<Optimizer>(new Adam(groups, o));
        for (int step = 1; step <= 12; ++step) {
          for (std::size_t i = 0; i < references.size(); ++i) references[i].adam(problem.give_gradient(i), o, o.lr, step, decoupled);
          ASSERT_TRUE(adam->step().applied());
        }
        expect_close(problem.parameters, references, dtype == DType::f64 ? 1e-12 : 4e-6, detail::message("Adam ", dtype, " decoupled ", decoupled, " beta1 ", o.beta1));
      }
    }
  }
}

TEST_P(Optimizers, TheFirstAdamStepIsTheRateTimesTheSign) {  // bias correction makes it so
  Tensor w = leaf({1, 1, 1}, on());
  Adam adam({w}, {.lr = 0.25, .eps = 0});
  w.set_grad(from_vector(Values{1e-6, -3, 1e4}, {3}, on()));
  adam.step();
  const Values got = w.to_vector<double>();
  EXPECT_NEAR(got[0], 0.75, 1e-6);
  EXPECT_NEAR(got[1], 1.25, 1e-6);
  EXPECT_NEAR(got[2], 0.75, 1e-6);
}

TEST_P(Optimizers, SkippedStepsDoNotCountInTheBiasCorrection) {
  const auto run = [&](bool with_skips) {
    Tensor w = leaf({1, -2, 3}, on());
    AdamW adam(std::vector<ParamGroup>{{{w}, 1, 0.125}}, {.lr = 0.0625});
    for (int step = 0; step < 6; ++step) {
      if (with_skips) {
        w.set_grad(from_vector(Values{1, step % 2 ? kNaN : kInf, 1}, {3}, on()));
        EXPECT_FALSE(adam.step().applied());
      }
      w.set_grad(from_vector(Values{0.5 * step, 1, -0.25}, {3}, on()));
      EXPECT_EQ(adam.step().applied_steps(), step + 1);
    }
    return bytes(w);
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_P(Optimizers, ParametersWithoutGradientAreLeftAlone) {
  for (const bool adam : {false, true}) {
    Tensor used = leaf({1, 2, 3}, on()), unused = leaf({4, 5}, on()), frozen = leaf({6}, on());
    const std::vector<ParamGroup> groups{{{unused, used, frozen}, 1, 0.25}};
    const auto optimizer = adam ? std::unique_ptr<Optimizer>(new AdamW(groups, AdamOptions{.lr = 0.125}))
                                : std::unique_ptr<Optimizer>(new SGD(groups, SGDOptions{.lr = 0.125, .momentum = 0.5}));
    const auto moments = [&] {
      std::vector<Bytes> all;
      for (const auto& [name, value] : optimizer->state_dict())
        if (name.ends_with(".0") || name.ends_with(".2")) all.push_back(bytes(value));
      return all;
    };
    const auto before = std::tuple(bytes(unused), bytes(frozen), moments());
    const auto used_before = bytes(used);
    for (int step = 0; step < 3; ++step) {
      used.set_grad(ones({3}, on()));
      frozen.set_grad(ones({1}, on()));
      frozen.set_requires_grad(false);
      ASSERT_TRUE(optimizer->step().applied());
      frozen.set_requires_grad(true);
    }
    EXPECT_EQ(std::tuple(bytes(unused), bytes(frozen), moments()), before) << "decay and moments included";
    EXPECT_NE(bytes(used), used_before);
    unused.set_grad(ones({2}, on()));  // and one that comes late is updated from then on
    ASSERT_TRUE(optimizer->step().applied());
    EXPECT_NE(bytes(unused), std::get<0>(before));
  }
}

TEST_P(Optimizers, AdamWDecaysMatricesOnly) {
  Tensor matrix = leaf(ones({2, 2}, on())), vector = leaf(ones({2}, on()));
  AdamW adam({vector, matrix}, {.lr = 0.5, .weight_decay = 0.25});
  vector.set_grad(zeros({2}, on()));
  matrix.set_grad(zeros({2, 2}, on()));
  ASSERT_TRUE(adam.step().applied());
  EXPECT_EQ(vector.to_vector()[0], 1);
  EXPECT_EQ(matrix.to_vector()[0], 0.875f);
  EXPECT_EQ(adam.parameters().size(), 2u);
}

TEST_P(Optimizers, GroupsMayChangeTheirFactorsBetweenSteps) {
  Tensor w = leaf({8}, on());
  SGD sgd({w}, {.lr = 1});
  w.set_grad(ones({1}, on()));
  sgd.step();
  sgd.groups()[0].lr_scale = 0.5;
  w.set_grad(ones({1}, on()));
  sgd.step();
  EXPECT_EQ(w.item(), 6.5);
  sgd.groups()[0].weight_decay = 2;
  w.set_grad(zeros({1}, on()));
  sgd.step();
  EXPECT_EQ(w.item(), 0);
}

// ---- schedules ----------------------------------------------------------------------------------------------------------

TEST_P(Optimizers, SchedulesFollowTheirFormulas) {
  constexpr double kPi = 3.14159265358979323846;
  struct Case {
    const char* name;
    Schedule schedule;
    std::function<double(double)> rate;  // of applied steps
  };
  const double lr = 0.3;
  const std::vector<Case> cases{
      {"constant", optim::constant(lr), [=](double) { return lr; }},
      {"constant, warm-up", optim::constant(lr, 4), [=](double t) { return t < 4 ? lr * (t + 1) / 4 : lr; }},
      {"linear", optim::linear_decay(lr, 10), [=](double t) { return t < 10 ? lr * (1 - t / 10) : 0; }},
      {"linear, warm-up, end", optim::linear_decay(lr, 12, 2, 0.1), [=](double t) { return t < 2 ? lr * (t + 1) / 2 : t < 12 ? lr - (lr - 0.1) * (t - 2) / 10 : 0.1; }},
      {"cosine", optim::cosine_decay(lr, 10), [=](double t) { return t < 10 ? lr * (1 + std::cos(kPi * t / 10)) / 2 : 0; }},
      {"cosine, warm-up, end", optim::cosine_decay(lr, 11, 3, 0.03), [=](double t) { return t < 3 ? lr * (t + 1) / 3 : t < 11 ? 0.03 + (lr - 0.03) * (1 + std::cos(kPi * (t - 3) / 8)) / 2 : 0.03; }},
      {"step", optim::step_decay(lr, 3, 0.5), [=](double t) { return lr * std::pow(0.5, std::floor(t / 3)); }},
      {"step, warm-up", optim::step_decay(lr, 2, 0.1, 5), [=](double t) { return t < 5 ? lr * (t + 1) / 5 : lr * std::pow(0.1, std::floor((t - 5) / 2)); }},
  };
  for (const Case& c : cases) {
    Tensor w = leaf({0}, on());
    SGD sgd({w}, {.lr = 1});
    sgd.set_schedule(c.schedule);
    double expected = 0;
    for (int t = 0; t < 16; ++t) {
      if (t % 3 == 1) {  // a skipped step does not advance the schedule
        w.set_grad(full({1}, kInf, on()));
        EXPECT_FALSE(sgd.step().applied());
      }
      w.set_grad(ones({1}, on()));
      const optim::StepResult result = sgd.step();
      EXPECT_NEAR(result.learning_rate(), c.rate(t), 1e-7 * lr) << c.name << " at " << t;
      expected -= c.rate(t);
    }
    EXPECT_NEAR(w.item(), expected, 2e-6) << c.name;
    EXPECT_EQ(sgd.applied_steps(), 16);
  }
}

TEST_P(Optimizers, AScheduleMayBeReplacedAndTheRateSet) {
  Tensor w = leaf({0}, on());
  SGD sgd({w}, {.lr = 1});
  for (const double lr : {1.0, 0.5, 0.0}) {
    sgd.set_lr(lr);
    EXPECT_EQ(sgd.schedule().base, lr);
    w.set_grad(ones({1}, on()));
    EXPECT_EQ(sgd.step().learning_rate(), lr);
  }
  EXPECT_EQ(w.item(), -1.5);
}

// ---- working copies -----------------------------------------------------------------------------------------------------

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
    const double expected = working.dtype() == DType::f16 ? rounded(masters[i], 10, -14, 65536) : rounded(masters[i], 7, -126, 0x1p128);
    if (copies[i] != expected || std::signbit(copies[i]) != std::signbit(expected))
      return ::testing::AssertionFailure() << working << " element " << i << ": " << masters[i] << " became " << copies[i] << ", expected " << expected;
  }
  return ::testing::AssertionSuccess();
}

TEST_P(Optimizers, WorkingCopiesAreTheRoundedMastersWithoutACast) {
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
      const auto optimizer = adam ? std::unique_ptr<Optimizer>(new AdamW(problem.parameters, {.lr = 1e-3}))
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

TEST_P(Optimizers, RoundedCopiesReachTheEndsOfTheRange) {
  // Overflow to inf, the largest finite number, subnormals, halves to even, and both zeros.
  const Values masters{65519, 65520, -65520, 65504, 1e30, 2048 + 1, 2048 + 3, 1 + 0x1p-11, 1 + 3 * 0x1p-11, 0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-26, 1e-30, 0.0, -0.0, 3e38, -1e-7};
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

TEST_P(Optimizers, SmallUpdatesAreNotSwallowed) {  // bf16 weights at 1.0 with updates of 1e-3 never move without masters
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

TEST_P(Optimizers, AdamsEpsilonIsNotLostInSixteenBits) {  // 1e-8 is zero in f16: 0/0, or steps of any size
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

// ---- saved state --------------------------------------------------------------------------------------------------------

template <class Make>
void expect_round_trip(TensorOptions on, Make make) {
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
  for (std::size_t i = 0; i < problem.parameters.size(); ++i) ASSERT_EQ(bytes(resumed.parameters[i]), bytes(problem.parameters[i])) << i;
  const StateDict a = optimizer->state_dict(), b = again->state_dict();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    ASSERT_EQ(bytes(a[i].second), bytes(b[i].second)) << a[i].first;
  }
}

TEST_P(Optimizers, ARestoredStateContinuesBitForBit) {
  using P = const std::vector<Tensor>&;
  expect_round_trip(on(), [](P p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.01}); });
  expect_round_trip(on(), [](P p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.5}); });
  expect_round_trip(on(), [](P p) { return std::make_unique<AdamW>(p); });
  expect_round_trip(on(), [](P p) {
    auto adam = std::make_unique<Adam>(p);
    adam->set_schedule(optim::cosine_decay(0.01, 6, 2));
    return adam;
  });
}

TEST_P(Optimizers, StateNamesMomentsInParameterOrder) {
  Tensor a = leaf({1}, on()), b = leaf({1, 2}, on());
  const auto names = [](const Optimizer& o) {
    std::vector<std::string> all;
    for (const auto& [name, value] : o.state_dict()) all.push_back(name + " " + to_string(value));
    return all;
  };
  const std::string where = detail::message("@", device());
  EXPECT_EQ(names(SGD({a, b})), (std::vector<std::string>{"applied i64[]@cpu"}));
  EXPECT_EQ(names(SGD({a, b}, {.momentum = 0.5})), (std::vector<std::string>{"applied i64[]@cpu", "state1.0 f32[1]" + where, "state1.1 f32[2]" + where}));
  EXPECT_EQ(names(Adam({a, b})), (std::vector<std::string>{"applied i64[]@cpu", "state1.0 f32[1]" + where, "state2.0 f32[1]" + where,
                                                          "state1.1 f32[2]" + where, "state2.1 f32[2]" + where}));
}

TEST_P(Optimizers, AStateThatDoesNotFitIsRefusedAndChangesNothing) {
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
  refuses({}, {"load_state_dict: the state does not fit this optimizer", "missing applied", "missing state1.0", "missing state2.1"});
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

TEST(OptimizersOnTheGpu, AgreeWithTheCpu) {
  MT_NEEDS_GPU();
  for (int kind = 0; kind < 4; ++kind) {
    std::vector<std::vector<Tensor>> results;
    for (const Device device : devices()) {
      Problem problem({DType::f32, device}, seed());
      std::unique_ptr<Optimizer> optimizer;
      if (kind == 0) optimizer = std::make_unique<SGD>(problem.parameters, SGDOptions{.lr = 0.1, .weight_decay = 0.01});
      if (kind == 1) optimizer = std::make_unique<SGD>(problem.parameters, SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true});
      if (kind == 2) optimizer = std::make_unique<Adam>(problem.parameters, AdamOptions{.weight_decay = 0.01});
      if (kind == 3) optimizer = std::make_unique<AdamW>(problem.parameters);
      for (int step = 0; step < 10; ++step) {
        for (std::size_t i = 0; i < problem.parameters.size(); ++i) problem.give_gradient(i);
        optimizer->clip_grad_norm(100);
        if (step % 2) optimizer->clip_grad_value(1.5);
        ASSERT_TRUE(optimizer->step().applied());
      }
      results.push_back(problem.parameters);
    }
    double worst = 0;
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      const Values a = results[0][i].to_vector<double>(), b = results[1][i].to_vector<double>();
      for (std::size_t j = 0; j < a.size(); ++j) worst = std::max(worst, std::abs(a[j] - b[j]) / (1 + std::abs(a[j])));
    }
    std::printf("optimizer %d: CPU and GPU differ by at most %.2e\n", kind, worst);
    EXPECT_LT(worst, 2e-6);  // the same formulas; contractions to fused multiply-adds may differ
  }
}

}  // namespace
}  // namespace mantissa
