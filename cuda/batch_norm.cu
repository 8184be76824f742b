// Batch norm of channels-last images, as a matrix [rows = N H W, channels]: statistics of chunks of rows,
// whose extent depends on the shape alone, are combined in order; then one pass over the elements.
#include <algorithm>
#include <bit>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {
namespace {

constexpr int kTogether = 4;  // rows that a thread loads before it uses them

/// Threads of a block: `lanes` neighbours take V channels each of a row, kThreads / lanes rows at a time.
struct Tiles {
  std::int64_t rows, channels, units, rows_a_chunk, chunks;
  int lanes;

  Tiles(std::int64_t r, std::int64_t c, int vector) : rows(r), channels(c), units(c / vector) {
    constexpr std::int64_t kBlocks = 384;  // three for each of the multiprocessors of a large device
    lanes = static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(std::min<std::int64_t>(units, kWarp))));
    const std::int64_t step = std::int64_t{kThreads} / lanes * kTogether;
    const std::int64_t wanted = std::max<std::int64_t>(1, kBlocks / columns());
    rows_a_chunk = std::max<std::int64_t>(1, ceil_div(ceil_div(rows, wanted), step)) * step;
    chunks = ceil_div(rows, rows_a_chunk);
  }
  std::int64_t columns() const { return ceil_div(units, lanes); }
  dim3 grid() const { return dim3(static_cast<unsigned>(columns()), static_cast<unsigned>(chunks)); }
  dim3 block() const { return dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(kThreads / lanes)); }
  __host__ __device__ std::int64_t rows_of(std::int64_t chunk) const {
    const std::int64_t left = rows - chunk * rows_a_chunk;
    return left < rows_a_chunk ? left : rows_a_chunk;
  }
};

/// f<kRows>(row) for the rows of this thread within its chunk: kRows at a time, blockDim.y apart.
template <class F> __device__ void for_each_row(const Tiles& t, const F& f) {
  const std::int64_t end = blockIdx.y * t.rows_a_chunk + t.rows_of(blockIdx.y);
  std::int64_t row = blockIdx.y * t.rows_a_chunk + threadIdx.y;
  for (; row + (kTogether - 1) * blockDim.y < end; row += kTogether * blockDim.y) f.template operator()<kTogether>(row);
  for (; row < end; row += blockDim.y) f.template operator()<1>(row);
}

/// V values of each of kRows rows, blockDim.y apart.
template <int V, int kRows, class T> struct Rows {
  Vec<T, V> row[kRows];
  __device__ Rows(const Tiles& t, const T* x, std::int64_t first, std::int64_t channel) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) row[k] = load<V>(x + (first + k * blockDim.y) * t.channels + channel);
  }
  __device__ compute_t<T> at(int k, int j) const { return widen(row[k].v[j]); }
};

/// Count, mean and biased variance of V channels, merged without cancellation and without squares that
/// overflow before the variance does (after Chan, Golub and LeVeque 1979).
template <class A, int V> struct Moments {
  A count = 0, first[V] = {}, second[V] = {};
  __device__ void merge(const Moments& b) {
    if (b.count == A(0)) return;
    count += b.count;
    const A share = b.count / count;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const A d = b.first[j] - first[j];
      first[j] += d * share;
      second[j] += share * (b.second[j] - second[j] + d * (d * (A(1) - share)));
    }
  }
  template <int kRows, class T> __device__ void add(const Rows<V, kRows, T>& x) {
    Moments group;
    group.count = A(kRows);
#pragma unroll
    for (int j = 0; j < V; ++j) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) group.first[j] += x.at(k, j) * (A(1) / kRows);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const A d = x.at(k, j) - group.first[j];
        group.second[j] += d * (d * (A(1) / kRows));
      }
    }
    merge(group);
  }
};

/// Sums of g xhat and of g.
template <class A, int V> struct GradSums {
  A first[V] = {}, second[V] = {};
  __device__ void merge(const GradSums& b) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      first[j] += b.first[j];
      second[j] += b.second[j];
    }
  }
};

/// Merges what the block's rows hold, as a tree, and writes the chunk's partial results [chunk][2][channels].
template <int V, class P, class A>
__device__ void finish_chunk(const Tiles& t, P mine, std::int64_t channel, A* partials) {
  __shared__ __align__(16) unsigned char memory[kThreads * sizeof(P)];
  P* shared = reinterpret_cast<P*>(memory);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  shared[thread] = mine;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.y) >= half) continue;
    mine.merge(shared[thread + half * blockDim.x]);
    shared[thread] = mine;
  }
  if (threadIdx.y != 0 || channel >= t.channels) return;
  A* out = partials + 2 * blockIdx.y * t.channels + channel;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out[j] = mine.first[j];
    out[t.channels + j] = mine.second[j];
  }
}

template <int V> __device__ std::int64_t first_channel() {
  return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
}

// Bytes: x once; floor = those / bandwidth.
template <int V, class T>
__global__ void __launch_bounds__(kThreads, 3) moments_kernel(Tiles t, const T* x, compute_t<T>* partials) {
  using A = compute_t<T>;
  const std::int64_t channel = first_channel<V>();
  Moments<A, V> mine;
  if (channel < t.channels)
    for_each_row(t, [&]<int kRows>(std::int64_t row) { mine.add(Rows<V, kRows, T>(t, x, row, channel)); });
  finish_chunk<V>(t, mine, channel, partials);
}

constexpr int kChunkThreads = 16;  // threads that share the chunks of a channel; a block has kWarp channels

/// The sum over threadIdx.y, in the same order in every thread.
__device__ double column_sum(double x) {
  __shared__ double shared[kChunkThreads][kWarp];
  __syncthreads();
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kChunkThreads; ++k) sum += shared[k][threadIdx.x];
  return sum;
}

/// The sum of f(chunk) over all chunks, shared by the threads of a channel.
template <class F> __device__ double sum_of_chunks(const Tiles& t, bool inside, const F& f) {
  double sum = 0;
  for (std::int64_t chunk = threadIdx.y; inside && chunk < t.chunks; chunk += kChunkThreads) sum += f(chunk);
  return column_sum(sum);
}

// One block for 32 channels. Partials are read twice: the mean of all rows comes first.
template <class A>
__global__ void __launch_bounds__(kWarp* kChunkThreads)
    statistics_kernel(Tiles t, const A* partials, double eps, double momentum, A* running_mean, A* running_var, A* mean,
                      A* rstd) {
  const std::int64_t channel = first_channel<1>();
  const bool inside = channel < t.channels;
  const double inverse = 1 / static_cast<double>(t.rows);
  const A* mine = partials + channel;
  const double m = sum_of_chunks(t, inside, [&](std::int64_t chunk) {
    return static_cast<double>(t.rows_of(chunk)) * inverse * mine[2 * chunk * t.channels];
  });
  const double variance = sum_of_chunks(t, inside, [&](std::int64_t chunk) {
    const double d = mine[2 * chunk * t.channels] - m;
    return static_cast<double>(t.rows_of(chunk)) * inverse * (d * d + mine[(2 * chunk + 1) * t.channels]);
  });
  if (!inside || threadIdx.y != 0) return;
  const double rows = static_cast<double>(t.rows), unbiased = variance * (t.rows > 1 ? rows / (rows - 1) : 1);
  mean[channel] = static_cast<A>(m);
  rstd[channel] = static_cast<A>(1 / ::sqrt(variance + eps));
  running_mean[channel] = static_cast<A>((1 - momentum) * running_mean[channel] + momentum * m);
  running_var[channel] = static_cast<A>((1 - momentum) * running_var[channel] + momentum * unbiased);
}

template <class A>
__global__ void running_statistics_kernel(std::int64_t channels, const A* running_mean, const A* running_var,
                                          double eps, A* mean, A* rstd) {
  const std::int64_t channel = first_channel<1>();
  if (channel >= channels) return;
  mean[channel] = running_mean[channel];
  rstd[channel] = static_cast<A>(1 / ::sqrt(static_cast<double>(running_var[channel]) + eps));
}

// Bytes: x once, y once; floor = those / bandwidth.
template <int V, class T>
__global__ void __launch_bounds__(kThreads, 3)
    normalize_kernel(Tiles t, const T* x, const compute_t<T>* w, const compute_t<T>* b, const compute_t<T>* mean,
                     const compute_t<T>* rstd, T* y) {
  using A = compute_t<T>;
  const std::int64_t channel = first_channel<V>();
  if (channel >= t.channels) return;
  A shift[V], scale[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    shift[j] = mean[channel + j];
    scale[j] = rstd[channel + j] * w[channel + j];
    bias[j] = b[channel + j];
  }
  for_each_row(t, [&]<int kRows>(std::int64_t row) {
    const Rows<V, kRows, T> values(t, x, row, channel);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      Vec<T, V> result;
#pragma unroll
      for (int j = 0; j < V; ++j) result.v[j] = convert<T>((values.at(k, j) - shift[j]) * scale[j] + bias[j]);
      store(y + (row + k * blockDim.y) * t.channels + channel, result);
    }
  });
}

// Bytes: g and x once; floor = those / bandwidth.
template <int V, class T>
__global__ void __launch_bounds__(kThreads, 3)
    grad_sums_kernel(Tiles t, const T* g, const T* x, const compute_t<T>* mean, const compute_t<T>* rstd,
                     compute_t<T>* partials) {
  using A = compute_t<T>;
  const std::int64_t channel = first_channel<V>();
  GradSums<A, V> mine;
  if (channel < t.channels) {
    A shift[V], scale[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      shift[j] = mean[channel + j];
      scale[j] = rstd[channel + j];
    }
    for_each_row(t, [&]<int kRows>(std::int64_t row) {
      const Rows<V, kRows, T> gradient(t, g, row, channel), values(t, x, row, channel);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          mine.first[j] += gradient.at(k, j) * ((values.at(k, j) - shift[j]) * scale[j]);
          mine.second[j] += gradient.at(k, j);
        }
      }
    });
  }
  finish_chunk<V>(t, mine, channel, partials);
}

/// gw and gb, and the factors of grad_kernel, [4][channels]: gx = scale (g - mean_g - (x - mean) slope).
/// `inverse`: 1 / rows in training; 0 when the statistics are fixed and pass no gradient.
template <class A>
__global__ void __launch_bounds__(kWarp* kChunkThreads)
    grad_total_kernel(Tiles t, const A* partials, double inverse, const A* w, const A* mean, const A* rstd, A* gw,
                      A* gb, A* factors) {
  const std::int64_t channel = first_channel<1>();
  const bool inside = channel < t.channels;
  const A* mine = partials + channel;
  const double sum_w =
      sum_of_chunks(t, inside, [&](std::int64_t k) { return static_cast<double>(mine[2 * k * t.channels]); });
  const double sum_b =
      sum_of_chunks(t, inside, [&](std::int64_t k) { return static_cast<double>(mine[(2 * k + 1) * t.channels]); });
  if (!inside || threadIdx.y != 0) return;
  gw[channel] = static_cast<A>(sum_w);
  gb[channel] = static_cast<A>(sum_b);
  factors += channel;
  factors[0] = w[channel] * rstd[channel];
  factors[t.channels] = inverse == 0 ? A(0) : static_cast<A>(inverse * sum_b);
  factors[2 * t.channels] = mean[channel];
  factors[3 * t.channels] = inverse == 0 ? A(0) : static_cast<A>(inverse * sum_w * rstd[channel]);
}

// Bytes: g and x once, gx once; floor = those / bandwidth.
template <int V, class T>
__global__ void __launch_bounds__(kThreads, 3)
    grad_kernel(Tiles t, const T* g, const T* x, const compute_t<T>* factors, T* gx) {
  using A = compute_t<T>;
  const std::int64_t channel = first_channel<V>();
  if (channel >= t.channels) return;
  A factor[4][V];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < V; ++j) factor[i][j] = factors[i * t.channels + channel + j];
  }
  for_each_row(t, [&]<int kRows>(std::int64_t row) {
    const Rows<V, kRows, T> gradient(t, g, row, channel), values(t, x, row, channel);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      Vec<T, V> result;
#pragma unroll
      for (int j = 0; j < V; ++j)
        result.v[j] = convert<T>(factor[0][j] *
                                 (gradient.at(k, j) - factor[1][j] - (values.at(k, j) - factor[2][j]) * factor[3][j]));
      store(gx + (row + k * blockDim.y) * t.channels + channel, result);
    }
  });
}

constexpr dim3 kChannelBlock(kWarp, kChunkThreads);
unsigned channel_blocks(std::int64_t channels) { return static_cast<unsigned>(ceil_div(channels, kWarp)); }

/// Calls f.operator()<V>() with the widest vector that rows of `channels` elements and the addresses allow.
template <class T, class F, class... Pointers>
void with_vector(std::int64_t channels, F&& f, const Pointers*... pointers) {
  if (channels % kVector<T> == 0 && aligned_alike(pointers...)) return f.template operator()<kVector<T>>();
  f.template operator()<1>();
}

}  // namespace

void CudaBackend::batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum,
                             bool training, Tensor& running_mean, Tensor& running_var, Tensor& y, Tensor& mean,
                             Tensor& rstd) {
  const std::int64_t channels = x.size(1);
  if (channels == 0) return;
  const detail::OpRange range("batch_norm");
  visit_float<CudaTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const auto* px = static_cast<const T*>(x.data());
    auto* py = static_cast<T*>(y.data());
    const auto *pw = static_cast<const A*>(w.data()), *pb = static_cast<const A*>(b.data());
    auto *pm = static_cast<A*>(mean.data()), *pr = static_cast<A*>(rstd.data()),
         *rm = static_cast<A*>(running_mean.data()), *rv = static_cast<A*>(running_var.data());
    const auto run = [&]<int V>() {
      const Tiles t(x.numel() / channels, channels, V);
      if (training && t.rows > 0) {
        const Tensor scratch = workspace(static_cast<std::size_t>(2 * t.chunks * channels) * sizeof(A));
        auto* partials = static_cast<A*>(scratch.data());
        moments_kernel<V><<<t.grid(), t.block(), 0, stream()>>>(t, px, partials);
        MT_LAUNCHED();
        statistics_kernel<<<channel_blocks(channels), kChannelBlock, 0, stream()>>>(t, partials, eps, momentum, rm, rv,
                                                                                    pm, pr);
      } else {
        running_statistics_kernel<<<channel_blocks(channels), kWarp, 0, stream()>>>(channels, rm, rv, eps, pm, pr);
      }
      MT_LAUNCHED();
      if (t.rows == 0) return;
      normalize_kernel<V><<<t.grid(), t.block(), 0, stream()>>>(t, px, pw, pb, pm, pr, py);
      MT_LAUNCHED();
    };
    with_vector<T>(channels, run, px, py);
  });
}

void CudaBackend::batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean,
                                  const Tensor& rstd, bool training, Tensor& gx, Tensor& gw, Tensor& gb) {
  const std::int64_t channels = x.size(1);
  if (channels == 0) return;
  const detail::OpRange range("batch_norm_grad");
  visit_float<CudaTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const auto *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data());
    auto* pgx = static_cast<T*>(gx.data());
    const auto *pw = static_cast<const A*>(w.data()), *pm = static_cast<const A*>(mean.data()),
               *pr = static_cast<const A*>(rstd.data());
    auto *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    const auto run = [&]<int V>() {
      const Tiles t(x.numel() / channels, channels, V);
      const Tensor scratch = workspace(static_cast<std::size_t>((2 * t.chunks + 4) * channels) * sizeof(A));
      auto *factors = static_cast<A*>(scratch.data()), *partials = factors + 4 * channels;
      if (t.rows > 0) {
        grad_sums_kernel<V><<<t.grid(), t.block(), 0, stream()>>>(t, pg, px, pm, pr, partials);
        MT_LAUNCHED();
      }
      const double inverse = training && t.rows > 0 ? 1 / static_cast<double>(t.rows) : 0;
      grad_total_kernel<<<channel_blocks(channels), kChannelBlock, 0, stream()>>>(t, partials, inverse, pw, pm, pr, pgw,
                                                                                  pgb, factors);
      MT_LAUNCHED();
      if (t.rows == 0) return;
      grad_kernel<V><<<t.grid(), t.block(), 0, stream()>>>(t, pg, px, factors, pgx);
      MT_LAUNCHED();
    };
    with_vector<T>(channels, run, pg, px, pgx);
  });
}

}  // namespace mantissa
