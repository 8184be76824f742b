// Exact arithmetic: inputs are small integers, so every partial sum is representable and any order gives the same bits.
// Tolerance zero, every type, every device: an indexing mistake can not hide.
#include "support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

using Values = std::vector<double>;

/// Integers in [-2, 2].
Tensor integers(const Shape& shape) { return uniform(shape, 0, 4.999, {f32, cpu}).to(i64).to(f64) - 2.0; }

struct Case {
  Device device;
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Device device : devices())
    for (const DType dtype : {f64, f32, f16, bf16}) all.push_back({device, dtype});
  return all;
}

/// What the exact integers become in the type of a result: rounded once.
Values rounded(const Values& exact, DType dtype) {
  return from_vector(exact, {static_cast<std::int64_t>(exact.size())}, {dtype, cpu}).to_vector<double>();
}

Values naive_matmul(const Values& a, const Values& b, std::int64_t m, std::int64_t k, std::int64_t n) {
  Values y(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t l = 0; l < k; ++l)
      for (std::int64_t j = 0; j < n; ++j)
        y[static_cast<std::size_t>(i * n + j)] +=
            a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * n + j)];
  return y;
}

TEST(Exact, MatmulOfEveryLayoutAndOddSizes) {
  manual_seed(seed());
  int count = 0;
  for (const auto& [device, dtype] : cases()) {
    std::uint64_t size_seed = seed() + count;
    for (int trial = 0; trial < 24; ++trial) {
      const auto pick = [&] {
        return 1 + static_cast<std::int64_t>(philox(size_seed, static_cast<std::uint64_t>(count++)).lane[0] % 130);
      };
      const std::int64_t m = pick(), k = pick(), n = pick();
      const Tensor a = integers({m, k}), b = integers({k, n});
      const Values exact = rounded(naive_matmul(a.to_vector<double>(), b.to_vector<double>(), m, k, n), dtype);
      Tensor x = a.to(dtype).to(device), y = b.to(dtype).to(device);
      if (trial & 1) x = x.transpose(0, 1).contiguous().transpose(0, 1);  // stored by columns
      if (trial & 2) y = y.transpose(0, 1).contiguous().transpose(0, 1);
      if (trial & 4) x = concat({x, x}, 1).slice(1, k, 2 * k);  // rows with gaps, odd offset
      EXPECT_EQ(matmul(x, y).to_vector<double>(), exact) << x << " " << y << " trial " << trial;
    }
  }
}

TEST(Exact, BatchedAndBroadcastMatmulWithGradients) {
  manual_seed(seed());
  for (const auto& [device, dtype] : cases()) {
    const std::int64_t m = 5, k = 9, n = 3;
    const Tensor a = integers({2, 1, m, k}), b = integers({3, k, n}), g = integers({2, 3, m, n});
    Tensor x = a.to(dtype).to(device).clone(), y = b.to(dtype).to(device).clone();
    x.set_requires_grad();
    y.set_requires_grad();
    const Tensor product = matmul(x, y);
    backward(product, {.seed = g.to(dtype).to(device)});
    Values forward, ga(static_cast<std::size_t>(2 * m * k)), gb(static_cast<std::size_t>(3 * k * n));
    for (std::int64_t i = 0; i < 2; ++i)
      for (std::int64_t j = 0; j < 3; ++j) {
        const Values va = a.slice(0, i, i + 1).to_vector<double>(), vb = b.slice(0, j, j + 1).to_vector<double>(),
                     vg = g.slice(0, i, i + 1).slice(1, j, j + 1).to_vector<double>();
        const Values part = naive_matmul(va, vb, m, k, n);
        forward.insert(forward.end(), part.begin(), part.end());
        for (std::int64_t r = 0; r < m; ++r)
          for (std::int64_t l = 0; l < k; ++l)
            for (std::int64_t c = 0; c < n; ++c) {
              ga[static_cast<std::size_t>((i * m + r) * k + l)] +=
                  vg[static_cast<std::size_t>(r * n + c)] * vb[static_cast<std::size_t>(l * n + c)];
              gb[static_cast<std::size_t>((j * k + l) * n + c)] +=
                  vg[static_cast<std::size_t>(r * n + c)] * va[static_cast<std::size_t>(r * k + l)];
            }
      }
    EXPECT_EQ(product.to_vector<double>(), rounded(forward, dtype));
    EXPECT_EQ(x.grad().to_vector<double>(), ga);
    EXPECT_EQ(y.grad().to_vector<double>(), gb);
  }
}

TEST(Exact, LinearAccumulatesItsWeightGradients) {
  manual_seed(seed());
  for (const auto& [device, dtype] : cases()) {
    const std::int64_t rows = 37, in = 19, out = 11;
    const Tensor x = integers({rows, in}), w = integers({out, in}), b = integers({out}), g = integers({rows, out});
    Tensor tw = w.to(dtype).to(device).clone(), tb = b.to(dtype).to(device).clone();
    tw.set_requires_grad();
    tb.set_requires_grad();
    for (int pass = 1; pass <= 3; ++pass) {
      const Tensor y = linear(x.to(dtype).to(device), tw, tb);
      backward(y, {.seed = g.to(dtype).to(device)});
      Values exact = naive_matmul(x.to_vector<double>(), w.transpose(0, 1).to_vector<double>(), rows, in, out);
      const Values vb = b.to_vector<double>(), vg = g.to_vector<double>();
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += vb[i % out];
      EXPECT_EQ(y.to_vector<double>(), rounded(exact, dtype));
      Values gw = naive_matmul(g.transpose(0, 1).to_vector<double>(), x.to_vector<double>(), out, rows, in),
             gb(static_cast<std::size_t>(out));
      for (double& v : gw) v *= pass;
      for (std::size_t i = 0; i < vg.size(); ++i) gb[i % out] += pass * vg[i];
      EXPECT_EQ(tw.grad().to_vector<double>(), gw) << "pass " << pass;
      EXPECT_EQ(tb.grad().to_vector<double>(), gb) << "pass " << pass;
    }
  }
}

TEST(Exact, SumsOverEverySetOfAxes) {
  manual_seed(seed());
  const Shape shape{3, 5, 7, 11};
  const Tensor x = integers(shape);
  const Values values = x.to_vector<double>();
  for (const auto& [device, dtype] : cases())
    for (unsigned mask = 1; mask < 16; ++mask) {
      std::vector<int> axes;
      Shape kept = shape;
      for (int a = 0; a < 4; ++a)
        if (mask >> a & 1u) {
          axes.push_back(a);
          kept[a] = 1;
        }
      Values exact(static_cast<std::size_t>(numel(kept)));
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        std::int64_t rest = i, at = 0, step = 1;
        for (int a = 3; a >= 0; --a) {
          const std::int64_t index = rest % shape[a];
          rest /= shape[a];
          at += (kept[a] == 1 ? 0 : index) * step;
          step *= kept[a];
        }
        exact[static_cast<std::size_t>(at)] += values[static_cast<std::size_t>(i)];
      }
      const Tensor t = x.to(dtype).to(device);
      EXPECT_EQ(sum(t, axes).to_vector<double>(), rounded(exact, dtype)) << mask;
      // The same elements stored with the axes reversed.
      EXPECT_EQ(sum(t.permute({3, 2, 1, 0}).contiguous().permute({3, 2, 1, 0}), axes).to_vector<double>(),
                rounded(exact, dtype))
          << mask;
    }
}

TEST(Exact, LongSumsDoNotStall) {
  for (const auto& [device, dtype] : cases()) {
    // 2^20 ones: a sum in 16 bits would stop at 2048 (f16) or 256 (bf16).
    const Tensor ones_tensor = ones({1 << 20}, {dtype, device});
    EXPECT_EQ(mean(ones_tensor).item(), 1);
    const Tensor columns = sum(ones({4096, 33}, {dtype, device}), {0});
    for (const double v : columns.to_vector<double>()) EXPECT_EQ(v, 4096);
  }
}

TEST(Exact, EmbeddingGradientCountsEveryHit) {
  for (const auto& [device, dtype] : cases()) {
    Tensor w = zeros({8, 6}, {dtype, device});
    w.set_requires_grad();
    std::vector<std::int64_t> ids(4096, 3);
    ids.push_back(0);
    ids.push_back(7);
    const Tensor y = embedding(from_vector(ids, {static_cast<std::int64_t>(ids.size())}, {i64, device}), w);
    backward(y, {.seed = ones(y.shape(), {dtype, device})});
    const Values g = w.grad().to_vector<double>();
    for (std::size_t i = 0; i < g.size(); ++i) EXPECT_EQ(g[i], i / 6 == 3 ? 4096 : i / 6 == 0 || i / 6 == 7 ? 1 : 0);
  }
}

TEST(Exact, ScatterAndGather) {
  manual_seed(seed());
  for (const auto& [device, dtype] : cases())
    for (const int axis : {0, 1, 2}) {
      const Shape base_shape{4, 5, 6};
      Shape index_shape{3, 4, 5};
      index_shape[axis] = 40;
      const Tensor base = integers(base_shape), x = integers(index_shape);
      const Tensor index = uniform(index_shape, 0, static_cast<double>(base_shape[axis]) - 1e-3, {f64, cpu}).to(i64);
      Values exact = base.to_vector<double>(), picked;
      const Values vx = x.to_vector<double>(), vi = index.to_vector<double>(), vb = exact;
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        std::int64_t at[3] = {i / index_shape[2] / index_shape[1], i / index_shape[2] % index_shape[1],
                              i % index_shape[2]};
        at[axis] = static_cast<std::int64_t>(vi[static_cast<std::size_t>(i)]);
        const auto to = static_cast<std::size_t>((at[0] * 5 + at[1]) * 6 + at[2]);
        exact[to] += vx[static_cast<std::size_t>(i)];
        picked.push_back(vb[to]);
      }
      const Tensor db = base.to(dtype).to(device), di = index.to(device), dx = x.to(dtype).to(device);
      EXPECT_EQ(scatter_add(db, axis, di, dx).to_vector<double>(), rounded(exact, dtype)) << axis;
      EXPECT_EQ(gather(db, axis, di).to_vector<double>(), picked) << axis;
    }
}

TEST(Exact, ConvolutionAndItsGradients) {
  manual_seed(seed());
  struct Geometry {
    std::int64_t kernel, stride, padding, dilation, groups;
  };
  for (const auto& [device, dtype] : cases())
    for (const Geometry& q : {Geometry{1, 1, 0, 1, 1}, Geometry{3, 1, 1, 1, 1}, Geometry{3, 2, 1, 1, 1},
                              Geometry{2, 1, 0, 2, 1}, Geometry{3, 1, 1, 1, 2}}) {
      const std::int64_t n = 2, c = 4, o = 6, h = 7, w = 5, cg = c / q.groups, og = o / q.groups;
      const std::int64_t reach = q.dilation * (q.kernel - 1) + 1, oh = (h + 2 * q.padding - reach) / q.stride + 1,
                         ow = (w + 2 * q.padding - reach) / q.stride + 1;
      const Tensor x = integers({n, c, h, w}), k = integers({o, cg, q.kernel, q.kernel}), g = integers({n, o, oh, ow});
      const Values vx = x.to_vector<double>(), vk = k.to_vector<double>(), vg = g.to_vector<double>();
      Values y(vg.size()), gx(vx.size()), gk(vk.size());
      for (std::int64_t b = 0; b < n; ++b)
        for (std::int64_t f = 0; f < o; ++f)
          for (std::int64_t i = 0; i < oh; ++i)
            for (std::int64_t j = 0; j < ow; ++j)
              for (std::int64_t ch = 0; ch < cg; ++ch)
                for (std::int64_t p = 0; p < q.kernel; ++p)
                  for (std::int64_t r = 0; r < q.kernel; ++r) {
                    const std::int64_t row = i * q.stride - q.padding + p * q.dilation,
                                       column = j * q.stride - q.padding + r * q.dilation;
                    if (row < 0 || row >= h || column < 0 || column >= w) continue;
                    const auto at_x = static_cast<std::size_t>(((b * c + f / og * cg + ch) * h + row) * w + column);
                    const auto at_k = static_cast<std::size_t>(((f * cg + ch) * q.kernel + p) * q.kernel + r),
                               at_y = static_cast<std::size_t>(((b * o + f) * oh + i) * ow + j);
                    y[at_y] += vx[at_x] * vk[at_k];
                    gx[at_x] += vg[at_y] * vk[at_k];
                    gk[at_k] += vg[at_y] * vx[at_x];
                  }
      Conv2dOptions options;
      for (int a = 0; a < 2; ++a)
        options.stride[a] = q.stride, options.padding[a] = q.padding, options.dilation[a] = q.dilation;
      options.groups = q.groups;
      Tensor tx = x.to(dtype).to(device).clone(), tk = k.to(dtype).to(device).clone();
      tx.set_requires_grad();
      tk.set_requires_grad();
      const Tensor ty = conv2d(tx, tk, {}, options);
      backward(ty, {.seed = g.to(dtype).to(device)});
      SCOPED_TRACE(detail::message(tx, " ", tk, " stride ", q.stride, " padding ", q.padding, " dilation ", q.dilation,
                                   " groups ", q.groups));
      EXPECT_EQ(ty.to_vector<double>(), rounded(y, dtype));
      EXPECT_EQ(tx.grad().to_vector<double>(), rounded(gx, dtype));
      EXPECT_EQ(tk.grad().to_vector<double>(), gk);
    }
}

TEST(Exact, ArgmaxTakesTheFirst) {
  for (const auto& [device, dtype] : cases()) {
    const Tensor x = from_vector(Values{1, 3, 3, 0, 5, -1, 5, 5}, {2, 4}, {dtype, device});
    EXPECT_EQ(argmax(x, 1).to_vector<double>(), (Values{1, 0}));
    EXPECT_EQ(argmax(x, 0).to_vector<double>(), (Values{1, 0, 1, 1}));
    const Tensor with_nan = from_vector(Values{1, NAN, 3, NAN}, {4}, {dtype, device});
    EXPECT_EQ(argmax(with_nan, 0).item(), 1);
  }
}

}  // namespace
