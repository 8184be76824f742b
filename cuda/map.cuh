#pragma once
// Elementwise kernels over any strides: y[i] = f(x0[i], x1[i], ...) with broadcasting.
//
// The host orders and merges the axes (core/strided.h). Dense tensors are one axis and take the fast kernel;
// where the innermost axis is contiguous, aligned and a multiple of 16 bytes a thread handles one vector,
// else single elements.

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/strided.h"
#include "core/tensor.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {

/// A plan as the device walks it: innermost axis first, sizes in units of V elements along it.
template <int N> struct Layout {
  int rank;
  FastDivisor size[kMaxRank];
  std::int64_t stride[N][kMaxRank];

  explicit Layout(const StridedPlan<N>& plan, int vector = 1) : rank(plan.rank) {
    for (int d = 0; d < rank; ++d) {
      const int axis = rank - 1 - d;
      size[d] = FastDivisor(static_cast<std::uint32_t>(d == 0 ? plan.sizes[axis] / vector : plan.sizes[axis]));
      for (int k = 0; k < N; ++k) stride[k][d] = plan.strides[k][axis] * (d == 0 ? vector : 1);
    }
  }
  /// Offsets in elements of the unit i.
  __device__ void locate(std::uint32_t i, std::int64_t (&offset)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) offset[k] = 0;
#pragma unroll 1
    for (int d = 0; d < rank - 1; ++d) {
      const std::uint32_t q = size[d].quotient(i), c = i - q * size[d].divisor;
#pragma unroll
      for (int k = 0; k < N; ++k) offset[k] += static_cast<std::int64_t>(c) * stride[k][d];
      i = q;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) offset[k] += static_cast<std::int64_t>(i) * stride[k][rank - 1];
  }
};

/// Cuts the outermost axis of a plan in two, at a multiple of `vector` if it is the innermost too: `plan`
/// keeps the first part, `rest` gets the other, which begins `begin[k]` elements later in operand k.
template <int N> void split(StridedPlan<N>& plan, StridedPlan<N>& rest, int vector, std::int64_t (&begin)[N]) {
  int axis = 0;
  while (axis < plan.rank - 1 && plan.sizes[axis] == 1) ++axis;
  rest = plan;
  const std::int64_t size = plan.sizes[axis], first = axis == plan.rank - 1 ? size / 2 / vector * vector : size / 2;
  plan.sizes[axis] = first;
  rest.sizes[axis] = size - first;
  plan.numel = plan.numel / size * first;
  rest.numel -= plan.numel;
  for (int k = 0; k < N; ++k) begin[k] = first * plan.strides[k][axis];
}

template <class T, int V, int U> struct Batch { Vec<T, V> unit[U]; };

template <int V, int U, class T> __device__ inline void fetch(Batch<T, V, U>& b, const T* x) {
#pragma unroll
  for (int u = 0; u < U; ++u) b.unit[u] = load<V>(x + u * kThreads * V);
}

template <int V, int U, class F, class Out, class... In>
__device__ inline void map_block(const F& f, Out* y, const In*... x, Batch<In, V, U>... b) {
  (fetch(b, x), ...);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    Vec<Out, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result.v[j] = f(b.unit[u].v[j]...);
    store(y + u * kThreads * V, result);
  }
}

// Dense operands. Bytes: every operand once; floor = bytes / bandwidth. All loads of a thread precede its
// first store.
template <int V, int U, class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads) map_dense(F f, std::int64_t n, Out* y, const In*... x) {
  constexpr int kBlock = kThreads * V * U;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kBlock;
  if (begin + kBlock <= n) {
    const std::int64_t i = begin + threadIdx.x * V;
    map_block<V, U, F, Out, In...>(f, y + i, (x + i)..., Batch<In, V, U>{}...);
  } else {
    std::int64_t i = begin + threadIdx.x * V;
#pragma unroll 1
    for (; i + V <= n; i += kThreads * V) map_block<V, 1, F, Out, In...>(f, y + i, (x + i)..., Batch<In, V, 1>{}...);
    i = n / V * V + threadIdx.x;
    if (i < n) y[i] = f(x[i]...);
  }
}

/// One operand's values of a unit; an operand that is constant along the innermost axis is read once.
template <int V, class T> __device__ inline Vec<T, V> load_or_spread(const T* x, bool constant) {
  if (V == 1 || !constant) return load<V>(x);
  const T value = *x;
  Vec<T, V> y;
#pragma unroll
  for (int j = 0; j < V; ++j) y.v[j] = value;
  return y;
}

/// The N offsets and the operands of U units of a thread.
template <int U, int N> struct Units {
  bool inside[U];
  std::int64_t offset[U][N];

  template <int V, class T> __device__ void fetch(Batch<T, V, U>& b, const T* x, int k, bool constant) const {
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (inside[u]) b.unit[u] = load_or_spread<V>(x + offset[u][k], constant);
  }
};

template <int V, int U, std::size_t... K, class F, class Out, class... In>
__device__ inline void map_units(std::index_sequence<K...>, const F& f, const Layout<1 + sizeof...(In)>& layout,
                                 const Units<U, 1 + sizeof...(In)>& units, Out* y, const In*... x) {
  [&](Batch<In, V, U>... b) {
    (units.fetch(b, x, K, layout.stride[K][0] == 0), ...);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!units.inside[u]) continue;
      Vec<Out, V> result;
#pragma unroll
      for (int j = 0; j < V; ++j) result.v[j] = f(b.unit[u].v[j]...);
      store(y + units.offset[u][sizeof...(In)], result);
    }
  }(Batch<In, V, U>{}...);
}

// Any strides, broadcast operands. Bytes: every operand once as long as repeated reads hit a cache. All loads
// of a thread precede its first store.
template <int V, int U, class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads)
    map_strided(F f, Layout<1 + sizeof...(In)> layout, std::uint32_t units, Out* y, const In*... x) {
  const std::uint32_t first = blockIdx.x * (kThreads * U) + threadIdx.x;
  Units<U, 1 + sizeof...(In)> mine;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    mine.inside[u] = first + u * kThreads < units;
    layout.locate(mine.inside[u] ? first + u * kThreads : 0, mine.offset[u]);
  }
  map_units<V, U>(std::make_index_sequence<sizeof...(In)>{}, f, layout, mine, y, x...);
}

template <class T, int N> bool vectorizes(const StridedPlan<N>& plan, int k, const T* data, int vector) {
  const int inner = plan.rank - 1;
  const bool constant = k < N - 1 && plan.strides[k][inner] == 0;
  if (constant) return true;
  const std::uintptr_t bytes = std::min<std::uintptr_t>(sizeof(T) * vector, 16);
  bool fits = plan.strides[k][inner] == 1 && reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  for (int d = 0; d < inner; ++d) fits = fits && plan.strides[k][d] % vector == 0;
  return fits;
}

template <int V, int U, std::size_t... K, class F, class Out, class... In>
void launch_strided(std::index_sequence<K...> inputs, CudaBackend& backend, const F& f,
                    StridedPlan<1 + sizeof...(In)> plan, Out* y, const In*... x) {
  constexpr int N = 1 + sizeof...(In);
  if (plan.numel / V >= kMaxUnits) {
    StridedPlan<N> rest;
    std::int64_t begin[N];
    split(plan, rest, V, begin);
    launch_strided<V, U>(inputs, backend, f, plan, y, x...);
    launch_strided<V, U>(inputs, backend, f, rest, y + begin[N - 1], (x + begin[K])...);
    return;
  }
  auto& counters = backend.counters;
  const std::int64_t units = plan.numel / V;
  map_strided<V, U, F, Out, In...>
      <<<static_cast<unsigned>(ceil_div(units, kThreads * U)), kThreads, 0, backend.stream()>>>(
          f, Layout<N>(plan, V), static_cast<std::uint32_t>(units), y, x...);
  MT_LAUNCHED();
}

/// Which kernels exist for a function: kStrided for dense tensors and any strides, kRows also for vectors
/// along rows that are not dense as a whole, kElements only the one that takes single elements.
enum class MapPaths { kElements, kStrided, kRows };

/// y = f(x...) at the storage types Out and In...; the plan's operands are the inputs, then y.
template <MapPaths kPaths, class F, class Out, class... In>
void launch_map(CudaBackend& backend, const F& f, StridedPlan<1 + sizeof...(In)> plan, Out* y, const In*... x) {
  constexpr int N = 1 + sizeof...(In);
  constexpr int kSmallest = static_cast<int>(std::min({sizeof(Out), sizeof(In)...}));
  constexpr int kLargest = static_cast<int>(std::max({sizeof(Out), sizeof(In)...}));
  constexpr bool kDouble = (std::is_same_v<Out, double> || ... || std::is_same_v<In, double>);  // rare: little code
  constexpr int V = kDouble || kPaths == MapPaths::kElements ? 1 : std::min(16 / kSmallest, 32 / kLargest);
  if (plan.numel == 0) return;
  if (plan.rank == 0) {  // one element
    plan.rank = 1;
    plan.sizes[0] = 1;
    for (auto& strides : plan.strides) strides[0] = 1;
  }
  constexpr std::make_index_sequence<N - 1> inputs;
  if constexpr (V > 1) {
    int k = 0;
    const bool vectors = (... && (vectorizes<In>(plan, k++, x, V))) && vectorizes<Out>(plan, N - 1, y, V);
    if (vectors && plan.flat) {
      constexpr int U = V >= 8 ? 2 : 4;
      auto& counters = backend.counters;
      map_dense<V, U, F, Out, In...>
          <<<static_cast<unsigned>(ceil_div(plan.numel, kThreads * V * U)), kThreads, 0, backend.stream()>>>(
              f, plan.numel, y, x...);
      MT_LAUNCHED();
      return;
    }
    if constexpr (kPaths == MapPaths::kRows) {
      if (vectors && plan.inner() % V == 0) return launch_strided<V, 1>(inputs, backend, f, plan, y, x...);
    }
  }
  launch_strided<1, kDouble ? 1 : 4>(inputs, backend, f, plan, y, x...);
}

template <class T> T* data_as(const Tensor& x) { return static_cast<T*>(x.data()); }

/// For kernels that only move elements: f<Bits>() with the unsigned type of the dtype's size.
template <class F> void visit_bits(DType dtype, F&& f) {
  switch (size_of(dtype)) {
    case 8:
      return f.template operator()<std::uint64_t>();
    case 4:
      return f.template operator()<std::uint32_t>();
    case 2:
      return f.template operator()<std::uint16_t>();
    default:
      return f.template operator()<std::uint8_t>();
  }
}

/// y = f(x...) on tensors; the inputs broadcast to y.
template <MapPaths kPaths, class Out, class... In, class F, class... Tensors>
void map(CudaBackend& backend, const F& f, const Tensor& y, const Tensors&... x) {
  static_assert(sizeof...(In) == sizeof...(Tensors));
  launch_map<kPaths, F, Out, In...>(backend, f, make_plan<1 + sizeof...(In)>(y.shape(), {&x..., &y}), data_as<Out>(y),
                                    data_as<const In>(x)...);
}

/// An op on compute types as a function on storage types.
template <class Op, class Out> struct Computes {
  Op op;
  template <class... In> __device__ Out operator()(In... x) const { return convert<Out>(op(widen(x)...)); }
};

}  // namespace mantissa
