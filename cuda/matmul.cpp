// Matrix products: batches, the epilogues that cuBLASLt fuses, and the general case in steps.
#include <algorithm>
#include <optional>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/matmul_plan.h"

namespace mantissa {
namespace {

constexpr std::int64_t kMostBatches = 65535;  // in one call of the library

cudaDataType_t cuda_type(DType t) {
  switch (t) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

/// Whether rows are contiguous and do not overlap. An axis of one element may have any stride.
bool by_rows(const Tensor& x) {
  return (x.stride(-1) == 1 || x.size(-1) == 1) && (x.size(-2) == 1 || x.stride(-2) >= x.size(-1));
}
bool by_columns(const Tensor& x) {
  return (x.stride(-2) == 1 || x.size(-2) == 1) && (x.size(-1) == 1 || x.stride(-1) >= x.size(-2));
}

Tensor transposed(const Tensor& x) {
  Shape shape = x.shape();
  Strides strides = x.strides();
  std::swap(shape[x.rank() - 1], shape[x.rank() - 2]);
  std::swap(strides[x.rank() - 1], strides[x.rank() - 2]);
  return x.view(shape, strides, x.offset());
}

/// Elements between rows, or between columns where there are no contiguous rows.
std::int64_t leading(const Tensor& x) {
  const int outer = by_rows(x) ? -2 : -1, inner = -3 - outer;
  return x.size(outer) == 1 ? std::max<std::int64_t>(x.size(inner), 1) : x.stride(outer);
}

/// The batch axes of the three operands, merged where they are contiguous for all; at least one, innermost
/// last.
struct Batches {
  int rank = 0;
  std::int64_t sizes[kMaxRank] = {}, a[kMaxRank] = {}, b[kMaxRank] = {}, y[kMaxRank] = {};

  Batches(const Tensor& ta, const Tensor& tb, const Tensor& ty) {
    for (int axis = 0; axis + 2 < ty.rank(); ++axis) {
      const std::int64_t size = ty.shape()[axis];
      if (size == 1) continue;
      const std::int64_t sa = ta.strides()[axis], sb = tb.strides()[axis], sy = ty.strides()[axis];
      const int last = rank - 1;
      const bool merges = rank > 0 && a[last] == sa * size && b[last] == sb * size && y[last] == sy * size;
      const int at = merges ? last : rank++;
      sizes[at] = merges ? sizes[at] * size : size;
      a[at] = sa;
      b[at] = sb;
      y[at] = sy;
    }
    if (rank == 0) sizes[rank++] = 1;
  }
  std::int64_t inner() const { return sizes[rank - 1]; }
  bool single() const { return rank == 1 && sizes[0] == 1; }

  /// f(offset in a, in b, in y) for each combination of the outer axes.
  template <class F> void for_each_outer(const F& f) const {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank - 1; ++axis) count *= sizes[axis];
    for (std::int64_t index = 0; index < count; ++index) {
      std::int64_t rest = index, at_a = 0, at_b = 0, at_y = 0;
      for (int axis = rank - 2; axis >= 0; --axis) {
        const std::int64_t i = rest % sizes[axis];
        rest /= sizes[axis];
        at_a += i * a[axis];
        at_b += i * b[axis];
        at_y += i * y[axis];
      }
      f(at_a, at_b, at_y);
    }
  }
};

/// The largest power of two up to 256 that divides all the addresses and `steps`.
std::int32_t alignment_of(std::initializer_list<const void*> pointers, std::int64_t steps) {
  std::uintptr_t bits = 256 | static_cast<std::uintptr_t>(steps);
  for (const void* p : pointers) bits |= reinterpret_cast<std::uintptr_t>(p);
  return static_cast<std::int32_t>(bits & (~bits + 1));
}

bool is_plain(const MatmulOptions& o) {
  return o.bias == nullptr && o.activation == Activation::none && o.grad_activation == Activation::none &&
         o.pre_activation == nullptr;
}

struct Epilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  const Tensor* aux = nullptr;
};

/// The library's name for what follows the product. A ReLU is left to a kernel: the library's turns NaN into
/// 0.
std::optional<Epilogue> name_epilogue(const MatmulOptions& o) {
  const bool bias = o.bias != nullptr;
  if (o.grad_activation != Activation::none) {
    const bool alone = !bias && o.activation == Activation::none && o.pre_activation == nullptr;
    if (o.grad_activation != Activation::gelu_tanh || !alone) return std::nullopt;
    return Epilogue{CUBLASLT_EPILOGUE_DGELU, o.grad_input};
  }
  if (o.activation == Activation::gelu_tanh) {
    if (o.pre_activation == nullptr) return Epilogue{bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU};
    return Epilogue{bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, o.pre_activation};
  }
  if (o.pre_activation != nullptr) return std::nullopt;
  return Epilogue{bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT};
}

/// Rows (or columns) of whole 16 bytes, from an address of whole 16 bytes.
bool in_16_bytes(const Tensor& x) {
  return reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0 &&
         leading(x) * static_cast<std::int64_t>(size_of(x.dtype())) % 16 == 0;
}

/// The epilogue to leave to the library. It adds to y before the epilogue, not after; and where operands are
/// not in whole 16 bytes it has kernels that round to 16 bits before they add the bias.
std::optional<Epilogue> fused_epilogue(const Tensor& a, const Tensor& b, const MatmulOptions& o, const Tensor& y) {
  if (is_plain(o)) return Epilogue{};
  const std::optional<Epilogue> e = name_epilogue(o);
  if (!e || o.accumulate || y.dtype() == DType::f64 || y.size(-1) % 8 != 0) return std::nullopt;
  if (!by_rows(y) || !in_16_bytes(y) || !in_16_bytes(a) || !in_16_bytes(b)) return std::nullopt;
  if (const Tensor* bias = o.bias) {
    const bool fits =
        bias->dtype() == y.dtype() && bias->stride(0) == 1 && reinterpret_cast<std::uintptr_t>(bias->data()) % 16 == 0;
    if (!fits) return std::nullopt;
  }
  if (const Tensor* aux = e->aux) {
    const bool fits = aux->dtype() == y.dtype() && aux->shape() == y.shape() && by_rows(*aux) && in_16_bytes(*aux) &&
                      leading(*aux) % 8 == 0;
    if (!fits) return std::nullopt;
  }
  return e;
}

cublasComputeType_t compute_type(DType t) {
  if (t == DType::f64) return CUBLAS_COMPUTE_64F;
  const bool tf32 = t == DType::f32 && float32_matmul() == Float32Matmul::tf32;
  return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

MatmulProblem problem_of(const Tensor& a, const Tensor& b, const Tensor& y, const Batches& batches,
                         const Epilogue& epilogue) {
  const int inner = batches.rank - 1;
  MatmulProblem p{};
  p.m = y.size(-2);
  p.n = y.size(-1);
  p.k = a.size(-1);
  p.lda = leading(a);
  p.ldb = leading(b);
  p.ldy = leading(y);
  p.ld_aux = epilogue.aux != nullptr ? leading(*epilogue.aux) : 0;
  p.stride_a = batches.a[inner];
  p.stride_b = batches.b[inner];
  p.stride_y = batches.y[inner];
  p.type_a = cuda_type(a.dtype());
  p.type_y = cuda_type(y.dtype());
  p.a_by_columns = !by_rows(a);
  p.b_by_columns = !by_rows(b);
  p.compute = compute_type(a.dtype());
  p.epilogue = epilogue.kind;
  return p;
}

std::byte* at(const Tensor& x, std::int64_t offset) {
  return static_cast<std::byte*>(x.data()) + offset * static_cast<std::int64_t>(size_of(x.dtype()));
}

}  // namespace

void CudaBackend::matmul(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("matmul");
  if (o.activation == Activation::relu && !o.accumulate && o.grad_activation == Activation::none) {
    MatmulOptions linear = o;  // rounding and ReLU commute
    linear.activation = Activation::none;
    matmul(a, b, linear, y);
    return unary(Relu{}, y, y);
  }
  const bool plain = is_plain(o);
  if (plain && !by_rows(y)) {
    MT_ASSERT(by_columns(y), "matmul: neither of the last two axes of ", y, " is contiguous");
    Tensor yt = transposed(y);
    return matmul(transposed(b), transposed(a), o, yt);
  }
  const Batches batches(a, b, y);
  const std::optional<Epilogue> epilogue = fused_epilogue(a, b, o, y);
  if (!epilogue || (!plain && !batches.single()) || a.size(-1) == 0) return matmul_in_steps(a, b, o, y);
  MT_ASSERT((by_rows(a) || by_columns(a)) && (by_rows(b) || by_columns(b)),
            "matmul: neither of the last two axes of an operand is contiguous: ", a, ", ", b);

  MatmulProblem p = problem_of(a, b, y, batches, *epilogue);
  MatmulOperands x{.bias = o.bias != nullptr ? o.bias->data() : nullptr,
                   .aux = epilogue->aux != nullptr ? epilogue->aux->data() : nullptr,
                   .alpha = o.alpha,
                   .accumulate = o.accumulate};
  const auto size_in = static_cast<std::int64_t>(size_of(a.dtype())),
             size_out = static_cast<std::int64_t>(size_of(y.dtype()));
  if (matmul_cache_ == nullptr) matmul_cache_ = std::make_shared<MatmulCache>(*this, cublas_);
  bool done = true;
  batches.for_each_outer([&](std::int64_t at_a, std::int64_t at_b, std::int64_t at_y) {
    for (std::int64_t first = 0; done && first < batches.inner(); first += kMostBatches) {
      x.a = at(a, at_a + first * p.stride_a);
      x.b = at(b, at_b + first * p.stride_b);
      x.y = at(y, at_y + first * p.stride_y);
      p.batch = std::min(batches.inner() - first, kMostBatches);
      p.alignment_in = alignment_of({x.a, x.b}, (p.stride_a | p.stride_b) * size_in);
      p.alignment_out = alignment_of({x.y, x.bias, x.aux}, p.stride_y * size_out);
      done = matmul_cache_->run(p, x);
    }
  });
  if (done) return;
  MT_CHECK(CudaError, !plain, "matmul: cuBLASLt has no algorithm for ", a, " times ", b, " into ", y);
  matmul_in_steps(a, b, o, y);
}

/// The general case: the product in the compute type, on top of the bias, then the rest by elementwise
/// kernels; rounds once.
void CudaBackend::matmul_in_steps(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t casts = counters.casts;
  const DType type = compute_dtype(y.dtype());
  const bool in_place = y.dtype() == type && !o.accumulate && (by_rows(y) || by_columns(y));
  Tensor product = in_place ? y : empty(y.shape(), {type, device()});
  if (o.bias != nullptr) {
    copy(*o.bias, product);
  } else if (a.size(-1) == 0) {
    fill(0, product);
  }
  if (a.size(-1) != 0) matmul(a, b, {.alpha = o.alpha, .accumulate = o.bias != nullptr}, product);
  if (o.pre_activation != nullptr) copy(product, *o.pre_activation);
  if (o.activation == Activation::relu) unary(Relu{}, product, product);
  if (o.activation == Activation::gelu_tanh) unary(GeluTanh{}, product, product);
  if (o.grad_activation != Activation::none) {
    Tensor saved = *o.grad_input;
    if (saved.dtype() != type) {
      saved = empty(y.shape(), {type, device()});
      copy(*o.grad_input, saved);
    }
    const bool relu = o.grad_activation == Activation::relu;
    unary_grad(relu ? UnaryOp(Relu{}) : UnaryOp(GeluTanh{}), product, saved, product);
  }
  if (o.accumulate) {
    accumulate(product, y);
  } else if (!in_place) {
    copy(product, y);
  }
  counters.casts = casts;  // part of the product
}

}  // namespace mantissa
