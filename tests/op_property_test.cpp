// What every row of the op table keeps: exact integers stay exact, NaN and infinity go where the definition sends them,
// the same call gives the same bits, and both devices agree.
#include <algorithm>

#include "op_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

std::vector<double> rounded(const std::vector<double>& exact, DType dtype) {
  return from_vector(exact, {static_cast<std::int64_t>(exact.size())}, {dtype, cpu}).to_vector<double>();
}

class OpProperties : public OnDeviceAndType {};

TEST_P(OpProperties, IntegersStayExact) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  manual_seed(seed());
  const Poison poison;
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : kLayouts) {
      const Inputs inputs = row_inputs(row, layout);
      if (!row.exact || inputs.empty() || (is_large(layout) && small_only())) continue;
      SCOPED_TRACE(label(row, layout));
      const RoundedInputs in(inputs, make_inputs(inputs, Data::integers), dtype(), device());
      const Tensor g = uniform(result_shape(row, layout, in.exact), 0, 4.999, {f64, cpu}).to(i64).to(f64) - 2.0;
      const Outcome exact = run(row, layout, inputs, in.exact, g), got = run(row, layout, inputs, in.x, g);
      // Rounded once; a bias of a convolution is added after that.
      if (row.forward_limit <= 1.10) {
        ASSERT_EQ(got.y.to_vector<double>(), rounded(exact_result(row, layout, in.exact), got.y.dtype()));
      }
      for (std::size_t i = 0; i < in.x.size(); ++i) {
        if (!exact.grads[i].defined()) continue;
        const std::vector<double> a = got.grads[i].to_vector<double>(), b = exact.grads[i].to_vector<double>(),
                                  once = rounded(b, dtype());
        for (std::size_t j = 0; j < b.size(); ++j)  // in f32, or rounded to 16 bits on the way
          ASSERT_TRUE(a[j] == b[j] || a[j] == once[j])
              << "gradient " << i << ", element " << j << ": " << a[j] << ", exactly " << b[j];
      }
      ++cases;
    }
  std::printf("%d cases\n", cases);
}

/// Where NaN and infinities arise from `bad` in one element of one input: by definition, and in the kernel.
TEST_P(OpProperties, NonFiniteValuesGoWhereTheDefinitionSendsThem) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  manual_seed(seed());
  const double infinity = std::numeric_limits<double>::infinity();
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : {Layout::contiguous, Layout::strided, Layout::broadcast, Layout::odd})
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), infinity, -infinity}) {
        const Inputs inputs = row_inputs(row, layout);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          if (inputs[i].classes > 0) continue;
          if (std::isinf(bad) && !row.elementwise && !row.exact) continue;  // inf - inf depends on the order of a sum
          std::vector<Tensor> made = make_inputs(inputs);
          std::vector<double> values = made[i].to_vector<double>();
          values[values.size() / 2] = bad;
          made[i] = from_vector(values, inputs[i].shape, {f64, cpu});
          const RoundedInputs in(inputs, made, dtype(), device());
          const NoGrad no_grad;
          const std::vector<double> exact = exact_result(row, layout, in.exact);
          const std::vector<double> got = call(row, layout, in.x).to_vector<double>();
          ASSERT_EQ(got.size(), exact.size());
          for (std::size_t j = 0; j < exact.size(); ++j) {
            if (row.op == "conv2d" && i == 1 && !std::isnan(exact[j]))
              continue;  // a weight may meet the zeros of the padding
            ASSERT_EQ(std::isnan(got[j]), std::isnan(exact[j]))
                << label(row, layout) << ": " << bad << " in input " << i << ", output " << j << " is " << got[j]
                << ", by definition " << exact[j];
            if (!std::isinf(exact[j])) continue;
            ASSERT_EQ(got[j], exact[j]) << label(row, layout) << ": " << bad << " in input " << i << ", output " << j;
          }
          ++cases;
        }
      }
  std::printf("%d cases\n", cases);
}

/// A gradient that is NaN in one element reaches the inputs as in f64: an overflow can not hide from the loss scaler.
TEST_P(OpProperties, NonFiniteGradientsArrive) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  manual_seed(seed());
  for (const Row& row : op_table())
    for (const Layout layout : {Layout::contiguous, Layout::strided, Layout::broadcast, Layout::odd}) {
      const Inputs inputs = row_inputs(row, layout);
      if (inputs.empty()) continue;
      const RoundedInputs in(inputs, make_inputs(inputs), dtype(), device());
      const Shape shape = result_shape(row, layout, in.exact);
      std::vector<double> g(static_cast<std::size_t>(numel(shape)), 0.5);
      g[g.size() / 2] = std::numeric_limits<double>::quiet_NaN();
      const Tensor seed_gradient = from_vector(g, shape, {f64, cpu});
      const Outcome exact = run(row, layout, inputs, in.exact, seed_gradient),
                    got = run(row, layout, inputs, in.x, seed_gradient);
      for (std::size_t i = 0; i < in.x.size(); ++i) {
        if (!exact.grads[i].defined()) continue;
        const std::vector<double> a = got.grads[i].to_vector<double>(), b = exact.grads[i].to_vector<double>();
        const auto is_nan = [](double x) { return std::isnan(x); };
        ASSERT_EQ(std::ranges::any_of(a, is_nan), std::ranges::any_of(b, is_nan))
            << label(row, layout) << ", gradient " << i;
        for (std::size_t j = 0; j < b.size(); ++j) {
          if (row.op == "conv2d" && i == 1 && std::isnan(b[j])) continue;  // NaN may have met the zeros of the padding
          ASSERT_EQ(std::isnan(a[j]), std::isnan(b[j]))
              << label(row, layout) << ", gradient " << i << ", element " << j << ": " << a[j] << ", in f64 " << b[j];
        }
      }
    }
}

TEST_P(OpProperties, TheSameCallGivesTheSameBits) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  manual_seed(seed());
  for (const Row& row : op_table())
    for (const Layout layout : {Layout::large, Layout::odd}) {
      const Inputs inputs = row_inputs(row, layout);
      if (inputs.empty() || (is_large(layout) && small_only())) continue;
      const RoundedInputs in(inputs, make_inputs(inputs), dtype(), device());
      const Outcome once = run(row, layout, inputs, in.x, {});
      const Tensor filler = empty({12345}, {f32, device()});  // moves what is allocated next
      const Outcome again = run(row, layout, inputs, in.x, once.g);
      EXPECT_EQ(once.y.to_vector<double>(), again.y.to_vector<double>()) << label(row, layout);
      for (std::size_t i = 0; i < in.x.size(); ++i) {
        if (!once.grads[i].defined()) continue;
        EXPECT_EQ(once.grads[i].to_vector<double>(), again.grads[i].to_vector<double>())
            << label(row, layout) << ", gradient " << i;
      }
    }
}

MT_ON_DEVICES_AND_TYPES(OpProperties, f64, f32, f16, bf16);

/// The devices against each other: equal bits for what moves or selects, else a few units of f32.
TEST(OpDevices, CpuAndGpuAgree) {
  MT_NEEDS_GPU();
  manual_seed(seed());
  int cases = 0;
  for (const DType dtype : {f32, f16, bf16})
    for (const Row& row : op_table())
      for (const Layout layout : kLayouts) {
        const Inputs inputs = row_inputs(row, layout);
        if (inputs.empty() || layout == Layout::large || (is_large(layout) && small_only())) continue;
        SCOPED_TRACE(label(row, layout) + " " + to_string(dtype));
        const std::vector<Tensor> made = make_inputs(inputs);
        const RoundedInputs here(inputs, made, dtype, cpu), there(inputs, made, dtype, cuda(0));
        const Outcome a = run(row, layout, inputs, here.x, {}), b = run(row, layout, inputs, there.x, a.g);
        ASSERT_EQ(a.y.dtype(), b.y.dtype());
        const double unit = dtype == f32 ? 8e-6 : dtype == f16 ? 2e-3 : 1.6e-2;
        EXPECT_LE(relative_error(b.y, a.y.to_vector<double>(), 0.2), unit);
        for (std::size_t i = 0; i < a.grads.size(); ++i) {
          if (!a.grads[i].defined()) continue;
          EXPECT_EQ(a.grads[i].dtype(), b.grads[i].dtype());
          EXPECT_LE(relative_error(b.grads[i], a.grads[i].to_vector<double>(), 0.2), 2 * unit) << "gradient " << i;
        }
        const bool moves = row.exact && row.backward_limit == 1.10 && !row.elementwise;
        if (moves || row.op == "max" || row.op == "max_pool2d" || row.op == "gather" || row.op == "embedding") {
          EXPECT_EQ(a.y.to_vector<double>(), b.y.to_vector<double>());
        }
        ++cases;
      }
  std::printf("%d cases\n", cases);
}

}  // namespace
