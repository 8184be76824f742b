// Walks the op table: gradients, rounding in every type on every device, Autocast.
#include <map>
#include <set>
#include <sstream>

#include "op_table.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

constexpr Layout kLayouts[] = {Layout::contiguous, Layout::strided, Layout::broadcast, Layout::empty, Layout::one, Layout::odd};

/// f64 inputs of a row on the CPU. `off_grid`: none nearer than 1/256 to a multiple of 1/64 or to another input, so that no
/// difference quotient straddles a kink (0 of relu, the ends of clamp, ties of maximum).
std::vector<Tensor> make_inputs(const std::vector<Input>& inputs, bool off_grid = false) {
  std::vector<Tensor> made;
  for (const Input& in : inputs) {
    if (in.classes > 0) {
      made.push_back(uniform(in.shape, 0, static_cast<double>(in.classes) - 1e-3, {f64, cpu}).to(i64));
    } else {
      made.push_back(uniform(in.shape, in.low, in.high, {f64, cpu}));
      if (!off_grid) continue;
      std::vector<double> values = made.back().to_vector<double>();
      for (double& v : values) v = (std::floor(64 * v) + 0.25 + 0.25 * static_cast<double>(made.size())) / 64;
      made.back() = from_vector(values, in.shape, {f64, cpu});
    }
  }
  return made;
}

/// The row's call on inputs that are stored with their axes reversed: every operand is strided.
Tensor call(const Row& row, Layout layout, std::span<const Tensor> inputs) {
  if (layout != Layout::strided) return row.call(inputs);
  std::vector<Tensor> views;
  for (const Tensor& x : inputs) {
    Shape axes = x.shape();
    for (int i = 0; i < x.rank(); ++i) axes[i] = x.rank() - 1 - i;
    views.push_back(x.permute(axes));
  }
  return row.call(views);
}

std::vector<Input> row_inputs(const Row& row, Layout layout) {
  std::vector<Input> inputs = row.inputs(layout);
  if (layout == Layout::strided)
    for (Input& in : inputs) {
      Shape reversed = in.shape;
      for (int i = 0; i < in.shape.rank(); ++i) reversed[i] = in.shape[in.shape.rank() - 1 - i];
      in.shape = reversed;
    }
  return inputs;
}

std::string label(const Row& row, Layout layout) { return row.op + (row.variant.empty() ? "" : " (" + row.variant + ")") + ", " + name(layout); }

TEST(OpTable, HasARowForEveryOp) {
  std::set<std::string> rows;
  for (const Row& row : op_table()) rows.insert(row.op);
  std::istringstream table(autocast_table());
  std::string line;
  int ops = 0;
  while (std::getline(table, line)) {
    const std::string op = line.substr(0, line.find(' '));
    ++ops;
    if (op == "argmax") continue;  // no gradient, no rounding: tests/exact_test.cpp
    EXPECT_TRUE(rows.contains(op)) << "no row in tests/op_table.h for " << op;
  }
  std::printf("%d ops in the table of rules, %zu rows\n", ops, op_table().size());
}

TEST(OpTable, GradientsMatchDifferencesInF64) {
  manual_seed(seed());
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : kLayouts) {
      const std::vector<Input> inputs = row_inputs(row, layout);
      if (inputs.empty()) continue;
      std::vector<Tensor> x = make_inputs(inputs, row.elementwise);
      for (std::size_t i = 0; i < x.size(); ++i)
        if (inputs[i].differentiable) x[i].set_requires_grad();
      const auto report = gradcheck([&](std::span<const Tensor> in) { return call(row, layout, in); }, x);
      EXPECT_TRUE(report.passed) << label(row, layout) << ": " << report.message;
      ++cases;
    }
  std::printf("%d gradient checks\n", cases);
}

/// Forward and gradients of a row in one type on one device.
struct Outcome {
  Tensor y;
  std::vector<Tensor> grads;
};

Outcome run(const Row& row, Layout layout, const std::vector<Input>& inputs, const std::vector<Tensor>& values, const Tensor& g) {
  std::vector<Tensor> x;
  for (std::size_t i = 0; i < values.size(); ++i) {
    x.push_back(values[i].detach());
    if (inputs[i].differentiable) x[i].set_requires_grad();
  }
  Outcome outcome;
  outcome.y = call(row, layout, x);
  backward(outcome.y, {.seed = g.to(outcome.y.device()).to(outcome.y.dtype())});
  for (std::size_t i = 0; i < x.size(); ++i) outcome.grads.push_back(inputs[i].differentiable ? x[i].grad() : Tensor{});
  return outcome;
}

/// ||y - exact|| / ||exact||, where exact counts as at least `floor` an element: a single result may happen to be near zero.
double relative_error(const Tensor& y, const std::vector<double>& exact, double floor) {
  const std::vector<double> got = y.to_vector<double>();
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return error == 0 ? 0 : std::sqrt(error / std::max(norm, floor * floor * static_cast<double>(exact.size())));
}

class OpTableOn : public ::testing::TestWithParam<std::tuple<bool, DType>> {};

TEST_P(OpTableOn, RoundsAsItMust) {
  const auto [on_gpu, dtype] = GetParam();
  if (on_gpu) MT_NEEDS_GPU();
  const Device device = on_gpu ? cuda(0) : cpu;
  manual_seed(seed());
  int cases = 0;
  for (const Row& row : op_table())
    for (const Layout layout : {Layout::large, Layout::aligned, Layout::contiguous, Layout::strided, Layout::broadcast, Layout::empty, Layout::one, Layout::odd}) {
      if ((layout == Layout::large || layout == Layout::aligned) && std::getenv("MANTISSA_SMALL") != nullptr) continue;  // under a sanitizer
      const std::vector<Input> inputs = row_inputs(row, layout);
      if (inputs.empty()) continue;
      std::vector<Tensor> exact_x = make_inputs(inputs), x;
      for (std::size_t i = 0; i < exact_x.size(); ++i) {
        if (inputs[i].classes > 0) {
          x.push_back(exact_x[i].to(device));
          continue;
        }
        const DType type = inputs[i].parameter ? compute_dtype(dtype) : dtype;
        const Tensor rounded = exact_x[i].to(type);
        exact_x[i] = rounded.to(f64);  // the reference starts from what the kernel sees
        x.push_back(rounded.to(device));
      }
      SCOPED_TRACE(label(row, layout));
      if (std::getenv("MANTISSA_TRACE") != nullptr) std::fprintf(stderr, "%s\n", label(row, layout).c_str());
      Tensor g;
      {
        const NoGrad no_grad;
        g = uniform(call(row, layout, exact_x).shape(), -1, 1, {f64, cpu}).to(dtype);
      }
      const Outcome exact = run(row, layout, inputs, exact_x, g.to(f64)), got = run(row, layout, inputs, x, g);
      ASSERT_EQ(got.y.shape(), exact.y.shape());
      const std::vector<double> y = exact.y.to_vector<double>();
      const bool statistics = layout == Layout::large || layout == Layout::aligned;  // small tensors have too few roundings for a ratio
      if (is_low_precision(dtype) && statistics && got.y.dtype() == dtype) {
        EXPECT_LE(rounding_ratio(got.y, y), row.forward_limit) << "forward";
      }
      const double underflow = dtype == f16 ? 3e-5 : 1e-15;  // below, the spacing of f16 is the error
      const double floor = statistics ? underflow : 0.2;
      const double unit = dtype == f64 ? 1e-12 : dtype == f32 ? 4e-6 : dtype == f16 ? 2e-3 : 1.6e-2;
      EXPECT_LE(relative_error(got.y, y, floor), unit) << "forward";
      for (std::size_t i = 0; i < exact.grads.size(); ++i) {
        if (!exact.grads[i].defined()) continue;
        ASSERT_TRUE(got.grads[i].defined()) << "gradient " << i;
        const std::vector<double> gx = exact.grads[i].to_vector<double>();
        EXPECT_LE(relative_error(got.grads[i], gx, floor), 2 * unit) << "gradient " << i;
        if (is_low_precision(dtype) && statistics) {
          const Tensor rounded = got.grads[i].to(cpu).to(inputs[i].parameter ? compute_dtype(dtype) : dtype);
          if (rounded.dtype() == dtype) {
            EXPECT_LE(rounding_ratio(rounded, gx), row.backward_limit) << "gradient " << i;
          }
        }
      }
      ++cases;
    }
  std::printf("%d cases\n", cases);
}

INSTANTIATE_TEST_SUITE_P(Types, OpTableOn, ::testing::Combine(::testing::Bool(), ::testing::Values(f64, f32, f16, bf16)), [](const auto& p) {
  return std::string(std::get<0>(p.param) ? "cuda_" : "cpu_") + to_string(std::get<1>(p.param));
});

/// The rule of each op, from the printed table.
std::map<std::string, std::string> rules() {
  std::map<std::string, std::string> found;
  std::istringstream table(autocast_table());
  std::string op, rule;
  while (table >> op >> rule) found[op] = rule;
  return found;
}

std::vector<double> bits(const Tensor& x) { return x.to_vector<double>(); }

TEST(OpTable, AutocastEqualsExplicitCasts) {
  manual_seed(seed());
  const auto rule = rules();
  int cases = 0;
  for (const Device device : devices())
    for (const DType low : {f16, bf16})
      for (const Row& row : op_table()) {
        const std::vector<Input> inputs = row.inputs(Layout::odd);
        if (inputs.empty()) continue;
        const std::string& r = rule.at(row.op);
        SCOPED_TRACE(row.op + " " + row.variant + " " + to_string(device) + " " + to_string(low) + " " + r);
        // f32 leaves under `low`; 16-bit activations elsewhere, so that `full` has something to widen.
        std::vector<Tensor> f64_inputs = make_inputs(inputs), a, b;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          Tensor x = inputs[i].classes > 0 ? f64_inputs[i] : f64_inputs[i].to(r == "low" || inputs[i].parameter ? f32 : low);
          for (auto* list : {&a, &b}) {
            list->push_back(x.to(device).clone());
            if (inputs[i].differentiable) list->back().set_requires_grad();
          }
        }
        Tensor ya, yb;
        {
          const Autocast scope(low, {.low_precision_weight_grad = true});
          ya = row.call(a);
        }
        std::vector<Tensor> explicitly;
        for (std::size_t i = 0; i < b.size(); ++i) {
          const bool is_value = inputs[i].classes == 0 && !inputs[i].parameter;
          explicitly.push_back(!is_value ? b[i] : r == "low" ? b[i].to(low) : r == "full" ? b[i].to(f32) : b[i]);
        }
        yb = row.call(explicitly);
        ASSERT_EQ(ya.dtype(), yb.dtype());
        EXPECT_EQ(bits(ya), bits(yb));
        const Tensor g = uniform(ya.shape(), -1, 1, {f64, cpu}).to(ya.dtype()).to(device);
        backward(ya, {.seed = g});
        backward(yb, {.seed = g});
        for (std::size_t i = 0; i < a.size(); ++i)
          if (a[i].grad().defined() || b[i].grad().defined()) {
            EXPECT_EQ(bits(a[i].grad()), bits(b[i].grad())) << "gradient " << i;
          }
        ++cases;
      }
  std::printf("%d cases\n", cases);
}

}  // namespace
