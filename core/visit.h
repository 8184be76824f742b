#pragma once
// From a runtime dtype to a C++ type. Each backend passes its own storage types (Types::f16, Types::bf16).

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/error.h"

namespace mantissa {

/// What kernels compute in: double for double, else float.
template <class T> using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class Types, class F> decltype(auto) visit_float(const char* op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f.template operator()<double>();
    case DType::f32:
      return f.template operator()<float>();
    case DType::f16:
      return f.template operator()<typename Types::f16>();
    case DType::bf16:
      return f.template operator()<typename Types::bf16>();
    default:
      MT_THROW(DTypeError, op, ": no kernel for dtype ", dtype, "; expected f64, f32, f16 or bf16");
  }
}

template <class Types, class F> decltype(auto) visit_all(const char* op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::i64:
      return f.template operator()<std::int64_t>();
    case DType::i32:
      return f.template operator()<std::int32_t>();
    case DType::u8:
      return f.template operator()<std::uint8_t>();
    case DType::boolean:
      return f.template operator()<bool>();
    case DType::f8e4m3:
      return f.template operator()<typename Types::f8e4m3>();
    case DType::f8e5m2:
      return f.template operator()<typename Types::f8e5m2>();
    default:
      return visit_float<Types>(op, dtype, std::forward<F>(f));
  }
}

template <class F> decltype(auto) visit_index(const char* op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::i64:
      return f.template operator()<std::int64_t>();
    case DType::i32:
      return f.template operator()<std::int32_t>();
    default:
      MT_THROW(DTypeError, op, ": indices must be i64 or i32, got ", dtype);
  }
}

}  // namespace mantissa
