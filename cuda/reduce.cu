// Sum, mean, maximum and minimum over any set of axes.
//
// Where the innermost axis is reduced, a warp or block walks along the elements of each result; where it is
// kept, each thread walks across them for a few neighbouring results. Few results: the elements are split
// among blocks, whose partial results a second launch combines. The split depends on the shape alone, so
// results are deterministic.
#include "core/strided.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/row_major.cuh"

namespace mantissa {
namespace {

/// Where results go: y, of any float type, or partial results in the compute type.
template <class A> struct Target {
  void* y;
  DType dtype;
  bool accumulate;
  A divisor;
  RowMajor at;

  template <class T> __device__ void put(T* p, A value) const {
    *p = convert<T>(accumulate ? convert<A>(*p) + value : value);
  }
  __device__ void write(std::int64_t result, A value) const {
    value /= divisor;
    const std::int64_t i = at(result);
    switch (dtype) {
      case DType::f64:
        return put(static_cast<double*>(y) + i, value);
      case DType::f32:
        return put(static_cast<float*>(y) + i, value);
      case DType::f16:
        return put(static_cast<__half*>(y) + i, value);
      default:
        return put(static_cast<__nv_bfloat16*>(y) + i, value);
    }
  }
};

/// `results` results of `count` elements each; `part` of these a block (blockIdx.y).
struct Work {
  std::int64_t results, count, part;
  RowMajor base, element;  // offset of a result's first element, and of its elements from there
};

// Bytes: x once; floor = those / bandwidth. kRun: the elements of a result lie side by side, so that vectors
// are read.
template <class Op, int kGroup, bool kRun, class T>
__global__ void __launch_bounds__(kThreads) along_kernel(Work work, const T* x, Target<compute_t<T>> target) {
  using A = compute_t<T>;
  const std::int64_t result = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (result >= work.results) return;
  const Op op;
  const int thread = threadIdx.x % kGroup;
  const std::int64_t begin = blockIdx.y * work.part, n = min(work.part, work.count - begin);
  x += work.base(result);
  A total = Op::template identity<A>();
  if constexpr (kRun) {
    walk_row<kVector<T>>(x + begin, n, thread, kGroup, [&](std::int64_t, const auto& v) {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(v.v) / sizeof(T)); ++j) total = op(total, widen(v.v[j]));
    });
  } else {
#pragma unroll 4
    for (std::int64_t i = thread; i < n; i += kGroup) total = op(total, widen(x[work.element(begin + i)]));
  }
  total = block_reduce<kGroup>(total, op);
  if (thread == 0) target.write(result * gridDim.y + blockIdx.y, total);
}

// Bytes: x once; floor = those / bandwidth. threadIdx.x: neighbouring results, V a thread; threadIdx.y and
// blockIdx.y: their elements. kEven: the elements of a result lie at one distance.
template <class Op, int V, bool kEven, class T>
__global__ void __launch_bounds__(512) across_kernel(Work work, const T* x, Target<compute_t<T>> target) {
  using A = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const Op op;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = unit * V < work.results;
  A total[V];
#pragma unroll
  for (int j = 0; j < V; ++j) total[j] = Op::template identity<A>();
  if (inside) {
    x += work.base(unit * V);
    const std::int64_t end = min((blockIdx.y + 1) * work.part, work.count);
    constexpr int kInFlight = kEven ? 8 : 1;
    const std::int64_t distance = work.element.stride[0];
    for (std::int64_t i = blockIdx.y * work.part + threadIdx.y; i < end; i += kInFlight * blockDim.y) {
      Vec<T, V> v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
        if (const std::int64_t k = i + u * blockDim.y; k < end)
          v[u] = load<V>(x + (kEven ? k * distance : work.element(k)));
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * blockDim.y >= end) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] = op(total[j], widen(v[u].v[j]));
      }
    }
  }
  A* shared = reinterpret_cast<A*>(memory);  // [blockDim.y][V][blockDim.x]
#pragma unroll
  for (int j = 0; j < V; ++j) shared[(threadIdx.y * V + j) * blockDim.x + threadIdx.x] = total[j];
  __syncthreads();
  for (int row = threadIdx.y; row < V; row += blockDim.y) {  // one of the V results of each unit
    if (!inside) continue;
    A sum = shared[row * blockDim.x + threadIdx.x];
    for (int r = 1; r < static_cast<int>(blockDim.y); ++r)
      sum = op(sum, shared[(r * V + row) * blockDim.x + threadIdx.x]);
    target.write(blockIdx.y * work.results + unit * V + row, sum);
  }
}

template <class A> constexpr DType dtype_for = std::is_same_v<A, double> ? DType::f64 : DType::f32;

class Reduction {
 public:
  Reduction(CudaBackend& backend, const Tensor& x, bool accumulate, double divisor, Tensor& y)
      : backend_(backend), counters(backend.counters), accumulate_(accumulate), divisor_(divisor), y_(y), x_(x) {
    const auto plan = make_plan<2>(x.shape(), {&y, &x});
    for (int d = 0; d < plan.rank; ++d) {
      if (plan.strides[0][d] == 0) {
        work_.element.push(plan.sizes[d], plan.strides[1][d]);
      } else {
        work_.base.push(plan.sizes[d], plan.strides[1][d]);
        y_at_.push(plan.sizes[d], plan.strides[0][d]);
      }
    }
    work_.base.finish();
    work_.element.finish();
    y_at_.finish();
    work_.results = work_.base.count();
    work_.count = work_.element.count();
    const int inner = plan.rank - 1;
    along_ = plan.rank == 0 || (plan.strides[0][inner] == 0 && plan.sizes[inner] >= kShortRun);
    run_ = work_.element.rank == 1 && work_.element.stride[0] == 1;
  }

  template <class Op, class T> void run() { along_ ? along<Op, T>() : across<Op, T>(); }

 private:
  static constexpr std::int64_t kShortRun = 16;

  template <class A> Target<A> target() const {
    return {y_.data(), y_.dtype(), accumulate_, static_cast<A>(divisor_), y_at_};
  }
  template <class A> static Target<A> partial_target(const Tensor& memory, std::int64_t n) {
    Target<A> t{memory.data(), dtype_for<A>, false, A(1), {}};
    t.at.push(n, 1);
    t.at.finish();
    return t;
  }

  template <class Op, int kGroup, class T>
  void launch_along(const Work& work, bool run, const T* x, const Target<compute_t<T>>& target, std::int64_t parts) {
    const dim3 grid(static_cast<unsigned>(ceil_div(work.results, kThreads / kGroup)), static_cast<unsigned>(parts));
    if (run) {
      along_kernel<Op, kGroup, true><<<grid, kThreads, 0, backend_.stream()>>>(work, x, target);
    } else {
      along_kernel<Op, kGroup, false><<<grid, kThreads, 0, backend_.stream()>>>(work, x, target);
    }
    MT_LAUNCHED();
  }

  template <class Op, class T> void along() {
    using A = compute_t<T>;
    const auto* x = static_cast<const T*>(x_.data());
    const std::int64_t wanted = ceil_div(8 * backend_.properties().multiProcessorCount, work_.results);
    const std::int64_t parts = std::max<std::int64_t>(1, std::min(wanted, work_.count / kPartElements));
    if (parts == 1) {
      work_.part = work_.count;
      if (work_.count <= 1024) return launch_along<Op, kWarp>(work_, run_, x, target<A>(), 1);
      return launch_along<Op, kThreads>(work_, run_, x, target<A>(), 1);
    }
    constexpr std::int64_t kAlign = 64;  // parts begin at whole vectors
    work_.part = ceil_div(ceil_div(work_.count, parts), kAlign) * kAlign;
    const std::int64_t used = ceil_div(work_.count, work_.part);
    const Tensor memory = backend_.workspace(static_cast<std::size_t>(work_.results * used) * sizeof(A));
    launch_along<Op, kThreads>(work_, run_, x, partial_target<A>(memory, work_.results * used), used);
    Work second{work_.results, used, used, {}, {}};
    second.base.push(work_.results, used);
    second.element.push(used, 1);
    second.base.finish();
    second.element.finish();
    launch_along<Op, kThreads>(second, true, static_cast<const A*>(memory.data()), target<A>(), 1);
  }

  template <class Op, int V, class T>
  void launch_across(const Work& work, int rows, const T* x, const Target<compute_t<T>>& target, std::int64_t parts) {
    const std::int64_t units = work.results / V;
    unsigned width = 1, height = 1;
    while (width < kWarp && width < units) width *= 2;
    while (height * 2 * width <= static_cast<unsigned>(rows * kWarp) && height < work.part) height *= 2;
    const dim3 grid(static_cast<unsigned>(ceil_div(units, width)), static_cast<unsigned>(parts));
    const dim3 block(width, height);
    const std::size_t shared = width * height * V * sizeof(compute_t<T>);
    if (work.element.rank == 1) {
      across_kernel<Op, V, true><<<grid, block, shared, backend_.stream()>>>(work, x, target);
    } else {
      across_kernel<Op, V, false><<<grid, block, shared, backend_.stream()>>>(work, x, target);
    }
    MT_LAUNCHED();
  }

  template <class Op, class T> void across() {
    constexpr int V = kVector<T>;
    const RowMajor& kept = work_.base;
    const int inner = kept.rank - 1;
    bool vectors =
        kept.stride[inner] == 1 && kept.size[inner] % V == 0 && reinterpret_cast<std::uintptr_t>(x_.data()) % 16 == 0;
    for (int d = 0; d < inner; ++d) vectors = vectors && kept.stride[d] % V == 0;
    for (int d = 0; d < work_.element.rank; ++d) vectors = vectors && work_.element.stride[d] % V == 0;
    vectors ? across_with<Op, V, T>() : across_with<Op, 1, T>();
  }

  template <class Op, int V, class T> void across_with() {
    using A = compute_t<T>;
    const auto* x = static_cast<const T*>(x_.data());
    const std::int64_t blocks = ceil_div(work_.results / V, kWarp);
    const std::int64_t wanted = ceil_div(8 * backend_.properties().multiProcessorCount, blocks);
    const std::int64_t parts =
        std::max<std::int64_t>(1, std::min({wanted, work_.count / kPartRows, std::int64_t{65535}}));
    work_.part = ceil_div(work_.count, parts);
    const std::int64_t used = ceil_div(work_.count, work_.part);
    if (used == 1) return launch_across<Op, V>(work_, 8, x, target<A>(), 1);
    const Tensor memory = backend_.workspace(static_cast<std::size_t>(work_.results * used) * sizeof(A));
    launch_across<Op, V>(work_, 8, x, partial_target<A>(memory, work_.results * used), used);
    Work second{work_.results, used, used, {}, {}};
    second.base.push(work_.results, 1);
    second.element.push(used, work_.results);
    second.base.finish();
    second.element.finish();
    launch_across<Op, 1>(second, 16, static_cast<const A*>(memory.data()), target<A>(), 1);
  }

  static constexpr std::int64_t kPartElements = 8192, kPartRows = 128;  // least work of a block

  CudaBackend& backend_;
  BackendCounters& counters;  // named as MT_LAUNCHED expects
  bool accumulate_;
  double divisor_;
  Tensor& y_;
  const Tensor& x_;
  Work work_{};
  RowMajor y_at_;
  bool along_ = false, run_ = false;
};

}  // namespace

void CudaBackend::reduce(ReduceOp op, const Tensor& x, bool accumulate, Tensor& y) {
  const detail::OpRange range("reduce");
  if (y.numel() == 0) return;
  if (x.numel() == 0) {
    if (accumulate) return;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const double empty[] = {0, std::numeric_limits<double>::quiet_NaN(), -kInfinity, kInfinity};
    return fill(empty[static_cast<int>(op)], y);
  }
  const double divisor = op == ReduceOp::mean ? static_cast<double>(x.numel() / y.numel()) : 1;
  Reduction reduction(*this, x, accumulate, divisor, y);
  visit_float<CudaTypes>("reduce", x.dtype(), [&]<class T>() {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::mean:
        return reduction.run<SumOp, T>();
      case ReduceOp::max:
        return reduction.run<MaxOp, T>();
      case ReduceOp::min:
        return reduction.run<MinOp, T>();
    }
  });
}

}  // namespace mantissa
