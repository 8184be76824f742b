#pragma once
// The named precisions that every tool and example takes.

#include <string>
#include <vector>

#include "core/dtype.h"

namespace mantissa {

enum class Precision : std::uint8_t {
  fp32,        // everything in f32
  tf32,        // f32, with TF32 products on the GPU
  fp16_mixed,  // f32 masters, f16 compute, loss scaling
  bf16_mixed   // f32 masters, bf16 compute
};

std::string to_string(Precision p);  // "fp16-mixed"
/// ConfigError listing the names when unknown.
Precision parse_precision(const std::string& text);
std::vector<std::string> precision_names();
/// What to give to Autocast: f16, bf16, or f32 (off).
DType autocast_dtype(Precision p);
/// Sets process-wide switches that the precision needs (TF32).
void use_precision(Precision p);

}  // namespace mantissa
