// What the op table does not reach on the CPU: copies of any strides, products of every layout with every
// epilogue, independence of the number of threads, extreme values, random bits, updates.
#include <cstring>
#include <functional>
#include <limits>

#include "core/backend.h"
#include "core/step.h"
#include "support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

Backend& be() { return cpu_backend(); }

Tensor random_tensor(const Shape& shape, DType dtype, double low = -1, double high = 1) {
  return uniform(shape, low, high).to(dtype);
}

/// The raw bytes of a contiguous tensor: equality to the last bit, NaN and signs of zero included.
std::string raw(const Tensor& x) {
  std::string bytes(static_cast<std::size_t>(x.numel()) * size_of(x.dtype()), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), x.data(), bytes.size());
  return bytes;
}

// ---- copies

TEST(CpuCopy, AnyStridesEqualElementByElement) {
  manual_seed(seed());
  const Tensor x = random_tensor({5, 7, 3, 33}, f32);
  const std::vector<float> all = x.to_vector();
  const Tensor y = x.permute({3, 1, 0, 2}).contiguous();
  const std::vector<float> moved = y.to_vector();
  for (std::int64_t a = 0; a < 33; ++a)
    for (std::int64_t b = 0; b < 7; ++b)
      for (std::int64_t c = 0; c < 5; ++c)
        for (std::int64_t d = 0; d < 3; ++d)
          ASSERT_EQ(moved[static_cast<std::size_t>(((a * 7 + b) * 5 + c) * 3 + d)],
                    all[static_cast<std::size_t>(((c * 7 + b) * 3 + d) * 33 + a)]);
  // Broadcast inner and outer axes at once, over several blocks.
  Tensor wide = empty({3, 2500, 2});
  be().copy(x.slice(3, 0, 1).select(1, 2).select(0, 1).view({3, 1, 1}, {33, 0, 0}, x.offset()), wide);
  const std::vector<float> filled = wide.to_vector();
  for (std::size_t i = 0; i < filled.size(); ++i) ASSERT_EQ(filled[i], all[i / 5000 * 33]);
}

TEST(CpuCopy, FloatsOutOfRangeSaturate) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor x = from_vector(std::vector<float>{1e30f, -1e30f, kInf, -kInf, nan, -2.9f, 2.9f}, {7});
  using Values = std::vector<std::int64_t>;
  const std::int64_t low = std::numeric_limits<std::int64_t>::min(), high = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(x.to(i64).to_vector<std::int64_t>(), (Values{high, low, high, low, 0, -2, 2}));
  EXPECT_EQ(x.to(i32).to_vector<std::int64_t>(),
            (Values{0x7fffffff, -0x80000000ll, 0x7fffffff, -0x80000000ll, 0, -2, 2}));
  EXPECT_EQ(x.to(u8).to_vector<std::int64_t>(), (Values{255, 0, 255, 0, 0, 0, 2}));
}

// ---- products
// ---------------------------------------------------------------------------------------------------------

enum class Layout { rows, columns, padded };

/// A tensor [batch, rows, columns] with the given layout of the last two axes, random.
Tensor matrix(std::int64_t batch, std::int64_t rows, std::int64_t columns, DType dtype, Layout layout) {
  if (layout == Layout::columns) return random_tensor({batch, columns, rows}, dtype).transpose(1, 2);
  if (layout == Layout::padded)
    return random_tensor({batch, rows + 2, columns + 3}, dtype).slice(1, 1, rows + 1).slice(2, 2, columns + 2);
  return random_tensor({batch, rows, columns}, dtype);
}

double gelu_tanh_of(double x) { return GeluTanh{}(x); }

struct Case {
  std::int64_t m, n, k;
  DType in, out;
};

void check_product(const Case& c, Layout la, Layout lb, Layout ly, const MatmulOptions& base, bool bias,
                   bool broadcast) {
  const std::int64_t batch = broadcast ? 3 : 2;
  const Tensor a = matrix(batch, c.m, c.k, c.in, la);
  Tensor b = matrix(batch, c.k, c.n, c.in, lb);
  if (broadcast) b = b.slice(0, 0, 1).expand({batch, c.k, c.n});
  Tensor y = matrix(batch, c.m, c.n, c.out, ly);
  const Tensor bias_values = random_tensor({c.n}, c.out);
  Tensor pre = empty({batch, c.m, c.n}, {c.out, cpu}), saved = random_tensor({batch, c.m, c.n}, c.out);
  MatmulOptions o = base;
  if (bias) o.bias = &bias_values;
  if (o.activation == Activation::gelu_tanh) o.pre_activation = &pre;
  if (o.grad_activation != Activation::none) o.grad_input = &saved;
  const std::vector<double> va = a.to_vector<double>(), vb = b.to_vector<double>(), old = y.to_vector<double>(),
                            vbias = bias_values.to_vector<double>(), vs = saved.to_vector<double>();
  be().matmul(a, b, o, y);
  const std::vector<double> got = y.to_vector<double>(), vpre = pre.to_vector<double>();
  const double unit = c.out == f64 ? 1e-13 : c.out == f32 ? 2e-6 : c.out == f16 ? 1e-3 : 8e-3;
  for (std::int64_t i = 0; i < batch * c.m; ++i)
    for (std::int64_t j = 0; j < c.n; ++j) {
      double value = 0, size = 1;
      for (std::int64_t l = 0; l < c.k; ++l) {
        const double term =
            va[static_cast<std::size_t>(i * c.k + l)] * vb[static_cast<std::size_t>((i / c.m * c.k + l) * c.n + j)];
        value += term;
        size += std::fabs(term);
      }
      const auto at = static_cast<std::size_t>(i * c.n + j);
      value *= o.alpha;
      if (bias) value += vbias[static_cast<std::size_t>(j)];
      if (o.pre_activation) {
        ASSERT_NEAR(vpre[at], value, unit * size) << "pre-activation";
      }
      if (o.activation == Activation::relu) value = std::max(value, 0.0);
      if (o.activation == Activation::gelu_tanh) value = gelu_tanh_of(value);
      if (o.grad_activation == Activation::relu) value = Relu{}.grad(value, vs[at]);
      if (o.grad_activation == Activation::gelu_tanh) value = GeluTanh{}.grad(value, vs[at]);
      if (o.accumulate) value += old[at];
      ASSERT_NEAR(got[at], value, 2 * unit * size) << "at " << i << ", " << j << " of " << c.m << "x" << c.n << "x"
                                                   << c.k << " " << to_string(c.in) << " -> " << to_string(c.out);
    }
}

TEST(CpuMatmul, EveryLayoutTypeAndEpilogue) {
  manual_seed(seed());
  const Layout layouts[] = {Layout::rows, Layout::columns, Layout::padded};
  int cases = 0;
  for (const Case& c :
       {Case{5, 7, 3, f64, f64}, Case{33, 17, 65, f32, f32}, Case{9, 31, 14, f16, f16}, Case{12, 5, 40, bf16, bf16},
        Case{6, 19, 21, f16, f32}, Case{1, 1, 1, f32, f32}, Case{1, 9, 4, bf16, f32}, Case{9, 1, 4, f16, f16},
        Case{3, 4, 0, f32, f32}, Case{3, 4, 0, f16, f16}})
    for (const Layout la : layouts)
      for (const Layout lb : layouts)
        for (const Layout ly : layouts) {
          for (const bool accumulate : {false, true})
            for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
              check_product(c, la, lb, ly, {.alpha = 0.5, .accumulate = accumulate, .activation = activation},
                            accumulate, false);
              check_product(c, la, lb, ly, {.accumulate = accumulate, .grad_activation = activation}, false, true);
              cases += 2;
            }
        }
  // More rows than one block.
  for (const DType type : {f32, bf16}) {
    check_product({523, 21, 10, type, type}, Layout::rows, Layout::columns, Layout::rows,
                  {.activation = Activation::gelu_tanh}, true, false);
    check_product({523, 21, 10, type, f32}, Layout::columns, Layout::rows, Layout::rows, {.accumulate = true}, false,
                  false);
    cases += 2;
  }
  std::printf("%d cases\n", cases);
}

// ---- threads
// ----------------------------------------------------------------------------------------------------------

/// Bytes of the outputs of a kernel under 1, 2, 3 and 5 threads.
void same_for_any_threads(const char* what, const std::function<std::string()>& run) {
  const int before = num_threads();
  set_num_threads(1);
  const std::string expected = run();
  for (const int n : {2, 3, 5}) {
    set_num_threads(n);
    EXPECT_TRUE(run() == expected) << what << " on " << n << " threads";
  }
  set_num_threads(before);
}

Tensor channels_last(const Shape& shape, DType dtype) {
  return random_tensor({shape[0], shape[2], shape[3], shape[1]}, dtype).permute({0, 3, 1, 2});
}

class CpuThreads : public ::testing::TestWithParam<DType> {};

TEST_P(CpuThreads, ResultsDoNotDependOnThem) {
  manual_seed(seed());
  const DType t = GetParam();
  const DType wide = compute_dtype(t);
  const Tensor x = random_tensor({700, 301}, t), g = random_tensor({700, 301}, t);
  for (const std::vector<int>& axes : {std::vector<int>{0}, {1}, {0, 1}})
    same_for_any_threads("sum", [&] { return raw(sum(x, axes)); });
  same_for_any_threads("softmax", [&] { return raw(softmax(x)); });
  same_for_any_threads("norm", [&] {
    const Tensor w = ones({301}, {wide, cpu});
    Tensor none, y = empty_like(x), mean = empty({700}, {wide, cpu}), rstd = empty_like(mean), gx = empty_like(x),
                 gw = empty_like(w), gb = empty_like(w);
    be().norm(NormKind::layer, x, {}, w, w, 1e-5, none, y, mean, rstd);
    be().norm_grad(NormKind::layer, g, {}, x, w, mean, rstd, false, gx, gw, gb);
    return raw(y) + raw(gx) + raw(gw) + raw(gb);
  });
  same_for_any_threads("cross entropy", [&] {
    const Tensor targets = zeros({700}, {i64, cpu});
    Tensor loss = empty({1}, {wide, cpu}), lse = empty({700}, {wide, cpu}), count = empty({1}, {wide, cpu});
    be().cross_entropy(x, targets, {}, loss, lse, count);
    return raw(loss) + raw(lse);
  });
  const Tensor ids = uniform({700}, 0, 6.9).to(i64);
  same_for_any_threads("embedding", [&] {
    Tensor gw = empty({7, 301}, {wide, cpu});
    be().embedding_grad(g, ids, false, gw);
    return raw(gw);
  });
  const Tensor image = channels_last({9, 16, 20, 21}, t), weight = channels_last({24, 16, 3, 3}, t),
               gy = channels_last({9, 24, 18, 19}, t);
  same_for_any_threads("convolution", [&] {
    Tensor y = empty_like(gy), gx = empty_like(image), gw = empty_like(weight, wide);
    be().conv2d(image, weight, {}, y);
    be().conv2d_grad_input(gy, weight, {}, gx);
    be().conv2d_grad_weight(gy, image, {}, false, gw);
    return raw(y) + raw(gx) + raw(gw);
  });
  same_for_any_threads("batch norm", [&] {
    const TensorOptions o{wide, cpu};
    const Tensor w = ones({16}, o);
    Tensor rm = zeros({16}, o), rv = ones({16}, o), mean = empty({16}, o), rstd = empty({16}, o), y = empty_like(image),
           gx = empty_like(image), gw = empty({16}, o), gb = empty({16}, o);
    be().batch_norm(image, w, w, 1e-5, 0.1, true, rm, rv, y, mean, rstd);
    be().batch_norm_grad(y, image, w, mean, rstd, true, gx, gw, gb);
    return raw(rm) + raw(rv) + raw(y) + raw(gx) + raw(gw) + raw(gb);
  });
  const Tensor q = random_tensor({2, 4, 150, 16}, t), kv = random_tensor({2, 2, 150, 16}, t);
  same_for_any_threads("attention", [&] {
    Tensor y = empty_like(q), lse = empty({2, 4, 150}, {wide, cpu}), gq = empty_like(q), gk = empty_like(kv),
           gv = empty_like(kv);
    be().attention(q, kv, kv, {true, 0.25}, y, lse);
    be().attention_grad(q, q, kv, kv, y, lse, {true, 0.25}, gq, gk, gv);
    return raw(y) + raw(lse) + raw(gq) + raw(gk) + raw(gv);
  });
  const Tensor big = random_tensor({100003}, t);
  same_for_any_threads("dropout", [&] {
    Tensor y = empty_like(big);
    be().dropout(big, 0.3, {7, 9}, y);
    return raw(y);
  });
  same_for_any_threads("normal", [&] {
    Tensor y = empty_like(big);
    be().random(RandomKind::normal, 0, 1, {7, 9}, y);
    return raw(y);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, CpuThreads, ::testing::Values(f64, f32, f16, bf16),
                         [](const auto& p) { return to_string(p.param); });

// ---- extremes
// ---------------------------------------------------------------------------------------------------------

TEST(CpuExtremes, NormsOfLargeValues) {
  manual_seed(seed());
  for (const auto& [dtype, scale] : {std::pair{f16, 60000.0}, {f32, 1e18}, {f32, 1e30}, {bf16, 1e18}}) {
    const std::int64_t n = 515;
    const Tensor x = uniform({3, n}, -scale, scale, {f64, cpu}).to(dtype);
    const std::vector<double> v = x.to_vector<double>();
    Tensor none, y = empty_like(x), mean = empty({3}), rstd = empty({3});
    be().norm(NormKind::layer, x, {}, {}, {}, 1e-5, none, y, mean, rstd);
    std::vector<double> exact(v.size());
    for (std::int64_t row = 0; row < 3; ++row) {
      double m = 0, s = 0;
      for (std::int64_t i = 0; i < n; ++i) m += v[static_cast<std::size_t>(row * n + i)] / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i)
        s += std::pow((v[static_cast<std::size_t>(row * n + i)] - m) / scale, 2) / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i)
        exact[static_cast<std::size_t>(row * n + i)] =
            (v[static_cast<std::size_t>(row * n + i)] - m) / scale / std::sqrt(s);
    }
    EXPECT_LE(rounding_ratio(y, exact), dtype == f32 ? 20 : 1.05) << dtype << " " << scale;
  }
}

TEST(CpuExtremes, NormOfASmallSpreadOnALargeOffset) {
  std::vector<float> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 60000.0f + 32.0f * static_cast<float>(i % 3);  // neighbours in f16
  const Tensor x = from_vector(values, {1, 1000}).to(f16);
  Tensor none, y = empty_like(x), mean = empty({1}), rstd = empty({1});
  be().norm(NormKind::layer, x, {}, {}, {}, 1e-5, none, y, mean, rstd);
  double m = 0, s = 0;
  for (const float v : values) m += static_cast<double>(v) / 1000;
  for (const float v : values) s += (static_cast<double>(v) - m) * (static_cast<double>(v) - m) / 1000;
  std::vector<double> exact;
  for (const float v : values) exact.push_back((static_cast<double>(v) - m) / std::sqrt(s));
  const std::vector<double> got = y.to_vector<double>();
  for (std::size_t i = 0; i < exact.size(); ++i) ASSERT_NEAR(got[i], exact[i], 1e-3);
}

TEST(CpuExtremes, BatchNormOfLargeValues) {
  manual_seed(seed());
  for (const auto& [dtype, scale] : {std::pair{f16, 60000.0}, {f32, 1e18}}) {
    const Tensor x = uniform({4, 16, 16, 3}, -scale, scale, {f64, cpu}).to(dtype).permute({0, 3, 1, 2});
    const Tensor one = ones({3}), zero = zeros({3});
    Tensor rm = zeros({3}), rv = ones({3}), y = empty_like(x), mean = empty({3}), rstd = empty({3});
    be().batch_norm(x, one, zero, 1e-5, 0.1, true, rm, rv, y, mean, rstd);
    double sum = 0, squares = 0;
    for (const double v : y.select(1, 1).to_vector<double>()) {
      sum += v;
      squares += v * v;
    }
    EXPECT_NEAR(sum / 1024, 0, 1e-3);
    EXPECT_NEAR(squares / 1024, 1, 2e-3);
  }
}

TEST(CpuExtremes, CrossEntropyOfLargeLogits) {
  const Tensor x = from_vector(std::vector<float>{30000, 30001, 29990, -40000}, {1, 4}).to(f32);
  const Tensor targets = from_vector(std::vector<std::int64_t>{1}, {1}, {i64, cpu});
  Tensor loss = empty({1}), lse = empty({1}), count = empty({1}), gx = empty_like(x);
  be().cross_entropy(x, targets, {}, loss, lse, count);
  const double exact = std::log(1 + std::exp(-1.0) + std::exp(-11.0));
  EXPECT_NEAR(loss.item(), exact, 1e-7);
}

TEST(CpuExtremes, NanPropagates) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values(700, 1.0f);
  values[333] = nan;
  const Tensor x = from_vector(values, {1, 700});
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
    Tensor y = empty({1, 1});
    be().reduce(op, x, false, y);
    EXPECT_TRUE(std::isnan(y.item()));
  }
  EXPECT_TRUE(std::isnan(softmax(x).to_vector()[0]));
  EXPECT_EQ(argmax(x, 1).item(), 333);
  for_each_op<UnaryOp>([&](auto op) { EXPECT_TRUE(std::isnan(unary(op, x).to_vector()[333])) << op.name; });
}

TEST(CpuExtremes, AttentionWithoutQueriesOrWithMoreKeys) {
  manual_seed(seed());
  const Tensor q = random_tensor({1, 2, 0, 4}, f32), k = random_tensor({1, 2, 5, 4}, f32);
  Tensor y = empty_like(q), lse = empty({1, 2, 0}), gq = empty_like(q), gk = full({1, 2, 5, 4}, 7),
         gv = full({1, 2, 5, 4}, 7);
  be().attention(q, k, k, {false, 1}, y, lse);
  be().attention_grad(q, q, k, k, y, lse, {false, 1}, gq, gk, gv);
  for (const Tensor& g : {gk, gv})
    for (const float v : g.to_vector()) EXPECT_EQ(v, 0);
}

TEST(CpuErrors, OutOfMemoryLeavesParallelLoopsIntact) {
  manual_seed(seed());
  const Tensor a = random_tensor({600, 64}, bf16), b = random_tensor({64, 96}, bf16);
  const Tensor expected = matmul(a, b);
  const std::int64_t held = memory_stats(cpu).total;
  for (int n = 1; n < 6; ++n) {
    Tensor y = empty({600, 96}, {bf16, cpu});
    be().allocator().fail_after(n);
    try {
      be().matmul(a, b, {}, y);
    } catch (const OutOfMemoryError&) {
    }
    be().allocator().fail_after(0);
    y = Tensor{};
    EXPECT_EQ(memory_stats(cpu).total, held);
  }
  EXPECT_EQ(raw(matmul(a, b)), raw(expected));
}

// ---- random bits
// --------------------------------------------------------------------------------------------------------

TEST(CpuRandom, DropoutKeepsWhatTheStreamSays) {
  for (const std::int64_t n : {1, 3, 31, 32, 33, 4099, 70001}) {
    const PhiloxState state{seed(), 0xfffffffdull};  // the counter carries into its upper half
    const Tensor x = ones({n});
    Tensor y = empty({n});
    be().dropout(x, 0.25, state, y);
    const std::vector<float> got = y.to_vector();
    for (std::int64_t i = 0; i < n; ++i) {
      const float u =
          uniform_from_bits(philox(state.seed, state.offset + static_cast<std::uint64_t>(i / 4)).lane[i % 4]);
      ASSERT_EQ(got[static_cast<std::size_t>(i)], u >= 0.25f ? static_cast<float>(1 / 0.75) : 0.0f) << i;
    }
  }
}

// ---- the step
// -----------------------------------------------------------------------------------------------------------

TEST(CpuStep, UpdatesEqualTheElementRulesAndRefreshTheWorkingCopy) {
  manual_seed(seed());
  const std::int64_t n = 40001;
  const Tensor w0 = random_tensor({n}, f32), g = random_tensor({n}, f32, -8, 8), m0 = random_tensor({n}, f32),
               v0 = random_tensor({n}, f32, 0, 1);
  StepState state;
  state.verdict = Verdict::applied;
  state.applied = 3;
  state.factor = 0.25f;
  state.max_value = 1;
  state.learning_rate = 0.01f;
  for (const bool adam : {false, true})
    for (const DType low : {f16, bf16}) {
      Tensor w = w0.clone(), m = m0.clone(), v = v0.clone(), copy = empty({n}, {low, cpu});
      const UpdateTensor t{w.data(), g.data(), m.data(), adam ? v.data() : nullptr, copy.data(), n, f32,
                           low,      2.0f,     0.1f};
      const SgdRule sgd{0.9, 0.1, true};
      const AdamRule rule{0.9, 0.99, 1e-8, true};
      adam ? be().adam_update(std::span(&t, 1), rule, &state) : be().sgd_update(std::span(&t, 1), sgd, &state);
      const std::vector<float> gw = w.to_vector(), vg = g.to_vector(), vw = w0.to_vector(), vm = m0.to_vector(),
                               vv = v0.to_vector();
      const SgdElement<double> sgd_element{0.02, static_cast<double>(0.1f), 0.9, 0.1, true, false};
      const AdamElement<double> adam_element{.lr = 0.02,
                                             .weight_decay = static_cast<double>(0.1f),
                                             .beta1 = 0.9,
                                             .beta2 = 0.99,
                                             .rest1 = 0.1,
                                             .rest2 = 0.01,
                                             .eps = 1e-8,
                                             .correction1 = 1 - std::pow(0.9, 3),
                                             .correction2 = 1 - std::pow(0.99, 3),
                                             .decoupled = true};
      for (std::size_t i = 0; i < gw.size(); ++i) {
        double weight = static_cast<double>(vw[i]), first = static_cast<double>(vm[i]),
               second = static_cast<double>(vv[i]);
        const double clipped = std::clamp(static_cast<double>(vg[i]) * 0.25, -1.0, 1.0);
        adam ? adam_element(clipped, weight, first, second) : sgd_element(clipped, weight, first);
        ASSERT_NEAR(static_cast<double>(gw[i]), weight, 1e-6);
      }
      EXPECT_EQ(raw(copy), raw(w.to(low)));
      state.verdict = Verdict::skipped_nan;
      const std::string before = raw(w) + raw(m) + raw(copy);
      adam ? be().adam_update(std::span(&t, 1), rule, &state) : be().sgd_update(std::span(&t, 1), sgd, &state);
      EXPECT_EQ(raw(w) + raw(m) + raw(copy), before);
      state.verdict = Verdict::applied;
    }
}

TEST(CpuStep, ChecksEveryElement) {
  std::vector<float> values(50000, 0.5f);
  StepState state;
  for (const std::size_t at : {std::size_t{0}, std::size_t{31}, std::size_t{16384}, values.size() - 1}) {
    values[at] = kInf;
    const Tensor g = from_vector(values, {50000});
    be().check_gradients(std::span(&g, 1), &state);
    EXPECT_EQ(state.infs, 1);
    EXPECT_EQ(state.nans, 0);
    values[at] = std::numeric_limits<float>::quiet_NaN();
    const Tensor h = from_vector(values, {50000});
    be().check_gradients(std::span(&h, 1), &state);
    EXPECT_EQ(state.infs, 0);
    EXPECT_EQ(state.nans, 1);
    values[at] = 0.5f;
  }
  const Tensor g = from_vector(values, {50000});
  be().check_gradients(std::span(&g, 1), &state);
  EXPECT_EQ(state.sum_of_squares, 12500);
}

}  // namespace
