// Plans for cuBLASLt. Its matrices are stored by columns and ours by rows: it computes y^T = b^T a^T, without
// copies.
//
// Sums are in f32 (f64 for f64); split-K may reduce in the compute type only. A large problem takes the
// fastest of the proposed algorithms whose results equal those of the first bit for bit, so timing never
// changes a result.
#include "cuda/matmul_plan.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/cuda_check.h"

namespace mantissa {
namespace {

constexpr std::size_t kWorkspace = std::size_t{64} << 20;
constexpr int kCandidates = 6;

template <class T> void set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what, const T& value) {
  MT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(d, what, &value, sizeof value));
}

cublasLtMatrixLayout_t make_layout(std::int32_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld,
                                   std::int64_t batch, std::int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, static_cast<cudaDataType_t>(type),
                                             static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                                             ld));
  if (batch == 1) return layout;
  const auto put = [&](cublasLtMatrixLayoutAttribute_t what, const auto& value) {
    MT_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, what, &value, sizeof value));
  };
  put(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
  put(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  return layout;
}

/// The algorithms that the library proposes, best first.
std::vector<cublasLtMatmulHeuristicResult_t> propose(cublasLtHandle_t handle, const MatmulProblem& p,
                                                     cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t y) {
  cublasLtMatmulPreference_t preference = nullptr;
  MT_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    MT_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspace});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto in = static_cast<std::uint32_t>(p.alignment_in), out = static_cast<std::uint32_t>(p.alignment_out);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, in);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, in);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out);
  std::vector<cublasLtMatmulHeuristicResult_t> found(kCandidates);
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation, b, a, y, y, preference, kCandidates, found.data(), &count);
  MT_CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<std::size_t>(count) : 0);
  std::erase_if(found, [](const auto& f) { return f.state != CUBLAS_STATUS_SUCCESS; });
  return found;
}

double operations(const MatmulProblem& p) {
  return 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) *
         static_cast<double>(p.batch);
}

class Event {
 public:
  Event() { MT_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

DType dtype_of_cuda(std::int32_t type) {
  switch (type) {
    case CUDA_R_64F:
      return DType::f64;
    case CUDA_R_32F:
      return DType::f32;
    case CUDA_R_16F:
      return DType::f16;
    default:
      return DType::bf16;
  }
}

/// Random values in the memory that a batch of matrices spans.
Tensor random_matrices(CudaBackend& backend, std::int32_t type, std::int64_t batch, std::int64_t stride,
                       std::int64_t vectors, std::int64_t ld, std::int64_t length) {
  const std::int64_t n = (batch - 1) * stride + (vectors - 1) * ld + length;
  Tensor x = empty({n}, {dtype_of_cuda(type), backend.device()});
  backend.random(RandomKind::normal, 0, 1, {static_cast<std::uint64_t>(n), 0}, x);
  return x;
}

}  // namespace

MatmulCache::MatmulCache(CudaBackend& backend, cublasLtHandle_t handle)
    : backend_(backend), handle_(handle), workspace_(backend.workspace(kWorkspace)) {}

bool MatmulCache::run(const MatmulProblem& p, const MatmulOperands& x) {
  const std::lock_guard lock(mutex_);
  auto it = plans_.find(p);
  if (it == plans_.end()) it = plans_.emplace(p, make_plan(p, x)).first;
  const Plan& plan = it->second;
  if (!plan.supported) return false;
  MT_CUBLAS_CHECK(launch(plan, plan.algorithm, x));
  ++backend_.counters.launches;
  return true;
}

cublasStatus_t MatmulCache::launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const MatmulOperands& x) {
  if (x.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, x.bias);
  if (x.aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, x.aux);
  const double alpha64 = x.alpha, beta64 = x.accumulate ? 1 : 0;
  const float alpha32 = static_cast<float>(x.alpha), beta32 = x.accumulate ? 1.0f : 0.0f;
  const void* alpha = plan.wide ? static_cast<const void*>(&alpha64) : &alpha32;
  const void* beta = plan.wide ? static_cast<const void*>(&beta64) : &beta32;
  return cublasLtMatmul(handle_, plan.operation, alpha, x.b, plan.b, x.a, plan.a, beta, x.y, plan.y, x.y, plan.y,
                        &algorithm, workspace_.data(), kWorkspace, backend_.stream());
}

MatmulCache::Plan MatmulCache::make_plan(const MatmulProblem& p, const MatmulOperands& x) {
  Plan plan;
  plan.wide = p.type_a == CUDA_R_64F;
  MT_CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, static_cast<cublasComputeType_t>(p.compute),
                                           plan.wide ? CUDA_R_64F : CUDA_R_32F));
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b_by_columns != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a_by_columns != 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(p.epilogue));
  // The library derives the alignment that it may count on from these pointers.
  if (x.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, x.bias);
  if (x.aux != nullptr) {
    set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, x.aux);
    set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_aux);
  }
  // Its first operand is our b, and its columns are our rows.
  const auto input = [&](bool by_columns, std::int64_t rows, std::int64_t columns, std::int64_t ld,
                         std::int64_t stride) {
    return by_columns ? make_layout(p.type_a, rows, columns, ld, p.batch, stride)
                      : make_layout(p.type_a, columns, rows, ld, p.batch, stride);
  };
  plan.b = input(p.b_by_columns != 0, p.k, p.n, p.ldb, p.stride_b);
  plan.a = input(p.a_by_columns != 0, p.m, p.k, p.lda, p.stride_a);
  plan.y = make_layout(p.type_y, p.n, p.m, p.ldy, p.batch, p.stride_y);
  const auto candidates = propose(handle_, p, plan.operation, plan.b, plan.a, plan.y);
  plan.supported = !candidates.empty();
  if (!plan.supported) return plan;
  const bool choose = candidates.size() > 1 && worth_timing(p);
  plan.algorithm = candidates[choose ? fastest(plan, p, x, candidates) : 0].algo;
  return plan;
}

bool MatmulCache::worth_timing(const MatmulProblem& p) const {
  static const bool wanted = [] {
    const char* text = std::getenv("MANTISSA_MATMUL_TUNE");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  constexpr double kLarge = 0x1p32;  // operations: about 10 microseconds of a large device
  if (!wanted || operations(p) < kLarge) return false;
  cudaStreamCaptureStatus capture{};
  MT_CUDA_CHECK(cudaStreamIsCapturing(backend_.stream(), &capture));
  return capture == cudaStreamCaptureStatusNone;
}

/// The fastest candidate that agrees with the first on random operands; x.y and an x.aux that is stored are
/// overwritten.
std::size_t MatmulCache::fastest(const Plan& plan, const MatmulProblem& p, MatmulOperands x,
                                 std::span<const cublasLtMatmulHeuristicResult_t> candidates) {
  const std::int64_t launches = backend_.counters.launches;
  const MemoryScope scope(MemoryCategory::workspace);
  Tensor a, b, y, digests;
  try {
    a = p.a_by_columns != 0 ? random_matrices(backend_, p.type_a, p.batch, p.stride_a, p.k, p.lda, p.m)
                            : random_matrices(backend_, p.type_a, p.batch, p.stride_a, p.m, p.lda, p.k);
    b = p.b_by_columns != 0 ? random_matrices(backend_, p.type_a, p.batch, p.stride_b, p.n, p.ldb, p.k)
                            : random_matrices(backend_, p.type_a, p.batch, p.stride_b, p.k, p.ldb, p.n);
    if (x.accumulate) {
      const std::int64_t n = (p.batch - 1) * p.stride_y + (p.m - 1) * p.ldy + p.n;
      y = empty({n}, {dtype_of_cuda(p.type_y), backend_.device()});
      x.y = y.data();
    }
    digests = empty({kCandidates}, {DType::i64, backend_.device()});
  } catch (const OutOfMemoryError&) {
    return 0;
  }
  x.a = a.data();
  x.b = b.data();
  x.accumulate = false;
  backend_.fill(0, digests);
  auto* digest = static_cast<std::uint64_t*>(digests.data());
  const std::size_t bytes = size_of(dtype_of_cuda(p.type_y));
  std::array<bool, kCandidates> runs{};
  for (std::size_t i = 0; i < candidates.size(); ++i) {  // also loads the kernels
    runs[i] = launch(plan, candidates[i].algo, x) == CUBLAS_STATUS_SUCCESS;
    if (!runs[i]) continue;
    add_digest(backend_, x.y, bytes, p.batch, p.stride_y, p.m, p.ldy, p.n, digest + i);
    if (x.aux != nullptr) add_digest(backend_, x.aux, bytes, 1, 0, p.m, p.ld_aux, p.n, digest + i);
  }
  const int repeats = static_cast<int>(std::clamp(0x1p38 / operations(p), 2.0, 20.0));
  std::array<Event, kCandidates + 1> events;
  MT_CUDA_CHECK(cudaEventRecord(events[0], backend_.stream()));
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    for (int k = 0; runs[i] && k < repeats; ++k) runs[i] = launch(plan, candidates[i].algo, x) == CUBLAS_STATUS_SUCCESS;
    MT_CUDA_CHECK(cudaEventRecord(events[i + 1], backend_.stream()));
  }
  std::array<std::uint64_t, kCandidates> found{};
  backend_.copy_to_host(digests, found.data());
  std::size_t best = 0;
  float least = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    float ms = 0;
    MT_CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
    if (i == 0) least = 0.98f * ms;  // leaving the first must be worth it
    if (i == 0 || !runs[i] || found[i] != found[0] || ms >= least) continue;
    best = i;
    least = ms;
  }
  backend_.counters.launches = launches;  // none of these belong to the program
  return best;
}

}  // namespace mantissa
