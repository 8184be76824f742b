// y = op(a, b) with broadcasting for every binary op and float type.
#include "cuda/map.cuh"

namespace mantissa {

void CudaBackend::binary(const BinaryOp& variant, const Tensor& a, const Tensor& b, Tensor& y) {
  std::visit(
      [&](auto op) {
        const detail::OpRange range(op.name);
        visit_float<CudaTypes>(op.name, y.dtype(), [&]<class T>() {
          map<MapPaths::kRows, T, T, T>(*this, Computes<decltype(op), T>{op}, y, a, b);
        });
      },
      variant);
}

}  // namespace mantissa
