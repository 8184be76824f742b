#include "autograd/autocast.h"

#include <algorithm>
#include <vector>

#include "autograd/graph.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"
#include "core/backend.h"

namespace mantissa {
namespace {

thread_local constinit AutocastState current_state{};

/// The parameter's 16-bit copy, brought up to date when the parameter was changed by anything but the optimizer.
Tensor working_copy(const Tensor& parameter, DType dtype) {
  Leaf& leaf = *parameter.node()->leaf;
  if (!leaf.working.defined() || leaf.working.dtype() != dtype || leaf.working_of != parameter.version()) {
    if (!leaf.working.defined() || leaf.working.dtype() != dtype) {
      const MemoryScope scope(MemoryCategory::working_copies);
      leaf.working = empty_like(parameter, dtype);
    }
    backend(parameter).copy(parameter, leaf.working);
    leaf.working.bump_version();
    leaf.working_of = parameter.version();
  }
  Tensor copy = leaf.working;
  copy.set_node(parameter.node(), 0);
  return copy;
}

}  // namespace

Autocast::Autocast(const AutocastState& state) : previous_(current_state) { current_state = state; }
Autocast::Autocast(DType dtype, AutocastOptions options) : previous_(current_state) {
  MT_CHECK(DTypeError, dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32,
           "Autocast: expected f16 or bf16, or f32 to turn it off, got ", dtype);
  current_state = {dtype != DType::f32, dtype, options};
}
Autocast::~Autocast() { current_state = previous_; }

AutocastState autocast_state() { return current_state; }

Tensor autocast(Cast rule, const Tensor& x) {
  if (!current_state.enabled || !x.defined() || !is_float(x.dtype()) || x.dtype() == DType::f64) return x;
  if (rule != Cast::low && rule != Cast::full) return x;
  const DType target = rule == Cast::low ? current_state.dtype : DType::f32;
  if (x.dtype() == target) return x;
  const bool is_parameter = x.node() != nullptr && x.node()->leaf != nullptr && !x.node()->leaf->activation &&
                            x.dtype() == DType::f32 && x.is_dense() && x.offset() == 0 &&
                            x.shape() == x.node()->outputs[0].shape;
  if (rule == Cast::low && is_parameter) return working_copy(x, target);
  return x.to(target);
}

std::string autocast_table() {
  std::vector<OpInfo> ops;
  for_each_op<UnaryOp>([&](auto op) { ops.push_back({op.name, op.cast}); });
  for_each_op<BinaryOp>([&](auto op) { ops.push_back({op.name, op.cast}); });
  for (const auto table : {linear_ops(), norm_ops(), loss_ops(), reduce_ops(), index_ops(), image_ops()})
    ops.insert(ops.end(), table.begin(), table.end());
  std::ranges::stable_sort(ops, {}, [](const OpInfo& op) { return std::string_view(op.name); });
  constexpr std::string_view names[] = {"keep", "low", "full", "widest"};
  std::string out;
  for (const OpInfo& op : ops) {
    std::string line = op.name;
    line.resize(std::max<std::size_t>(line.size() + 1, 20), ' ');
    out += line + std::string(names[static_cast<std::size_t>(op.cast)]) + "\n";
  }
  return out;
}

}  // namespace mantissa
