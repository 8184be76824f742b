#include "core/precision.h"

#include "core/backend.h"

namespace mantissa {
namespace {
constexpr Precision kAll[] = {Precision::fp32, Precision::tf32, Precision::fp16_mixed, Precision::bf16_mixed};
}

std::string to_string(Precision p) {
  constexpr const char* names[] = {"fp32", "tf32", "fp16-mixed", "bf16-mixed"};
  return names[static_cast<std::size_t>(p)];
}

std::vector<std::string> precision_names() {
  std::vector<std::string> names;
  for (const Precision p : kAll) names.push_back(to_string(p));
  return names;
}

Precision parse_precision(const std::string& text) {
  std::string known;
  for (const Precision p : kAll) {
    if (text == to_string(p)) return p;
    known += (known.empty() ? "" : ", ") + to_string(p);
  }
  MT_THROW(ConfigError, "precision: '", text, "' is not one of ", known);
}

DType autocast_dtype(Precision p) {
  return p == Precision::fp16_mixed ? DType::f16 : p == Precision::bf16_mixed ? DType::bf16 : DType::f32;
}

void use_precision(Precision p) {
  set_float32_matmul(p == Precision::tf32 ? Float32Matmul::tf32 : Float32Matmul::full);
}

}  // namespace mantissa
