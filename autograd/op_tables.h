#pragma once
// Each ops_*.cpp states its ops' names and Autocast rules in one table beside their definitions; this lists the tables.

#include <span>

#include "autograd/graph.h"

namespace mantissa {
std::span<const OpInfo> linear_ops();
std::span<const OpInfo> norm_ops();
std::span<const OpInfo> loss_ops();
std::span<const OpInfo> reduce_ops();
std::span<const OpInfo> index_ops();
std::span<const OpInfo> image_ops();
}  // namespace mantissa
