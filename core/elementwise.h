#pragma once
// Every elementwise op: one struct each, and the two lists that make them exist.
//
// To add one: write the struct, add it to the list at the bottom, declare a one-liner in autograd/ops.h. Nothing else:
// both devices, every dtype, autograd, autocast and the generated tests follow from the list.
//   needs    what grad() reads besides the incoming gradient
//   cast     what Autocast does to the inputs
//   domain   (optional) where the function is smooth and defined, for the generated gradient checks
// A is float, or double for f64 tensors: there is no half arithmetic. Comparisons are written so that NaN propagates.

#include <concepts>
#include <type_traits>
#include <variant>

#include "core/math.h"

namespace mantissa {

/// What Autocast does to the floating inputs of an op.
enum class Cast : unsigned char {
  keep,   // whatever type arrives
  low,    // the scope's 16-bit type
  full,   // f32
  widest  // the widest type among the inputs (also without Autocast)
};

enum class Needs : unsigned char { nothing, input, output };

/// What a product may apply to its result.
enum class Activation : unsigned char { none, relu, gelu_tanh };

struct Domain {
  double low, high;
};

template <class Op>
concept Unary = std::is_trivially_copyable_v<Op> && requires(const Op op, double x) {
  { Op::name } -> std::convertible_to<const char*>;
  { Op::needs } -> std::convertible_to<Needs>;
  { Op::cast } -> std::convertible_to<Cast>;
  { op(x) } -> std::same_as<double>;
  { op.grad(x, x) } -> std::same_as<double>;  // grad(g, input or output)
};

template <class Op>
concept Binary = std::is_trivially_copyable_v<Op> && requires(const Op op, double x) {
  { Op::name } -> std::convertible_to<const char*>;
  { Op::cast } -> std::convertible_to<Cast>;
  { Op::reads_operands } -> std::convertible_to<bool>;  // whether the gradients read a and b
  { op(x, x) } -> std::same_as<double>;
  { op.grad_a(x, x, x) } -> std::same_as<double>;  // grad_a(g, a, b)
  { op.grad_b(x, x, x) } -> std::same_as<double>;
};

// ---- unary ----------------------------------------------------------------------------------------------------------

struct Neg {
  static constexpr auto name = "neg";
  static constexpr auto needs = Needs::nothing;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return -x; }
  template <class A> MT_HD A grad(A g, A) const { return -g; }
};

struct Abs {
  static constexpr auto name = "abs";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::abs(x); }
  template <class A> MT_HD A grad(A g, A x) const { return x > A(0) ? g : x < A(0) ? -g : A(0) * x; }
};

struct Exp {
  static constexpr auto name = "exp";
  static constexpr auto needs = Needs::output;
  static constexpr auto cast = Cast::full;
  template <class A> MT_HD A operator()(A x) const { return math::exp(x); }
  template <class A> MT_HD A grad(A g, A y) const { return g * y; }
};

struct Expm1 {
  static constexpr auto name = "expm1";
  static constexpr auto needs = Needs::output;
  static constexpr auto cast = Cast::full;
  template <class A> MT_HD A operator()(A x) const { return math::expm1(x); }
  template <class A> MT_HD A grad(A g, A y) const { return g * (y + A(1)); }
};

struct Log {
  static constexpr auto name = "log";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  static constexpr Domain domain{0.1, 8};
  template <class A> MT_HD A operator()(A x) const { return math::log(x); }
  template <class A> MT_HD A grad(A g, A x) const { return g / x; }
};

struct Log1p {
  static constexpr auto name = "log1p";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  static constexpr Domain domain{-0.9, 8};
  template <class A> MT_HD A operator()(A x) const { return math::log1p(x); }
  template <class A> MT_HD A grad(A g, A x) const { return g / (x + A(1)); }
};

struct Sqrt {
  static constexpr auto name = "sqrt";
  static constexpr auto needs = Needs::output;
  static constexpr auto cast = Cast::keep;
  static constexpr Domain domain{0.1, 8};
  template <class A> MT_HD A operator()(A x) const { return math::sqrt(x); }
  template <class A> MT_HD A grad(A g, A y) const { return g * (A(0.5) / y); }
};

struct Rsqrt {
  static constexpr auto name = "rsqrt";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  static constexpr Domain domain{0.1, 8};
  template <class A> MT_HD A operator()(A x) const { return A(1) / math::sqrt(x); }
  template <class A> MT_HD A grad(A g, A x) const { return g * (A(-0.5) / (x * math::sqrt(x))); }
};

struct Reciprocal {
  static constexpr auto name = "reciprocal";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  static constexpr Domain domain{0.2, 8};
  template <class A> MT_HD A operator()(A x) const { return A(1) / x; }
  template <class A> MT_HD A grad(A g, A x) const { return -g / (x * x); }
};

struct Square {
  static constexpr auto name = "square";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  template <class A> MT_HD A operator()(A x) const { return x * x; }
  template <class A> MT_HD A grad(A g, A x) const { return A(2) * g * x; }
};

struct Sin {
  static constexpr auto name = "sin";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::sin(x); }
  template <class A> MT_HD A grad(A g, A x) const { return g * math::cos(x); }
};

struct Cos {
  static constexpr auto name = "cos";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::cos(x); }
  template <class A> MT_HD A grad(A g, A x) const { return -g * math::sin(x); }
};

struct Tanh {
  static constexpr auto name = "tanh";
  static constexpr auto needs = Needs::input;  // from the output, 1 - y^2 loses its digits in 16 bits near |y| = 1
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::tanh(x); }
  template <class A> MT_HD A grad(A g, A x) const {
    const A e = math::exp(A(-2) * math::abs(x)), d = A(1) + e;  // 1 - tanh^2 = 4 e / (1 + e)^2
    return g * (A(4) * e / (d * d));
  }
};

struct Sigmoid {
  static constexpr auto name = "sigmoid";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::sigmoid(x); }
  template <class A> MT_HD A grad(A g, A x) const {
    const A e = math::exp(-math::abs(x)), d = A(1) + e;
    return g * (e / (d * d));
  }
};

struct Erf {
  static constexpr auto name = "erf";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return math::erf(x); }
  template <class A> MT_HD A grad(A g, A x) const { return g * (A(1.1283791670955126) * math::exp(-x * x)); }
};

struct Relu {
  static constexpr auto name = "relu";
  static constexpr auto needs = Needs::output;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x < A(0) ? A(0) : x; }
  template <class A> MT_HD A grad(A g, A y) const { return y > A(0) ? g : A(0); }
};

struct LeakyRelu {
  double slope = 0.01;
  static constexpr auto name = "leaky_relu";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x < A(0) ? A(slope) * x : x; }
  template <class A> MT_HD A grad(A g, A x) const { return x > A(0) ? g : A(slope) * g; }
};

struct Gelu {  // x Phi(x), Hendrycks and Gimpel 2016
  static constexpr auto name = "gelu";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x * math::normal_cdf(x); }
  template <class A> MT_HD A grad(A g, A x) const {
    return g * (math::normal_cdf(x) + x * A(0.39894228040143268) * math::exp(A(-0.5) * x * x));
  }
};

struct GeluTanh {  // the tanh form that GPT-2 uses
  static constexpr auto name = "gelu_tanh";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  // x (1 + tanh(u)) / 2 = x sigmoid(2 u), which keeps its digits where the tanh is near -1.
  template <class A> MT_HD A operator()(A x) const { return x * math::sigmoid(twice_u(x)); }
  template <class A> MT_HD A grad(A g, A x) const {
    const A s = math::sigmoid(twice_u(x)), slope = A(1.5957691216057308) * (A(1) + A(0.134145) * x * x);
    return g * (s + x * s * (A(1) - s) * slope);
  }
  template <class A> MT_HD static A twice_u(A x) { return A(1.5957691216057308) * (x + A(0.044715) * x * x * x); }
};

struct Silu {
  static constexpr auto name = "silu";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x * math::sigmoid(x); }
  template <class A> MT_HD A grad(A g, A x) const {
    const A s = math::sigmoid(x);
    return g * (s * (A(1) + x * (A(1) - s)));
  }
};

struct Softplus {
  static constexpr auto name = "softplus";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  template <class A> MT_HD A operator()(A x) const {
    return (x > A(0) ? x : A(0)) + math::log1p(math::exp(-math::abs(x)));
  }
  template <class A> MT_HD A grad(A g, A x) const { return g * math::sigmoid(x); }
};

struct Clamp {
  double low = 0, high = 1;
  static constexpr auto name = "clamp";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x < A(low) ? A(low) : x > A(high) ? A(high) : x; }
  template <class A> MT_HD A grad(A g, A x) const { return x < A(low) || x > A(high) ? A(0) : g; }
};

struct AddScalar {
  double value = 1;
  static constexpr auto name = "add_scalar";
  static constexpr auto needs = Needs::nothing;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x + A(value); }
  template <class A> MT_HD A grad(A g, A) const { return g; }
};

struct MulScalar {
  double value = 2;
  static constexpr auto name = "mul_scalar";
  static constexpr auto needs = Needs::nothing;
  static constexpr auto cast = Cast::keep;
  template <class A> MT_HD A operator()(A x) const { return x * A(value); }
  template <class A> MT_HD A grad(A g, A) const { return g * A(value); }
};

struct PowScalar {
  double exponent = 2.5;
  static constexpr auto name = "pow_scalar";
  static constexpr auto needs = Needs::input;
  static constexpr auto cast = Cast::full;
  static constexpr Domain domain{0.1, 4};
  template <class A> MT_HD A operator()(A x) const { return power(x, exponent); }
  template <class A> MT_HD A grad(A g, A x) const {
    return exponent == 0 ? A(0) * x : g * (A(exponent) * power(x, exponent - 1));
  }
  // The device's pow misses the last bit even of pow(3, 1).
  template <class A> MT_HD static A power(A x, double e) {
    return e == 1 ? x : e == 2 ? x * x : e == 3 ? x * x * x : math::pow(x, A(e));
  }
};

// ---- binary (with broadcasting) -------------------------------------------------------------------------------------

struct Add {
  static constexpr auto name = "add";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = false;
  template <class A> MT_HD A operator()(A a, A b) const { return a + b; }
  template <class A> MT_HD A grad_a(A g, A, A) const { return g; }
  template <class A> MT_HD A grad_b(A g, A, A) const { return g; }
};

struct Sub {
  static constexpr auto name = "sub";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = false;
  template <class A> MT_HD A operator()(A a, A b) const { return a - b; }
  template <class A> MT_HD A grad_a(A g, A, A) const { return g; }
  template <class A> MT_HD A grad_b(A g, A, A) const { return -g; }
};

struct Mul {
  static constexpr auto name = "mul";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = true;
  template <class A> MT_HD A operator()(A a, A b) const { return a * b; }
  template <class A> MT_HD A grad_a(A g, A, A b) const { return g * b; }
  template <class A> MT_HD A grad_b(A g, A a, A) const { return g * a; }
};

struct Div {
  static constexpr auto name = "div";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = true;
  static constexpr Domain domain{0.3, 4};
  template <class A> MT_HD A operator()(A a, A b) const { return a / b; }
  template <class A> MT_HD A grad_a(A g, A, A b) const { return g / b; }
  template <class A> MT_HD A grad_b(A g, A a, A b) const { return -g * (a / b) / b; }
};

struct Pow {
  static constexpr auto name = "pow";
  static constexpr auto cast = Cast::full;
  static constexpr bool reads_operands = true;
  static constexpr Domain domain{0.3, 3};
  template <class A> MT_HD A operator()(A a, A b) const { return math::pow(a, b); }
  template <class A> MT_HD A grad_a(A g, A a, A b) const { return b == A(0) ? A(0) : g * (b * math::pow(a, b - A(1))); }
  template <class A> MT_HD A grad_b(A g, A a, A b) const {
    return a == A(0) ? A(0) : g * (math::pow(a, b) * math::log(a));
  }
};

// At a tie the gradient is shared equally, as in PyTorch and NumPy-based autograd.
struct Maximum {
  static constexpr auto name = "maximum";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = true;
  template <class A> MT_HD A operator()(A a, A b) const { return a > b || a != a ? a : b; }
  template <class A> MT_HD A grad_a(A g, A a, A b) const { return a > b ? g : a == b ? A(0.5) * g : A(0); }
  template <class A> MT_HD A grad_b(A g, A a, A b) const { return b > a ? g : a == b ? A(0.5) * g : A(0); }
};

struct Minimum {
  static constexpr auto name = "minimum";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = true;
  template <class A> MT_HD A operator()(A a, A b) const { return a < b || a != a ? a : b; }
  template <class A> MT_HD A grad_a(A g, A a, A b) const { return a < b ? g : a == b ? A(0.5) * g : A(0); }
  template <class A> MT_HD A grad_b(A g, A a, A b) const { return b < a ? g : a == b ? A(0.5) * g : A(0); }
};

struct SwiGlu {  // silu(a) b, Shazeer 2020
  static constexpr auto name = "swiglu";
  static constexpr auto cast = Cast::widest;
  static constexpr bool reads_operands = true;
  template <class A> MT_HD A operator()(A a, A b) const { return a * math::sigmoid(a) * b; }
  template <class A> MT_HD A grad_a(A g, A a, A b) const {
    const A s = math::sigmoid(a);
    return g * b * (s * (A(1) + a * (A(1) - s)));
  }
  template <class A> MT_HD A grad_b(A g, A a, A) const { return g * (a * math::sigmoid(a)); }
};

// ---- the lists ------------------------------------------------------------------------------------------------------

template <Unary... Ops> using UnaryList = std::variant<Ops...>;
template <Binary... Ops> using BinaryList = std::variant<Ops...>;

using UnaryOp = UnaryList<Neg, Abs, Exp, Expm1, Log, Log1p, Sqrt, Rsqrt, Reciprocal, Square, Sin, Cos, Tanh, Sigmoid,
                          Erf, Relu, LeakyRelu, Gelu, GeluTanh, Silu, Softplus, Clamp, AddScalar, MulScalar, PowScalar>;
using BinaryOp = BinaryList<Add, Sub, Mul, Div, Pow, Maximum, Minimum, SwiGlu>;

/// Calls f(Op{}) for every op of a list.
template <class List, class F> void for_each_op(F&& f) {
  [&]<class... Ops>(std::type_identity<std::variant<Ops...>>) { (f(Ops{}), ...); }(std::type_identity<List>{});
}

}  // namespace mantissa
