// Mean cross entropy of logits against class indices, and its gradient in one pass.
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/rows.cuh"

namespace mantissa {
namespace {

enum class TargetKind { counted, ignored, invalid };

struct Target {
  std::int64_t classes, ignore_index;
  __device__ TargetKind kind(std::int64_t t) const {
    if (t == ignore_index) return TargetKind::ignored;
    return t >= 0 && t < classes ? TargetKind::counted : TargetKind::invalid;
  }
};

// Bytes: x once; floor = n classes sizeof(T) / bandwidth. An invalid target makes the loss NaN.
template <int kBlock, bool kSmooth, class T, class Index>
__global__ void __launch_bounds__(kBlock)
    loss_kernel(const T* x, const Index* targets, Target rule, compute_t<T> smoothing, compute_t<T>* row_loss,
                compute_t<T>* lse) {
  using A = compute_t<T>;
  const std::int64_t row = blockIdx.x;
  x += row * rule.classes;
  OnlineSum<T> total;
  A sum = 0;  // of x, for label smoothing
  walk_row<kVector<T>>(x, rule.classes, threadIdx.x, kBlock, [&](std::int64_t, const auto& v) {
    total.add(v);
    if constexpr (kSmooth) {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(v.v) / sizeof(T)); ++j) sum += widen(v.v[j]);
    }
  });
  total.template join<kBlock>();
  if constexpr (kSmooth) sum = block_reduce<kBlock>(sum, SumOp{});
  if (threadIdx.x != 0) return;
  const A log_sum = ::log(total.sum);
  lse[row] = total.max + log_sum;
  const std::int64_t t = targets[row];
  const TargetKind kind = rule.kind(t);
  A loss = 0;
  if (kind == TargetKind::counted) {
    loss = log_sum + (total.max - widen(x[t]));
    if constexpr (kSmooth) {
      const A uniform = log_sum + (total.max - sum / static_cast<A>(rule.classes));
      loss = (A(1) - smoothing) * loss + smoothing * uniform;
    }
  } else if (kind == TargetKind::invalid) {
    loss = static_cast<A>(__int_as_float(0x7fc00000));
  }
  row_loss[row] = loss;
}

// One block, so that the order of the sum is fixed. Bytes: row_loss and targets once, a small part of the
// whole.
template <class A, class Index>
__global__ void __launch_bounds__(1024)
    mean_loss_kernel(const A* row_loss, const Index* targets, std::int64_t n, Target rule, A* loss, A* count) {
  double sum = 0, counted = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += 1024) {
    sum += static_cast<double>(row_loss[i]);
    counted += rule.kind(targets[i]) == TargetKind::ignored ? 0 : 1;
  }
  sum = block_reduce<1024>(sum, SumOp{});
  counted = block_reduce<1024>(counted, SumOp{});
  if (threadIdx.x != 0) return;
  *loss = static_cast<A>(counted > 0 ? sum / counted : 0);
  *count = static_cast<A>(counted);
}

// Bytes: x read once, gx written once (they may be the same); floor = 2 n classes sizeof(T) / bandwidth.
// blockIdx.y: parts of a row, when there are few rows.
template <int V, class T, class Index>
__global__ void __launch_bounds__(kThreads)
    grad_kernel(const compute_t<T>* g, const T* x, const Index* targets, Target rule, compute_t<T> smoothing,
                const compute_t<T>* lse, const compute_t<T>* count, std::int64_t part, T* gx) {
  using A = compute_t<T>;
  const std::int64_t row = blockIdx.x, begin = blockIdx.y * part;
  const std::int64_t n = rule.classes - begin < part ? rule.classes - begin : part;
  x += row * rule.classes + begin;
  gx += row * rule.classes + begin;
  const std::int64_t target = targets[row];
  const TargetKind kind = rule.kind(target);
  const A scale = kind == TargetKind::ignored   ? A(0)
                  : kind == TargetKind::counted ? *g / *count
                                                : A(__int_as_float(0x7fc00000));
  const A uniform = scale * smoothing / static_cast<A>(rule.classes), hit = scale * (A(1) - smoothing);
  const A row_lse = lse[row];
  const std::int64_t here = target - begin;  // within the part, perhaps
  walk_row<V>(x, n, threadIdx.x, kThreads, [&](std::int64_t i, const auto& v) {
    constexpr int kWidth = sizeof(v.v) / sizeof(T);
    A value[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) value[j] = exp_for<T>(widen(v.v[j]) - row_lse) * scale - uniform;
    if (static_cast<std::uint64_t>(here - i) < kWidth) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (i + j == here) value[j] -= hit;
    }
    Vec<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      result.v[j] = kind == TargetKind::ignored ? convert<T>(A(0)) : convert<T>(value[j]);
    store(gx + i, result);
  });
}

template <class F> void visit_types(const char* op, const Tensor& x, const Tensor& targets, F&& f) {
  visit_float<CudaTypes>(op, x.dtype(), [&]<class T>() {
    visit_index(op, targets.dtype(), [&]<class Index>() { f.template operator()<T, Index>(); });
  });
}

}  // namespace

void CudaBackend::cross_entropy(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options,
                                Tensor& loss, Tensor& lse, Tensor& count) {
  const detail::OpRange range("cross_entropy");
  const std::int64_t n = x.size(0), classes = x.size(1);
  const Target rule{classes, options.ignore_index};
  const DType compute = compute_dtype(x.dtype());
  MT_ASSERT(loss.dtype() == compute && lse.dtype() == compute && count.dtype() == compute, "cross_entropy of ", x);
  const Tensor row_loss = workspace(static_cast<std::size_t>(n) * size_of(compute));
  visit_types("cross_entropy", x, targets, [&]<class T, class Index>() {
    using A = compute_t<T>;
    const auto* index = static_cast<const Index*>(targets.data());
    auto* losses = static_cast<A*>(row_loss.data());
    const auto run = [&]<int kBlock, bool kSmooth>() {
      loss_kernel<kBlock, kSmooth><<<static_cast<unsigned>(n), kBlock, 0, stream()>>>(
          static_cast<const T*>(x.data()), index, rule, static_cast<A>(options.label_smoothing), losses,
          static_cast<A*>(lse.data()));
      MT_LAUNCHED();
    };
    const bool smooth = options.label_smoothing != 0;
    if (n > 0 && (n >= 512 || classes < 8192)) {
      smooth ? run.template operator()<kThreads, true>() : run.template operator()<kThreads, false>();
    } else if (n > 0) {  // few long rows
      smooth ? run.template operator()<1024, true>() : run.template operator()<1024, false>();
    }
    mean_loss_kernel<<<1, 1024, 0, stream()>>>(losses, index, n, rule, static_cast<A*>(loss.data()),
                                               static_cast<A*>(count.data()));
    MT_LAUNCHED();
  });
}

void CudaBackend::cross_entropy_grad(const Tensor& g, const Tensor& x, const Tensor& targets,
                                     const CrossEntropyOptions& options, const Tensor& lse, const Tensor& count,
                                     Tensor& gx) {
  const detail::OpRange range("cross_entropy_grad");
  if (x.numel() == 0) return;
  const std::int64_t n = x.size(0), classes = x.size(1);
  const Target rule{classes, options.ignore_index};
  const std::int64_t wanted = ceil_div(8 * properties_.multiProcessorCount, n);  // parts a row
  const std::int64_t part = std::max<std::int64_t>(ceil_div(classes, wanted), 4096);
  const dim3 grid(static_cast<unsigned>(n), static_cast<unsigned>(ceil_div(classes, part)));
  visit_types("cross_entropy_grad", x, targets, [&]<class T, class Index>() {
    using A = compute_t<T>;
    const auto* from = static_cast<const T*>(x.data());
    auto* to = static_cast<T*>(gx.data());
    const auto run = [&]<int V>() {
      grad_kernel<V><<<grid, kThreads, 0, stream()>>>(
          static_cast<const A*>(g.data()), from, static_cast<const Index*>(targets.data()), rule,
          static_cast<A>(options.label_smoothing), static_cast<const A*>(lse.data()),
          static_cast<const A*>(count.data()), part, to);
      MT_LAUNCHED();
    };
    from == to || aligned_alike(from, to) ? run.template operator()<kVector<T>>() : run.template operator()<1>();
  });
}

}  // namespace mantissa
