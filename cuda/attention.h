#pragma once
// The parts of attention: cuDNN's fused kernels, and the masked softmax between two matrix products.

#include "cuda/cuda_backend.h"

namespace mantissa {

/// The fused kernels of cuDNN, for 16-bit operands whose addresses and outer strides are multiples of 16
/// bytes. False when the library refuses the problem; then nothing has run.
bool fused_attention(CudaBackend& backend, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options, Tensor& y, Tensor& lse);
bool fused_attention_grad(CudaBackend& backend, const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& y, const Tensor& lse, const AttentionOptions& options, Tensor& gq, Tensor& gk,
                          Tensor& gv);

/// Contiguous rows of scores: `rows` consecutive ones of each of some entries, which have `all_rows` each;
/// the first `width` keys. Row r lies place(r) rows after the first, which is the row `first` of all; a row
/// is of query (its index) % queries.
struct ScoreRows {
  std::int64_t first = 0, count = 0, rows = 1, all_rows = 1, queries = 0, keys = 0, width = 0;
  bool causal = false;
  MT_HD std::int64_t place(std::int64_t r) const { return r / rows * all_rows + r % rows; }
};

/// scores -> their softmax over the keys that each query sees, 0 elsewhere; lse[first + place(r)] is written.
void masked_softmax(CudaBackend& backend, const ScoreRows& rows, Tensor& scores, Tensor& lse);
/// scores -> p = exp(scores - lse); gp -> scale p (gp - g . y): the gradient of q k^T. Masked elements become
/// 0. scores, gp, and g and y (one row of
/// the head size a score row, at the same places) are contiguous.
void masked_softmax_grad(CudaBackend& backend, const ScoreRows& rows, double scale, const Tensor& g, const Tensor& y,
                         const Tensor& lse, Tensor& scores, Tensor& gp);

}  // namespace mantissa
