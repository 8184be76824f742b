// gx = op.grad_a(g, a, b) or op.grad_b(g, a, b), in the broadcast shape, for every binary op and float type.
#include "cuda/map.cuh"

namespace mantissa {
namespace {

template <class Op, int kOperand> struct Gradient {
  Op op;
  template <class A> __device__ A operator()(A g, A a, A b) const {
    if constexpr (kOperand == 0)
      return op.grad_a(g, a, b);
    else
      return op.grad_b(g, a, b);
  }
  template <class A> __device__ A operator()(A g) const { return (*this)(g, A(0), A(0)); }
};

template <int kOperand, class Op>
void launch(CudaBackend& backend, Op op, const Tensor& g, const Tensor& a, const Tensor& b, Tensor& gx) {
  visit_float<CudaTypes>(op.name, g.dtype(), [&]<class T>() {
    const Computes<Gradient<Op, kOperand>, T> f{{op}};
    if constexpr (Op::reads_operands) {
      map<MapPaths::kRows, T, T, T, T>(backend, f, gx, g, a, b);
    } else {
      map<MapPaths::kStrided, T, T>(backend, f, gx, g);
    }
  });
}

}  // namespace

void CudaBackend::binary_grad(const BinaryOp& variant, int operand, const Tensor& g, const Tensor& a, const Tensor& b,
                              Tensor& gx) {
  std::visit(
      [&](auto op) {
        const detail::OpRange range(op.name);
        operand == 0 ? launch<0>(*this, op, g, a, b, gx) : launch<1>(*this, op, g, a, b, gx);
      },
      variant);
}

}  // namespace mantissa
