// Gradients of layer and RMS norm: gx = rstd (g w - mean(g w) - xhat mean(g w xhat)) (+ g_sum), gw = sum g
// xhat, gb = sum g, the last two as partial sums of each block and then over the blocks, in a fixed order.
#include "cuda/norm.cuh"

namespace mantissa {
namespace {

template <class T> struct NormGradArguments {
  using A = compute_t<T>;
  const T *g, *g_sum, *x;
  const A *w, *mean, *rstd;
  T* gx;
  A *partial_w, *partial_b;  // [blocks, columns]; null when not wanted
  std::int64_t rows, columns;
  __device__ A mean_of(std::int64_t row) const { return mean != nullptr ? mean[row] : A(0); }
};

/// Blocks of norm_grad_kernel on a multiprocessor: what its registers allow, and few, as each writes partial
/// sums.
constexpr int norm_grad_occupancy(int group, int items) {
  if (group == kWarp) return items == 1 ? 4 : 2;
  return group == 128 ? 4 : group == 256 ? 3 : items == 1 ? 2 : 1;
}

/// Shared memory of norm_grad_kernel: two rows of g and x for each group, one in use and one on its way.
template <class T, int kGroup, int kItems> constexpr std::size_t norm_grad_memory() {
  return 4 * kItems * kNormBlock<kGroup> * sizeof(Vec<T, kNormWidth>);
}

// Bytes: g, x (and g_sum) read once, gx written once; floor = those / bandwidth. The blocks stay and walk
// over the rows, so that each thread keeps the sums for gw and gb of its columns in registers; it copies its
// part of the next row to shared memory meanwhile, where no other thread looks.
template <int kGroup, int kItems, class T>
__global__ void __launch_bounds__(kNormBlock<kGroup>, norm_grad_occupancy(kGroup, kItems))
    norm_grad_kernel(NormGradArguments<T> p) {
  constexpr int V = kNormWidth, kBlock = kNormBlock<kGroup>, kRows = kBlock / kGroup, kStep = kGroup * V;
  using Part = Vec<T, V>;
  extern __shared__ __align__(16) unsigned char memory[];
  const int columns = static_cast<int>(p.columns), first = static_cast<int>(threadIdx.x % kGroup) * V;
  const auto part = [&](int stage, int tensor, int k) {
    return reinterpret_cast<Part*>(memory) + ((stage * 2 + tensor) * kItems + k) * kBlock + threadIdx.x;
  };
  const auto fetch = [&](std::int64_t row, int stage) {
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (const int i = first + k * kStep; i < columns) {
        copy_async(part(stage, 0, k), p.g + row * p.columns + i);
        copy_async(part(stage, 1, k), p.x + row * p.columns + i);
      }
  };
  const bool centred = p.mean != nullptr;
  const float share = 1.0f / static_cast<float>(columns);
  float sum_w[kItems][V] = {}, sum_b[kItems][V] = {};
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRows;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  float next_mean = 0, next_rstd = 0;
  if (row < p.rows) {
    fetch(row, 0);
    next_mean = p.mean_of(row);
    next_rstd = p.rstd[row];
  }
  commit_copies();
  for (int stage = 0; row < p.rows; row += step, stage ^= 1) {
    const float mean = next_mean, rstd = next_rstd;
    if (row + step < p.rows) {
      fetch(row + step, stage ^ 1);
      next_mean = p.mean_of(row + step);
      next_rstd = p.rstd[row + step];
    }
    commit_copies();
    wait_for_copies<1>();
    Part extra[kItems];
    if (p.g_sum != nullptr) {
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (const int i = first + k * kStep; i < columns) extra[k] = load<V>(p.g_sum + row * p.columns + i);
    }
    Pair<float> total{0, 0};  // of g w and g w xhat
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = first + k * kStep;
      if (i >= columns) continue;
      const Part g = *part(stage, 0, k), x = *part(stage, 1, k);
      const Vec<float, V> w = parameter<V>(p.w, i, 1.0f);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float a = widen(g.v[j]), xhat = (widen(x.v[j]) - mean) * rstd, aw = a * w.v[j];
        total.first += aw;
        total.second += aw * xhat;
        sum_w[k][j] += a * xhat;
        sum_b[k][j] += a;
      }
    }
    total = block_sum<kGroup>(total);
    asm volatile("" ::: "memory");  // read the row again: its widened values would not fit the registers
    const float shift = centred ? total.first * share : 0.0f, slope = total.second * share;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = first + k * kStep;
      if (i >= columns) continue;
      const Part g = *part(stage, 0, k), x = *part(stage, 1, k);
      const Vec<float, V> w = parameter<V>(p.w, i, 1.0f);
      Part out;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float xhat = (widen(x.v[j]) - mean) * rstd;
        float value = rstd * (widen(g.v[j]) * w.v[j] - shift - xhat * slope);
        if (p.g_sum != nullptr) value += widen(extra[k].v[j]);
        out.v[j] = convert<T>(value);
      }
      store(p.gx + row * p.columns + i, out);
    }
  }
  // The warps of a block hold sums for the same columns; their rows' memory is free now.
  float* shared = reinterpret_cast<float*>(memory);
  wait_for_copies<0>();
  __syncthreads();
  const auto write = [&](float(&sum)[kItems][V], float* partial) {
    if (partial == nullptr) return;
    partial += blockIdx.x * p.columns;
    if constexpr (kRows > 1) {
      float* mine = shared + threadIdx.x / kGroup * (kItems * kGroup * V);
#pragma unroll
      for (int k = 0; k < kItems; ++k)
#pragma unroll
        for (int j = 0; j < V; ++j) mine[first + k * kGroup * V + j] = sum[k][j];
      __syncthreads();
      for (int c = threadIdx.x; c < columns; c += kNormBlock<kGroup>) {
        float total = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) total += shared[r * (kItems * kGroup * V) + c];
        partial[c] = total;
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (const int i = first + k * kGroup * V; i < columns) {
#pragma unroll
          for (int j = 0; j < V; ++j) partial[i + j] = sum[k][j];
        }
    }
  };
  write(sum_w, p.partial_w);
  write(sum_b, p.partial_b);
}

// Rows of any length: gx alone, g and x read twice.
template <int kGroup, class T>
__global__ void __launch_bounds__(kThreads) norm_grad_long_kernel(NormGradArguments<T> p) {
  using A = compute_t<T>;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= p.rows) return;
  const std::int64_t base = row * p.columns, first = threadIdx.x % kGroup;
  const A mean = p.mean_of(row), rstd = p.rstd[row], share = A(1) / static_cast<A>(p.columns);
  Pair<A> total{0, 0};
  for (std::int64_t i = first; i < p.columns; i += kGroup) {
    const A aw = widen(p.g[base + i]) * (p.w != nullptr ? p.w[i] : A(1));
    total.first += aw;
    total.second += aw * ((widen(p.x[base + i]) - mean) * rstd);
  }
  total = block_sum<kGroup>(total);
  const A shift = p.mean != nullptr ? total.first * share : A(0), slope = total.second * share;
  for (std::int64_t i = first; i < p.columns; i += kGroup) {
    const A aw = widen(p.g[base + i]) * (p.w != nullptr ? p.w[i] : A(1)), xhat = (widen(p.x[base + i]) - mean) * rstd;
    A value = rstd * (aw - shift - xhat * slope);
    if (p.g_sum != nullptr) value += widen(p.g_sum[base + i]);
    p.gx[base + i] = convert<T>(value);
  }
}

constexpr int kColumnRows = 32;  // rows that a block of the two column kernels handles at a time
constexpr int kColumnThreads = kColumnRows * kWarp;

/// Sum over threadIdx.y, valid where it is 0.
template <class A> __device__ inline A sum_of_warps(A x) {
  __shared__ A shared[kColumnRows][kWarp];
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  A total = 0;
  if (threadIdx.y == 0)
    for (int r = 0; r < kColumnRows; ++r) total += shared[r][threadIdx.x];
  __syncthreads();
  return total;
}

// The partial sums for gw and gb of the rows blockIdx.y, blockIdx.y + gridDim.y, ... (times kColumnRows): g
// and x once more.
template <class T> __global__ void __launch_bounds__(kColumnThreads) column_partials_kernel(NormGradArguments<T> p) {
  using A = compute_t<T>;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A sum_w = 0, sum_b = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * kColumnRows;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * kColumnRows + threadIdx.y;
       c < p.columns && row < p.rows; row += step) {
    const A a = widen(p.g[row * p.columns + c]);
    sum_w += a * ((widen(p.x[row * p.columns + c]) - p.mean_of(row)) * p.rstd[row]);
    sum_b += a;
  }
  sum_w = sum_of_warps(sum_w);
  sum_b = sum_of_warps(sum_b);
  if (threadIdx.y != 0 || c >= p.columns) return;
  if (p.partial_w != nullptr) p.partial_w[blockIdx.y * p.columns + c] = sum_w;
  if (p.partial_b != nullptr) p.partial_b[blockIdx.y * p.columns + c] = sum_b;
}

// gw (blockIdx.y = 0) and gb (1) from the partial sums of `blocks` blocks.
template <class A>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums_kernel(const A* partial_w, const A* partial_b, int blocks, std::int64_t columns, bool accumulate, A* gw,
                       A* gb) {
  const A* partial = blockIdx.y == 0 ? partial_w : partial_b;
  A* target = blockIdx.y == 0 ? gw : gb;
  if (target == nullptr) return;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A sum = 0;
#pragma unroll 4
  for (int r = threadIdx.y; r < blocks; r += kColumnRows)
    if (c < columns) sum += partial[r * columns + c];
  sum = sum_of_warps(sum);
  if (threadIdx.y == 0 && c < columns) target[c] = accumulate ? target[c] + sum : sum;
}

}  // namespace

void CudaBackend::norm_grad(NormKind kind, const Tensor& g, const Tensor& g_sum, const Tensor& x, const Tensor& w,
                            const Tensor& mean, const Tensor& rstd, bool accumulate, Tensor& gx, Tensor& gw,
                            Tensor& gb) {
  const detail::OpRange range("norm_grad");
  const std::int64_t columns = x.size(-1), rows = columns > 0 ? x.numel() / columns : 0;
  if (columns == 0) return;
  const bool sums = gw.defined() || gb.defined();
  const std::int64_t processors = properties_.multiProcessorCount, most_blocks = 4 * processors;
  visit_float<CudaTypes>("norm_grad", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const Tensor scratch = workspace(sums ? 2 * static_cast<std::size_t>(most_blocks * columns) * sizeof(A) : 0);
    auto* partial = static_cast<A*>(scratch.data());
    NormGradArguments<T> p{data_or_null<T>(g),
                           data_or_null<T>(g_sum),
                           data_or_null<T>(x),
                           data_or_null<A>(w),
                           kind == NormKind::layer ? data_or_null<A>(mean) : nullptr,
                           data_or_null<A>(rstd),
                           static_cast<T*>(gx.data()),
                           gw.defined() ? partial : nullptr,
                           gb.defined() ? partial + most_blocks * columns : nullptr,
                           rows,
                           columns};
    std::int64_t blocks = 0;  // that wrote partial sums
    bool done = rows == 0;
    if constexpr (!std::is_same_v<T, double>) {
      const bool vectors = columns % kNormWidth == 0 && aligned_alike(p.g, p.g_sum, p.x, p.w, p.gx);
      if (!done && vectors) {
        const auto run = [&]<int kGroup, int kItems>() {
          constexpr int kBlock = kNormBlock<kGroup>;
          constexpr std::size_t kMemory = norm_grad_memory<T, kGroup, kItems>();
          done = kMemory <= properties_.sharedMemPerBlockOptin;
          if (!done) return;
          blocks = std::min(norm_grad_occupancy(kGroup, kItems) * processors, ceil_div(rows, kBlock / kGroup));
          const auto kernel = norm_grad_kernel<kGroup, kItems, T>;
          if (kMemory > std::size_t{48} << 10)
            MT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory));
          kernel<<<static_cast<unsigned>(blocks), kBlock, kMemory, stream()>>>(p);
          MT_LAUNCHED();
        };
        with_registers(columns, run);
      }
    }
    if (!done) {
      if (columns > 1024) {
        norm_grad_long_kernel<kThreads><<<static_cast<unsigned>(rows), kThreads, 0, stream()>>>(p);
      } else {
        norm_grad_long_kernel<kWarp>
            <<<static_cast<unsigned>(ceil_div(rows, kThreads / kWarp)), kThreads, 0, stream()>>>(p);
      }
      MT_LAUNCHED();
    }
    if (!sums) return;
    const auto tiles = static_cast<unsigned>(ceil_div(columns, kWarp));
    const dim3 block(kWarp, kColumnRows);
    if (!done) {
      blocks = std::min(most_blocks, ceil_div(rows, kColumnRows));
      column_partials_kernel<<<dim3(tiles, static_cast<unsigned>(blocks)), block, 0, stream()>>>(p);
      MT_LAUNCHED();
    }
    column_sums_kernel<<<dim3(tiles, 2), block, 0, stream()>>>(
        static_cast<const A*>(partial), static_cast<const A*>(partial + most_blocks * columns),
        static_cast<int>(blocks), columns, accumulate, static_cast<A*>(gw.data()), static_cast<A*>(gb.data()));
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
