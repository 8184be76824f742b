// The random stream: Philox against an implementation of its own and the authors' vectors, the same bits on every
// device, distributions, dropout's mask.
#include <array>
#include <set>

#include "step_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

/// Philox 4x32-10 from the paper (Salmon et al. 2011), with all four counter words.
std::array<std::uint32_t, 4> reference_philox(std::array<std::uint32_t, 4> c, std::array<std::uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const unsigned __int128 a = static_cast<unsigned __int128>(0xD2511F53) * c[0],
                            b = static_cast<unsigned __int128>(0xCD9E8D57) * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(a)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return c;
}

std::array<std::uint32_t, 4> ours(std::uint64_t seed, std::uint64_t counter) {
  const Philox4 p = philox(seed, counter);
  return {p.lane[0], p.lane[1], p.lane[2], p.lane[3]};
}

TEST(Philox, KnownAnswers) {  // Random123's kat_vectors
  using Counter = std::array<std::uint32_t, 4>;
  const Counter zero{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  EXPECT_EQ(ours(0, 0), zero);
  EXPECT_EQ(reference_philox({0, 0, 0, 0}, {0, 0}), zero);
  EXPECT_EQ(reference_philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference_philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EqualsTheReferenceForAnySeedAndCounter) {
  std::uint64_t x = seed();
  const auto next = [&x] { return x = x * 6364136223846793005ull + 1442695040888963407ull; };
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t s = next() ^ next() >> 32, c = i % 3 == 0 ? next() >> 40 : next() ^ next() >> 32;
    ASSERT_EQ(ours(s, c), reference_philox({static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(c >> 32), 0, 0},
                                           {static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(s >> 32)}));
  }
}

TEST(Philox, UniformBitsAreExact) {
  EXPECT_EQ(uniform_from_bits(0), 0.0f);
  EXPECT_EQ(uniform_from_bits(0xffffffff), 1.0f - 0x1p-24f);
  EXPECT_EQ(uniform_from_bits(0x80000000), 0.5f);
}

class Random : public OnDevice {};
MT_ON_DEVICES(Random);

TEST_P(Random, AStreamIsDefinedByItsSeedAndOffset) {
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{5}, (std::uint64_t{1} << 32) - 2}) {
    set_random_state({.seed = 0x123456789abcdefull, .offset = offset});
    const std::vector<float> values = rand({1003}, on()).to_vector();
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], uniform_from_bits(philox(0x123456789abcdefull, offset + i / 4).lane[i % 4])) << i;
    EXPECT_EQ(random_state().offset, offset + 251);  // 1003 elements take 251 blocks of four
    EXPECT_EQ(random_state().seed, 0x123456789abcdefull);
  }
}

TEST_P(Random, OtherTypesAreTheSameDrawRounded) {
  for (const DType dtype : {DType::f64, DType::f16, DType::bf16}) {
    manual_seed(7);
    const Tensor wide = rand({4099}, on());
    manual_seed(7);
    EXPECT_EQ(rand({4099}, on(dtype)).to_vector<double>(), wide.to(dtype).to_vector<double>()) << dtype;
  }
}

TEST_P(Random, ASeedRepeatsEveryDraw) {
  const auto draws = [] {
    std::vector<double> all;
    for (const Tensor& x : {rand({17}, on()), randn({1000}, on()), bernoulli({31}, 0.3, on()),
                            uniform({5}, -3, 4, on()), normal({9}, 2, 3, on()), dropout(ones({64}, on()), 0.5)})
      for (const double v : x.to_vector<double>()) all.push_back(v);
    return all;
  };
  manual_seed(42);
  const auto first = draws(), second = draws();
  manual_seed(42);
  EXPECT_EQ(draws(), first);
  EXPECT_NE(first, second);
  manual_seed(43);
  EXPECT_NE(draws(), first);
  // A state taken in between goes on from there.
  manual_seed(42);
  draws();
  const PhiloxState middle = random_state();
  manual_seed(1);
  set_random_state(middle);
  EXPECT_EQ(draws(), second);
}

TEST_P(Random, DrawsDoNotOverlap) {
  manual_seed(3);
  std::set<float> seen;
  std::size_t count = 0;
  for (const std::int64_t n : {1, 2, 3, 4, 5, 7, 8, 0, 33}) {
    for (const float v : randn({n}, on()).to_vector()) seen.insert(v);
    count += static_cast<std::size_t>(n);
  }
  EXPECT_EQ(seen.size(), count);
}

TEST_P(Random, MomentsOfTheNormal) {
  manual_seed(seed());
  constexpr std::int64_t n = 1 << 20;
  for (const DType dtype : {DType::f64, DType::f32}) {
    const std::vector<double> x = normal({n}, 0, 1, on(dtype)).to_vector<double>();
    double m[5] = {}, lag1 = 0, lag4 = 0;
    int beyond[4] = {};
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_TRUE(std::isfinite(x[i]));
      for (int k = 1; k < 5; ++k) m[k] += std::pow(x[i], k) / n;
      if (i >= 1) lag1 += x[i] * x[i - 1] / n;
      if (i >= 4) lag4 += x[i] * x[i - 4] / n;
      for (int k = 1; k < 4; ++k) beyond[k] += std::fabs(x[i]) > k ? 1 : 0;
    }
    const double unit = 1 / std::sqrt(static_cast<double>(n));  // limits: six standard deviations
    EXPECT_NEAR(m[1], 0, 6 * unit);
    EXPECT_NEAR(m[2], 1, 6 * unit * std::sqrt(2.0));
    EXPECT_NEAR(m[3], 0, 6 * unit * std::sqrt(15.0));
    EXPECT_NEAR(m[4], 3, 6 * unit * std::sqrt(96.0));
    EXPECT_NEAR(lag1, 0, 6 * unit);
    EXPECT_NEAR(lag4, 0, 6 * unit);
    for (int k = 1; k < 4; ++k) {
      const double p = std::erfc(k / std::sqrt(2.0));
      EXPECT_NEAR(beyond[k] / static_cast<double>(n), p, 6 * unit * std::sqrt(p * (1 - p))) << k;
    }
  }
  const std::vector<double> shifted = normal({n}, 5, 0.5, on()).to_vector<double>();
  double mean = 0, square = 0;
  for (const double v : shifted) mean += v / n, square += (v - 5) * (v - 5) / n;
  EXPECT_NEAR(mean, 5, 6 * 0.5 / std::sqrt(static_cast<double>(n)));
  EXPECT_NEAR(square, 0.25, 6 * 0.25 * std::sqrt(2.0 / n));
  for (const double v : normal({100}, 3, 0, on()).to_vector<double>()) EXPECT_EQ(v, 3);
}

TEST_P(Random, UniformFillsItsInterval) {
  manual_seed(seed());
  constexpr std::int64_t n = 1 << 18;
  const std::vector<double> x = uniform({n}, -2, 6, on()).to_vector<double>();
  std::array<int, 64> bins{};
  for (const double v : x) {
    ASSERT_GE(v, -2);
    ASSERT_LT(v, 6);
    ++bins[static_cast<std::size_t>((v + 2) * 8)];
  }
  double chi = 0;
  for (const int count : bins) chi += (count - n / 64.0) * (count - n / 64.0) / (n / 64.0);
  EXPECT_LT(chi, 63 + 6 * std::sqrt(2 * 63.0));
  for (const double v : uniform({100}, 1.5, 1.5, on()).to_vector<double>()) EXPECT_EQ(v, 1.5);
  for (const double p : {0.0, 0.25, 1.0}) {
    double share = 0;
    for (const double v : bernoulli({n}, p, on()).to_vector<double>()) {
      ASSERT_TRUE(v == 0 || v == 1);
      share += v / n;
    }
    EXPECT_NEAR(share, p, 6 * std::sqrt(p * (1 - p) / n));
  }
}

TEST_P(Random, DropoutKeepsTheRightShareAndScalesIt) {
  manual_seed(seed());
  constexpr std::int64_t n = 1 << 18;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (const double p : {0.1, 0.5, 0.9}) {
      const double kept = from_vector(std::vector<double>{1 / (1 - p)}, {}, {dtype, cpu}).item();
      std::int64_t count = 0;
      for (const double v : dropout(ones({n}, on(dtype)), p).to_vector<double>()) {
        ASSERT_TRUE(v == 0 || v == kept) << v;
        count += v != 0 ? 1 : 0;
      }
      EXPECT_NEAR(static_cast<double>(count) / n, 1 - p, 6 * std::sqrt(p * (1 - p) / n)) << dtype << " " << p;
    }
}

TEST_P(Random, DropoutDrawsTheSameMaskBackward) {
  manual_seed(seed());
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (const bool transposed : {false, true}) {
      Tensor x = ones({37, 53}, on(dtype));
      if (transposed) x = x.transpose(0, 1);
      x = leaf(x.detach());
      const Tensor y = dropout(x, 0.25);
      backward(y, {.seed = ones(y.shape(), on(dtype))});
      EXPECT_EQ(x.grad().to_vector<double>(), y.to_vector<double>()) << dtype;
      // And again, though other draws came in between.
      x.zero_grad();
      const Tensor z = dropout(x, 0.25);
      rand({1000}, on());
      backward(z, {.seed = ones(z.shape(), on(dtype))});
      EXPECT_EQ(x.grad().to_vector<double>(), z.to_vector<double>());
      EXPECT_NE(y.to_vector<double>(), z.to_vector<double>());
    }
}

TEST_P(Random, DropoutAtTheEnds) {
  const Tensor x = leaf(from_vector(std::vector<double>{1, -2, kInf, kNaN}, {4}, on()));
  const PhiloxState before = random_state();
  EXPECT_EQ(dropout(x, 0).storage(), x.storage());  // the identity, and no numbers are drawn
  EXPECT_EQ(dropout(x, 0.5, false).storage(), x.storage());
  EXPECT_EQ(random_state().offset, before.offset);
  const Tensor none = dropout(x, 1);
  EXPECT_EQ(none.to_vector<double>(), (std::vector<double>{0, 0, 0, 0}));
  sum(none).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{0, 0, 0, 0}));
  // A dropped element is 0 whatever it was: 0 times infinity does not come back as NaN.
  manual_seed(1);
  for (const double v : dropout(full({1000}, kInf, on()), 0.5).to_vector<double>()) ASSERT_TRUE(v == 0 || v == kInf);
}

TEST(RandomDevices, TheStreamIsTheSameOnBoth) {
  MT_NEEDS_GPU();
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    const auto both = [&](auto draw, double tolerance) {
      manual_seed(11);
      const std::vector<double> here = draw(TensorOptions{dtype, cpu}).template to_vector<double>();
      const PhiloxState after = random_state();
      manual_seed(11);
      const std::vector<double> there = draw(TensorOptions{dtype, cuda(0)}).template to_vector<double>();
      EXPECT_EQ(random_state().offset, after.offset);
      ASSERT_EQ(here.size(), there.size());
      for (std::size_t i = 0; i < here.size(); ++i)
        ASSERT_NEAR(here[i], there[i], tolerance * std::fabs(here[i])) << dtype << " " << i;
    };
    const double unit = dtype == DType::f16 ? 0x1p-10 : dtype == DType::bf16 ? 0x1p-7 : 1e-5;
    both([](TensorOptions o) { return rand({100003}, o); }, 0);
    both([](TensorOptions o) { return bernoulli({1003}, 0.3, o); }, 0);
    both([](TensorOptions o) { return dropout(ones({100003}, o), 0.5); }, 0);
    both([](TensorOptions o) { return normal({100003}, 10, 1, o); }, unit);
  }
}

}  // namespace
