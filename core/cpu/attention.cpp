// Attention, one (batch, head) at a time and in blocks of query rows, so that the causal half that is masked
// is not computed and the scores stay in the cache. Backward recomputes them from the saved log sum exp.
#include <cmath>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/lanes.h"
#include "core/cpu/loops.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

constexpr std::int64_t kQueryRows = 64;

/// Hands out pieces of one buffer.
template <class A> struct Arena {
  A* next;
  A* take(std::int64_t n) {
    A* piece = next;
    next += n;
    return piece;
  }
};

template <class A> struct Matrix {
  A* data;
  std::int64_t ld;
  A* row(std::int64_t i) const { return data + i * ld; }
};

template <class T> T* head_data(const Tensor& x, std::int64_t batch, std::int64_t head) {
  return static_cast<T*>(x.data()) + batch * x.stride(0) + head * x.stride(1);
}

/// Whether a head can be used in place as a matrix of the compute type.
template <class A, class T> bool in_place(const Tensor& x) {
  return std::is_same_v<A, T> && x.stride(3) == 1 && x.stride(2) >= x.size(3);
}

/// One head [T, D] as a matrix of the compute type: in place, or widened into `buffer`.
template <class A, class T>
Matrix<const A> load_head(const Tensor& x, std::int64_t batch, std::int64_t head, A* buffer) {
  const T* p = head_data<T>(x, batch, head);
  if constexpr (std::is_same_v<A, T>)
    if (in_place<A, T>(x)) return {p, x.stride(2)};
  const std::int64_t rows = x.size(2), columns = x.size(3);
  for (std::int64_t row = 0; row < rows; ++row) {
    A* target = buffer + row * columns;
    const A* values = load_block<A>(p + row * x.stride(2), x.stride(3), columns, target);
    if (values != target) std::copy_n(values, columns, target);
  }
  return {buffer, columns};
}

/// Where the results of a head go: in place, or a buffer that store_head rounds.
template <class A, class T> Matrix<A> result_head(const Tensor& y, std::int64_t batch, std::int64_t head, A* buffer) {
  if constexpr (std::is_same_v<A, T>)
    if (in_place<A, T>(y)) return {head_data<T>(y, batch, head), y.stride(2)};
  return {buffer, y.size(3)};
}

template <class A, class T> void store_head(Matrix<A> values, const Tensor& y, std::int64_t batch, std::int64_t head) {
  if (in_place<A, T>(y)) return;
  T* p = head_data<T>(y, batch, head);
  for (std::int64_t row = 0; row < y.size(2); ++row)
    store_block<A>(values.row(row), p + row * y.stride(2), y.stride(3), y.size(3));
}

/// Keys that query row i sees.
std::int64_t visible(const AttentionOptions& o, std::int64_t i, std::int64_t queries, std::int64_t keys) {
  return o.causal ? std::clamp<std::int64_t>(i + 1 + keys - queries, 0, keys) : keys;
}

/// s = exp(s - max) over the first n of `width` scores, 0 after them; returns the sum, and the maximum.
template <class A> A exponentials(A* s, std::int64_t n, std::int64_t width, A& largest) {
  largest = row_max(s, n);
  const A shift = largest;
  for (std::int64_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - shift);
  std::fill(s + n, s + width, A(0));
  return lane_sum<A>(n, [s](std::int64_t j) { return s[j]; });
}

template <class A, class T>
void forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o, Tensor& y, Tensor& lse) {
  const std::int64_t heads = q.size(1), queries = q.size(2), keys = k.size(2), size = q.size(3);
  const std::int64_t group = heads / k.size(1);
  A* plse = static_cast<A*>(lse.data());
  const ThreadScratch<A> scratch(kQueryRows * keys + 2 * (queries + keys) * size);
  parallel_tasks(q.size(0) * heads, [&](std::int64_t task) {
    const std::int64_t batch = task / heads, head = task % heads;
    Arena<A> arena{scratch.data()};
    A* scores = arena.take(kQueryRows * keys);
    const auto mq = load_head<A, T>(q, batch, head, arena.take(queries * size));
    const auto mk = load_head<A, T>(k, batch, head / group, arena.take(keys * size));
    const auto mv = load_head<A, T>(v, batch, head / group, arena.take(keys * size));
    const auto out = result_head<A, T>(y, batch, head, arena.take(queries * size));
    for (std::int64_t first = 0; first < queries; first += kQueryRows) {
      const std::int64_t rows = std::min(kQueryRows, queries - first);
      const std::int64_t width = visible(o, first + rows - 1, queries, keys);
      A sums[kQueryRows];
      gemm(rows, width, size, static_cast<A>(o.scale), mq.row(first), mq.ld, 1, mk.data, 1, mk.ld, A(0), scores, keys);
      for (std::int64_t row = 0; row < rows; ++row) {
        A largest;
        sums[row] = exponentials(scores + row * keys, visible(o, first + row, queries, keys), width, largest);
        plse[task * queries + first + row] = largest + std::log(sums[row]);
      }
      gemm(rows, size, width, A(1), scores, keys, 1, mv.data, mv.ld, 1, A(0), out.row(first), out.ld);
      for (std::int64_t row = 0; row < rows; ++row) {
        const A scale = sums[row] == A(0) ? A(0) : A(1) / sums[row];  // no visible key: zeros
        A* r = out.row(first + row);
        for (std::int64_t d = 0; d < size; ++d) r[d] *= scale;
      }
    }
    store_head<A, T>(out, y, batch, head);
  });
}

template <class A, class T>
void backward_heads(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                    const Tensor& lse, const AttentionOptions& o, Tensor& gq, Tensor& gk, Tensor& gv) {
  const std::int64_t heads = q.size(1), kv_heads = k.size(1), group = heads / kv_heads;
  const std::int64_t queries = q.size(2), keys = k.size(2), size = q.size(3);
  const A* plse = static_cast<const A*>(lse.data());
  const A scale = static_cast<A>(o.scale);
  const ThreadScratch<A> scratch(2 * kQueryRows * keys + 4 * (queries + keys) * size);
  parallel_tasks(q.size(0) * kv_heads, [&](std::int64_t task) {  // a thread owns the sums over a group of heads
    const std::int64_t batch = task / kv_heads, kv_head = task % kv_heads;
    Arena<A> arena{scratch.data()};
    A *p = arena.take(kQueryRows * keys), *gp = arena.take(kQueryRows * keys);
    const auto mk = load_head<A, T>(k, batch, kv_head, arena.take(keys * size));
    const auto mv = load_head<A, T>(v, batch, kv_head, arena.take(keys * size));
    const auto out_k = result_head<A, T>(gk, batch, kv_head, arena.take(keys * size));
    const auto out_v = result_head<A, T>(gv, batch, kv_head, arena.take(keys * size));
    for (std::int64_t row = 0; row < keys; ++row) {
      std::fill_n(out_k.row(row), size, A(0));
      std::fill_n(out_v.row(row), size, A(0));
    }
    A *buffer_q = arena.take(queries * size), *buffer_g = arena.take(queries * size),
      *buffer_y = arena.take(queries * size), *buffer_gq = arena.take(queries * size);
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const auto mq = load_head<A, T>(q, batch, head, buffer_q), mg = load_head<A, T>(g, batch, head, buffer_g),
                 my = load_head<A, T>(y, batch, head, buffer_y);
      const auto out_q = result_head<A, T>(gq, batch, head, buffer_gq);
      for (std::int64_t first = 0; first < queries; first += kQueryRows) {
        const std::int64_t rows = std::min(kQueryRows, queries - first);
        const std::int64_t width = visible(o, first + rows - 1, queries, keys);
        gemm(rows, width, size, scale, mq.row(first), mq.ld, 1, mk.data, 1, mk.ld, A(0), p, keys);
        gemm(rows, width, size, A(1), mg.row(first), mg.ld, 1, mv.data, 1, mv.ld, A(0), gp, keys);
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t i = first + row, n = visible(o, i, queries, keys);
          A *s = p + row * keys, *gs = gp + row * keys;
          const A shift = plse[(batch * heads + head) * queries + i];
          const A *vg = mg.row(i), *vy = my.row(i);
          const A dot = lane_sum<A>(size, [=](std::int64_t d) { return vg[d] * vy[d]; });  // sum_j p_j gp_j = g . y
          for (std::int64_t j = 0; j < n; ++j) s[j] = math::exp(s[j] - shift);
          for (std::int64_t j = 0; j < n; ++j) gs[j] = s[j] * (gs[j] - dot) * scale;
          std::fill(s + n, s + width, A(0));
          std::fill(gs + n, gs + width, A(0));
        }
        gemm(width, size, rows, A(1), p, 1, keys, mg.row(first), mg.ld, 1, A(1), out_v.data, out_v.ld);
        gemm(rows, size, width, A(1), gp, keys, 1, mk.data, mk.ld, 1, A(0), out_q.row(first), out_q.ld);
        gemm(width, size, rows, A(1), gp, 1, keys, mq.row(first), mq.ld, 1, A(1), out_k.data, out_k.ld);
      }
      store_head<A, T>(out_q, gq, batch, head);
    }
    store_head<A, T>(out_k, gk, batch, kv_head);
    store_head<A, T>(out_v, gv, batch, kv_head);
  });
}

}  // namespace

void CpuBackend::attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o, Tensor& y,
                           Tensor& lse) {
  if (y.numel() == 0) return;
  visit_float<CpuTypes>("attention", q.dtype(), [&]<class T>() { forward<compute_t<T>, T>(q, k, v, o, y, lse); });
}

void CpuBackend::attention_grad(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                                const Tensor& lse, const AttentionOptions& o, Tensor& gq, Tensor& gk, Tensor& gv) {
  if (g.numel() == 0) {  // no queries: the keys may exist all the same
    fill(0, gk);
    fill(0, gv);
    return;
  }
  visit_float<CpuTypes>("attention", q.dtype(),
                        [&]<class T>() { backward_heads<compute_t<T>, T>(g, q, k, v, y, lse, o, gq, gk, gv); });
}

}  // namespace mantissa
