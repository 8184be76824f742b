// Gather, deterministic scatter, and the check of index ranges.
#include <bit>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernels.h"
#include "cuda/row_major.cuh"

namespace mantissa {
namespace {

/// x as `index` walks it: the axis, which the index replaces, does not move.
RowMajor without_axis(const Tensor& x, const Shape& shape, int axis) {
  RowMajor map;
  for (int d = 0; d < shape.rank(); ++d)
    if (shape[d] != 1) map.push(shape[d], d == axis ? 0 : x.strides()[d]);
  map.finish();
  return map;
}

// Bytes: index and y once, x as far as it is hit. An index outside the axis gives NaN (all bits set).
template <class Bits, class Index>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Bits* x, const Index* index, Bits* y, std::int64_t n, std::int64_t size, std::int64_t stride,
                  RowMajor x_at, RowMajor index_at, RowMajor y_at) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const std::int64_t k = index[index_at(i)];
  y[y_at(i)] = k >= 0 && k < size ? x[x_at(i) + k * stride] : static_cast<Bits>(~Bits(0));
}

/// The elements of a scatter: `lines` lines of `length` along the axis. Lines never meet in y.
template <class T, class Index> struct Scatter {
  using A = compute_t<T>;
  const T* x;
  const Index* index;
  A* y;
  std::int64_t lines, length, size;  // size: of y's axis
  std::int64_t x_stride, index_stride, y_stride;
  RowMajor x_at, index_at, y_at;  // beginnings of lines
  __device__ bool valid(std::int64_t k) const { return k >= 0 && k < size; }
};

// A thread a line, in the order of its elements.
template <class T, class Index> __global__ void __launch_bounds__(kThreads) scatter_lines_kernel(Scatter<T, Index> p) {
  const std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (line >= p.lines) return;
  const T* x = p.x + p.x_at(line);
  const Index* index = p.index + p.index_at(line);
  auto* y = p.y + p.y_at(line);
  for (std::int64_t j = 0; j < p.length; ++j) {
    const std::int64_t k = index[j * p.index_stride];
    if (p.valid(k)) y[k * p.y_stride] += widen(x[j * p.x_stride]);
  }
}

// The key of an element is its target; one key more for those without.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    scatter_keys_kernel(Scatter<T, Index> p, std::uint64_t* keys, std::uint32_t* elements) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.lines * p.length) return;
  const std::int64_t line = i / p.length, j = i % p.length, k = p.index[p.index_at(line) + j * p.index_stride];
  keys[i] = static_cast<std::uint64_t>(p.valid(k) ? line * p.size + k : p.lines * p.size);
  elements[i] = static_cast<std::uint32_t>(i);
}

// A warp for each sorted element; the one at the beginning of a run of equal keys adds up the run.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    scatter_runs_kernel(Scatter<T, Index> p, const std::uint64_t* keys, const std::uint32_t* elements, std::int64_t n) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (begin >= n) return;
  const std::uint64_t key = keys[begin];
  if (key == static_cast<std::uint64_t>(p.lines * p.size) || (begin > 0 && keys[begin - 1] == key)) return;
  std::int64_t low = begin + 1, high = n;  // the first element of another run
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (keys[middle] == key)
      low = middle + 1;
    else
      high = middle;
  }
  compute_t<T> sum = 0;
#pragma unroll 4
  for (std::int64_t e = begin + threadIdx.x % kWarp; e < low; e += kWarp) {
    const std::int64_t i = elements[e];
    sum += widen(p.x[p.x_at(i / p.length) + i % p.length * p.x_stride]);
  }
  sum = warp_reduce(sum, SumOp{});
  const auto target = static_cast<std::int64_t>(key);
  if (threadIdx.x % kWarp == 0) p.y[p.y_at(target / p.size) + target % p.size * p.y_stride] += sum;
}

template <class Index>
__global__ void __launch_bounds__(kThreads)
    range_kernel(const Index* index, std::int64_t n, RowMajor at, std::int64_t low, std::int64_t high,
                 std::int64_t ignored, int* bad) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const std::int64_t k = index[at(i)];
  if ((k < low || k >= high) && k != ignored) *bad = 1;  // all writers agree
}

unsigned blocks_for(std::int64_t n, int per_block) { return static_cast<unsigned>(ceil_div(n, per_block)); }

}  // namespace

void CudaBackend::gather(const Tensor& x, int axis, const Tensor& index, Tensor& y) {
  const detail::OpRange range("gather");
  const std::int64_t n = index.numel();
  if (n == 0) return;
  visit_index("gather", index.dtype(), [&]<class Index>() {
    const auto run = [&]<class Bits>() {
      gather_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream()>>>(
          static_cast<const Bits*>(x.data()), static_cast<const Index*>(index.data()), static_cast<Bits*>(y.data()), n,
          x.shape()[axis], x.strides()[axis], without_axis(x, index.shape(), axis), RowMajor(index), RowMajor(y));
      MT_LAUNCHED();
    };
    switch (size_of(x.dtype())) {
      case 8:
        return run.template operator()<std::uint64_t>();
      case 4:
        return run.template operator()<std::uint32_t>();
      case 2:
        return run.template operator()<std::uint16_t>();
      default:
        return run.template operator()<std::uint8_t>();
    }
  });
}

void CudaBackend::scatter_add(const Tensor& x, int axis, const Tensor& index, Tensor& y) {
  const detail::OpRange range("scatter_add");
  const std::int64_t n = index.numel();
  if (n == 0 || y.numel() == 0) return;
  MT_ASSERT(y.dtype() == compute_dtype(x.dtype()), "scatter_add: ", x, " into ", y);
  Shape line_shape = index.shape();
  line_shape[axis] = 1;
  const std::int64_t length = index.shape()[axis], lines = n / length, size = y.shape()[axis];
  visit_index("scatter_add", index.dtype(), [&]<class Index>() {
    visit_float<CudaTypes>("scatter_add", x.dtype(), [&]<class T>() {
      const Scatter<T, Index> p{static_cast<const T*>(x.data()),
                                static_cast<const Index*>(index.data()),
                                static_cast<compute_t<T>*>(y.data()),
                                lines,
                                length,
                                size,
                                x.strides()[axis],
                                index.strides()[axis],
                                y.strides()[axis],
                                without_axis(x, line_shape, axis),
                                without_axis(index, line_shape, axis),
                                without_axis(y, line_shape, axis)};
      constexpr std::int64_t kManyLines = 8192, kShortLine = 64;
      if (lines >= kManyLines || length <= kShortLine || n >= kMaxUnits) {
        scatter_lines_kernel<<<blocks_for(lines, kThreads), kThreads, 0, stream()>>>(p);
        MT_LAUNCHED();
        return;
      }
      const Tensor memory =
          workspace(static_cast<std::size_t>(2 * n) * (sizeof(std::uint64_t) + sizeof(std::uint32_t)));
      auto *keys = static_cast<std::uint64_t*>(memory.data()), *sorted = keys + n;
      auto *elements = reinterpret_cast<std::uint32_t*>(keys + 2 * n), *order = elements + n;
      scatter_keys_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream()>>>(p, keys, elements);
      MT_LAUNCHED();
      std::size_t scratch_bytes = 0;
      const int bits = std::bit_width(static_cast<std::uint64_t>(lines * size));
      sort_pairs(nullptr, scratch_bytes, keys, sorted, elements, order, n, bits, stream());
      const Tensor scratch = workspace(scratch_bytes);
      sort_pairs(scratch.data(), scratch_bytes, keys, sorted, elements, order, n, bits, stream());
      ++counters.launches;
      scatter_runs_kernel<<<blocks_for(n, kThreads / kWarp), kThreads, 0, stream()>>>(
          p, static_cast<const std::uint64_t*>(sorted), static_cast<const std::uint32_t*>(order), n);
      MT_LAUNCHED();
    });
  });
}

bool CudaBackend::indices_in_range(const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored) {
  const detail::OpRange range("indices_in_range");
  const std::int64_t n = index.numel();
  if (n == 0) return true;
  const Tensor flag = workspace(sizeof(int));
  MT_CUDA_CHECK(cudaMemsetAsync(flag.data(), 0, sizeof(int), stream()));
  visit_index("indices_in_range", index.dtype(), [&]<class Index>() {
    range_kernel<<<blocks_for(n, kThreads), kThreads, 0, stream()>>>(static_cast<const Index*>(index.data()), n,
                                                                     RowMajor(index), low, high, ignored,
                                                                     static_cast<int*>(flag.data()));
    MT_LAUNCHED();
  });
  int bad = 0;
  copy_to_host(flag, &bad);
  return bad == 0;
}

}  // namespace mantissa
