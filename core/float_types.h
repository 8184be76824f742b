#pragma once
// The 16- and 8-bit storage types with exact conversions: widening is exact, narrowing rounds once to nearest
// even, from float and from double. They hold bits and do no arithmetic: kernels widen, compute, and narrow.
// Specification: IEEE 754-2019; bfloat16 as the upper half of binary32; FP8 as in OCP OFP8 1.0.

#include <bit>
#include <cstdint>
#include <type_traits>

namespace mantissa {
namespace detail {

struct Format {
  int exponent_bits, fraction_bits;
  bool has_infinity;  // E4M3 has none: overflow gives NaN (or the maximum when saturating)
  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
inline constexpr Format kFloat16{5, 10, true}, kBFloat16{8, 7, true}, kFloat8E4M3{4, 3, false}, kFloat8E5M2{5, 2, true};

/// Rounds an IEEE value (given as its bits and format) to a narrower format, to nearest even, in integers only.
template <class Bits>
constexpr std::uint32_t narrow(Bits bits, int source_exponent_bits, int source_fraction_bits, Format to,
                               bool saturate) {
  const int source_bias = (1 << (source_exponent_bits - 1)) - 1;
  const Bits fraction_mask = (Bits(1) << source_fraction_bits) - 1;
  const auto sign = static_cast<std::uint32_t>(bits >> (source_exponent_bits + source_fraction_bits))
                    << (to.exponent_bits + to.fraction_bits);
  const int exponent_field = static_cast<int>(bits >> source_fraction_bits) & ((1 << source_exponent_bits) - 1);
  Bits significand = bits & fraction_mask;
  const std::uint32_t all_ones = (1u << to.exponent_bits) - 1;
  const std::uint32_t infinity = all_ones << to.fraction_bits;  // E4M3: 0x78, an ordinary 256
  const std::uint32_t nan =
      to.has_infinity ? infinity | (1u << (to.fraction_bits - 1)) : infinity | ((1u << to.fraction_bits) - 1);
  const std::uint32_t largest = to.has_infinity ? infinity - 1 : nan - 1;
  const std::uint32_t overflow = sign | (saturate ? largest : to.has_infinity ? infinity : nan);
  if (exponent_field == (1 << source_exponent_bits) - 1) {
    if (significand == 0) return overflow;
    // A NaN keeps its sign and the upper bits of its payload, and becomes quiet.
    if (!to.has_infinity) return sign | nan;
    return sign | nan | static_cast<std::uint32_t>(significand >> (source_fraction_bits - to.fraction_bits));
  }
  int exponent = exponent_field - source_bias;
  if (exponent_field == 0) {
    exponent = 1 - source_bias;  // zero or subnormal: no hidden bit
  } else {
    significand |= Bits(1) << source_fraction_bits;
  }
  // Bits to drop so that what remains counts units of the target's last place; more below its normal range.
  int shift = source_fraction_bits - to.fraction_bits;
  std::uint32_t base = 0;
  if (exponent < 1 - to.bias()) {
    shift += (1 - to.bias()) - exponent;
    if (shift > source_fraction_bits + 2) return sign;  // below half of the least subnormal
  } else {
    base = static_cast<std::uint32_t>(exponent + to.bias() - 1) << to.fraction_bits;
    // The hidden bit adds one to the exponent field; a source subnormal in range (bf16) has none and adds nothing.
    if (exponent + to.bias() > static_cast<int>(all_ones)) return overflow;
  }
  Bits kept = significand >> shift;
  const Bits rest = significand & ((Bits(1) << shift) - 1), half = Bits(1) << (shift - 1);
  if (rest > half || (rest == half && (kept & 1))) ++kept;
  const std::uint32_t magnitude = base + static_cast<std::uint32_t>(kept);  // a carry moves into the exponent field
  if (magnitude > largest) return overflow;
  return sign | magnitude;
}

constexpr std::uint32_t narrow(float x, Format to, bool saturate = false) {
  return narrow<std::uint32_t>(std::bit_cast<std::uint32_t>(x), 8, 23, to, saturate);
}
constexpr std::uint32_t narrow(double x, Format to, bool saturate = false) {
  return narrow<std::uint64_t>(std::bit_cast<std::uint64_t>(x), 11, 52, to, saturate);
}

constexpr float widen(std::uint32_t bits, Format from) {
  const int width = from.exponent_bits + from.fraction_bits;
  const std::uint32_t sign = (bits >> width) << 31;
  const std::uint32_t all_ones = (1u << from.exponent_bits) - 1;
  const std::uint32_t exponent = (bits >> from.fraction_bits) & all_ones;
  const std::uint32_t fraction = bits & ((1u << from.fraction_bits) - 1);
  const int up = 23 - from.fraction_bits;
  if (exponent == all_ones && (from.has_infinity || fraction == (1u << from.fraction_bits) - 1)) {
    return std::bit_cast<float>(sign | 0x7f800000u | (fraction << up) | (fraction ? 0x400000u : 0u));
  }
  if (exponent == 0) {
    if (fraction == 0) return std::bit_cast<float>(sign);
    if (from.exponent_bits == 8) return std::bit_cast<float>(sign | (fraction << up));
    const int high = 31 - std::countl_zero(fraction);  // position of the leading one
    const int e = 1 - from.bias() - (from.fraction_bits - high) + 127;
    return std::bit_cast<float>(sign | (static_cast<std::uint32_t>(e) << 23) | ((fraction << (23 - high)) & 0x7fffffu));
  }
  return std::bit_cast<float>(sign | ((exponent + static_cast<std::uint32_t>(127 - from.bias())) << 23) |
                              (fraction << up));
}

/// A storage-only float: `Bits` wide, converting exactly.
template <class Bits, const Format& format> struct StorageFloat {
  Bits bits = 0;
  constexpr StorageFloat() = default;
  constexpr explicit StorageFloat(float x) : bits(static_cast<Bits>(narrow(x, format))) {}
  constexpr explicit StorageFloat(double x) : bits(static_cast<Bits>(narrow(x, format))) {}
  template <class T>
  requires std::is_integral_v<T>
  constexpr explicit StorageFloat(T x) : StorageFloat(static_cast<double>(x)) {}
  constexpr explicit operator float() const { return widen(bits, format); }
  constexpr explicit operator double() const { return static_cast<double>(widen(bits, format)); }
  static constexpr StorageFloat from_bits(Bits b) {
    StorageFloat x;
    x.bits = b;
    return x;
  }
  /// Like the constructor, but what overflows becomes the largest finite value.
  static constexpr StorageFloat saturate(float x) { return from_bits(static_cast<Bits>(narrow(x, format, true))); }
};

}  // namespace detail

using float16 = detail::StorageFloat<std::uint16_t, detail::kFloat16>;
using bfloat16 = detail::StorageFloat<std::uint16_t, detail::kBFloat16>;
using float8_e4m3 = detail::StorageFloat<std::uint8_t, detail::kFloat8E4M3>;
using float8_e5m2 = detail::StorageFloat<std::uint8_t, detail::kFloat8E5M2>;

}  // namespace mantissa
