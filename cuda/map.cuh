#pragma once
// Elementwise kernels over any strides: y[i] = f(x0[i], x1[i], ...) with broadcasting.
//
// The host orders and merges the axes. Dense tensors are one axis and take the fast kernel; where the innermost axis is
// contiguous, aligned and a multiple of 16 bytes a thread handles one vector, else single elements.

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "core/tensor.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {

/// Nested loops over N operands, innermost axis first. Operand 0 is the output.
template <int N>
struct Loops {
  using Each = std::array<std::int64_t, N>;  // one value an operand
  int rank = 0;
  std::array<std::int64_t, kMaxRank> size{};
  std::array<std::array<std::int64_t, kMaxRank>, N> stride{};

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= size[d];
    return n;
  }
  void push(std::int64_t extent, const Each& strides) {
    size[rank] = extent;
    for (int k = 0; k < N; ++k) stride[k][rank] = strides[k];
    ++rank;
  }
  void swap_axes(int a, int b) {
    std::swap(size[a], size[b]);
    for (auto& s : stride) std::swap(s[a], s[b]);
  }
  /// Innermost: the axis of the output's smallest stride.
  void sort() {
    for (int a = 1; a < rank; ++a)
      for (int b = a; b > 0 && stride[0][b] < stride[0][b - 1]; --b) swap_axes(b, b - 1);
  }
  /// Cuts the outermost axis in two, at a multiple of `vector` if it is the innermost too: *this keeps the first part of
  /// the row-major order, `rest` gets the other. Returns where `rest` begins, in elements of each operand.
  Each split(int vector, Loops& rest) {
    int axis = rank - 1;
    while (axis > 0 && size[axis] == 1) --axis;
    rest = *this;
    size[axis] = axis == 0 ? size[0] / 2 / vector * vector : size[axis] / 2;
    rest.size[axis] -= size[axis];
    Each begin;
    for (int k = 0; k < N; ++k) begin[k] = size[axis] * stride[k][axis];
    return begin;
  }
  /// Joins neighbouring axes that every operand walks in one stride.
  void merge() {
    Loops out;
    for (int d = 0; d < rank; ++d) {
      if (size[d] == 1) continue;
      const int last = out.rank - 1;
      bool joins = last >= 0;
      for (int k = 0; joins && k < N; ++k) joins = stride[k][d] == out.stride[k][last] * out.size[last];
      if (joins) {
        out.size[last] *= size[d];
        continue;
      }
      Each s;
      for (int k = 0; k < N; ++k) s[k] = stride[k][d];
      out.push(size[d], s);
    }
    if (out.rank == 0) {
      Each s;
      s.fill(1);
      out.push(1, s);
    }
    *this = out;
  }
};

/// The loops over `shape` of operands that broadcast to it, in row-major order (unsorted, unmerged).
template <int N>
Loops<N> loops_over(const Shape& shape, const std::array<const Tensor*, N>& operands) {
  Loops<N> loops;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    typename Loops<N>::Each strides{};
    for (int k = 0; k < N; ++k) {
      const int axis = d - (shape.rank() - operands[k]->rank());
      strides[k] = axis < 0 || operands[k]->shape()[axis] != shape[d] ? 0 : operands[k]->strides()[axis];
    }
    loops.push(shape[d], strides);
  }
  return loops;
}

/// The same, for the device; sizes count units of V elements along the innermost axis.
template <int N>
struct Layout {
  int rank;
  FastDivisor size[kMaxRank];
  std::int64_t stride[N][kMaxRank];

  explicit Layout(const Loops<N>& loops, int vector = 1) : rank(loops.rank) {
    for (int d = 0; d < rank; ++d) {
      size[d] = FastDivisor(static_cast<std::uint32_t>(d == 0 ? loops.size[d] / vector : loops.size[d]));
      for (int k = 0; k < N; ++k) stride[k][d] = loops.stride[k][d] * (d == 0 ? vector : 1);
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

template <class T, int V, int U>
struct Batch {
  Vec<T, V> unit[U];
};

template <int V, int U, class T>
__device__ inline void fetch(Batch<T, V, U>& b, const T* x) {
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

// Dense operands. Bytes: every operand once; floor = bytes / bandwidth. All loads of a thread precede its first store.
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
template <int V, class T>
__device__ inline Vec<T, V> load_or_spread(const T* x, bool constant) {
  if (V == 1 || !constant) return load<V>(x);
  const T value = *x;
  Vec<T, V> y;
#pragma unroll
  for (int j = 0; j < V; ++j) y.v[j] = value;
  return y;
}

template <int V, class F, class Out, class... In>
__device__ inline void apply(const F& f, Out* y, const Vec<In, V>&... x) {
  Vec<Out, V> result;
#pragma unroll
  for (int j = 0; j < V; ++j) result.v[j] = f(x.v[j]...);
  store(y, result);
}

template <int V, std::size_t... K, class F, class Out, class... In>
__device__ inline void map_unit(std::index_sequence<K...>, const F& f, const Layout<1 + sizeof...(In)>& layout,
                                std::uint32_t unit, Out* y, const In*... x) {
  std::int64_t offset[1 + sizeof...(In)];
  layout.locate(unit, offset);
  apply<V, F, Out, In...>(f, y + offset[0], load_or_spread<V>(x + offset[K + 1], layout.stride[K + 1][0] == 0)...);
}

// Any strides, broadcast operands. Bytes: every operand once as long as repeated reads hit a cache.
template <int V, int U, class F, class Out, class... In>
__global__ void __launch_bounds__(kThreads)
    map_strided(F f, Layout<1 + sizeof...(In)> layout, std::uint32_t units, Out* y, const In*... x) {
  const std::uint32_t first = blockIdx.x * (kThreads * U) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u * kThreads < units)
      map_unit<V>(std::make_index_sequence<sizeof...(In)>{}, f, layout, first + u * kThreads, y, x...);
}

template <class T, int N>
bool vectorizes(const Loops<N>& loops, int k, const T* data, int vector) {
  constexpr std::uintptr_t kLimit = 16;
  const std::uintptr_t bytes = sizeof(T) * vector;
  const bool constant = k > 0 && loops.stride[k][0] == 0;
  if (!constant && loops.stride[k][0] != 1) return false;
  if (!constant && reinterpret_cast<std::uintptr_t>(data) % (bytes < kLimit ? bytes : kLimit) != 0) return false;
  for (int d = 1; d < loops.rank; ++d)
    if (!constant && loops.stride[k][d] % vector != 0) return false;
  return loops.rank == 1 || loops.size[0] % vector == 0;
}

template <int V, int U, std::size_t... K, class F, class Out, class... In>
void launch_strided(std::index_sequence<K...> inputs, CudaBackend& backend, const F& f, Loops<1 + sizeof...(In)> loops, Out* y,
                    const In*... x) {
  const std::int64_t units = loops.numel() / V;
  if (units >= kMaxUnits) {
    Loops<1 + sizeof...(In)> rest;
    const auto begin = loops.split(V, rest);
    launch_strided<V, U>(inputs, backend, f, loops, y, x...);
    launch_strided<V, U>(inputs, backend, f, rest, y + begin[0], (x + begin[K + 1])...);
    return;
  }
  auto& counters = backend.counters;
  map_strided<V, U, F, Out, In...><<<static_cast<unsigned>(ceil_div(units, kThreads * U)), kThreads, 0, backend.stream()>>>(
      f, Layout<1 + sizeof...(In)>(loops, V), static_cast<std::uint32_t>(units), y, x...);
  MT_LAUNCHED();
}

/// Which kernels exist for a function: kStrided for dense tensors and any strides, kRows also for vectors along rows that
/// are not dense as a whole, kElements only the one that takes single elements.
enum class MapPaths { kElements, kStrided, kRows };

/// y = f(x...) at the storage types Out and In...; loops: operand 0 is y, then the inputs.
template <MapPaths kPaths, class F, class Out, class... In>
void launch_map(CudaBackend& backend, const F& f, Loops<1 + sizeof...(In)> loops, Out* y, const In*... x) {
  constexpr int N = 1 + sizeof...(In);
  constexpr int kSmallest = static_cast<int>(std::min({sizeof(Out), sizeof(In)...}));
  constexpr int kLargest = static_cast<int>(std::max({sizeof(Out), sizeof(In)...}));
  constexpr bool kDouble = (std::is_same_v<Out, double> || ... || std::is_same_v<In, double>);  // rare: little code
  constexpr int V = kDouble || kPaths == MapPaths::kElements ? 1 : std::min(16 / kSmallest, 32 / kLargest);
  auto& counters = backend.counters;
  if (loops.numel() == 0) return;
  loops.sort();
  loops.merge();
  int k = 0;
  const bool vectors = V > 1 && vectorizes<Out>(loops, 0, y, V) && (... && (++k, vectorizes<In>(loops, k, x, V)));
  if constexpr (V > 1) {
    bool dense = vectors && loops.rank == 1;
    for (k = 0; k < N; ++k) dense = dense && loops.stride[k][0] == 1;
    if (dense) {
      constexpr int U = V >= 8 ? 2 : 4;
      const std::int64_t n = loops.size[0];
      map_dense<V, U, F, Out, In...>
          <<<static_cast<unsigned>(ceil_div(n, kThreads * V * U)), kThreads, 0, backend.stream()>>>(f, n, y, x...);
      MT_LAUNCHED();
      return;
    }
  }
  constexpr std::make_index_sequence<N - 1> inputs;
  if constexpr (V > 1 && kPaths == MapPaths::kRows) {
    if (vectors && loops.size[0] % V == 0) return launch_strided<V, 1>(inputs, backend, f, loops, y, x...);
  }
  launch_strided<1, kDouble ? 1 : 4>(inputs, backend, f, loops, y, x...);
}

template <class T>
T* data_as(const Tensor& x) {
  return static_cast<T*>(x.data());
}

/// For kernels that only move elements: f<Bits>() with the unsigned type of the dtype's size.
template <class F>
void visit_bits(DType dtype, F&& f) {
  switch (size_of(dtype)) {
    case 8: return f.template operator()<std::uint64_t>();
    case 4: return f.template operator()<std::uint32_t>();
    case 2: return f.template operator()<std::uint16_t>();
    default: return f.template operator()<std::uint8_t>();
  }
}

/// y = f(x...) on tensors; the inputs broadcast to y.
template <MapPaths kPaths, class Out, class... In, class F, class... Tensors>
void map(CudaBackend& backend, const F& f, const Tensor& y, const Tensors&... x) {
  static_assert(sizeof...(In) == sizeof...(Tensors));
  launch_map<kPaths, F, Out, In...>(backend, f, loops_over<1 + sizeof...(In)>(y.shape(), {&y, &x...}), data_as<Out>(y),
                                    data_as<const In>(x)...);
}

/// An op on compute types as a function on storage types.
template <class Op, class Out>
struct Computes {
  Op op;
  template <class... In>
  __device__ Out operator()(In... x) const {
    return convert<Out>(op(widen(x)...));
  }
};

}  // namespace mantissa
