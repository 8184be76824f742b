// Matrix products on cuBLASLt. Our tensors are row-major and the library's are column-major: y^T = b^T a^T needs no copies.
//
// The first algorithm that the library proposes for a problem is kept for the process, so results do not depend on timing.
// Sums are in f32 (f64 for f64); split-K may reduce in the compute type only, never in 16 bits.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"

namespace mantissa {
namespace {

constexpr std::size_t kWorkspace = std::size_t{64} << 20;

cudaDataType_t cuda_type(DType t) {
  switch (t) {
    case DType::f64: return CUDA_R_64F;
    case DType::f32: return CUDA_R_32F;
    case DType::f16: return CUDA_R_16F;
    default: return CUDA_R_16BF;
  }
}

/// One strided-batch problem in the library's terms; compared and hashed as bytes, so it has no padding.
struct Problem {
  std::int64_t m, n, k, batch;                    // ours: y[m,n]
  std::int64_t lda, ldb, ldy, ld_aux;
  std::int64_t stride_a, stride_b, stride_y;
  std::int32_t type_a, type_y;                    // a and b share a type
  std::int32_t a_transposed, b_transposed;        // the library's operations on our a and b
  std::int32_t compute, epilogue;
  std::int32_t accumulate;
  std::int32_t alignment;                         // least alignment of the operands, in bytes, at most 256

  bool operator==(const Problem& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<Problem>);

struct ProblemHash {
  std::size_t operator()(const Problem& p) const {
    std::uint64_t words[sizeof(Problem) / 8], h = 0x9E3779B97F4A7C15ull;
    std::memcpy(words, &p, sizeof words);
    for (const std::uint64_t w : words) h = (h ^ w) * 0xBF58476D1CE4E5B9ull, h ^= h >> 29;
    return static_cast<std::size_t>(h);
  }
};

/// The library's description of a problem and the algorithm chosen for it.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool supported = false;
};

template <class T>
void set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what, const T& value) {
  MT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(d, what, &value, sizeof value));
}

cublasLtMatrixLayout_t make_layout(std::int32_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld, std::int64_t batch, std::int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, static_cast<cudaDataType_t>(type), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), ld));
  if (batch > 1) {
    const auto count = static_cast<std::int32_t>(batch);
    MT_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    MT_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return layout;
}

Plan make_plan(cublasLtHandle_t handle, const Problem& p, const void* aux) {
  Plan plan;
  const auto scale = p.type_y == CUDA_R_64F ? CUDA_R_64F : CUDA_R_32F;
  MT_CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, static_cast<cublasComputeType_t>(p.compute), scale));
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(p.epilogue));
  if (aux != nullptr) {
    set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_aux);
    set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
  }
  // The library's first operand is our b: memory n x k by columns, or k x n when b is stored by columns.
  plan.b = p.b_transposed ? make_layout(p.type_a, p.k, p.n, p.ldb, p.batch, p.stride_b) : make_layout(p.type_a, p.n, p.k, p.ldb, p.batch, p.stride_b);
  plan.a = p.a_transposed ? make_layout(p.type_a, p.m, p.k, p.lda, p.batch, p.stride_a) : make_layout(p.type_a, p.k, p.m, p.lda, p.batch, p.stride_a);
  plan.y = make_layout(p.type_y, p.n, p.m, p.ldy, p.batch, p.stride_y);
  cublasLtMatmulPreference_t preference = nullptr;
  MT_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    MT_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof value));
  };
  const auto alignment = static_cast<std::uint32_t>(p.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspace});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(what, alignment);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.b, plan.a, plan.y, plan.y, preference, 1, &result, &found);
  MT_CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  plan.supported = status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = result.algo;
  return plan;
}

bool row_major(const Tensor& x) { return x.stride(-1) == 1 && (x.stride(-2) != 1 || x.size(-1) == 1 || x.size(-2) != 1); }

Tensor transposed(const Tensor& x) {
  Shape shape = x.shape();
  Strides strides = x.strides();
  std::swap(shape[x.rank() - 1], shape[x.rank() - 2]);
  std::swap(strides[x.rank() - 1], strides[x.rank() - 2]);
  return x.view(shape, strides, x.offset());
}

/// The batch axes of the three operands, merged where they are contiguous for all.
struct Batches {
  int rank = 0;
  std::int64_t sizes[kMaxRank] = {}, a[kMaxRank] = {}, b[kMaxRank] = {}, y[kMaxRank] = {};
  Batches(const Tensor& ta, const Tensor& tb, const Tensor& ty) {
    for (int axis = 0; axis + 2 < ty.rank(); ++axis) {
      const std::int64_t size = ty.shape()[axis];
      if (size == 1) continue;
      const std::int64_t sa = ta.strides()[axis], sb = tb.strides()[axis], sy = ty.strides()[axis];
      const int last = rank - 1;
      if (rank > 0 && a[last] == sa * size && b[last] == sb * size && y[last] == sy * size) {
        sizes[last] *= size;
        a[last] = sa;
        b[last] = sb;
        y[last] = sy;
      } else {
        sizes[rank] = size;
        a[rank] = sa;
        b[rank] = sb;
        y[rank++] = sy;
      }
    }
  }
};

std::int32_t alignment_of(std::initializer_list<const void*> pointers, std::size_t step_bytes) {
  std::uintptr_t bits = 256 | step_bytes;
  for (const void* p : pointers) bits |= reinterpret_cast<std::uintptr_t>(p);
  return static_cast<std::int32_t>(bits & (~bits + 1));
}

}  // namespace

struct MatmulCache {
  std::unordered_map<Problem, Plan, ProblemHash> plans;
  Tensor workspace;
};

void CudaBackend::matmul(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("matmul");
  const bool plain = o.bias == nullptr && o.activation == Activation::none && o.grad_activation == Activation::none && o.pre_activation == nullptr;
  if (!row_major(y)) {
    MT_ASSERT(plain && y.stride(-2) == 1, "matmul: neither of the last two axes of ", y, " is contiguous, or an epilogue needs its rows to be");
    Tensor yt = transposed(y);
    matmul(transposed(b), transposed(a), {.alpha = o.alpha, .accumulate = o.accumulate}, yt);
    return;
  }
  const cudaStream_t on = stream();
  if (matmul_cache_ == nullptr) {
    matmul_cache_ = std::make_shared<MatmulCache>();
    matmul_cache_->workspace = workspace(kWorkspace);
  }
  // What the library's epilogues express; the rest is done by kernels on an f32 result.
  std::int32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* aux = nullptr;
  bool fused = !o.accumulate && (o.bias == nullptr || o.bias->dtype() == y.dtype()) && y.dtype() != DType::f64;
  if (!plain && fused) {
    const bool bias = o.bias != nullptr;
    if (o.grad_activation == Activation::gelu_tanh && !bias && o.activation == Activation::none && o.pre_activation == nullptr) {
      epilogue = CUBLASLT_EPILOGUE_DGELU;
      aux = o.grad_input->data();
    } else if (o.grad_activation != Activation::none) {
      fused = false;
    } else if (o.activation == Activation::gelu_tanh) {
      epilogue = o.pre_activation != nullptr ? (bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX) : (bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU);
      if (o.pre_activation != nullptr) aux = o.pre_activation->data();
    } else if (o.pre_activation != nullptr) {
      fused = false;
    } else {
      epilogue = o.activation == Activation::relu ? (bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU) : CUBLASLT_EPILOGUE_BIAS;
    }
    // The library wants rows of whole 16 bytes; its kernels for narrower ones round to 16 bits before they add the bias.
    if (y.size(-1) % 8 != 0 || alignment_of({a.data(), b.data(), y.data(), bias ? o.bias->data() : nullptr, aux}, 0) < 16) fused = false;
  }
  const Batches batches(a, b, y);
  const std::int64_t k = a.size(-1);
  if ((!plain && (!fused || batches.rank > 0)) || k == 0) return matmul_in_steps(a, b, o, y);

  const std::size_t size_in = size_of(a.dtype()), size_out = size_of(y.dtype());
  const int inner = batches.rank - 1;
  Problem p{};
  p.m = y.size(-2);
  p.n = y.size(-1);
  p.k = k;
  p.a_transposed = !row_major(a);
  p.b_transposed = !row_major(b);
  // A stride along an axis of one element means nothing, but the library insists on rows that do not overlap.
  p.lda = std::max(p.a_transposed ? a.stride(-1) : a.stride(-2), p.a_transposed ? p.m : p.k);
  p.ldb = std::max(p.b_transposed ? b.stride(-1) : b.stride(-2), p.b_transposed ? p.k : p.n);
  p.ldy = std::max(y.stride(-2), p.n);
  p.ld_aux = p.n;
  p.batch = inner >= 0 ? batches.sizes[inner] : 1;
  if (inner >= 0) {
    p.stride_a = batches.a[inner];
    p.stride_b = batches.b[inner];
    p.stride_y = batches.y[inner];
  }
  p.type_a = cuda_type(a.dtype());
  p.type_y = cuda_type(y.dtype());
  const bool tf32 = a.dtype() == DType::f32 && float32_matmul() == Float32Matmul::tf32;
  p.compute = a.dtype() == DType::f64 ? CUBLAS_COMPUTE_64F : tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  p.epilogue = epilogue;
  p.accumulate = o.accumulate;
  std::int64_t outer = 1;
  for (int axis = 0; axis < inner; ++axis) outer *= batches.sizes[axis];
  for (std::int64_t index = 0; index < outer; ++index) {
    std::int64_t rest = index, at_a = 0, at_b = 0, at_y = 0;
    for (int axis = inner - 1; axis >= 0; --axis) {
      const std::int64_t i = rest % batches.sizes[axis];
      rest /= batches.sizes[axis];
      at_a += i * batches.a[axis];
      at_b += i * batches.b[axis];
      at_y += i * batches.y[axis];
    }
    const auto* pa = static_cast<const std::byte*>(a.data()) + at_a * static_cast<std::int64_t>(size_in);
    const auto* pb = static_cast<const std::byte*>(b.data()) + at_b * static_cast<std::int64_t>(size_in);
    auto* py = static_cast<std::byte*>(y.data()) + at_y * static_cast<std::int64_t>(size_out);
    const void* bias = o.bias != nullptr ? o.bias->data() : nullptr;
    const auto steps = static_cast<std::size_t>(p.stride_a | p.stride_b) * size_in | static_cast<std::size_t>(p.stride_y) * size_out;
    p.alignment = alignment_of({pa, pb, py, bias, aux}, steps | 256);
    auto it = matmul_cache_->plans.find(p);
    if (it == matmul_cache_->plans.end()) it = matmul_cache_->plans.emplace(p, make_plan(cublas_, p, aux)).first;
    const Plan& plan = it->second;
    if (!plan.supported) {
      MT_CHECK(CudaError, !plain, "matmul: cuBLASLt has no algorithm for ", a, " times ", b, " into ", y);
      return matmul_in_steps(a, b, o, y);
    }
    if (bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    const double one64 = o.alpha, beta64 = o.accumulate ? 1 : 0;
    const float one32 = static_cast<float>(o.alpha), beta32 = o.accumulate ? 1.0f : 0.0f;
    const bool wide = y.dtype() == DType::f64;
    const void *alpha = wide ? static_cast<const void*>(&one64) : &one32, *beta = wide ? static_cast<const void*>(&beta64) : &beta32;
    MT_CUBLAS_CHECK(cublasLtMatmul(cublas_, plan.operation, alpha, pb, plan.b, pa, plan.a, beta, py, plan.y, py, plan.y, &plan.algorithm,
                                   matmul_cache_->workspace.data(), kWorkspace, on));
    ++counters.launches;
  }
}

/// The general case: the product in the compute type, then the epilogue by elementwise kernels, rounded once.
void CudaBackend::matmul_in_steps(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t casts = counters.casts;
  Tensor product = empty(y.shape(), {compute_dtype(y.dtype()), device()});
  if (a.size(-1) == 0) {
    fill(0, product);
  } else {
    matmul(a, b, {.alpha = o.alpha}, product);
  }
  if (o.bias != nullptr) {
    Tensor bias = empty(o.bias->shape(), {product.dtype(), device()});
    copy(*o.bias, bias);
    binary(Add{}, product, bias, product);
  }
  if (o.pre_activation != nullptr) {
    Tensor pre = o.pre_activation->view(y.shape(), contiguous_strides(y.shape()), o.pre_activation->offset());
    copy(product, pre);
  }
  if (o.activation == Activation::relu) unary(Relu{}, product, product);
  if (o.activation == Activation::gelu_tanh) unary(GeluTanh{}, product, product);
  if (o.grad_activation != Activation::none) {
    Tensor saved = empty(y.shape(), {product.dtype(), device()});
    copy(o.grad_input->view(y.shape(), contiguous_strides(y.shape()), o.grad_input->offset()), saved);
    unary_grad(o.grad_activation == Activation::relu ? UnaryOp(Relu{}) : UnaryOp(GeluTanh{}), product, saved, product);
  }
  o.accumulate ? accumulate(product, y) : copy(product, y);
  counters.casts = casts;  // part of the product
}

}  // namespace mantissa
