// Attention, one (batch, head) at a time and in blocks of query rows, so that the causal half that is masked is not
// computed and the scores stay in the cache. Backward recomputes them from the saved log sum exp.
#include <omp.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

constexpr std::int64_t kQueryRows = 64;

/// One head [T, D] as a dense matrix of the compute type.
template <class A, class T>
const A* head_matrix(const Tensor& x, std::int64_t batch, std::int64_t head, std::vector<A>& buffer, std::int64_t& ld) {
  const T* p = static_cast<const T*>(x.data()) + batch * x.stride(0) + head * x.stride(1);
  if constexpr (std::is_same_v<A, T>) {
    if (x.stride(3) == 1 && x.stride(2) >= x.size(3)) {
      ld = x.stride(2);
      return p;
    }
  }
  const std::int64_t rows = x.size(2), columns = x.size(3);
  ld = columns;
  buffer.resize(static_cast<std::size_t>(rows * columns));
  for (std::int64_t row = 0; row < rows; ++row) {
    A* target = buffer.data() + row * columns;
    const A* values = load_block<A>(p + row * x.stride(2), x.stride(3), columns, target);
    if (values != target) std::copy_n(values, columns, target);
  }
  return buffer.data();
}

template <class A, class T>
void store_head(const std::vector<A>& values, Tensor& y, std::int64_t batch, std::int64_t head) {
  T* p = static_cast<T*>(y.data()) + batch * y.stride(0) + head * y.stride(1);
  const std::int64_t rows = y.size(2), columns = y.size(3);
  for (std::int64_t row = 0; row < rows; ++row) store_block<A>(values.data() + row * columns, p + row * y.stride(2), y.stride(3), columns);
}

/// Keys that query row i sees.
std::int64_t visible(const AttentionOptions& o, std::int64_t i, std::int64_t queries, std::int64_t keys) {
  return o.causal ? std::min(keys, i + 1 + keys - queries) : keys;
}

}  // namespace

void CpuBackend::attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o, Tensor& y, Tensor& lse) {
  if (y.numel() == 0) return;
  const std::int64_t batches = q.size(0), heads = q.size(1), queries = q.size(2), keys = k.size(2), size = q.size(3), group = heads / k.size(1);
  visit_float<CpuTypes>("attention", q.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    A* plse = static_cast<A*>(lse.data());
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t task = 0; task < batches * heads; ++task) {
      const std::int64_t batch = task / heads, head = task % heads;
      std::vector<A> bq, bk, bv, scores(static_cast<std::size_t>(kQueryRows * keys)), out(static_cast<std::size_t>(queries * size));
      std::int64_t lq, lk, lv;
      const A *mq = head_matrix<A, T>(q, batch, head, bq, lq), *mk = head_matrix<A, T>(k, batch, head / group, bk, lk),
              *mv = head_matrix<A, T>(v, batch, head / group, bv, lv);
      for (std::int64_t first = 0; first < queries; first += kQueryRows) {
        const std::int64_t rows = std::min(kQueryRows, queries - first), width = visible(o, first + rows - 1, queries, keys);
        gemm(rows, width, size, static_cast<A>(o.scale), mq + first * lq, lq, 1, mk, 1, lk, A(0), scores.data(), keys);
        for (std::int64_t row = 0; row < rows; ++row) {
          A* s = scores.data() + row * keys;
          const std::int64_t n = visible(o, first + row, queries, keys);
          A largest = -std::numeric_limits<A>::infinity(), total = 0;
          for (std::int64_t j = 0; j < n; ++j) largest = s[j] > largest || s[j] != s[j] ? s[j] : largest;
          for (std::int64_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - largest);
          A lanes[8] = {};
          std::int64_t j = 0;
          for (; j + 8 <= n; j += 8)
            for (int lane = 0; lane < 8; ++lane) lanes[lane] += s[j + lane];
          for (; j < n; ++j) lanes[0] += s[j];
          for (const A lane : lanes) total += lane;
          const A scale = A(1) / total;
          for (j = 0; j < n; ++j) s[j] *= scale;
          for (j = n; j < width; ++j) s[j] = 0;
          plse[task * queries + first + row] = largest + std::log(total);
        }
        gemm(rows, size, width, A(1), scores.data(), keys, 1, mv, lv, 1, A(0), out.data() + first * size, size);
      }
      store_head<A, T>(out, y, batch, head);
    }
  });
}

void CpuBackend::attention_grad(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y, const Tensor& lse,
                                const AttentionOptions& o, Tensor& gq, Tensor& gk, Tensor& gv) {
  if (g.numel() == 0) return;
  const std::int64_t batches = q.size(0), heads = q.size(1), kv_heads = k.size(1), queries = q.size(2), keys = k.size(2), size = q.size(3), group = heads / kv_heads;
  visit_float<CpuTypes>("attention", q.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const A* plse = static_cast<const A*>(lse.data());
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t task = 0; task < batches * kv_heads; ++task) {  // a thread owns the sums over a group of heads
      const std::int64_t batch = task / kv_heads, kv_head = task % kv_heads;
      std::vector<A> bq, bk, bv, bg, by, p(static_cast<std::size_t>(kQueryRows * keys)), gp(p.size()), out_q(static_cast<std::size_t>(queries * size)),
          out_k(static_cast<std::size_t>(keys * size)), out_v(out_k.size());
      std::int64_t lq, lk, lv, lg, ly;
      const A *mk = head_matrix<A, T>(k, batch, kv_head, bk, lk), *mv = head_matrix<A, T>(v, batch, kv_head, bv, lv);
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const A *mq = head_matrix<A, T>(q, batch, head, bq, lq), *mg = head_matrix<A, T>(g, batch, head, bg, lg), *my = head_matrix<A, T>(y, batch, head, by, ly);
        for (std::int64_t first = 0; first < queries; first += kQueryRows) {
          const std::int64_t rows = std::min(kQueryRows, queries - first), width = visible(o, first + rows - 1, queries, keys);
          gemm(rows, width, size, static_cast<A>(o.scale), mq + first * lq, lq, 1, mk, 1, lk, A(0), p.data(), keys);
          gemm(rows, width, size, A(1), mg + first * lg, lg, 1, mv, 1, lv, A(0), gp.data(), keys);
          for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t i = first + row, n = visible(o, i, queries, keys);
            A *s = p.data() + row * keys, *gs = gp.data() + row * keys;
            const A shift = plse[(batch * heads + head) * queries + i];
            A dot = 0;  // sum_j p_j gp_j = g . y
            for (std::int64_t d = 0; d < size; ++d) dot += mg[i * lg + d] * my[i * ly + d];
            for (std::int64_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - shift);
            for (std::int64_t j = 0; j < n; ++j) gs[j] = s[j] * (gs[j] - dot) * static_cast<A>(o.scale);
            for (std::int64_t j = n; j < width; ++j) s[j] = gs[j] = 0;
          }
          gemm(width, size, rows, A(1), p.data(), 1, keys, mg + first * lg, lg, 1, A(1), out_v.data(), size);
          gemm(rows, size, width, A(1), gp.data(), keys, 1, mk, lk, 1, A(0), out_q.data() + first * size, size);
          gemm(width, size, rows, A(1), gp.data(), 1, keys, mq + first * lq, lq, 1, A(1), out_k.data(), size);
        }
        store_head<A, T>(out_q, gq, batch, head);
      }
      store_head<A, T>(out_k, gk, batch, kv_head);
      store_head<A, T>(out_v, gv, batch, kv_head);
    }
  });
}

}  // namespace mantissa
