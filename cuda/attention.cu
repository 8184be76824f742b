// The masked softmax between the two products of attention, forward and backward, in place over f32 (f64)
// scores.
#include "cuda/attention.h"
#include "cuda/cuda_check.h"
#include "cuda/rows.cuh"

namespace mantissa {
namespace {

/// The number of keys that a row sees: query i sees keys up to i + keys - queries.
__device__ inline std::int64_t visible_keys(const ScoreRows& m, std::int64_t row) {
  if (!m.causal) return m.keys;
  const std::int64_t n = (m.first + m.place(row)) % m.queries + 1 + m.keys - m.queries;
  return n < m.keys ? n : m.keys;
}

// A group of kGroup threads a row, a warp or the block. Scores are read twice (the second time from a cache)
// and written once; floor = 2 x bytes of the scores / bandwidth.
template <int kGroup, class A>
__global__ void __launch_bounds__(kThreads) masked_softmax_kernel(A* scores, A* lse, ScoreRows m) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= m.count) return;  // a whole group
  const int thread = threadIdx.x % kGroup;
  const std::int64_t visible = visible_keys(m, row);
  scores += row * m.width;
  OnlineSum<A> total;
  for (std::int64_t j = thread; j < visible; j += kGroup) total.add(load<1>(scores + j));
  total.template join<kGroup>();
  const A factor = A(1) / total.sum;
  for (std::int64_t j = thread; j < m.width; j += kGroup)
    scores[j] = j < visible ? exp_for<A>(scores[j] - total.max) * factor : A(0);
  if (thread == 0) lse[m.first + m.place(row)] = total.max + A(::log(total.sum));
}

// Both matrices are read and written once, g and y read once.
template <int kGroup, class A>
__global__ void __launch_bounds__(kThreads)
    masked_softmax_grad_kernel(A* scores, A* gp, const A* g, const A* y, const A* lse, ScoreRows m, std::int64_t size,
                               A scale) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= m.count) return;
  const int thread = threadIdx.x % kGroup;
  const std::int64_t visible = visible_keys(m, row);
  const std::int64_t place = m.place(row);
  A dot = 0;  // g . y = sum of p gp over the row
  for (std::int64_t d = thread; d < size; d += kGroup) dot += g[place * size + d] * y[place * size + d];
  dot = block_reduce<kGroup>(dot, SumOp{});
  const A shift = lse[m.first + place];
  scores += row * m.width;
  gp += row * m.width;
  for (std::int64_t j = thread; j < m.width; j += kGroup) {
    const bool seen = j < visible;
    const A p = seen ? exp_for<A>(scores[j] - shift) : A(0);
    gp[j] = seen ? p * (gp[j] - dot) * scale : A(0);
    scores[j] = p;
  }
}

/// f<A, kGroup>(blocks) for the type of the scores and the length of a row.
template <class F> void with_rows(const char* op, DType dtype, const ScoreRows& m, F&& f) {
  const auto go = [&]<class A>() {
    const auto blocks = [&](int group) { return static_cast<unsigned>(ceil_div(m.count, kThreads / group)); };
    if (m.width <= 1024)
      f.template operator()<A, kWarp>(blocks(kWarp));
    else
      f.template operator()<A, kThreads>(blocks(kThreads));
  };
  MT_ASSERT(dtype == DType::f32 || dtype == DType::f64, op, ": scores of ", dtype);
  dtype == DType::f64 ? go.template operator()<double>() : go.template operator()<float>();
}

}  // namespace

void masked_softmax(CudaBackend& backend, const ScoreRows& rows, Tensor& scores, Tensor& lse) {
  BackendCounters& counters = backend.counters;
  with_rows("attention", scores.dtype(), rows, [&]<class A, int kGroup>(unsigned blocks) {
    masked_softmax_kernel<kGroup, A>
        <<<blocks, kThreads, 0, backend.stream()>>>(static_cast<A*>(scores.data()), static_cast<A*>(lse.data()), rows);
    MT_LAUNCHED();
  });
}

void masked_softmax_grad(CudaBackend& backend, const ScoreRows& rows, double scale, const Tensor& g, const Tensor& y,
                         const Tensor& lse, Tensor& scores, Tensor& gp) {
  BackendCounters& counters = backend.counters;
  with_rows("attention_grad", scores.dtype(), rows, [&]<class A, int kGroup>(unsigned blocks) {
    masked_softmax_grad_kernel<kGroup, A><<<blocks, kThreads, 0, backend.stream()>>>(
        static_cast<A*>(scores.data()), static_cast<A*>(gp.data()), static_cast<const A*>(g.data()),
        static_cast<const A*>(y.data()), static_cast<const A*>(lse.data()), rows, g.size(-1), static_cast<A>(scale));
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
