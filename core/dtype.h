#pragma once
// Element types. The enumerators are also names in the namespace, so that users write mt::f16.

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

namespace mantissa {

enum class DType : std::uint8_t { f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, u8, boolean };

inline constexpr DType f64 = DType::f64;        // IEEE binary64; CPU, for gradient checks
inline constexpr DType f32 = DType::f32;        // IEEE binary32; the type of parameters
inline constexpr DType f16 = DType::f16;        // IEEE binary16
inline constexpr DType bf16 = DType::bf16;      // bfloat16: 8 exponent bits, 7 fraction bits
inline constexpr DType f8e4m3 = DType::f8e4m3;  // OCP FP8 E4M3: no infinity, maximum 448; storage only
inline constexpr DType f8e5m2 = DType::f8e5m2;  // OCP FP8 E5M2: infinity, maximum 57344; storage only
inline constexpr DType i64 = DType::i64;
inline constexpr DType i32 = DType::i32;
inline constexpr DType u8 = DType::u8;
inline constexpr DType boolean = DType::boolean;  // one byte, 0 or 1

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

/// f64, f32, f16 or bf16: the types that arithmetic and autograd accept.
constexpr bool is_float(DType t) { return t <= DType::bf16; }
/// f16 or bf16.
constexpr bool is_low_precision(DType t) { return t == DType::f16 || t == DType::bf16; }
/// i64, i32 or u8.
constexpr bool is_integer(DType t) { return t == DType::i64 || t == DType::i32 || t == DType::u8; }
/// The type that kernels compute in: f64 for f64, else f32.
constexpr DType compute_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }
/// The wider of two float types; f16 with bf16 gives f32.
constexpr DType widest(DType a, DType b) {
  if (a == b) return a;
  if (is_low_precision(a) && is_low_precision(b)) return DType::f32;
  return a < b ? a : b;
}

constexpr std::string_view name(DType t) {
  constexpr std::string_view names[] = {"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "u8", "bool"};
  return names[static_cast<std::size_t>(t)];
}
inline std::string to_string(DType t) { return std::string(name(t)); }
std::ostream& operator<<(std::ostream& out, DType t);

}  // namespace mantissa
