// Autocast: an op under a scope equals explicit casts and the op, bit for bit, forward and backward; its rule is one
// for all devices.
#include <fstream>
#include <regex>
#include <set>

#include "op_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

std::vector<double> values(const Tensor& x) { return x.to_vector<double>(); }

std::string rule_of(const Row& row) {
  static const auto rules = autocast_rules();
  const auto found = rules.find(row.op);
  return found == rules.end() ? "keep" : found->second;  // views and copies are not in the table: they take what comes
}

TEST(OpTable, HasARowForEveryOp) {
  std::set<std::string> rows;
  for (const Row& row : op_table()) rows.insert(row.op);
  for (const auto& [op, rule] : autocast_rules()) {
    if (op == "argmax") continue;  // no gradient, no rounding: exact_test.cpp
    EXPECT_TRUE(rows.contains(op)) << "no row in op_table.h for " << op;
  }
  // And for every function of the public header.
  const std::set<std::string> elsewhere{
      "unary",   "binary",                                // the generated rows themselves
      "compare", "argmax",                                // not differentiable: exact_test.cpp
      "uniform", "normal", "bernoulli", "rand", "randn",  // random_test.cpp
      "cast",                                             // dtype_test.cpp, autograd_test.cpp
  };
  std::ifstream header(std::string(MANTISSA_SOURCE_DIR) + "/autograd/ops.h");
  ASSERT_TRUE(header);
  const std::regex declaration(R"(^(?:inline )?(?:Tensor|Normed|std::vector<Tensor>) (\w+)\()");
  std::set<std::string> functions;
  std::string line;
  while (std::getline(header, line))
    if (std::smatch match; std::regex_search(line, match, declaration) && match[1] != "operator")
      functions.insert(match[1]);
  EXPECT_GT(functions.size(), 60u);
  for (const std::string& f : functions)
    EXPECT_TRUE(rows.contains(f) || elsewhere.contains(f)) << "no row in op_table.h for " << f;
  std::printf("%zu ops in the table of rules, %zu public functions, %zu rows\n", autocast_rules().size(),
              functions.size(), op_table().size());
}

/// Two equal sets of inputs: f32 leaves for ops of rule `low`, else 16-bit ones, so that `full` has something to widen.
std::pair<std::vector<Tensor>, std::vector<Tensor>> twins(const Row& row, const Inputs& inputs, DType low,
                                                          Device device) {
  std::pair<std::vector<Tensor>, std::vector<Tensor>> sets;
  const std::vector<Tensor> made = make_inputs(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor x =
        inputs[i].classes > 0 ? made[i] : made[i].to(rule_of(row) == "low" || inputs[i].parameter ? f32 : low);
    for (auto* set : {&sets.first, &sets.second}) {
      set->push_back(x.to(device).clone());
      if (inputs[i].differentiable) set->back().set_requires_grad();
    }
  }
  return sets;
}

std::vector<Tensor> explicit_casts(const Row& row, const Inputs& inputs, const std::vector<Tensor>& x, DType low) {
  std::vector<Tensor> converted;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const bool is_value = inputs[i].classes == 0 && !inputs[i].parameter;
    converted.push_back(!is_value                ? x[i]
                        : rule_of(row) == "low"  ? x[i].to(low)
                        : rule_of(row) == "full" ? x[i].to(f32)
                                                 : x[i]);
  }
  return converted;
}

TEST(OpAutocast, EqualsExplicitCasts) {
  manual_seed(seed());
  int cases = 0;
  for (const Device device : devices())
    for (const DType low : {f16, bf16})
      for (const Row& row : op_table())
        for (const Layout layout : kSmallLayouts) {
          const Inputs inputs = row_inputs(row, layout);
          if (inputs.empty()) continue;
          SCOPED_TRACE(label(row, layout) + " " + to_string(device) + " " + to_string(low) + " " + rule_of(row));
          const auto [a, b] = twins(row, inputs, low, device);
          Tensor ya;
          {
            const Autocast scope(low, {.low_precision_weight_grad = true});
            ya = call(row, layout, a);
          }
          const Tensor yb = call(row, layout, explicit_casts(row, inputs, b, low));
          ASSERT_EQ(ya.dtype(), yb.dtype());
          EXPECT_EQ(values(ya), values(yb));
          const Tensor g = uniform(ya.shape(), -1, 1, {f64, cpu}).to(ya.dtype()).to(device);
          backward(ya, {.seed = g});
          backward(yb, {.seed = g});
          for (std::size_t i = 0; i < a.size(); ++i) {
            ASSERT_EQ(a[i].grad().defined(), b[i].grad().defined());
            if (!a[i].grad().defined()) continue;
            EXPECT_EQ(a[i].grad().dtype(), f32);
            EXPECT_EQ(values(a[i].grad()), values(b[i].grad())) << "gradient " << i;
          }
          ++cases;
        }
  std::printf("%d cases\n", cases);
}

/// By default weight gradients stay in f32: the classic recipe's gradient is that, rounded.
TEST(OpAutocast, WeightGradientsAreTheClassicOnesBeforeRounding) {
  manual_seed(seed());
  int wider = 0;
  for (const Device device : devices())
    for (const DType low : {f16, bf16})
      for (const Row& row : op_table()) {
        const Inputs inputs = row_inputs(row, Layout::odd);
        if (inputs.empty() || rule_of(row) != "low") continue;
        SCOPED_TRACE(label(row, Layout::odd) + " " + to_string(device) + " " + to_string(low));
        const auto [a, b] = twins(row, inputs, low, device);
        Tensor y[2], g;
        for (const bool classic : {false, true}) {
          const Autocast scope(low, {.low_precision_weight_grad = classic});
          y[classic] = row.call(classic ? b : a);
          if (!g.defined()) g = uniform(y[0].shape(), -1, 1, {f64, cpu}).to(low).to(device);
          backward(y[classic], {.seed = g});
        }
        EXPECT_EQ(values(y[0]), values(y[1]));
        for (std::size_t i = 0; i < a.size(); ++i) {
          if (!a[i].grad().defined()) continue;
          const std::vector<double> wide = values(a[i].grad()), rounded = values(a[i].grad().to(low)),
                                    classic = values(b[i].grad());
          wider += wide != classic ? 1 : 0;
          if (device.is_cpu()) {
            EXPECT_EQ(rounded, classic) << "gradient " << i;
            continue;
          }
          // A GPU library may sum in another order for another type of result.
          for (std::size_t j = 0; j < wide.size(); ++j)
            EXPECT_NEAR(wide[j], classic[j], (low == f16 ? 0x1p-10 : 0x1p-7) * std::abs(wide[j]) + 1e-5)
                << "gradient " << i;
        }
      }
  EXPECT_GT(wider, 0) << "the default rounds weight gradients to 16 bits";
}

/// What a row returns under a scope tells its rule, on every device.
TEST(OpAutocast, ResultsHaveTheTypeOfTheRule) {
  manual_seed(seed());
  for (const Device device : devices())
    for (const DType low : {f16, bf16})
      for (const DType given : {f32, f16, bf16, f64})
        for (const Row& row : op_table()) {
          const Inputs inputs = row_inputs(row, Layout::contiguous);
          if (inputs.empty() || row.op == "checkpoint") continue;  // checkpoint calls others
          std::vector<Tensor> x;
          for (const Tensor& made : make_inputs(inputs))
            x.push_back(made.dtype() == i64 ? made.to(device) : made.to(given).to(device));
          const std::string rule = rule_of(row);
          const bool loss = row.op == "cross_entropy" || row.op == "mse_loss";  // f32 whatever comes
          const DType expected = given == f64 ? f64 : loss ? f32 : rule == "low" ? low : rule == "full" ? f32 : given;
          const Autocast scope(low);
          EXPECT_EQ(row.call(x).dtype(), expected)
              << label(row, Layout::contiguous) << " of " << given << " under " << low << " on " << to_string(device);
        }
}

TEST(OpAutocast, MixedTypesWiden) {
  for (const Device device : devices()) {
    const Tensor h = ones({2}, {f16, device}), b = ones({2}, {bf16, device}), s = ones({2}, {f32, device}),
                 d = ones({2}, {f64, device});
    const Tensor condition = compare(CompareOp::equal, s, s);
    const auto check = [&](const Tensor& p, const Tensor& q, DType expected) {
      for_each_op<BinaryOp>([&](auto op) { EXPECT_EQ(binary(op, p, q).dtype(), expected) << op.name; });
      EXPECT_EQ(concat({p, q}).dtype(), expected);
      EXPECT_EQ(where(condition, p, q).dtype(), expected);
      EXPECT_EQ(matmul(p, q).dtype(), expected);
    };
    check(h, h, f16);
    check(h, b, f32);
    check(b, h, f32);
    check(h, s, f32);
    check(s, b, f32);
    check(s, d, f64);
    check(d, h, f64);
  }
}

}  // namespace
