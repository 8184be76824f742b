// gx = op.grad(g, input or output) for every unary op and float type.
#include "cuda/map.cuh"

namespace mantissa {
namespace {

template <class Op> struct Gradient {
  Op op;
  template <class A> __device__ A operator()(A g, A saved) const { return op.grad(g, saved); }
};

template <class Op> struct GradientAlone {  // reads nothing but g
  Op op;
  template <class A> __device__ A operator()(A g) const { return op.grad(g, A(0)); }
};

}  // namespace

void CudaBackend::unary_grad(const UnaryOp& variant, const Tensor& g, const Tensor& saved, Tensor& gx) {
  std::visit(
      [&](auto op) {
        using Op = decltype(op);
        const detail::OpRange range(op.name);
        visit_float<CudaTypes>(op.name, g.dtype(), [&]<class T>() {
          if constexpr (Op::needs == Needs::nothing) {
            map<MapPaths::kStrided, T, T>(*this, Computes<GradientAlone<Op>, T>{{op}}, gx, g);
          } else {
            map<MapPaths::kStrided, T, T, T>(*this, Computes<Gradient<Op>, T>{{op}}, gx, g, saved);
          }
        });
      },
      variant);
}

}  // namespace mantissa
