// Embedding, gather and scatter.
#include <atomic>

#include "autograd/op_checks.h"
#include "autograd/op_tables.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {
constexpr OpInfo kEmbedding{"embedding", Cast::low}, kGather{"gather", Cast::keep},
    kScatterAdd{"scatter_add", Cast::keep};
constexpr OpInfo kTable[] = {kEmbedding, kGather, kScatterAdd};
std::atomic<bool> check_on_gpu{false};

void check_gather(const char* op, const Tensor& base, int axis, const Tensor& index) {
  check_index(op, index);
  check_same_device(op, base, index);
  MT_CHECK(ShapeError, index.rank() == base.rank(), op, ": index must have the rank of ", base, ", got ", index);
  for (int i = 0; i < base.rank(); ++i)
    MT_CHECK(ShapeError, i == axis || index.shape()[i] <= base.shape()[i], op, ": index ", index, " is larger than ",
             base, " on axis ", i);
  check_index_range(op, index, 0, base.shape()[axis], 0);
}
}  // namespace

std::span<const OpInfo> index_ops() { return kTable; }

void set_check_indices(bool value) { check_on_gpu = value; }

void check_index_range(const char* op, const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored) {
  if (!index.device().is_cpu() && !check_on_gpu) return;
  MT_CHECK(IndexError, backend(index).indices_in_range(index, low, high, ignored), op, ": an index of ", index,
           " lies outside [", low, ", ", high, ")");
}

Tensor embedding(const Tensor& ids, const Tensor& weight) {
  const OpScope scope("embedding");
  check_index("embedding", ids);
  check_float("embedding", weight);
  check_same_device("embedding", ids, weight);
  MT_CHECK(ShapeError, weight.rank() == 2, "embedding: w must be [rows, size], got ", weight);
  check_index_range("embedding", ids, 0, weight.size(0), 0);
  const Tensor w = autocast(kEmbedding.cast, weight), wd = contiguous_data(w), index = contiguous_data(ids);
  Shape shape = ids.shape();
  shape.push_back(w.size(1));
  Tensor y = empty(shape, {w.dtype(), w.device()});
  backend(w).embedding(index, wd, y);
  return record(kEmbedding, y, {w},
                [index = save(index), shape = w.shape(), dtype = compute_dtype(w.dtype())](Grads g, GradOut& out) {
                  const Tensor rows = contiguous_data(g[0]);
                  out.write(0, [&](Tensor& gw, bool accumulate) {
                    if (gw.dtype() == dtype && gw.is_contiguous()) {
                      backend(rows).embedding_grad(rows, index.get(), accumulate, gw);
                      return;
                    }
                    Tensor sums = empty(shape, {dtype, rows.device()});  // summed in f32, rounded once
                    backend(rows).embedding_grad(rows, index.get(), false, sums);
                    backend(rows).copy(sums, gw);
                  });
                });
}

Tensor gather(const Tensor& x, int axis, const Tensor& index) {
  const OpScope scope("gather");
  check_float("gather", x);
  axis = normalize_axis("gather", axis, x.rank());
  check_gather("gather", x, axis, index);
  Tensor y = empty(index.shape(), {x.dtype(), x.device()});
  backend(x).gather(x, axis, index, y);
  return record(kGather, y, {x}, [axis, index = save(index), shape = x.shape()](Grads g, GradOut& out) {
    Tensor sums = zeros(shape, {compute_dtype(g[0].dtype()), g[0].device()});
    backend(sums).scatter_add(g[0], axis, index.get(), sums);
    out.set(0, sums);
  });
}

Tensor scatter_add(const Tensor& base, int axis, const Tensor& index, const Tensor& x) {
  const OpScope scope("scatter_add");
  check_float("scatter_add", base);
  check_float("scatter_add", x);
  check_same_device("scatter_add", base, x);
  axis = normalize_axis("scatter_add", axis, base.rank());
  check_gather("scatter_add", base, axis, index);
  MT_CHECK(ShapeError, index.shape() == x.shape(), "scatter_add: index is ", index, ", x is ", x);
  MT_CHECK(DTypeError, base.dtype() == x.dtype(), "scatter_add: dtypes differ: base is ", base, ", x is ", x);
  const DType wide = compute_dtype(base.dtype());
  Tensor sums = empty(base.shape(), {wide, base.device()});
  backend(base).copy(base, sums);
  backend(base).scatter_add(x, axis, index, sums);
  Tensor y = sums;
  if (wide != base.dtype()) {
    y = empty(base.shape(), {base.dtype(), base.device()});
    backend(base).copy(sums, y);
  }
  return record(kScatterAdd, y, {base, x}, [axis, index = save(index)](Grads g, GradOut& out) {
    out.set(0, g[0]);
    if (!out.wanted(1)) return;
    Tensor gx = empty(index.get().shape(), {g[0].dtype(), g[0].device()});
    backend(gx).gather(g[0], axis, index.get(), gx);
    out.set(1, gx);
  });
}

}  // namespace mantissa
