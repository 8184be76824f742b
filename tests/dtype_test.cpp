// Conversions of the 16- and 8-bit types against an oracle written from the standard with ldexp and comparisons of
// exact rationals in f64: no shared code, no bit tricks. MANTISSA_EXHAUSTIVE=1 adds all 2^32 patterns of f32.
#include <bit>
#include <limits>
#include <random>

#include "support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

struct Oracle {
  int exponent_bits, fraction_bits;
  bool infinity;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  unsigned top() const { return (1u << exponent_bits) - 1; }
  unsigned sign_bit() const { return 1u << (exponent_bits + fraction_bits); }

  /// The value of a pattern.
  double value(unsigned bits) const {
    const double sign = bits & sign_bit() ? -1 : 1;
    const unsigned e = bits >> fraction_bits & top(), f = bits & ((1u << fraction_bits) - 1);
    if (infinity && e == top())
      return f ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (!infinity && e == top() && f == (1u << fraction_bits) - 1) return std::numeric_limits<double>::quiet_NaN();
    if (e == 0) return sign * std::ldexp(f, 1 - bias() - fraction_bits);
    return sign * std::ldexp((1u << fraction_bits) + f, static_cast<int>(e) - bias() - fraction_bits);
  }
  /// The magnitudes in order: pattern i is the i-th, and one more is what overflow starts from.
  unsigned largest() const {
    return infinity ? (top() << fraction_bits) - 1 : (top() << fraction_bits) + (1u << fraction_bits) - 2;
  }

  /// All magnitudes in order, for repeated use.
  std::vector<double> magnitudes() const {
    std::vector<double> all;
    for (unsigned bits = 0; bits <= largest(); ++bits) all.push_back(value(bits));
    return all;
  }

  /// Round to nearest even by search among the magnitudes.
  unsigned round(double x) const {
    return round(x, [this](unsigned bits) { return value(bits); });
  }
  template <class Value> unsigned round(double x, Value value) const {
    const unsigned sign = std::signbit(x) ? sign_bit() : 0;
    const double a = std::fabs(x);
    const double step = value(largest()) - value(largest() - 1), limit = value(largest()) + step / 2;
    // At the midpoint beyond the largest, even decides: the largest is odd in IEEE formats and even in E4M3.
    if (a > limit || (a == limit && largest() % 2 == 1)) return sign | (infinity ? largest() + 1 : largest() + 1);
    unsigned low = 0, high = largest();
    while (low < high) {  // the largest magnitude that does not exceed a
      const unsigned middle = (low + high + 1) / 2;
      value(middle) <= a ? low = middle : high = middle - 1;
    }
    if (low == largest()) return sign | low;
    const double below = a - value(low), above = value(low + 1) - a;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
  }
};

template <class T> constexpr Oracle oracle_of() {
  if constexpr (std::is_same_v<T, float16>) return {5, 10, true};
  if constexpr (std::is_same_v<T, bfloat16>) return {8, 7, true};
  if constexpr (std::is_same_v<T, float8_e4m3>) return {4, 3, false};
  return {5, 2, true};
}

template <class T> class Types : public ::testing::Test {};
using AllTypes = ::testing::Types<float16, bfloat16, float8_e4m3, float8_e5m2>;
TYPED_TEST_SUITE(Types, AllTypes);

template <class T> unsigned patterns() { return 1u << (8 * sizeof(T)); }

TYPED_TEST(Types, EveryPatternWidens) {
  const Oracle o = oracle_of<TypeParam>();
  for (unsigned bits = 0; bits < patterns<TypeParam>(); ++bits) {
    const auto x = TypeParam::from_bits(static_cast<decltype(TypeParam::bits)>(bits));
    const double exact = o.value(bits);
    const auto wide = static_cast<float>(x);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(o.value(TypeParam(wide).bits))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), exact) << bits;
    ASSERT_EQ(std::signbit(wide), std::signbit(exact)) << bits;
    ASSERT_EQ(TypeParam(wide).bits, bits) << "round trip";
  }
}

/// Every midpoint of two neighbours, every value, and the f32 numbers beside them, in both signs.
template <class T> std::vector<float> boundaries() {
  const Oracle o = oracle_of<T>();
  std::vector<float> list{0.0f,
                          std::numeric_limits<float>::min(),
                          std::numeric_limits<float>::denorm_min(),
                          std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::infinity(),
                          65504.0f,
                          65519.996f,
                          65520.0f,
                          std::bit_cast<float>(0x7F7F7FFFu),
                          std::bit_cast<float>(0x7F7F8000u),
                          std::bit_cast<float>(0x7F7F8001u),
                          448.0f,
                          464.0f,
                          57344.0f,
                          61440.0f};
  for (unsigned bits = 0; bits <= o.largest(); ++bits) {
    const double v = o.value(bits), next = bits < o.largest() ? o.value(bits + 1) : 2 * v - o.value(bits - 1);
    for (const double x : {v, (v + next) / 2}) {
      const auto f = static_cast<float>(x);
      list.push_back(f);
      list.push_back(std::nextafterf(f, INFINITY));
      list.push_back(std::nextafterf(f, 0.0f));
    }
  }
  const std::size_t n = list.size();
  for (std::size_t i = 0; i < n; ++i) list.push_back(-list[i]);
  return list;
}

TYPED_TEST(Types, NarrowsAtEveryBoundaryAndAtRandom) {
  const Oracle o = oracle_of<TypeParam>();
  std::vector<float> list = boundaries<TypeParam>();
  std::mt19937 random(static_cast<unsigned>(seed()));
  for (int i = 0; i < (1 << 20); ++i) list.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (const float x : list) {
    const unsigned got = TypeParam(x).bits;
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(o.value(got)));
      continue;
    }
    ASSERT_EQ(got, o.round(static_cast<double>(x))) << std::hexfloat << x;
  }
}

TYPED_TEST(Types, NarrowsF64Once) {
  const Oracle o = oracle_of<TypeParam>();
  std::mt19937_64 random(seed());
  std::vector<double> list{1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-4 + 0x1p-40, 1 + 0x1p-3 + 0x1p-40};
  for (const float x : boundaries<TypeParam>()) {  // just beside a midpoint, where a detour over f32 rounds twice
    list.push_back(static_cast<double>(x) * (1 + 0x1p-45));
    list.push_back(static_cast<double>(x) * (1 - 0x1p-45));
  }
  for (int i = 0; i < 200000; ++i) list.push_back(std::bit_cast<double>(random()));
  for (const double x : list) {
    if (std::isnan(x)) continue;
    ASSERT_EQ(TypeParam(x).bits, o.round(x)) << std::hexfloat << x;
  }
}

TYPED_TEST(Types, TensorsConvertLikeScalars) {
  std::vector<float> list = boundaries<TypeParam>();
  std::mt19937 random(static_cast<unsigned>(seed()));
  for (int i = 0; i < 100003; ++i) list.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (const Device device : devices()) {
    const auto n = static_cast<std::int64_t>(list.size());
    // Odd offset: the vector path starts unaligned.
    const Tensor x = from_vector(list, {n}, {f32, cpu}).to(device).slice(0, 1, n);
    const Tensor narrow = x.to(dtype_of<TypeParam>::value), wide = narrow.to(f32);
    const Tensor host = narrow.contiguous().to(cpu);
    const TypeParam* bits = host.data<TypeParam>();
    const std::vector<float> back = wide.to_vector<float>();
    for (std::int64_t i = 0; i < n - 1; ++i) {
      const float value = list[static_cast<std::size_t>(i + 1)];
      const TypeParam expected(value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(static_cast<float>(bits[i]))) << i;
        continue;
      }
      ASSERT_EQ(bits[i].bits, expected.bits) << std::hexfloat << value << " on " << to_string(device);
      // E4M3 turns what overflows into NaN.
      if (!std::isnan(static_cast<float>(expected))) {
        ASSERT_EQ(back[static_cast<std::size_t>(i)], static_cast<float>(expected));
      }
    }
  }
}

TEST(DTypes, ExhaustiveNarrowing) {
  if (std::getenv("MANTISSA_EXHAUSTIVE") == nullptr) GTEST_SKIP() << "all 2^32 patterns: set MANTISSA_EXHAUSTIVE=1";
  constexpr std::int64_t kPart = std::int64_t{1} << 26;
  const Device device = devices().back();
  for (std::int64_t begin = 0; begin < (std::int64_t{1} << 32); begin += kPart) {
    Tensor x = empty({kPart}, {f32, cpu});
    auto* words = static_cast<std::uint32_t*>(x.data());
    for (std::int64_t i = 0; i < kPart; ++i) words[i] = static_cast<std::uint32_t>(begin + i);
    const Tensor there = x.to(device);
    const auto check = [&]<class T>() {
      const Tensor narrow = there.to(dtype_of<T>::value).to(cpu);
      const T* got = narrow.data<T>();
      const float* values = x.data<float>();
      const Oracle o = oracle_of<T>();
      const std::vector<double> table = o.magnitudes();
      const auto magnitude = [&](unsigned bits) { return table[bits]; };
      std::int64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong)
      for (std::int64_t i = 0; i < kPart; ++i)
        wrong += std::isnan(values[i]) ? !std::isnan(o.value(got[i].bits))
                                       : got[i].bits != o.round(static_cast<double>(values[i]), magnitude);
      ASSERT_EQ(wrong, 0) << "patterns from " << begin;
    };
    check.template operator()<float16>();
    check.template operator()<bfloat16>();
  }
}

TEST(DTypes, CountsOfTheFormats) {
  const auto count = [](const Oracle& o, auto holds) {
    int n = 0;
    for (unsigned bits = 0; bits < 65536; ++bits) n += holds(o.value(bits)) ? 1 : 0;
    return n;
  };
  const Oracle half = oracle_of<float16>(), brain = oracle_of<bfloat16>();
  EXPECT_EQ(count(half, [](double v) { return std::isnan(v); }), 2046);
  EXPECT_EQ(count(brain, [](double v) { return std::isnan(v); }), 254);
  EXPECT_EQ(count(half, [](double v) { return v != 0 && std::fabs(v) < 0x1p-14; }), 2046);
  EXPECT_EQ(count(brain, [](double v) { return v != 0 && std::fabs(v) < 0x1p-126; }), 254);
}

}  // namespace
