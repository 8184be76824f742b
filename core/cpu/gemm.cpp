#include "core/cpu/gemm.h"

#include <Eigen/Core>
#include <algorithm>

#ifdef MANTISSA_HAS_CBLAS
#include <cblas.h>
#endif

namespace mantissa {
namespace {

template <class T>
using Strided = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>, 0, Eigen::OuterStride<>>;

template <class T>
void eigen_gemm(std::int64_t m, std::int64_t n, std::int64_t k, T alpha, const T* a, std::int64_t a_row,
                std::int64_t a_column, const T* b, std::int64_t b_row, std::int64_t b_column, T beta, T* c,
                std::int64_t ldc) {
  Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, 0, Eigen::OuterStride<>> y(
      c, m, n, Eigen::OuterStride<>(ldc));
  if (beta == T(0)) {
    y.setZero();
  } else if (beta != T(1)) {
    y *= beta;
  }
  if (k == 0) return;
  // Column-major views: a[m,k] itself when its rows are contiguous in memory by columns, else the transpose
  // of a[k,m].
  const bool a_plain = a_row == 1 && (a_column != 1 || m == 1 || k == 1),
             b_plain = b_row == 1 && (b_column != 1 || k == 1 || n == 1);
  const Strided<T> av(a, a_plain ? m : k, a_plain ? k : m, Eigen::OuterStride<>(a_plain ? a_column : a_row));
  const Strided<T> bv(b, b_plain ? k : n, b_plain ? n : k, Eigen::OuterStride<>(b_plain ? b_column : b_row));
  if (a_plain && b_plain) y.noalias() += alpha * (av * bv);
  if (a_plain && !b_plain) y.noalias() += alpha * (av * bv.transpose());
  if (!a_plain && b_plain) y.noalias() += alpha * (av.transpose() * bv);
  if (!a_plain && !b_plain) y.noalias() += alpha * (av.transpose() * bv.transpose());
}

#ifdef MANTISSA_HAS_CBLAS
void blas(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float* a, int lda,
          const float* b, int ldb, float beta, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
void blas(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, double alpha, const double* a, int lda,
          const double* b, int ldb, double beta, double* c, int ldc) {
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
#endif

template <class T>
void any_gemm(std::int64_t m, std::int64_t n, std::int64_t k, T alpha, const T* a, std::int64_t a_row,
              std::int64_t a_column, const T* b, std::int64_t b_row, std::int64_t b_column, T beta, T* c,
              std::int64_t ldc) {
  if (m == 0 || n == 0) return;
#ifdef MANTISSA_HAS_CBLAS
  constexpr std::int64_t kBlasLimit = 0x7fffffff;
  if (k > 0 && std::max({m, n, k, a_row, a_column, b_row, b_column, ldc}) < kBlasLimit) {
    const bool a_rows = a_column == 1, b_rows = b_column == 1;
    const auto lda = static_cast<int>(std::max<std::int64_t>(a_rows ? a_row : a_column, a_rows ? k : m));
    const auto ldb = static_cast<int>(std::max<std::int64_t>(b_rows ? b_row : b_column, b_rows ? n : k));
    blas(a_rows ? CblasNoTrans : CblasTrans, b_rows ? CblasNoTrans : CblasTrans, static_cast<int>(m),
         static_cast<int>(n), static_cast<int>(k), alpha, a, lda, b, ldb, beta, c, static_cast<int>(ldc));
    return;
  }
#endif
  eigen_gemm(m, n, k, alpha, a, a_row, a_column, b, b_row, b_column, beta, c, ldc);
}

}  // namespace

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t a_row,
          std::int64_t a_column, const float* b, std::int64_t b_row, std::int64_t b_column, float beta, float* c,
          std::int64_t ldc) {
  any_gemm(m, n, k, alpha, a, a_row, a_column, b, b_row, b_column, beta, c, ldc);
}

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, const double* a, std::int64_t a_row,
          std::int64_t a_column, const double* b, std::int64_t b_row, std::int64_t b_column, double beta, double* c,
          std::int64_t ldc) {
  any_gemm(m, n, k, alpha, a, a_row, a_column, b, b_row, b_column, beta, c, ldc);
}

}  // namespace mantissa
