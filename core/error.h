#pragma once
// Errors and the two checking macros. Every message has the form
//   op: what is wrong: a is f16[32,784]@cpu, b is ...  [file:line]
// MT_CHECK is for the caller's mistakes, MT_ASSERT for ours. Parts are formatted only on failure.

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace mantissa {

/// Base of everything this library throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ShapeError : public Error {
  using Error::Error;
};  // sizes, ranks, axes
class DTypeError : public Error {
  using Error::Error;
};  // element types
class DeviceError : public Error {
  using Error::Error;
};  // devices, missing GPU
class OutOfMemoryError : public Error {
  using Error::Error;
};  // host or device memory
class NonFiniteError : public Error {
  using Error::Error;
};  // inf or NaN where none is allowed
class IndexError : public Error {
  using Error::Error;
};  // label, token or index out of range
class AutogradError : public Error {
  using Error::Error;
};  // misuse of the graph
class FormatError : public Error {
  using Error::Error;
};  // broken file: names file and offset
class IoError : public Error {
  using Error::Error;
};  // the operating system refused
class DistributedError : public Error {
  using Error::Error;
};  // ranks disagree, died or hang
class CudaError : public Error {
  using Error::Error;
};  // a CUDA library call failed
class ConfigError : public Error {
  using Error::Error;
};  // an option outside its range
class InternalError : public Error {
  using Error::Error;
};  // our own bug: please report

namespace detail {

std::string number_to_string(double x);  // shortest text that reads back as x

template <class T> void append(std::string& out, const T& part) {
  if constexpr (std::is_same_v<T, bool>) {
    out += part ? "true" : "false";
  } else if constexpr (std::is_same_v<T, char>) {
    out += part;
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    out += std::string_view(part);
  } else if constexpr (std::floating_point<T>) {
    out += number_to_string(static_cast<double>(part));
  } else if constexpr (std::integral<T>) {
    out += std::to_string(part);
  } else {
    out += to_string(part);  // found by argument-dependent lookup: Tensor, Shape, DType, Device, ...
  }
}

template <class... Parts> std::string message(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

std::string with_location(std::string text, const char* file, int line);

template <class E, class... Parts> [[noreturn]] void raise(const char* file, int line, const Parts&... parts) {
  throw E(with_location(message(parts...), file, line));
}

}  // namespace detail
}  // namespace mantissa

#define MT_THROW(Type, ...) ::mantissa::detail::raise<::mantissa::Type>(__FILE__, __LINE__, __VA_ARGS__)

/// The caller's mistake: throws mantissa::Type with the message parts unless `condition` holds.
#define MT_CHECK(Type, condition, ...) \
  do {                                 \
    if (!(condition)) [[unlikely]] {   \
      MT_THROW(Type, __VA_ARGS__);     \
    }                                  \
  } while (false)

/// Our mistake: throws mantissa::InternalError.
#define MT_ASSERT(condition, ...) \
  MT_CHECK(InternalError, condition, "internal error, please report: " #condition ": ", __VA_ARGS__)
