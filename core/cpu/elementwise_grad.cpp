// Backward elementwise kernels.
#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {

void CpuBackend::unary_grad(const UnaryOp& variant, const Tensor& g, const Tensor& saved, Tensor& gx) {
  const Tensor& s = saved.defined() ? saved : g;  // ops that need nothing ignore it
  std::visit(
      [&](auto op) {
        visit_float<CpuTypes>(op.name, gx.dtype(), [&]<class T>() {
          map_binary<compute_t<T>, T, T, T>(g, s, gx, [op](auto v, auto w) { return op.grad(v, w); });
        });
      },
      variant);
}

void CpuBackend::binary_grad(const BinaryOp& variant, int operand, const Tensor& g, const Tensor& a, const Tensor& b,
                             Tensor& gx) {
  std::visit(
      [&](auto op) {
        const Tensor &va = op.reads_operands ? a : g, &vb = op.reads_operands ? b : g;
        visit_float<CpuTypes>(op.name, gx.dtype(), [&]<class T>() {
          using A = compute_t<T>;
          if (operand == 0) {
            map_ternary<A, T>(g, va, vb, gx, [op](A v, A x, A y) { return op.grad_a(v, x, y); });
          } else {
            map_ternary<A, T>(g, va, vb, gx, [op](A v, A x, A y) { return op.grad_b(v, x, y); });
          }
        });
      },
      variant);
}

}  // namespace mantissa
