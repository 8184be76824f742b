#pragma once
// A matrix product in cuBLASLt's terms, and the algorithm kept for each.

#include <cublasLt.h>

#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>

#include "cuda/bytes_hash.h"
#include "cuda/cuda_backend.h"

namespace mantissa {

/// One strided-batch product y[m,n] = a[m,k] b[k,n]; compared and hashed as bytes, so it has no padding.
struct MatmulProblem {
  std::int64_t m, n, k, batch;
  std::int64_t lda, ldb, ldy, ld_aux;         // elements between rows (columns, where stored by columns)
  std::int64_t stride_a, stride_b, stride_y;  // elements between the matrices of a batch
  std::int32_t type_a, type_y;                // cudaDataType_t; b has a's, bias and aux have y's
  std::int32_t a_by_columns, b_by_columns;
  std::int32_t compute, epilogue;            // cublasComputeType_t, cublasLtEpilogue_t
  std::int32_t alignment_in, alignment_out;  // bytes, at most 256: of a and b; of y, bias and aux
};

struct MatmulOperands {
  const void *a = nullptr, *b = nullptr;
  void* y = nullptr;
  const void* bias = nullptr;
  void* aux = nullptr;  // what the epilogue stores or reads besides y
  double alpha = 1;
  bool accumulate = false;
};

/// The plans of one device. A plan is made at the first call for a problem and kept for the process.
struct MatmulCache {
 public:
  MatmulCache(CudaBackend& backend, cublasLtHandle_t handle);
  /// y = epilogue(alpha a b) (+ y); false when the library has no algorithm, and then nothing has run.
  bool run(const MatmulProblem& problem, const MatmulOperands& operands);

 private:
  struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, y = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    bool supported = false, wide = false;  // wide: alpha and beta are doubles
  };
  Plan make_plan(const MatmulProblem& problem, const MatmulOperands& operands);
  cublasStatus_t launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const MatmulOperands& x);
  bool worth_timing(const MatmulProblem& problem) const;
  std::size_t fastest(const Plan& plan, const MatmulProblem& problem, MatmulOperands operands,
                      std::span<const cublasLtMatmulHeuristicResult_t> candidates);

  CudaBackend& backend_;
  cublasLtHandle_t handle_;
  std::mutex mutex_;  // guards the plans, and the descriptors while a call sets their pointers
  std::unordered_map<MatmulProblem, Plan, BytesHash, BytesEqual> plans_;
  Tensor workspace_;
};

/// *digest += a hash of place and bits of every element of y[batch, rows, columns]: equal for equal results.
/// Elements have 2, 4 or 8 bytes.
void add_digest(CudaBackend& backend, const void* y, std::size_t element_bytes, std::int64_t batch, std::int64_t stride,
                std::int64_t rows, std::int64_t ld, std::int64_t columns, std::uint64_t* digest);

}  // namespace mantissa
