// Gradients: every row of the op table against differences in f64, and by hand where a function has a kink.
#include "op_support.h"
#include "step_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

TEST(OpGradients, MatchDifferencesInF64) {
  manual_seed(seed());
  const Poison poison;
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : kSmallLayouts) {
      const Inputs inputs = row_inputs(row, layout);
      if (inputs.empty()) continue;
      const auto check = [&] {
        std::vector<Tensor> x = make_inputs(inputs, row.elementwise ? Data::off_grid : Data::uniform);
        for (std::size_t i = 0; i < x.size(); ++i)
          if (inputs[i].differentiable) x[i].set_requires_grad();
        return gradcheck([&](Args in) { return call(row, layout, in); }, x);
      };
      GradcheckReport report = check();
      if (!report.passed) report = check();  // a difference that straddles a kink by chance; a mistake fails again
      EXPECT_TRUE(report.passed) << label(row, layout) << ": " << report.message;
      ++cases;
    }
  std::printf("%d gradient checks\n", cases);
}

class Gradients : public OnDevice {
 protected:
  /// d sum(f(x)) / dx at `values`.
  template <class F> static std::vector<double> at(const std::vector<double>& values, DType dtype, F&& f) {
    const Tensor x = leaf(values, on(dtype));
    sum(f(x)).backward();
    return x.grad().to_vector<double>();
  }
  using Values = std::vector<double>;
};
MT_ON_DEVICES(Gradients);

TEST_P(Gradients, AtKinks) {
  for (const DType dtype : {f64, f32, f16, bf16}) {
    SCOPED_TRACE(to_string(dtype));
    EXPECT_EQ(at({-1, -0.0, 0.0, 1}, dtype, [](const Tensor& x) { return relu(x); }), (Values{0, 0, 0, 1}));
    EXPECT_EQ(at({-1, -0.0, 0.0, 1}, dtype, [](const Tensor& x) { return abs(x); }), (Values{-1, 0, 0, 1}));
    EXPECT_EQ(at({-1, 0, 1}, dtype, [](const Tensor& x) { return leaky_relu(x, 0.25); }), (Values{0.25, 0.25, 1}));
    EXPECT_EQ(at({-2, -1, 0, 1, 2}, dtype, [](const Tensor& x) { return clamp(x, -1, 1); }),
              (Values{0, 1, 1, 1, 0}));  // the ends belong to it
    EXPECT_EQ(at({0, 2}, dtype, [](const Tensor& x) { return sqrt(x); }),
              (Values{kInf, at({2}, dtype, [](const Tensor& x) { return sqrt(x); })[0]}));
    EXPECT_EQ(at({0, 3}, dtype, [](const Tensor& x) { return pow(x, 0); }), (Values{0, 0}));
    EXPECT_EQ(at({0, 3}, dtype, [](const Tensor& x) { return pow(x, 2); }), (Values{0, 6}));
    EXPECT_EQ(at({0, 3}, dtype, [](const Tensor& x) { return pow(x, 1); }), (Values{1, 1}));
    // Large arguments: the limits, and no 0 * inf.
    for (const double big : {80.0, 300.0, 60000.0}) {
      EXPECT_EQ(at({-big, big}, dtype, [](const Tensor& x) { return softplus(x); })[1], 1) << big;
      EXPECT_NEAR(at({big}, dtype, [](const Tensor& x) { return tanh(x); })[0], 0, 1e-60) << big;
      for (const auto f : {+[](const Tensor& x) { return gelu(x); }, +[](const Tensor& x) { return gelu_tanh(x); },
                           +[](const Tensor& x) { return silu(x); }}) {
        EXPECT_EQ(at({big}, dtype, f), (Values{1})) << big;
        EXPECT_NEAR(at({-big}, dtype, f)[0], 0, 1e-30) << big;
      }
      EXPECT_NEAR(at({-big}, dtype, [](const Tensor& x) { return sigmoid(x); })[0], 0, 1e-30);
      EXPECT_NEAR(at({big}, dtype, [](const Tensor& x) { return sigmoid(x); })[0], 0, 1e-30);
    }
  }
}

TEST_P(Gradients, AtTies) {
  for (const DType dtype : {f64, f32, f16, bf16}) {
    const Tensor a = leaf(Values{1, 2, 3}, on(dtype)), b = leaf(Values{2, 2, 2}, on(dtype));
    sum(maximum(a, b)).backward();
    EXPECT_EQ(a.grad().to_vector<double>(), (Values{0, 0.5, 1})) << dtype;  // shared equally
    EXPECT_EQ(b.grad().to_vector<double>(), (Values{1, 0.5, 0})) << dtype;
    a.zero_grad();
    b.zero_grad();
    sum(minimum(a, b)).backward();
    EXPECT_EQ(a.grad().to_vector<double>(), (Values{1, 0.5, 0})) << dtype;
    EXPECT_EQ(b.grad().to_vector<double>(), (Values{0, 0.5, 1})) << dtype;
    // Reductions and windows: the first of the largest takes all.
    EXPECT_EQ(at({1, 5, 5, 2}, dtype, [](const Tensor& x) { return max(x, 0); }), (Values{0, 1, 0, 0}));
    EXPECT_EQ(at({5, 1, 1, 2}, dtype, [](const Tensor& x) { return min(x, 0); }), (Values{0, 1, 0, 0}));
    EXPECT_EQ(at({7, 7, 7, 7}, dtype,
                 [](const Tensor& x) {
                   return max_pool2d(x.reshape({1, 1, 2, 2}));
                 }),
              (Values{1, 0, 0, 0}));
  }
}

/// Backward is linear in the gradient that arrives, and what does not arrive counts as zero.
TEST_P(Gradients, AreLinearInWhatArrives) {
  manual_seed(seed());
  for (const Row& row : op_table())
    for (const Layout layout : {Layout::contiguous, Layout::odd}) {
      const Inputs inputs = row_inputs(row, layout);
      if (inputs.empty()) continue;
      std::vector<Tensor> x;
      for (const Tensor& value : make_inputs(inputs)) x.push_back(value.to(device()));
      const Outcome one = run(row, layout, inputs, x, {}), four = run(row, layout, inputs, x, one.g * 4.0),
                    none = run(row, layout, inputs, x, one.g * 0.0);
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (!one.grads[i].defined()) continue;
        EXPECT_EQ((one.grads[i] * 4.0).to_vector<double>(), four.grads[i].to_vector<double>())
            << label(row, layout);  // 4 is exact
        for (const double v : none.grads[i].to_vector<double>()) ASSERT_EQ(v, 0) << label(row, layout);
      }
    }
}

}  // namespace
