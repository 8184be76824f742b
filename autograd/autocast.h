#pragma once
// Automatic mixed precision: while an Autocast lives, each op of this thread casts its inputs by its own rule (Cast).
//
//   {
//     mt::Autocast scope(mt::f16);
//     loss = model.loss(tokens, targets);
//   }
//
// Parameters stay f32: an op that runs in 16 bits reads the parameter's working copy, which is made once and then
// refreshed by the optimizer's update kernel, so that a steady step casts no weights.

#include <string>

#include "core/tensor.h"

namespace mantissa {

enum class Cast : unsigned char;

struct AutocastOptions {
  /// Weight gradients come out of the product in f32 and are accumulated there. True: they are rounded to 16 bits
  /// first, as in the classic recipe, for those who study underflow.
  bool low_precision_weight_grad = false;
};

struct AutocastState {
  bool enabled = false;
  DType dtype = DType::f16;
  AutocastOptions options;
};

/// RAII scope of mixed precision on this thread; nests, and `Autocast off(mt::f32)` turns it off for a region.
class Autocast {
 public:
  /// f16 or bf16 turn it on, f32 turns it off; anything else is a DTypeError.
  explicit Autocast(DType dtype, AutocastOptions options = {});
  explicit Autocast(const AutocastState& state);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  AutocastState previous_;
};

AutocastState autocast_state();

/// `x` as an op with rule `cast` wants it under the current scope (Cast::widest is resolved by the op). The result
/// carries x's place in the graph: a recorded cast for activations, the leaf itself for a parameter's working copy.
Tensor autocast(Cast cast, const Tensor& x);

/// The rule of every op, one per line, as printed in docs/mixed-precision.md; the same on every device.
std::string autocast_table();

}  // namespace mantissa
