// y = op(x) for every unary op and float type.
#include "cuda/map.cuh"

namespace mantissa {

void CudaBackend::unary(const UnaryOp& variant, const Tensor& x, Tensor& y) {
  std::visit(
      [&](auto op) {
        const detail::OpRange range(op.name);
        visit_float<CudaTypes>(op.name, x.dtype(), [&]<class T>() {
          map<MapPaths::kStrided, T, T>(*this, Computes<decltype(op), T>{op}, y, x);
        });
      },
      variant);
}

}  // namespace mantissa
