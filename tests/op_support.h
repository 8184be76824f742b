#pragma once
// How the tests of the op table make inputs, call a row and look at what comes out.

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "op_table.h"

namespace mantissa::testing {

inline constexpr Layout kSmallLayouts[] = {Layout::contiguous, Layout::strided, Layout::broadcast,
                                           Layout::empty,      Layout::one,     Layout::odd};
inline constexpr Layout kLayouts[] = {Layout::large,     Layout::aligned, Layout::contiguous, Layout::strided,
                                      Layout::broadcast, Layout::empty,   Layout::one,        Layout::odd};

enum class Data {
  uniform,   // in the interval of the input
  off_grid,  // the same, but 1/256 or more from multiples of 1/64 and from other inputs: no kink within a difference
             // quotient
  grid,      // in the interval, multiples of 1/64: sums of a thousand products are exact in f32
  normal,
  heavy,    // +-2^u, u uniform in [-24, 3]
  integers  // in [-2, 2]
};
inline const char* name(Data d) {
  constexpr const char* names[] = {"uniform", "off grid", "grid", "normal", "heavy-tailed", "integers"};
  return names[static_cast<int>(d)];
}

/// f64 inputs of a row on the CPU.
inline std::vector<Tensor> make_inputs(const Inputs& inputs, Data data = Data::uniform) {
  std::vector<Tensor> made;
  for (const Input& in : inputs) {
    const TensorOptions options{f64, cpu};
    if (in.classes > 0) {
      made.push_back(uniform(in.shape, 0, static_cast<double>(in.classes) - 1e-3, options).to(i64));
      continue;
    }
    made.push_back(!in.bounded && data == Data::normal ? normal(in.shape, 0, 1, options)
                                                       : uniform(in.shape, in.low, in.high, options));
    if (data == Data::uniform || data == Data::normal || (data == Data::heavy && in.bounded)) continue;
    std::vector<double> values = made.back().to_vector<double>();
    const std::vector<double> exponents = uniform(in.shape, -24, 3, options).to_vector<double>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      double& v = values[i];
      if (data == Data::off_grid) v = (std::floor(64 * v) + 0.25 + 0.25 * static_cast<double>(made.size() % 3)) / 64;
      if (data == Data::grid) v = std::round(64 * v) / 64;
      if (data == Data::heavy) v = std::copysign(std::exp2(exponents[i]), v);
      if (data == Data::integers) v = std::round(2.49 * (2 * (v - in.low) / (in.high - in.low) - 1));
    }
    made.back() = from_vector(values, in.shape, options);
  }
  return made;
}

/// The shapes that `call` expects: reversed where it reverses them.
inline Inputs row_inputs(const Row& row, Layout layout) {
  Inputs inputs = row.inputs(layout);
  if (layout == Layout::strided)
    for (Input& in : inputs) std::reverse(in.shape.begin(), in.shape.end());
  return inputs;
}

/// The operands as the row sees them: for the strided layout they are stored with their axes reversed.
inline std::vector<Tensor> operands(Layout layout, Args inputs) {
  std::vector<Tensor> views(inputs.begin(), inputs.end());
  if (layout != Layout::strided) return views;
  for (Tensor& x : views) {
    Shape axes = x.shape();
    for (int i = 0; i < x.rank(); ++i) axes[i] = x.rank() - 1 - i;
    x = x.permute(axes);
  }
  return views;
}
inline Tensor call(const Row& row, Layout layout, Args inputs) { return row.call(operands(layout, inputs)); }

inline std::string label(const Row& row, Layout layout) {
  return row.op + (row.variant.empty() ? "" : " (" + row.variant + ")") + ", " + name(layout);
}

/// What the row gives by definition, or by its own f64 arithmetic where the definition has no loops.
inline std::vector<double> exact_result(const Row& row, Layout layout, Args inputs) {
  const NoGrad no_grad;
  if (!row.oracle) return call(row, layout, inputs).to_vector<double>();
  return row.oracle(operands(layout, inputs)).v;
}

/// f64 values rounded to `dtype` (parameters to its compute type), where they go to `device`, and the same in f64
/// again: a reference starts from what the kernel sees.
struct RoundedInputs {
  std::vector<Tensor> x, exact;
  RoundedInputs(const Inputs& inputs, const std::vector<Tensor>& values, DType dtype, Device device) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const DType type = inputs[i].classes > 0 ? i64 : inputs[i].parameter ? compute_dtype(dtype) : dtype;
      const Tensor rounded = values[i].to(type);
      x.push_back(rounded.to(device));
      exact.push_back(inputs[i].classes > 0 ? rounded : rounded.to(f64));
    }
  }
};

/// Forward and gradients of a row, and the gradient that came in.
struct Outcome {
  Tensor y, g;
  std::vector<Tensor> grads;
};

/// With an undefined `g`, one is drawn that `g_dtype` holds.
inline Outcome run(const Row& row, Layout layout, const Inputs& inputs, const std::vector<Tensor>& values,
                   const Tensor& g, DType g_dtype = f64) {
  std::vector<Tensor> x;
  for (std::size_t i = 0; i < values.size(); ++i) {
    x.push_back(values[i].detach());
    if (inputs[i].differentiable) x[i].set_requires_grad();
  }
  Outcome outcome;
  outcome.y = call(row, layout, x);
  outcome.g = g.defined() ? g : uniform(outcome.y.shape(), -1, 1, {f64, cpu}).to(g_dtype).to(f64);
  backward(outcome.y, {.seed = outcome.g.to(outcome.y.dtype()).to(outcome.y.device())});
  for (std::size_t i = 0; i < x.size(); ++i) outcome.grads.push_back(inputs[i].differentiable ? x[i].grad() : Tensor{});
  return outcome;
}

/// The shape of a row's result.
inline Shape result_shape(const Row& row, Layout layout, Args inputs) {
  const NoGrad no_grad;
  return call(row, layout, inputs).shape();
}

/// ||y - exact|| / ||exact||, where exact counts as at least `floor` an element: a single result may happen to be near
/// zero.
inline double relative_error(const Tensor& y, const std::vector<double>& exact, double floor) {
  const std::vector<double> got = y.to_vector<double>();
  EXPECT_EQ(got.size(), exact.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return error == 0 ? 0 : std::sqrt(error / std::max(norm, floor * floor * static_cast<double>(exact.size())));
}

/// While it lives, fresh memory of the CPU is NaN: an element that a kernel forgets, or reads too early, shows.
class Poison {
 public:
  Poison() {
    cpu_backend().allocator().set_poison([](void* data, std::size_t n) { std::memset(data, 0xFF, n); });
  }
  ~Poison() { cpu_backend().allocator().set_poison(nullptr); }
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;
};

/// The rule of each op, from the printed table.
inline std::map<std::string, std::string> autocast_rules() {
  std::map<std::string, std::string> found;
  std::istringstream table(autocast_table());
  std::string op, rule;
  while (table >> op >> rule) found[op] = rule;
  return found;
}

/// A suite over devices and types: (on the GPU, type).
class OnDeviceAndType : public ::testing::TestWithParam<std::tuple<bool, DType>> {
 protected:
  static DType dtype() { return std::get<1>(GetParam()); }
  static Device device() { return std::get<0>(GetParam()) ? cuda(0) : cpu; }
};
inline std::string device_and_type(const ::testing::TestParamInfo<std::tuple<bool, DType>>& info) {
  return std::string(std::get<0>(info.param) ? "cuda_" : "cpu_") + to_string(std::get<1>(info.param));
}
#define MT_ON_DEVICES_AND_TYPES(Suite, ...)                                                                     \
  INSTANTIATE_TEST_SUITE_P(Types, Suite, ::testing::Combine(::testing::Bool(), ::testing::Values(__VA_ARGS__)), \
                           ::mantissa::testing::device_and_type)

/// Under a sanitizer: small shapes only.
inline bool small_only() { return std::getenv("MANTISSA_SMALL") != nullptr; }

}  // namespace mantissa::testing
