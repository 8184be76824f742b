#pragma once
// One matrix product on the CPU: BLAS where there is one, else Eigen. Row-major or column-major by strides.

#include <cstdint>

namespace mantissa {

/// c[m,n] = alpha a[m,k] b[k,n] + beta c. Row and column strides in elements; one of each pair is 1. c is
/// row-major. Inside a parallel region it runs on the calling thread alone.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t a_row,
          std::int64_t a_column, const float* b, std::int64_t b_row, std::int64_t b_column, float beta, float* c,
          std::int64_t ldc);
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, const double* a, std::int64_t a_row,
          std::int64_t a_column, const double* b, std::int64_t b_row, std::int64_t b_column, double beta, double* c,
          std::int64_t ldc);

}  // namespace mantissa
