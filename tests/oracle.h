#pragma once
// Results by definition: plain loops in f64 over row-major arrays, without a kernel or a library. What the op table
// compares with; NaN takes the way that the loops give it.

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "support.h"

namespace mantissa::testing::oracle {

struct Array {
  Shape shape;
  std::vector<double> v;

  explicit Array(const Shape& s) : shape(s), v(static_cast<std::size_t>(numel(s))) {}
  Array(const Tensor& x) : shape(x.shape()), v(x.to_vector<double>()) {}  // NOLINT: implicit, so that rows read well

  template <class... Index> double& operator()(Index... index) { return v[offset(index...)]; }
  template <class... Index> double operator()(Index... index) const { return v[offset(index...)]; }
  std::int64_t size(int axis) const { return shape[axis < 0 ? axis + shape.rank() : axis]; }

 private:
  template <class... Index> std::size_t offset(Index... index) const {
    std::int64_t at = 0;
    int axis = 0;
    ((at = at * shape[axis++] + static_cast<std::int64_t>(index)), ...);
    return static_cast<std::size_t>(at);
  }
};

/// Calls f(flat index, index of every axis).
template <class F> void for_each_index(const Shape& shape, F&& f) {
  Shape index = shape;
  const std::int64_t n = numel(shape);
  for (std::int64_t flat = 0; flat < n; ++flat) {
    std::int64_t rest = flat;
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      index[axis] = rest % shape[axis];
      rest /= shape[axis];
    }
    f(static_cast<std::size_t>(flat), index);
  }
}

/// Where `index` of a larger shape lies in an operand that broadcasts to it.
inline std::size_t broadcast_at(const Shape& index, const Shape& own) {
  std::int64_t at = 0;
  for (int axis = 0; axis < own.rank(); ++axis)
    at = at * own[axis] + (own[axis] == 1 ? 0 : index[axis + index.rank() - own.rank()]);
  return static_cast<std::size_t>(at);
}

// ---- elementwise
// --------------------------------------------------------------------------------------------------------

/// The elementwise ops by name, from the C library's functions; options as the structs have them by default.
inline const std::map<std::string, std::function<double(double)>>& unary_formulas() {
  static const std::map<std::string, std::function<double(double)>> formulas{
      {"neg", [](double x) { return -x; }},
      {"abs", [](double x) { return std::fabs(x); }},
      {"exp", [](double x) { return std::exp(x); }},
      {"expm1", [](double x) { return std::expm1(x); }},
      {"log", [](double x) { return std::log(x); }},
      {"log1p", [](double x) { return std::log1p(x); }},
      {"sqrt", [](double x) { return std::sqrt(x); }},
      {"rsqrt", [](double x) { return 1 / std::sqrt(x); }},
      {"reciprocal", [](double x) { return 1 / x; }},
      {"square", [](double x) { return x * x; }},
      {"sin", [](double x) { return std::sin(x); }},
      {"cos", [](double x) { return std::cos(x); }},
      {"tanh", [](double x) { return std::tanh(x); }},
      {"sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }},
      {"erf", [](double x) { return std::erf(x); }},
      {"relu", [](double x) { return std::isnan(x) ? x : std::fmax(x, 0); }},
      {"leaky_relu", [](double x) { return x < 0 ? 0.01 * x : x; }},
      {"gelu", [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }},
      {"gelu_tanh",
       [](double x) { return x / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))); }},
      {"silu", [](double x) { return x / (1 + std::exp(-x)); }},
      {"softplus", [](double x) { return x > 30 ? x : std::log1p(std::exp(x)); }},
      {"clamp", [](double x) { return std::isnan(x) ? x : std::fmin(std::fmax(x, 0), 1); }},
      {"add_scalar", [](double x) { return x + 1; }},
      {"mul_scalar", [](double x) { return x * 2; }},
      {"pow_scalar", [](double x) { return std::pow(x, 2.5); }},
  };
  return formulas;
}

inline const std::map<std::string, std::function<double(double, double)>>& binary_formulas() {
  static const std::map<std::string, std::function<double(double, double)>> formulas{
      {"add", [](double a, double b) { return a + b; }},
      {"sub", [](double a, double b) { return a - b; }},
      {"mul", [](double a, double b) { return a * b; }},
      {"div", [](double a, double b) { return a / b; }},
      {"pow", [](double a, double b) { return std::pow(a, b); }},
      {"maximum", [](double a, double b) { return std::isnan(a + b) ? a + b : std::fmax(a, b); }},
      {"minimum", [](double a, double b) { return std::isnan(a + b) ? a + b : std::fmin(a, b); }},
      {"swiglu", [](double a, double b) { return a / (1 + std::exp(-a)) * b; }},
  };
  return formulas;
}

template <class F> Array map(const Array& x, F&& f) {
  Array y(x.shape);
  for (std::size_t i = 0; i < y.v.size(); ++i) y.v[i] = f(x.v[i]);
  return y;
}

template <class F> Array zip(const Array& a, const Array& b, F&& f) {
  Array y(broadcast_shapes("oracle", a.shape, b.shape));
  for_each_index(y.shape, [&](std::size_t flat, const Shape& at) {
    y.v[flat] = f(a.v[broadcast_at(at, a.shape)], b.v[broadcast_at(at, b.shape)]);
  });
  return y;
}

// ---- products
// -----------------------------------------------------------------------------------------------------------

inline Array matmul(const Array& a, const Array& b) {  // both of at least two axes
  Shape batch_a, batch_b;
  for (int i = 0; i + 2 < a.shape.rank(); ++i) batch_a.push_back(a.shape[i]);
  for (int i = 0; i + 2 < b.shape.rank(); ++i) batch_b.push_back(b.shape[i]);
  const Shape batch = broadcast_shapes("oracle", batch_a, batch_b);
  const std::int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  Shape shape = batch;
  shape.push_back(m);
  shape.push_back(n);
  Array y(shape);
  for_each_index(batch, [&](std::size_t flat, const Shape& at) {
    const double* pa = a.v.data() + static_cast<std::int64_t>(broadcast_at(at, batch_a)) * m * k;
    const double* pb = b.v.data() + static_cast<std::int64_t>(broadcast_at(at, batch_b)) * k * n;
    double* py = y.v.data() + static_cast<std::int64_t>(flat) * m * n;
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t l = 0; l < k; ++l)
        for (std::int64_t j = 0; j < n; ++j) py[i * n + j] += pa[i * k + l] * pb[l * n + j];
  });
  return y;
}

/// act(x w^T + b); b may be empty.
inline Array linear(const Array& x, const Array& w, const std::vector<double>& b, const std::string& activation) {
  const std::int64_t in = w.size(1), out = w.size(0), rows = in > 0 ? static_cast<std::int64_t>(x.v.size()) / in : 0;
  Shape shape = x.shape;
  shape[shape.rank() - 1] = out;
  Array y(shape);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = b.empty() ? 0 : b[static_cast<std::size_t>(o)];
      for (std::int64_t i = 0; i < in; ++i) sum += x.v[static_cast<std::size_t>(r * in + i)] * w(o, i);
      y.v[static_cast<std::size_t>(r * out + o)] = activation.empty() ? sum : unary_formulas().at(activation)(sum);
    }
  return y;
}

inline Array attention(const Array& q, const Array& k, const Array& v, bool causal, double scale) {
  const std::int64_t batch = q.size(0), heads = q.size(1), t = q.size(2), d = q.size(3), s = k.size(2),
                     group = heads / k.size(1);
  Array y(q.shape);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < t; ++i) {
        const std::int64_t seen = causal ? i + s - t + 1 : s;
        std::vector<double> p(static_cast<std::size_t>(seen));
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (std::int64_t j = 0; j < seen; ++j) {
          for (std::int64_t c = 0; c < d; ++c)
            p[static_cast<std::size_t>(j)] += scale * q(b, h, i, c) * k(b, h / group, j, c);
          top = std::fmax(top, p[static_cast<std::size_t>(j)]);
        }
        for (double& w : p) total += w = std::exp(w - top);
        for (std::int64_t j = 0; j < seen; ++j)
          for (std::int64_t c = 0; c < d; ++c)
            y(b, h, i, c) += p[static_cast<std::size_t>(j)] / total * v(b, h / group, j, c);
      }
  return y;
}

// ---- rows
// ---------------------------------------------------------------------------------------------------------------

/// Calls f(row) for each run of values along an axis; row is a vector of pointers to them.
template <class F> void for_each_row(Array& x, int axis, F&& f) {
  if (axis < 0) axis += x.shape.rank();
  std::int64_t inner = 1;
  for (int i = axis + 1; i < x.shape.rank(); ++i) inner *= x.shape[i];
  const std::int64_t n = x.shape[axis], rows = n > 0 ? static_cast<std::int64_t>(x.v.size()) / n : 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<double*> row;
    for (std::int64_t i = 0; i < n; ++i)
      row.push_back(&x.v[static_cast<std::size_t>(r / inner * n * inner + i * inner + r % inner)]);
    f(row);
  }
}

inline Array softmax(Array x, int axis, bool log) {
  for_each_row(x, axis, [&](const std::vector<double*>& row) {
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (const double* p : row) top = std::fmax(top, *p);
    for (const double* p : row) total += std::exp(*p - top);
    for (double* p : row) *p = log ? *p - top - std::log(total) : std::exp(*p - top) / total;
  });
  return x;
}

inline Array cross_entropy(const Array& x, const Array& targets, std::int64_t ignored, double smoothing) {
  const std::int64_t classes = x.size(-1);
  const Array logs = softmax(x, -1, true);
  double sum = 0;
  std::int64_t counted = 0;
  for (std::size_t row = 0; row < targets.v.size(); ++row) {
    const auto target = static_cast<std::int64_t>(targets.v[row]);
    if (target == ignored) continue;
    ++counted;
    for (std::int64_t c = 0; c < classes; ++c) {
      const double weight = (c == target ? 1 - smoothing : 0) + smoothing / static_cast<double>(classes);
      if (weight != 0) sum -= weight * logs.v[row * static_cast<std::size_t>(classes) + static_cast<std::size_t>(c)];
    }
  }
  Array loss{Shape{}};
  loss.v[0] = counted > 0 ? sum / static_cast<double>(counted) : 0;
  return loss;
}

inline Array mse_loss(const Array& x, const Array& target) {
  Array loss{Shape{}};
  for (std::size_t i = 0; i < x.v.size(); ++i) loss.v[0] += (x.v[i] - target.v[i]) * (x.v[i] - target.v[i]);
  loss.v[0] /= static_cast<double>(x.v.size());
  return loss;
}

/// (x - mean) / sqrt(var + eps) w + b over the last axis; rms: without the mean. w, b may be empty.
inline Array norm(Array x, bool rms, const std::vector<double>& w, const std::vector<double>& b, double eps) {
  for_each_row(x, -1, [&](const std::vector<double*>& row) {
    double mean = 0, var = 0;
    const auto n = static_cast<double>(row.size());
    for (const double* p : row) mean += rms ? 0 : *p / n;
    for (const double* p : row) var += (*p - mean) * (*p - mean) / n;
    for (std::size_t i = 0; i < row.size(); ++i)
      *row[i] = (*row[i] - mean) / std::sqrt(var + eps) * (w.empty() ? 1 : w[i]) + (b.empty() ? 0 : b[i]);
  });
  return x;
}

/// mean and var are the running ones, unless training.
inline Array batch_norm(Array x, const Array& w, const Array& b, double mean, double var, bool training, double eps) {
  const std::int64_t per_image = x.size(1) * x.size(2) * x.size(3), pixels = x.size(2) * x.size(3);
  for (std::int64_t c = 0; c < x.size(1); ++c) {
    std::vector<double*> channel;
    for (std::int64_t n = 0; n < x.size(0); ++n)
      for (std::int64_t i = 0; i < pixels; ++i)
        channel.push_back(&x.v[static_cast<std::size_t>(n * per_image + c * pixels + i)]);
    if (training) {
      mean = var = 0;
      for (const double* p : channel) mean += *p / static_cast<double>(channel.size());
      for (const double* p : channel) var += (*p - mean) * (*p - mean) / static_cast<double>(channel.size());
    }
    for (double* p : channel) *p = (*p - mean) / std::sqrt(var + eps) * w(c) + b(c);
  }
  return x;
}

// ---- images
// -------------------------------------------------------------------------------------------------------------

inline Array conv2d(const Array& x, const Array& w, const std::vector<double>& b, const Conv2dOptions& o) {
  const auto out_size = [&](int i) {
    return (x.size(2 + i) + 2 * o.padding[i] - o.dilation[i] * (w.size(2 + i) - 1) - 1) / o.stride[i] + 1;
  };
  const std::int64_t in_group = w.size(1), out_group = w.size(0) / o.groups;
  Array y(Shape{x.size(0), w.size(0), out_size(0), out_size(1)});
  for_each_index(y.shape, [&](std::size_t flat, const Shape& at) {
    double sum = b.empty() ? 0 : b[static_cast<std::size_t>(at[1])];
    for (std::int64_t c = 0; c < in_group; ++c)
      for (std::int64_t p = 0; p < w.size(2); ++p)
        for (std::int64_t q = 0; q < w.size(3); ++q) {
          const std::int64_t row = at[2] * o.stride[0] - o.padding[0] + p * o.dilation[0];
          const std::int64_t column = at[3] * o.stride[1] - o.padding[1] + q * o.dilation[1];
          if (row < 0 || row >= x.size(2) || column < 0 || column >= x.size(3)) continue;
          sum += x(at[0], at[1] / out_group * in_group + c, row, column) * w(at[1], c, p, q);
        }
    y.v[flat] = sum;
  });
  return y;
}

inline Array pool2d(const Array& x, bool max, const Pool2dOptions& o) {
  const auto out_size = [&](int i) { return (x.size(2 + i) + 2 * o.padding[i] - o.kernel[i]) / o.stride[i] + 1; };
  Array y(Shape{x.size(0), x.size(1), out_size(0), out_size(1)});
  for_each_index(y.shape, [&](std::size_t flat, const Shape& at) {
    double sum = 0, top = -std::numeric_limits<double>::infinity();
    std::int64_t inside = 0;
    for (std::int64_t row = at[2] * o.stride[0] - o.padding[0]; row < at[2] * o.stride[0] - o.padding[0] + o.kernel[0];
         ++row)
      for (std::int64_t column = at[3] * o.stride[1] - o.padding[1];
           column < at[3] * o.stride[1] - o.padding[1] + o.kernel[1]; ++column) {
        if (row < 0 || row >= x.size(2) || column < 0 || column >= x.size(3)) continue;
        const double v = x(at[0], at[1], row, column);
        ++inside;
        sum += v;
        top = std::isnan(v) || std::isnan(top) ? v + top : std::fmax(top, v);
      }
    y.v[flat] = max ? top : sum / static_cast<double>(o.count_include_pad ? o.kernel[0] * o.kernel[1] : inside);
  });
  return y;
}

// ---- reductions and indexing
// --------------------------------------------------------------------------------------------

enum class Reduction { sum, mean, var, max, min };

/// Over `axes` (all when empty); var with n - 1.
inline Array reduce(Reduction kind, const Array& x, const std::vector<int>& axes, bool keepdims) {
  std::vector<bool> reduced(static_cast<std::size_t>(x.shape.rank()), axes.empty());
  for (const int axis : axes) reduced[static_cast<std::size_t>(axis < 0 ? axis + x.shape.rank() : axis)] = true;
  Shape kept = x.shape, dropped;
  for (int i = 0; i < x.shape.rank(); ++i) {
    if (reduced[static_cast<std::size_t>(i)]) {
      kept[i] = 1;
    } else {
      dropped.push_back(x.shape[i]);
    }
  }
  std::vector<std::vector<double>> groups(static_cast<std::size_t>(numel(kept)));
  for_each_index(x.shape,
                 [&](std::size_t flat, const Shape& at) { groups[broadcast_at(at, kept)].push_back(x.v[flat]); });
  Array y(keepdims ? kept : dropped);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto n = static_cast<double>(groups[i].size());
    double sum = 0, squares = 0, most = -std::numeric_limits<double>::infinity(), least = -most;
    for (const double v : groups[i]) {
      sum += v;
      most = std::isnan(v) || std::isnan(most) ? v + most : std::fmax(most, v);
      least = std::isnan(v) || std::isnan(least) ? v + least : std::fmin(least, v);
    }
    for (const double v : groups[i]) squares += (v - sum / n) * (v - sum / n);
    y.v[i] = kind == Reduction::sum    ? sum
             : kind == Reduction::mean ? sum / n
             : kind == Reduction::var  ? squares / (n - 1)
             : kind == Reduction::max  ? most
                                       : least;
  }
  return y;
}

inline Array embedding(const Array& ids, const Array& w) {
  Shape shape = ids.shape;
  shape.push_back(w.size(1));
  Array y(shape);
  for (std::size_t i = 0; i < ids.v.size(); ++i)
    for (std::int64_t c = 0; c < w.size(1); ++c)
      y.v[i * static_cast<std::size_t>(w.size(1)) + static_cast<std::size_t>(c)] = w(ids.v[i], c);
  return y;
}

inline Array gather(const Array& x, const Array& index) {  // along axis 0 of two
  Array y(index.shape);
  for (std::int64_t i = 0; i < y.size(0); ++i)
    for (std::int64_t j = 0; j < y.size(1); ++j) y(i, j) = x(index(i, j), j);
  return y;
}

inline Array scatter_add(Array base, const Array& index, const Array& x) {  // along axis 0 of two
  for (std::int64_t i = 0; i < x.size(0); ++i)
    for (std::int64_t j = 0; j < x.size(1); ++j) base(index(i, j), j) += x(i, j);
  return base;
}

}  // namespace mantissa::testing::oracle
