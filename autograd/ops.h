#pragma once
// The public ops: free functions with NumPy's and PyTorch's names. All are differentiable unless said otherwise, run on
// the device of their inputs, take any strides, and throw typed errors that name the op and its operands.
// The Autocast rule of each op is printed by autocast_table().

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autograd/autocast.h"
#include "core/backend.h"
#include "core/elementwise.h"
#include "core/tensor.h"

namespace mantissa {

// ---- elementwise; y[i] = f(x[i]) ------------------------------------------------------------------------------------

Tensor unary(const UnaryOp& op, const Tensor& x);
Tensor binary(const BinaryOp& op, const Tensor& a, const Tensor& b);  // broadcasts; mixed dtypes widen

inline Tensor neg(const Tensor& x) { return unary(Neg{}, x); }
inline Tensor abs(const Tensor& x) { return unary(Abs{}, x); }
inline Tensor exp(const Tensor& x) { return unary(Exp{}, x); }
inline Tensor expm1(const Tensor& x) { return unary(Expm1{}, x); }
inline Tensor log(const Tensor& x) { return unary(Log{}, x); }
inline Tensor log1p(const Tensor& x) { return unary(Log1p{}, x); }
inline Tensor sqrt(const Tensor& x) { return unary(Sqrt{}, x); }
inline Tensor rsqrt(const Tensor& x) { return unary(Rsqrt{}, x); }            // 1 / sqrt(x)
inline Tensor reciprocal(const Tensor& x) { return unary(Reciprocal{}, x); }  // 1 / x
inline Tensor square(const Tensor& x) { return unary(Square{}, x); }
inline Tensor sin(const Tensor& x) { return unary(Sin{}, x); }
inline Tensor cos(const Tensor& x) { return unary(Cos{}, x); }
inline Tensor tanh(const Tensor& x) { return unary(Tanh{}, x); }
inline Tensor sigmoid(const Tensor& x) { return unary(Sigmoid{}, x); }  // 1 / (1 + exp(-x))
inline Tensor erf(const Tensor& x) { return unary(Erf{}, x); }
inline Tensor relu(const Tensor& x) { return unary(Relu{}, x); }  // max(x, 0); NaN stays NaN
inline Tensor leaky_relu(const Tensor& x, double slope = 0.01) { return unary(LeakyRelu{slope}, x); }
inline Tensor gelu(const Tensor& x) { return unary(Gelu{}, x); }           // x Phi(x)
inline Tensor gelu_tanh(const Tensor& x) { return unary(GeluTanh{}, x); }  // GPT-2's approximation
inline Tensor silu(const Tensor& x) { return unary(Silu{}, x); }           // x sigmoid(x)
inline Tensor softplus(const Tensor& x) { return unary(Softplus{}, x); }   // log(1 + exp(x))
inline Tensor clamp(const Tensor& x, double low, double high) { return unary(Clamp{low, high}, x); }
inline Tensor pow(const Tensor& x, double exponent) { return unary(PowScalar{exponent}, x); }

inline Tensor add(const Tensor& a, const Tensor& b) { return binary(Add{}, a, b); }
inline Tensor sub(const Tensor& a, const Tensor& b) { return binary(Sub{}, a, b); }
inline Tensor mul(const Tensor& a, const Tensor& b) { return binary(Mul{}, a, b); }
inline Tensor div(const Tensor& a, const Tensor& b) { return binary(Div{}, a, b); }
inline Tensor pow(const Tensor& a, const Tensor& b) { return binary(Pow{}, a, b); }
inline Tensor maximum(const Tensor& a, const Tensor& b) { return binary(Maximum{}, a, b); }
inline Tensor minimum(const Tensor& a, const Tensor& b) { return binary(Minimum{}, a, b); }
inline Tensor swiglu(const Tensor& a, const Tensor& b) { return binary(SwiGlu{}, a, b); }  // silu(a) b

inline Tensor operator-(const Tensor& x) { return neg(x); }
inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator+(const Tensor& a, double b) { return unary(AddScalar{b}, a); }
inline Tensor operator+(double a, const Tensor& b) { return unary(AddScalar{a}, b); }
inline Tensor operator-(const Tensor& a, double b) { return unary(AddScalar{-b}, a); }
inline Tensor operator-(double a, const Tensor& b) { return unary(AddScalar{a}, neg(b)); }
inline Tensor operator*(const Tensor& a, double b) { return unary(MulScalar{b}, a); }
inline Tensor operator*(double a, const Tensor& b) { return unary(MulScalar{a}, b); }
inline Tensor operator/(const Tensor& a, double b) { return unary(MulScalar{1 / b}, a); }

/// Elementwise comparison with broadcasting, to bool; not differentiable.
Tensor compare(CompareOp op, const Tensor& a, const Tensor& b);
inline Tensor operator==(const Tensor& a, const Tensor& b) { return compare(CompareOp::equal, a, b); }
inline Tensor operator!=(const Tensor& a, const Tensor& b) { return compare(CompareOp::not_equal, a, b); }
inline Tensor operator<(const Tensor& a, const Tensor& b) { return compare(CompareOp::less, a, b); }
inline Tensor operator<=(const Tensor& a, const Tensor& b) { return compare(CompareOp::less_equal, a, b); }
inline Tensor operator>(const Tensor& a, const Tensor& b) { return compare(CompareOp::greater, a, b); }
inline Tensor operator>=(const Tensor& a, const Tensor& b) { return compare(CompareOp::greater_equal, a, b); }
/// condition ? a : b, with broadcasting; condition is bool.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);

/// Zeroes each element with probability p and divides the rest by 1 - p; the identity when not training.
/// No mask is stored: backward draws the same numbers again.
Tensor dropout(const Tensor& x, double p, bool training = true);

// ---- random; from the process-wide stream (manual_seed)
// ---------------------------------------------------------------

Tensor rand(const Shape& shape, TensorOptions options = {});   // uniform [0, 1)
Tensor randn(const Shape& shape, TensorOptions options = {});  // normal, mean 0, deviation 1
Tensor uniform(const Shape& shape, double low, double high, TensorOptions options = {});
Tensor normal(const Shape& shape, double mean, double deviation, TensorOptions options = {});
Tensor bernoulli(const Shape& shape, double p, TensorOptions options = {});

// ---- reductions; over all axes when none is named
// --------------------------------------------------------------------

Tensor sum(const Tensor& x, std::vector<int> axes = {}, bool keepdims = false);
Tensor mean(const Tensor& x, std::vector<int> axes = {}, bool keepdims = false);
Tensor var(const Tensor& x, std::vector<int> axes = {}, bool keepdims = false, int correction = 1);
Tensor max(const Tensor& x, int axis, bool keepdims = false);  // the gradient goes to the first largest element
Tensor min(const Tensor& x, int axis, bool keepdims = false);
Tensor argmax(const Tensor& x, int axis, bool keepdims = false);  // i64; not differentiable

// ---- products
// ---------------------------------------------------------------------------------------------------------

/// a[..., m, k] b[..., k, n] -> [..., m, n]; leading axes broadcast; a vector is a row on the left, a column on the
/// right.
Tensor matmul(const Tensor& a, const Tensor& b);
/// activation(x w^T + b): x[..., in], w[out, in], b[out] or undefined -> [..., out].
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b = {}, Activation activation = Activation::none);
/// softmax(q k^T scale + mask) v; q[B,H,T,D], k and v [B,G,S,D] with G dividing H (grouped heads).
/// causal: query i sees keys j <= i + S - T. scale: default 1/sqrt(D). Fused; the scores are never stored.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal = false,
                 std::optional<double> scale = {});
/// The same on a packed projection qkv[B,T,3 H D] -> [B,T,H D], with its gradient written packed: no copies.
Tensor attention_qkv(const Tensor& qkv, int heads, bool causal = true);

// ---- normalisation and loss
// -------------------------------------------------------------------------------------------

Tensor softmax(const Tensor& x, int axis = -1);
Tensor log_softmax(const Tensor& x, int axis = -1);
/// Over the last axis: (x - mean) / sqrt(var + eps) w + b; w, b [columns] may be undefined. Statistics in f32.
Tensor layer_norm(const Tensor& x, const Tensor& w = {}, const Tensor& b = {}, double eps = 1e-5);
/// x / sqrt(mean(x^2) + eps) w (Zhang and Sennrich 2019).
Tensor rms_norm(const Tensor& x, const Tensor& w = {}, double eps = 1e-6);
struct Normed {
  Tensor y, sum;
};
/// sum = x + residual; y = layer_norm(sum): one kernel forward, one backward.
Normed add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& w = {}, const Tensor& b = {},
                      double eps = 1e-5);
Normed add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& w = {}, double eps = 1e-6);
/// Training: statistics of the batch [N,C,H,W], and running = (1 - momentum) running + momentum batch; else the running
/// ones.
Tensor batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& running_mean,
                  const Tensor& running_var, bool training, double momentum = 0.1, double eps = 1e-5);

/// Mean of -log softmax(x)[target] over the rows whose target is not ignore_index (0 when there are none); f32 scalar.
/// x[..., classes], targets[...] i32 or i64. label_smoothing s: target distribution (1 - s) onehot + s / classes.
Tensor cross_entropy(const Tensor& x, const Tensor& targets, CrossEntropyOptions options = {});
Tensor mse_loss(const Tensor& x, const Tensor& target);  // mean((x - target)^2), f32 scalar

// ---- images: logical [N,C,H,W], stored channels-last
// -------------------------------------------------------------------

/// x[N,C,H,W], w[O,C/groups,KH,KW], b[O] or undefined -> [N,O,H',W'], H' = (H + 2 pad - dilation (KH-1) - 1) / stride
/// + 1.
Tensor conv2d(const Tensor& x, const Tensor& w, const Tensor& b = {}, Conv2dOptions options = {});
Tensor max_pool2d(const Tensor& x, Pool2dOptions options = {});
Tensor avg_pool2d(const Tensor& x, Pool2dOptions options = {});

// ---- indexing
// ----------------------------------------------------------------------------------------------------------

/// w[rows, d] and ids of any shape -> [..., d]; the gradient sums in f32, in a fixed order.
Tensor embedding(const Tensor& ids, const Tensor& w);
/// y[i...] = x[i... with i[axis] replaced by index[i...]]; index i64 or i32 of x's rank.
Tensor gather(const Tensor& x, int axis, const Tensor& index);
/// base with x[i...] added at [i... with i[axis] replaced by index[i...]].
Tensor scatter_add(const Tensor& base, int axis, const Tensor& index, const Tensor& x);

// ---- shapes: views where possible (members of Tensor)
// --------------------------------------------------------------------

Tensor concat(const std::vector<Tensor>& parts, int axis = 0);
Tensor stack(const std::vector<Tensor>& parts, int axis = 0);
/// Views of equal or given sizes along an axis.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int axis = 0);
/// The conversion that Autocast inserts; differentiable between float types.
Tensor cast(const Tensor& x, DType dtype);

/// Runs fn(inputs) without keeping its intermediate results, and runs it again in backward: memory for time.
/// Random numbers, Autocast and everything else of the thread are as they were the first time.
Tensor checkpoint(const std::function<Tensor(std::span<const Tensor>)>& fn, const std::vector<Tensor>& inputs);

/// Checks every index and target on the GPU too, at the price of waiting for the device. Default: only on the CPU.
void set_check_indices(bool value);

}  // namespace mantissa
