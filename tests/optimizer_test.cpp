// Optimizers against independent loops in f64, schedules against their formulas.

#include <algorithm>

#include "optimizer_problem.h"

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

void expect_close(const std::vector<Tensor>& parameters, const std::vector<Reference>& references, double tolerance,
                  const std::string& what) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Values got = parameters[i].to_vector<double>();
    for (std::size_t j = 0; j < got.size(); ++j)
      ASSERT_LE(std::abs(got[j] - references[i].w[j]), tolerance * (1 + std::abs(references[i].w[j])))
          << what << ", parameter " << i << ", element " << j << ": " << got[j] << ", expected " << references[i].w[j];
  }
}

class Optimizers : public OnDevice {
 protected:
  static std::vector<DType> dtypes() {
    return device().is_cpu() ? std::vector{DType::f32, DType::f64} : std::vector{DType::f32};
  }
  static double tolerance(DType dtype) { return dtype == DType::f64 ? 1e-13 : 2e-6; }
};
MT_ON_DEVICES(Optimizers);

/// The parameters dealt into two groups with their own factors.
std::vector<ParamGroup> two_groups(const std::vector<Tensor>& p) {
  return {{{p[0], p[2], p[4]}, 0.5, 0.25}, {{p[1], p[3], p[5]}, 2, 0.0625}};
}
std::vector<Tensor> in_order(const std::vector<ParamGroup>& groups) {
  std::vector<Tensor> all;
  for (const ParamGroup& group : groups) all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  return all;
}
std::vector<Reference> references_of(const std::vector<ParamGroup>& groups) {
  std::vector<Reference> all;
  for (const ParamGroup& group : groups)
    for (const Tensor& p : group.parameters)
      all.emplace_back(p.to_vector<double>(), group.lr_scale, group.weight_decay);
  return all;
}

// Rates and decays are dyadic, so that they are the same number in f32 and f64.
TEST_P(Optimizers, SgdFollowsItsRule) {
  for (const DType dtype : dtypes()) {
    for (const SGDOptions& o : {SGDOptions{.lr = 0.0625}, SGDOptions{.lr = 0.0625, .momentum = 0.9},
                                SGDOptions{.lr = 0.0625, .momentum = 0.5, .dampening = 0.25},
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
      expect_close(problem.parameters, references, tolerance(dtype),
                   detail::message("SGD ", dtype, " momentum ", o.momentum, " nesterov ", o.nesterov));
    }
  }
}

TEST_P(Optimizers, AdamAndAdamWFollowTheirRules) {
  for (const DType dtype : dtypes()) {
    for (const bool decoupled : {false, true}) {
      for (const AdamOptions& o :
           {AdamOptions{.lr = 0.015625}, AdamOptions{.lr = 0.015625, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.0625},
            AdamOptions{.lr = 0.015625, .beta1 = 0}}) {
        Problem problem(on(dtype));
        const auto groups = two_groups(problem.parameters);
        problem.parameters = in_order(groups);
        auto references = references_of(groups);
        const auto adam = decoupled ? std::unique_ptr<Optimizer>(new AdamW(groups, o))
                                    : std::unique_ptr<Optimizer>(new Adam(groups, o));
        for (int step = 1; step <= 12; ++step) {
          for (std::size_t i = 0; i < references.size(); ++i)
            references[i].adam(problem.give_gradient(i), o, o.lr, step, decoupled);
          ASSERT_TRUE(adam->step().applied());
        }
        expect_close(problem.parameters, references, dtype == DType::f64 ? 1e-12 : 4e-6,
                     detail::message("Adam ", dtype, " decoupled ", decoupled, " beta1 ", o.beta1));
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

// ---- schedules
// ----------------------------------------------------------------------------------------------------------

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
      {"linear, warm-up, end", optim::linear_decay(lr, 12, 2, 0.1),
       [=](double t) { return t < 2    ? lr * (t + 1) / 2
                              : t < 12 ? lr - (lr - 0.1) * (t - 2) / 10
                                       : 0.1; }},
      {"cosine", optim::cosine_decay(lr, 10),
       [=](double t) { return t < 10 ? lr * (1 + std::cos(kPi * t / 10)) / 2 : 0; }},
      {"cosine, warm-up, end", optim::cosine_decay(lr, 11, 3, 0.03),
       [=](double t) {
         return t < 3 ? lr * (t + 1) / 3 : t < 11 ? 0.03 + (lr - 0.03) * (1 + std::cos(kPi * (t - 3) / 8)) / 2 : 0.03;
       }},
      {"step", optim::step_decay(lr, 3, 0.5), [=](double t) { return lr * std::pow(0.5, std::floor(t / 3)); }},
      {"step, warm-up", optim::step_decay(lr, 2, 0.1, 5),
       [=](double t) { return t < 5 ? lr * (t + 1) / 5 : lr * std::pow(0.1, std::floor((t - 5) / 2)); }},
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

TEST(OptimizersOnTheGpu, AgreeWithTheCpu) {
  MT_NEEDS_GPU();
  for (int kind = 0; kind < 4; ++kind) {
    std::vector<std::vector<Tensor>> results;
    for (const Device device : devices()) {
      Problem problem({DType::f32, device}, seed());
      std::unique_ptr<Optimizer> optimizer;
      if (kind == 0) optimizer = std::make_unique<SGD>(problem.parameters, SGDOptions{.lr = 0.1, .weight_decay = 0.01});
      if (kind == 1)
        optimizer = std::make_unique<SGD>(problem.parameters, SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true});
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
