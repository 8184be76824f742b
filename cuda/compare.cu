// Comparisons to bool, and selection by a bool.
#include "cuda/map.cuh"

namespace mantissa {
namespace {

template <class T> struct Compare {
  bool less, equal, greater, negate;
  explicit Compare(CompareOp op)
      : less(op == CompareOp::less || op == CompareOp::less_equal),
        equal(op == CompareOp::equal || op == CompareOp::not_equal || op == CompareOp::less_equal ||
              op == CompareOp::greater_equal),
        greater(op == CompareOp::greater || op == CompareOp::greater_equal),
        negate(op == CompareOp::not_equal) {}  // so that NaN differs from everything

  __device__ bool operator()(T x, T y) const {
    if constexpr (is_storage_float<T>) {
      return test(to_float(x), to_float(y));
    } else {
      return test(x, y);
    }
  }
  template <class A> __device__ bool test(A a, A b) const {
    return ((less && a < b) || (equal && a == b) || (greater && a > b)) != negate;
  }
};

template <class Bits> struct Select {
  __device__ Bits operator()(bool condition, Bits a, Bits b) const { return condition ? a : b; }
};

}  // namespace

void CudaBackend::compare(CompareOp op, const Tensor& a, const Tensor& b, Tensor& y) {
  const detail::OpRange range("compare");
  visit_all<CudaTypes>("compare", a.dtype(),
                       [&]<class T>() { map<MapPaths::kStrided, bool, T, T>(*this, Compare<T>(op), y, a, b); });
}

void CudaBackend::where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) {
  const detail::OpRange range("where");
  visit_bits(y.dtype(), [&]<class Bits>() {
    map<MapPaths::kRows, Bits, bool, Bits, Bits>(*this, Select<Bits>{}, y, condition, a, b);
  });
}

}  // namespace mantissa
