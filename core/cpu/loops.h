#pragma once
// Elementwise loops of one, two or three inputs over a strided plan, in blocks and on several threads.

#include "core/cpu/block.h"
#include "core/cpu/parallel.h"
#include "core/strided.h"

namespace mantissa {

/// The offsets of the rows of a plan, one after another.
template <int N> class RowCursor {
 public:
  RowCursor(const StridedPlan<N>& plan, std::int64_t row) : plan_(plan) {
    for (int axis = plan.rank - 2; axis >= 0; --axis) {
      index_[axis] = row % plan.sizes[axis];
      row /= plan.sizes[axis];
      for (int k = 0; k < N; ++k) offsets_[k] += index_[axis] * plan.strides[k][axis];
    }
  }
  void next() {
    for (int axis = plan_.rank - 2; axis >= 0; --axis) {
      for (int k = 0; k < N; ++k) offsets_[k] += plan_.strides[k][axis];
      if (++index_[axis] < plan_.sizes[axis]) return;
      index_[axis] = 0;
      for (int k = 0; k < N; ++k) offsets_[k] -= plan_.sizes[axis] * plan_.strides[k][axis];
    }
  }
  std::int64_t operator[](int operand) const { return offsets_[operand]; }

 private:
  const StridedPlan<N>& plan_;
  std::int64_t index_[kMaxRank] = {}, offsets_[N] = {};
};

/// Calls f(offsets, n) for runs of at most kBlock elements along the innermost axis; offsets[k] is operand
/// k's first element.
template <int N, class F> void for_each_run(const StridedPlan<N>& plan, F&& f) {
  const std::int64_t inner = plan.inner(), rows = plan.rows();
  if (plan.numel == 0) return;
  const std::int64_t blocks = (inner + kBlock - 1) / kBlock;
  const std::int64_t grain = std::max<std::int64_t>(1, kParallelGrain / std::min(inner, kBlock));
  parallel_for(rows * blocks, grain, [&](std::int64_t begin, std::int64_t end) {
    RowCursor<N> row(plan, begin / blocks);
    std::int64_t block = begin % blocks, offsets[N];
    for (std::int64_t run = begin; run < end; ++run) {
      const std::int64_t first = block * kBlock, n = std::min(kBlock, inner - first);
      for (int k = 0; k < N; ++k) offsets[k] = row[k] + first * plan.inner_stride(k);
      f(offsets, n);
      if (++block == blocks) {
        block = 0;
        row.next();
      }
    }
  });
}

template <class A, class TX, class TY, class F> void map_unary(const Tensor& x, Tensor& y, F f) {
  const auto plan = make_plan<2>(y.shape(), {&x, &y});
  const TX* px = static_cast<const TX*>(x.data());
  TY* py = static_cast<TY*>(y.data());
  const std::int64_t sx = plan.inner_stride(0), sy = plan.inner_stride(1);
  for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
    alignas(64) A bx[kBlock], by[kBlock];
    const A* vx = load_block<A>(px + at[0], sx, n, bx);
    A* vy = result_block<A>(py + at[1], sy, by);
    for (std::int64_t i = 0; i < n; ++i) vy[i] = f(vx[i]);
    store_block(vy, py + at[1], sy, n);
  });
}

template <class A, class TX, class TZ, class TY, class F>
void map_binary(const Tensor& x, const Tensor& z, Tensor& y, F f) {
  const auto plan = make_plan<3>(y.shape(), {&x, &z, &y});
  const TX* px = static_cast<const TX*>(x.data());
  const TZ* pz = static_cast<const TZ*>(z.data());
  TY* py = static_cast<TY*>(y.data());
  const std::int64_t sx = plan.inner_stride(0), sz = plan.inner_stride(1), sy = plan.inner_stride(2);
  for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
    alignas(64) A bx[kBlock], bz[kBlock], by[kBlock];
    const A *vx = load_block<A>(px + at[0], sx, n, bx), *vz = load_block<A>(pz + at[1], sz, n, bz);
    A* vy = result_block<A>(py + at[2], sy, by);
    for (std::int64_t i = 0; i < n; ++i) vy[i] = f(vx[i], vz[i]);
    store_block(vy, py + at[2], sy, n);
  });
}

template <class A, class T, class F>
void map_ternary(const Tensor& x, const Tensor& z, const Tensor& w, Tensor& y, F f) {
  const auto plan = make_plan<4>(y.shape(), {&x, &z, &w, &y});
  const T *px = static_cast<const T*>(x.data()), *pz = static_cast<const T*>(z.data()),
          *pw = static_cast<const T*>(w.data());
  T* py = static_cast<T*>(y.data());
  const std::int64_t sx = plan.inner_stride(0), sz = plan.inner_stride(1), sw = plan.inner_stride(2),
                     sy = plan.inner_stride(3);
  for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
    alignas(64) A bx[kBlock], bz[kBlock], bw[kBlock], by[kBlock];
    const A *vx = load_block<A>(px + at[0], sx, n, bx), *vz = load_block<A>(pz + at[1], sz, n, bz),
            *vw = load_block<A>(pw + at[2], sw, n, bw);
    A* vy = result_block<A>(py + at[3], sy, by);
    for (std::int64_t i = 0; i < n; ++i) vy[i] = f(vx[i], vz[i], vw[i]);
    store_block(vy, py + at[3], sy, n);
  });
}

}  // namespace mantissa
