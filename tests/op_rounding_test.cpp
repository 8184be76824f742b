// Rounding: every row of the op table in every type on every device against f64, as a ratio to perfect rounding;
// elementary functions on all 65,536 inputs; products up to long inner dimensions. Memory is poisoned all the while.
#include "op_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

TEST(OpOracle, EveryRowIsWhatItsDefinitionSays) {
  manual_seed(seed());
  const Poison poison;
  int cases = 0, rows = 0;
  for (const Row& row : op_table()) {
    rows += row.oracle ? 1 : 0;
    for (const Layout layout : kSmallLayouts) {
      const Inputs inputs = row_inputs(row, layout);
      if (inputs.empty() || !row.oracle) continue;
      for (const Data data : {Data::uniform, Data::normal, Data::heavy}) {
        const std::vector<Tensor> x = make_inputs(inputs, data);
        const oracle::Array exact = row.oracle(operands(layout, x));
        const Tensor y = call(row, layout, x);
        SCOPED_TRACE(label(row, layout) + ", " + name(data));
        ASSERT_EQ(y.shape(), exact.shape);
        EXPECT_LE(relative_error(y, exact.v, 1e-3), 1e-12);
        ++cases;
      }
    }
  }
  std::printf("%d cases of %d rows with an independent definition\n", cases, rows);
}

class OpRounding : public OnDeviceAndType {};

TEST_P(OpRounding, EveryRowRoundsAsItMust) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  manual_seed(seed());
  const Poison poison;
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : kLayouts)
      for (const Data data : {Data::uniform, Data::normal, Data::heavy}) {
        const bool large = is_large(layout);  // small tensors have too few roundings for a ratio
        const Inputs inputs = row_inputs(row, layout);
        if (inputs.empty() || (large && (small_only() || dtype() == f64)) || (!large && data == Data::normal)) continue;
        if (data != Data::uniform && row.inner_kink) continue;
        if (data != (row.inner_kink ? Data::uniform : Data::normal) && layout == Layout::aligned) continue;
        if (data != Data::uniform && layout != Layout::aligned &&
            std::ranges::all_of(inputs, [](const Input& in) { return in.bounded; }))
          continue;
        const RoundedInputs in(inputs, make_inputs(inputs, row.inner_kink ? Data::grid : data), dtype(), device());
        SCOPED_TRACE(label(row, layout) + ", " + name(data));
        if (std::getenv("MANTISSA_TRACE") != nullptr)
          std::fprintf(stderr, "%s, %s\n", label(row, layout).c_str(), name(data));
        const Outcome exact = run(row, layout, inputs, in.exact, {}, dtype()),
                      got = run(row, layout, inputs, in.x, exact.g);
        ASSERT_EQ(got.y.shape(), exact.y.shape());
        const std::vector<double> y =
            row.oracle && !large ? exact_result(row, layout, in.exact) : exact.y.to_vector<double>();
        if (is_low_precision(dtype()) && large && got.y.dtype() == dtype()) {
          EXPECT_LE(rounding_ratio(got.y, y), row.forward_limit) << "forward";
        }
        const double underflow = dtype() == f16 ? 3e-5 : 1e-15;  // below, the spacing of f16 is the error
        double floor = large ? underflow : 0.2;
        if (large && y.size() < 64) {  // a sum that happens to be near zero is as exact as its terms allow
          std::vector<Tensor> sizes = in.exact;
          for (Tensor& x : sizes)
            if (x.dtype() == f64) x = abs(x);
          for (const double v : exact_result(row, layout, sizes)) floor = std::max(floor, std::abs(v) / 16);
        }
        const double unit = dtype() == f64 ? 1e-12 : dtype() == f32 ? 4e-6 : dtype() == f16 ? 2e-3 : 1.6e-2;
        EXPECT_LE(relative_error(got.y, y, floor), unit) << "forward";
        for (std::size_t i = 0; i < exact.grads.size(); ++i) {
          if (!exact.grads[i].defined()) continue;
          ASSERT_TRUE(got.grads[i].defined()) << "gradient " << i;
          const std::vector<double> gx = exact.grads[i].to_vector<double>();
          EXPECT_LE(relative_error(got.grads[i], gx, floor), 2 * unit) << "gradient " << i;
          // Fused attention takes sum_j p_j gp_j from the rounded result: where a row sees one key, little but that
          // rounding is left.
          const bool one_hot = row.forward_limit == 1.5 && data == Data::heavy;
          if (is_low_precision(dtype()) && large && !inputs[i].parameter && !one_hot) {
            EXPECT_LE(rounding_ratio(got.grads[i].to(cpu).to(dtype()), gx), row.backward_limit) << "gradient " << i;
          }
        }
        ++cases;
      }
  std::printf("%d cases\n", cases);
}

MT_ON_DEVICES_AND_TYPES(OpRounding, f64, f32, f16, bf16);

// ---- elementary functions
// -----------------------------------------------------------------------------------------------

/// The place of a value among all values of a 16-bit type, in order; both zeros are 0.
int place(DType dtype, double value) {
  const Tensor x = from_vector(std::vector<double>{value}, {1}, {dtype, cpu});
  std::uint16_t bits = 0;
  std::memcpy(&bits, x.data(), sizeof bits);
  return bits & 0x8000u ? -static_cast<int>(bits & 0x7FFFu) : bits;
}

class AllInputs : public OnDeviceAndType {
 protected:
  /// Every pattern of the type.
  static Tensor patterns() {
    const Tensor x = empty({65536}, {dtype(), cpu});
    auto* bits = static_cast<std::uint16_t*>(x.data());
    for (unsigned i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    return x;
  }
};

TEST_P(AllInputs, OfEveryUnaryOp) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  const Tensor x = patterns();
  const std::vector<double> values = x.to_vector<double>();
  for_each_op<UnaryOp>([&](auto op) {
    const auto formula = oracle::unary_formulas().find(op.name);
    if (formula == oracle::unary_formulas().end()) return;
    const std::vector<double> got = unary(op, x.to(device())).template to_vector<double>();
    std::vector<double> exact(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) exact[i] = formula->second(values[i]);
    const std::vector<double> rounded = from_vector(exact, {65536}, {dtype(), cpu}).template to_vector<double>();
    int wrong = 0, worst = 0;
    double worst_at = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isinf(values[i])) continue;  // limits: NonFinite in op_property_test.cpp
      if (std::isnan(rounded[i]) || std::isnan(got[i])) {
        ASSERT_EQ(std::isnan(rounded[i]), std::isnan(got[i]))
            << op.name << "(" << values[i] << ") is " << got[i] << ", exactly " << exact[i];
        continue;
      }
      if (rounded[i] == got[i]) continue;
      ++wrong;
      // What f32 keeps of sums like 1 + erf(x): the left tails of sigmoid and gelu lose digits there, and only there.
      if (std::abs(got[i] - exact[i]) <= 0x1p-23 * std::max(1.0, std::abs(values[i]))) continue;
      const int distance = std::abs(place(dtype(), rounded[i]) - place(dtype(), got[i]));
      if (distance > worst) worst = distance, worst_at = values[i];
    }
    EXPECT_LE(worst, 1) << op.name << "(" << worst_at << ") is " << worst << " units off";
    EXPECT_LE(wrong, 655) << op.name << ": more than 1 in 100 is not rounded correctly";
  });
}

MT_ON_DEVICES_AND_TYPES(AllInputs, f16, bf16);

// ---- long products
// --------------------------------------------------------------------------------------------------------

class LongProducts : public OnDeviceAndType {};

/// |y - exact| <= u |exact| + c g(K) u32 (|A| |B|) in every element, and perfect rounding on the whole: a sum that is
/// kept in 16 bits anywhere grows as sqrt(K).
TEST_P(LongProducts, AccumulateInF32) {
  if (device().is_cuda()) MT_NEEDS_GPU();
  if (small_only()) GTEST_SKIP() << "MANTISSA_SMALL";
  manual_seed(seed());
  for (const std::int64_t k : {1, 64, 1024, 4099}) {
    const std::int64_t m = 104, n = 100;
    const Tensor a = normal({m, k}, 0, 1, {f64, cpu}).to(dtype()), b = normal({k, n}, 0, 1, {f64, cpu}).to(dtype());
    const Tensor y = matmul(a.to(device()), b.to(device())).to(cpu);
    const std::vector<double> exact = matmul(a.to(f64), b.to(f64)).to_vector<double>(),
                              size = matmul(abs(a.to(f64)), abs(b.to(f64))).to_vector<double>(),
                              got = y.to_vector<double>();
    SCOPED_TRACE(detail::message("inner dimension ", k));
    const double u = dtype() == f16    ? 0x1p-11
                     : dtype() == bf16 ? 0x1p-8
                                       : 0x1p-24,
                 length = std::min(static_cast<double>(k), 4 * std::sqrt(static_cast<double>(k)));
    for (std::size_t i = 0; i < exact.size(); ++i)
      ASSERT_LE(std::abs(got[i] - exact[i]),
                u * std::abs(exact[i]) + 2 * length * 0x1p-24 * size[i] + (dtype() == f16 ? 0x1p-25 : 0x1p-134))
          << i;
    if (dtype() != f32) {
      EXPECT_LE(rounding_ratio(y, exact), 1.10);
    } else {
      EXPECT_LE(relative_error(y, exact, 1e-30), 4 * std::sqrt(static_cast<double>(k)) * 0x1p-24);
    }
  }
}

MT_ON_DEVICES_AND_TYPES(LongProducts, f32, f16, bf16);

}  // namespace
