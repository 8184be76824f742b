// Attention: cuDNN's fused kernels where they apply, else matrix products in the compute type around a masked
// softmax.
#include "cuda/attention.h"

#include <algorithm>
#include <initializer_list>

#include "cuda/cuda_check.h"

namespace mantissa {
namespace {

constexpr std::int64_t kScratch = std::int64_t{256} << 20;      // bytes of scores that exist at a time
constexpr std::int64_t kFusedElements = std::int64_t{1} << 31;  // exclusive bound of offsets in a call of the library

// ---- the fused kernels ----

/// Whether every offset within `batches` entries of each tensor is below kFusedElements.
bool offsets_fit(std::initializer_list<const Tensor*> tensors, std::int64_t batches) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor* x) {
    std::int64_t last = (batches - 1) * x->stride(0);
    for (int axis = 1; axis < 4; ++axis) last += (x->size(axis) - 1) * x->stride(axis);
    return last < kFusedElements;
  });
}

bool fits_fused(const Tensor& x) {
  if (reinterpret_cast<std::uintptr_t>(x.data()) % 16 != 0 || x.stride(3) != 1) return false;
  for (int axis = 0; axis < 3; ++axis)
    if (x.size(axis) > 1 && (x.stride(axis) <= 0 || x.stride(axis) % 8 != 0)) return false;
  return true;
}

bool wants_fused(const Tensor& q, const Tensor& k) {
  return is_low_precision(q.dtype()) && q.size(3) % 8 == 0 && q.size(3) <= 256 && k.size(2) > 0;
}

/// x, or a copy that the fused kernels can read (or write, and then it is copied back by the caller).
Tensor fused_input(CudaBackend& backend, const Tensor& x) {
  if (fits_fused(x)) return x;
  Tensor copied = empty(x.shape(), {x.dtype(), x.device()});
  backend.copy(x, copied);
  return copied;
}
Tensor fused_output(const Tensor& x) { return fits_fused(x) ? x : empty(x.shape(), {x.dtype(), x.device()}); }
void finish_output(CudaBackend& backend, const Tensor& written, Tensor& x) {
  if (written.storage() != x.storage()) backend.copy(written, x);
}

Tensor batches_of(const Tensor& x, std::int64_t first, std::int64_t count) {
  Shape shape = x.shape();
  shape[0] = count;
  return x.view(shape, x.strides(), x.offset() + first * x.stride(0));
}

// ---- the composed path: entries are (batch, kv head), and the heads of a group are further rows of queries
// ----

/// x[B, H, T, D] as contiguous [entries, rows, D] of the compute type.
Tensor dense(CudaBackend& backend, const Tensor& x, std::int64_t entries) {
  const DType type = compute_dtype(x.dtype());
  const Shape shape{entries, x.numel() / entries / x.size(3), x.size(3)};
  if (x.dtype() == type && x.is_contiguous()) return x.view(shape, contiguous_strides(shape), x.offset());
  Tensor copied = empty(x.shape(), {type, x.device()});
  backend.copy(x, copied);
  return copied.view(shape, contiguous_strides(shape), 0);
}
/// Where results of the compute type go before store() rounds them into x; x itself where that is possible.
Tensor dense_output(const Tensor& x, std::int64_t entries) {
  const DType type = compute_dtype(x.dtype());
  const Shape shape{entries, x.numel() / entries / x.size(3), x.size(3)};
  if (x.dtype() == type && x.is_contiguous()) return x.view(shape, contiguous_strides(shape), x.offset());
  return empty(shape, {type, x.device()});
}
void store(CudaBackend& backend, const Tensor& values, Tensor& x) {
  if (values.storage() != x.storage())
    backend.copy(values.view(x.shape(), contiguous_strides(x.shape()), values.offset()), x);
}

/// Some entries, some rows of each, and the keys that these see.
struct Part {
  std::int64_t entry, entries, row, rows, keys;
  bool first;  // of the parts of these entries
};
Tensor part_of(const Tensor& x, const Part& p) {
  return x.view({p.entries, p.rows, x.size(2)}, x.strides(), x.offset() + p.entry * x.stride(0) + p.row * x.stride(1));
}
Tensor keys_of(const Tensor& x, const Part& p) { return part_of(x, {p.entry, p.entries, 0, p.keys, 0, false}); }
Tensor transposed(const Tensor& x) {
  return x.view({x.size(0), x.size(2), x.size(1)}, {x.stride(0), x.stride(2), x.stride(1)}, x.offset());
}

/// The scores of q k^T and how they are cut so that a part of them fits `bytes`.
struct Scores {
  std::int64_t entries, rows, queries, keys;
  bool causal;

  ScoreRows rows_of(const Part& p) const {
    return {p.entry * rows + p.row, p.entries * p.rows, p.rows, rows, queries, keys, p.keys, causal};
  }
  template <class F> void for_parts(DType type, std::int64_t bytes, F&& f) const {
    constexpr std::int64_t kCausalRows = 256;
    const std::int64_t row_bytes = std::max<std::int64_t>(keys * static_cast<std::int64_t>(size_of(type)), 1);
    const std::int64_t fit = std::max<std::int64_t>(bytes / row_bytes, 1);
    // Where all rows are of one head, those of the first queries need not meet the last keys.
    const bool stepped = causal && rows == queries && rows > kCausalRows;
    const std::int64_t row_step = std::min({rows, fit, stepped ? kCausalRows : rows});
    const std::int64_t entry_step = row_step < rows && !stepped ? 1 : std::max<std::int64_t>(fit / row_step, 1);
    for (std::int64_t entry = 0; entry < entries; entry += entry_step) {
      const std::int64_t some = std::min(entry_step, entries - entry);
      for (std::int64_t end = rows, begin; end > 0; end = begin) {  // the last rows see all keys
        begin = (end - 1) / row_step * row_step;
        f(Part{entry, some, begin, end - begin, stepped ? keys - queries + end : keys, end == rows});
      }
    }
  }
};

void composed(CudaBackend& backend, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o,
              Tensor& y, Tensor& lse) {
  const std::int64_t entries = k.size(0) * k.size(1);
  const Tensor dq = dense(backend, q, entries), dk = dense(backend, k, entries), dv = dense(backend, v, entries);
  const Tensor out = dense_output(y, entries);
  const Scores all{entries, dq.size(1), q.size(2), k.size(2), o.causal};
  all.for_parts(dq.dtype(), kScratch, [&](const Part& p) {
    Tensor scores = empty({p.entries, p.rows, p.keys}, {dq.dtype(), q.device()}), target = part_of(out, p);
    backend.matmul(part_of(dq, p), transposed(keys_of(dk, p)), {.alpha = o.scale}, scores);
    masked_softmax(backend, all.rows_of(p), scores, lse);
    backend.matmul(scores, keys_of(dv, p), {}, target);
  });
  store(backend, out, y);
}

void composed_grad(CudaBackend& backend, const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& y, const Tensor& lse, const AttentionOptions& o, Tensor& gq, Tensor& gk, Tensor& gv) {
  const std::int64_t entries = k.size(0) * k.size(1);
  const Tensor dq = dense(backend, q, entries), dk = dense(backend, k, entries), dv = dense(backend, v, entries);
  const Tensor dg = dense(backend, g, entries), dy = dense(backend, y, entries);
  const Tensor out_q = dense_output(gq, entries), out_k = dense_output(gk, entries), out_v = dense_output(gv, entries);
  const Scores all{entries, dq.size(1), q.size(2), k.size(2), o.causal};
  all.for_parts(dq.dtype(), kScratch / 2, [&](const Part& p) {
    Tensor scores = empty({p.entries, p.rows, p.keys}, {dq.dtype(), q.device()}), gp = empty_like(scores);
    Tensor to_q = part_of(out_q, p), to_k = keys_of(out_k, p), to_v = keys_of(out_v, p);
    const Tensor part_g = part_of(dg, p), part_q = part_of(dq, p), part_k = keys_of(dk, p);
    backend.matmul(part_q, transposed(part_k), {.alpha = o.scale}, scores);
    backend.matmul(part_g, transposed(keys_of(dv, p)), {}, gp);
    masked_softmax_grad(backend, all.rows_of(p), o.scale, part_g, part_of(dy, p), lse, scores, gp);
    const MatmulOptions sum{.accumulate = !p.first};  // over the parts of an entry, in order
    backend.matmul(transposed(scores), part_g, sum, to_v);
    backend.matmul(gp, part_k, {}, to_q);
    backend.matmul(transposed(gp), part_q, sum, to_k);
  });
  store(backend, out_q, gq);
  store(backend, out_k, gk);
  store(backend, out_v, gv);
}

}  // namespace

void CudaBackend::attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o, Tensor& y,
                            Tensor& lse) {
  if (y.numel() == 0) return;
  const detail::OpRange range("attention");
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t casts = counters.casts;  // widening below is part of the op
  bool done = false;
  if (wants_fused(q, k)) {
    const Tensor fq = fused_input(*this, q), fk = fused_input(*this, k), fv = fused_input(*this, v),
                 fy = fused_output(y);
    const auto tensors = {&fq, &fk, &fv, &fy};
    const std::int64_t batches = q.size(0), step = offsets_fit(tensors, batches) ? batches : 1;
    done = offsets_fit(tensors, step);
    for (std::int64_t first = 0; done && first < batches; first += step) {
      Tensor part_y = batches_of(fy, first, step), part_lse = batches_of(lse, first, step);
      done = fused_attention(*this, batches_of(fq, first, step), batches_of(fk, first, step),
                             batches_of(fv, first, step), o, part_y, part_lse);
    }
    if (done) finish_output(*this, fy, y);
  }
  if (!done) composed(*this, q, k, v, o, y, lse);
  counters.casts = casts;
}

void CudaBackend::attention_grad(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                                 const Tensor& lse, const AttentionOptions& o, Tensor& gq, Tensor& gk, Tensor& gv) {
  if (g.numel() == 0 || k.numel() == 0) {  // empty sums
    for (Tensor* x : {&gq, &gk, &gv}) fill(0, *x);
    return;
  }
  const detail::OpRange range("attention_grad");
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t casts = counters.casts;
  bool done = false;
  if (wants_fused(q, k)) {
    const Tensor fg = fused_input(*this, g), fq = fused_input(*this, q), fk = fused_input(*this, k),
                 fv = fused_input(*this, v), fy = fused_input(*this, y);
    const Tensor out_q = fused_output(gq), out_k = fused_output(gk), out_v = fused_output(gv);
    const auto tensors = {&fg, &fq, &fk, &fv, &fy, &out_q, &out_k, &out_v};
    const std::int64_t batches = q.size(0), step = offsets_fit(tensors, batches) ? batches : 1;
    done = offsets_fit(tensors, step);
    for (std::int64_t first = 0; done && first < batches; first += step) {
      const auto part = [&](const Tensor& x) { return batches_of(x, first, step); };
      Tensor to_q = part(out_q), to_k = part(out_k), to_v = part(out_v);
      done =
          fused_attention_grad(*this, part(fg), part(fq), part(fk), part(fv), part(fy), part(lse), o, to_q, to_k, to_v);
    }
    if (done) {
      finish_output(*this, out_q, gq);
      finish_output(*this, out_k, gk);
      finish_output(*this, out_v, gv);
    }
  }
  if (!done) composed_grad(*this, g, q, k, v, y, lse, o, gq, gk, gv);
  counters.casts = casts;
}

}  // namespace mantissa
