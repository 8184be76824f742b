// Rows of a table by index, and the deterministic sum of gradients by row.
#include <bit>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace mantissa {
namespace {

__device__ inline void set_ones(uint4& x) { x = {~0u, ~0u, ~0u, ~0u}; }
template <class Bits> __device__ inline void set_ones(Bits& x) { x = static_cast<Bits>(~Bits(0)); }

// Bytes: the rows read and written once; floor = 2 n row_bytes / bandwidth. A warp a row, moved in words of
// up to 16 bytes. An index outside the table gives NaN (all bits set).
template <class W, class Index>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const Index* ids, const W* table, W* y, std::int64_t n, std::int64_t rows, std::int64_t words) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (i >= n) return;
  const std::int64_t id = ids[i];
  const bool valid = id >= 0 && id < rows;
  const W* from = table + (valid ? id : 0) * words;
  W* to = y + i * words;
  constexpr int kInFlight = 4;
  for (std::int64_t c = threadIdx.x % kWarp; c < words; c += kInFlight * kWarp) {
    W value[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (c + u * kWarp >= words) continue;
      if (valid)
        value[u] = from[c + u * kWarp];
      else
        set_ones(value[u]);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (c + u * kWarp < words) store_word(to + c + u * kWarp, value[u]);
  }
}

// An index outside the table becomes the key `rows`, which no sum takes.
template <class Index>
__global__ void __launch_bounds__(kThreads)
    number_kernel(const Index* ids, std::int64_t n, std::int64_t rows, std::uint32_t* keys, std::uint32_t* positions) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const std::int64_t id = ids[i];
  keys[i] = static_cast<std::uint32_t>(id >= 0 && id < rows ? id : rows);
  positions[i] = static_cast<std::uint32_t>(i);
}

constexpr int kChunk = 32;  // sorted entries that a block of sum_kernel adds up

/// Sorted (row, position) entries, in chunks; a run of equal keys may cross chunks.
template <class A> struct Runs {
  const std::uint32_t *keys, *positions;
  std::int64_t n, rows, columns;
  bool accumulate;
  A *gw, *head, *tail;  // [rows, columns], [chunks, columns] twice

  template <int V> __device__ void put(std::uint32_t key, std::int64_t column, const Vec<A, V>& sum) const {
    if (key >= rows) return;
    A* target = gw + key * columns + column;
    Vec<A, V> out = sum;
    if (accumulate) {
      const Vec<A, V> old = load<V>(target);
#pragma unroll
      for (int j = 0; j < V; ++j) out.v[j] += old.v[j];
    }
    store(target, out);
  }
};

// Bytes: g once, one row of gw for each distinct index. A run within the chunk goes to gw; the part of a run
// that began in an earlier chunk goes to `head`, the part of one that goes on in the next to `tail`.
template <int V, class T> __global__ void __launch_bounds__(128) sum_kernel(Runs<compute_t<T>> p, const T* g) {
  using A = compute_t<T>;
  __shared__ std::uint32_t keys[kChunk + 2], positions[kChunk];  // keys with a neighbour on either side
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kChunk;
  const int m = static_cast<int>(min(p.n - begin, static_cast<std::int64_t>(kChunk)));
  const std::uint32_t none = static_cast<std::uint32_t>(p.rows);
  for (int e = threadIdx.x; e < m + 2; e += blockDim.x) {
    const std::int64_t i = begin + e - 1;
    keys[e] = i >= 0 && i < p.n ? p.keys[i] : none;
    if (e < m) positions[e] = p.positions[begin + e];
  }
  __syncthreads();
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * V; c < p.columns; c += blockDim.x * V) {
    Vec<A, V> sum{};
    bool began_before = keys[0] == keys[1];
    constexpr int kInFlight = 4;
    for (int e = 0; e < m; e += kInFlight) {
      Vec<T, V> row[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
        if (e + u < m) row[u] = load<V>(g + positions[e + u] * p.columns + c);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (e + u >= m) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) sum.v[j] += widen(row[u].v[j]);
        const std::uint32_t key = keys[e + u + 1];
        const bool last = e + u == m - 1, goes_on = keys[e + u + 2] == key;
        if (goes_on && !last) continue;
        if (began_before) {
          store(p.head + blockIdx.x * p.columns + c, sum);
        } else if (goes_on) {
          store(p.tail + blockIdx.x * p.columns + c, sum);
        } else {
          p.put(key, c, sum);
        }
        began_before = false;
        sum = {};
      }
    }
  }
}

// One block a chunk: where a run begins that crosses into later chunks, adds up its parts in order.
template <int V, class A> __global__ void __launch_bounds__(128) join_kernel(Runs<A> p) {
  const std::int64_t chunk = blockIdx.x, chunks = gridDim.x, begin = chunk * kChunk, end = begin + kChunk;
  if (end >= p.n) return;
  const std::uint32_t key = p.keys[end - 1];
  if (key >= p.rows || p.keys[end] != key) return;
  if (begin > 0 && p.keys[begin - 1] == key) return;  // began earlier: all keys in between are equal
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * V; c < p.columns; c += blockDim.x * V) {
    Vec<A, V> sum = load<V>(p.tail + chunk * p.columns + c);
    for (std::int64_t next = chunk + 1; next < chunks && p.keys[next * kChunk] == key; ++next) {
      const Vec<A, V> part = load<V>(p.head + next * p.columns + c);
#pragma unroll
      for (int j = 0; j < V; ++j) sum.v[j] += part.v[j];
    }
    p.put(key, c, sum);
  }
}

}  // namespace

void CudaBackend::embedding(const Tensor& ids, const Tensor& w, Tensor& y) {
  const detail::OpRange range("embedding");
  const std::int64_t n = ids.numel(), rows = w.size(0),
                     bytes = w.size(1) * static_cast<std::int64_t>(size_of(w.dtype()));
  if (n == 0 || bytes == 0 || rows == 0) return;
  const auto run = [&]<class W>() {
    visit_index("embedding", ids.dtype(), [&]<class Index>() {
      embedding_kernel<W><<<static_cast<unsigned>(ceil_div(n, kThreads / kWarp)), kThreads, 0, stream()>>>(
          static_cast<const Index*>(ids.data()), static_cast<const W*>(w.data()), static_cast<W*>(y.data()), n, rows,
          bytes / static_cast<std::int64_t>(sizeof(W)));
      MT_LAUNCHED();
    });
  };
  if (bytes % 16 == 0 && aligned_alike(w.data(), y.data())) return run.template operator()<uint4>();
  switch (size_of(w.dtype())) {
    case 8:
      return run.template operator()<std::uint64_t>();
    case 4:
      return run.template operator()<std::uint32_t>();
    default:
      return run.template operator()<std::uint16_t>();
  }
}

void CudaBackend::embedding_grad(const Tensor& g, const Tensor& ids, bool accumulate, Tensor& gw) {
  const detail::OpRange range("embedding_grad");
  const std::int64_t rows = gw.size(0), columns = gw.size(1), total = columns > 0 ? ids.numel() : 0;
  MT_ASSERT(gw.dtype() == compute_dtype(g.dtype()), "embedding_grad: ", g, " into ", gw);
  MT_ASSERT(rows < (std::int64_t{1} << 32) - 1, "embedding_grad: too many rows in ", gw);
  if (!accumulate) fill(0, gw);
  if (gw.numel() == 0) return;
  constexpr std::int64_t kSlice = std::int64_t{1} << 30;  // positions have 32 bits
  for (std::int64_t from = 0; from < total; from += kSlice) {
    const std::int64_t n = std::min(total - from, kSlice), chunks = ceil_div(n, kChunk);
    const Tensor pairs = workspace(static_cast<std::size_t>(4 * n) * sizeof(std::uint32_t));
    auto *keys = static_cast<std::uint32_t*>(pairs.data()), *positions = keys + n, *sorted = keys + 2 * n,
         *order = keys + 3 * n;
    visit_index("embedding_grad", ids.dtype(), [&]<class Index>() {
      number_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, 0, stream()>>>(
          static_cast<const Index*>(ids.data()) + from, n, rows, keys, positions);
      MT_LAUNCHED();
    });
    std::size_t scratch_bytes = 0;
    const int bits = std::bit_width(static_cast<std::uint64_t>(rows));
    sort_pairs(nullptr, scratch_bytes, keys, sorted, positions, order, n, bits, stream());
    const Tensor scratch = workspace(scratch_bytes);
    sort_pairs(scratch.data(), scratch_bytes, keys, sorted, positions, order, n, bits, stream());
    ++counters.launches;
    visit_float<CudaTypes>("embedding_grad", g.dtype(), [&]<class T>() {
      using A = compute_t<T>;
      const Tensor parts = workspace(2 * static_cast<std::size_t>(chunks * columns) * sizeof(A));
      auto* head = static_cast<A*>(parts.data());
      const Runs<A> p{sorted,
                      order,
                      n,
                      rows,
                      columns,
                      accumulate || from > 0,
                      static_cast<A*>(gw.data()),
                      head,
                      head + chunks * columns};
      const auto* grad = static_cast<const T*>(g.data()) + from * columns;
      const auto run = [&]<int V>() {
        sum_kernel<V><<<static_cast<unsigned>(chunks), 128, 0, stream()>>>(p, grad);
        MT_LAUNCHED();
        join_kernel<V><<<static_cast<unsigned>(chunks), 128, 0, stream()>>>(p);
        MT_LAUNCHED();
      };
      columns % kVector<T> == 0 && aligned_alike(grad, p.gw) ? run.template operator()<kVector<T>>()
                                                             : run.template operator()<1>();
    });
  }
}

}  // namespace mantissa
