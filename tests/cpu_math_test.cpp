// The vectorised maths of the CPU over all exponents, and block conversions bit by bit.
#include <bit>
#include <initializer_list>
#include <limits>
#include <random>

#include "core/cpu/block.h"
#include "core/math.h"
#include "support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- maths
// ------------------------------------------------------------------------------------------------------------

double unit_in_last_place(float y) {
  const float a = std::fabs(y);
  if (a < std::numeric_limits<float>::min()) return 0x1p-149;
  int e = 0;
  std::frexp(a, &e);
  return std::ldexp(1.0, e - 24);
}

struct Function {
  const char* name;
  float (*ours)(float);
  double (*exact)(double);
};

TEST(CpuMath, WithinTwoUnitsInTheLastPlace) {
  const Function functions[] = {
      {"exp", [](float x) { return math::exp(x); }, [](double x) { return std::exp(x); }},
      {"expm1", [](float x) { return math::expm1(x); }, [](double x) { return std::expm1(x); }},
      {"log", [](float x) { return math::log(x); }, [](double x) { return std::log(x); }},
      {"log1p", [](float x) { return math::log1p(x); }, [](double x) { return std::log1p(x); }},
      {"tanh", [](float x) { return math::tanh(x); }, [](double x) { return std::tanh(x); }},
      {"erf", [](float x) { return math::erf(x); }, [](double x) { return std::erf(x); }}};
  for (const Function& f : functions) {
    double worst = 0;
    for (std::uint64_t bits = seed() % 1009; bits < (std::uint64_t{1} << 32); bits += 1009) {
      const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits)), y = f.ours(x);
      const double exact = f.exact(static_cast<double>(x));
      const float rounded = static_cast<float>(exact);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(y)) << f.name << " of " << x << " is " << y;
      } else if (std::isinf(rounded)) {
        ASSERT_TRUE(y == rounded || (!std::isinf(exact) && std::fabs(y) > 3.4e38f))
            << f.name << " of " << x << " is " << y;
      } else {
        worst = std::max(worst, std::fabs(static_cast<double>(y) - exact) / unit_in_last_place(rounded));
      }
    }
    EXPECT_LE(worst, 2) << f.name;
    std::printf("%-6s at most %.2f units in the last place\n", f.name, worst);
  }
}

TEST(CpuMath, SpecialValues) {
  for (float (*f)(float) : std::initializer_list<float (*)(float)>{
           [](float x) { return math::expm1(x); }, [](float x) { return math::log1p(x); },
           [](float x) { return math::tanh(x); }, [](float x) { return math::erf(x); }}) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(f(0.0f)), 0u);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(f(-0.0f)), 0x80000000u);
    EXPECT_TRUE(std::isnan(f(std::numeric_limits<float>::quiet_NaN())));
  }
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_EQ(math::exp(-0.0f), 1.0f);
  EXPECT_EQ(math::exp(kInf), kInf);
  EXPECT_EQ(math::exp(-kInf), 0.0f);
  EXPECT_EQ(math::expm1(-kInf), -1.0f);
  EXPECT_EQ(math::log(0.0f), -kInf);
  EXPECT_EQ(math::log(-0.0f), -kInf);
  EXPECT_EQ(math::log(kInf), kInf);
  EXPECT_EQ(math::log(1.0f), 0.0f);
  EXPECT_TRUE(std::isnan(math::log(-1.0f)));
  EXPECT_EQ(math::log1p(-1.0f), -kInf);
  EXPECT_EQ(math::log1p(kInf), kInf);
  EXPECT_EQ(math::tanh(kInf), 1.0f);
  EXPECT_EQ(math::tanh(-kInf), -1.0f);
  EXPECT_EQ(math::erf(-kInf), -1.0f);
}

// ---- conversions
// ------------------------------------------------------------------------------------------------------

TEST(CpuConversion, BlocksEqualTheScalarTypes) {
  std::mt19937_64 random(seed());
  std::vector<float> values;
  for (int i = 0; i < 200000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (std::uint32_t h = 0; h < 0x10000u; ++h) {  // every f16 and bf16, the midpoints above them, and their neighbours
    for (const float x :
         {static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(h))), std::bit_cast<float>(h << 16)}) {
      const float next = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) + 0x8000u);
      const float half = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) + 0x1000u);
      for (const float y : {x, half, next}) {
        values.push_back(y);
        values.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(y) + 1));
        values.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(y) - 1));
      }
    }
  }
  const auto check = [&]<class T>(const char* name) {
    std::vector<T> narrow(values.size());
    std::vector<float> wide(values.size());
    narrow_block(values.data(), narrow.data(), static_cast<std::int64_t>(values.size()));
    widen_block(narrow.data(), wide.data(), static_cast<std::int64_t>(values.size()));
    std::size_t bad = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      bad += narrow[i].bits != T(values[i]).bits ? 1 : 0;
      bad += std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(static_cast<float>(T(values[i])))
                 ? 1
                 : 0;
    }
    EXPECT_EQ(bad, 0u) << name;
  };
  check.operator()<float16>("f16");
  check.operator()<bfloat16>("bf16");
}

}  // namespace
