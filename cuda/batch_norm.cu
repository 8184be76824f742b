// Batch norm of channels-last images, as a matrix [rows = N H W, channels]: sums over rows in two stages of a fixed
// partition, so that results are deterministic, then one pass over the elements.
#include <algorithm>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {
namespace {

constexpr int kChannels = 32, kRows = 8;  // threads of a block
constexpr int kTogether = 8;              // rows that a thread loads before it uses them

/// Count, mean and sum of squared deviations, merged without cancellation (Chan, Golub and LeVeque 1979).
template <class A>
struct Moments {
  A n = 0, mean = 0, m2 = 0;
  __device__ void merge(const Moments& b) {
    const A total = n + b.n;
    if (total == A(0)) return;
    const A d = b.mean - mean, share = b.n / total;
    mean += d * share;
    m2 += b.m2 + d * d * n * share;
    n = total;
  }
};

template <class A>
struct Pair {  // sums of g xhat and g
  A first = 0, second = 0;
  __device__ void merge(const Pair& b) {
    first += b.first;
    second += b.second;
  }
};

struct Split {
  std::int64_t rows, channels, rows_a_chunk, chunks;
  Split(std::int64_t r, std::int64_t c) : rows(r), channels(c) {
    rows_a_chunk = std::max<std::int64_t>(kRows * kTogether, ceil_div(ceil_div(r, 512), kRows * kTogether) * kRows * kTogether);
    chunks = ceil_div(r, rows_a_chunk);
  }
  dim3 grid() const { return dim3(static_cast<unsigned>(ceil_div(channels, kChannels)), static_cast<unsigned>(chunks)); }
};

/// Merges the block's rows in order and writes the chunk's partial result.
template <class P>
__device__ void finish_chunk(const Split& s, const P& mine, P* partials) {
  __shared__ P shared[kRows][kChannels];
  shared[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kChannels + threadIdx.x;
  if (threadIdx.y != 0 || channel >= s.channels) return;
  P total = shared[0][threadIdx.x];
  for (int row = 1; row < kRows; ++row) total.merge(shared[row][threadIdx.x]);
  partials[blockIdx.y * s.channels + channel] = total;
}

// Bytes: x once.
template <class T>
__global__ void __launch_bounds__(kChannels* kRows) moments_kernel(Split s, const T* x, Moments<compute_t<T>>* partials) {
  using A = compute_t<T>;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kChannels + threadIdx.x;
  const std::int64_t begin = blockIdx.y * s.rows_a_chunk, end = min(begin + s.rows_a_chunk, s.rows);
  Moments<A> mine;
  if (channel < s.channels) {
    for (std::int64_t row = begin + threadIdx.y; row < end; row += kRows * kTogether) {
      A value[kTogether];
      int count = 0;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const bool inside = row + k * kRows < end;
        value[k] = inside ? widen(x[(row + k * kRows) * s.channels + channel]) : A(0);
        count += inside ? 1 : 0;
      }
      Moments<A> group;
      group.n = static_cast<A>(count);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) group.mean += value[k];
      group.mean /= group.n;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const A d = k < count ? value[k] - group.mean : A(0);
        group.m2 += d * d;
      }
      mine.merge(group);
    }
  }
  finish_chunk(s, mine, partials);
}

template <class A>
__global__ void statistics_kernel(Split s, const Moments<A>* partials, double eps, double momentum, bool training, A* running_mean, A* running_var, A* mean,
                                  A* rstd) {
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= s.channels) return;
  if (!training) {
    mean[channel] = running_mean[channel];
    rstd[channel] = A(1) / ::sqrt(running_var[channel] + static_cast<A>(eps));
    return;
  }
  Moments<A> total;
  for (std::int64_t chunk = 0; chunk < s.chunks; ++chunk) total.merge(partials[chunk * s.channels + channel]);
  const A variance = total.m2 / total.n, unbiased = total.m2 / (total.n > A(1) ? total.n - A(1) : A(1)), m = static_cast<A>(momentum);
  mean[channel] = total.mean;
  rstd[channel] = A(1) / ::sqrt(variance + static_cast<A>(eps));
  running_mean[channel] = (A(1) - m) * running_mean[channel] + m * total.mean;
  running_var[channel] = (A(1) - m) * running_var[channel] + m * unbiased;
}

// Bytes: x once, y once. V elements a thread, all of one row: V divides the channels, or is 1.
template <int V, class T>
__global__ void __launch_bounds__(kThreads) normalize_kernel(std::int64_t vectors, std::int64_t channels, const T* x, const compute_t<T>* w, const compute_t<T>* b,
                                                             const compute_t<T>* mean, const compute_t<T>* rstd, T* y) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const std::int64_t channel = i * V % channels;
  Vec<T, V> v = load<V>(x + i * V);
#pragma unroll
  for (int j = 0; j < V; ++j)
    v.v[j] = convert<T>((widen(v.v[j]) - mean[channel + j]) * rstd[channel + j] * w[channel + j] + b[channel + j]);
  store(y + i * V, v);
}

// Bytes: g and x once.
template <class T>
__global__ void __launch_bounds__(kChannels* kRows) grad_sums_kernel(Split s, const T* g, const T* x, const compute_t<T>* mean, const compute_t<T>* rstd,
                                                                     Pair<compute_t<T>>* partials) {
  using A = compute_t<T>;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kChannels + threadIdx.x;
  const std::int64_t begin = blockIdx.y * s.rows_a_chunk, end = min(begin + s.rows_a_chunk, s.rows);
  Pair<A> mine;
  if (channel < s.channels) {
    const A m = mean[channel], r = rstd[channel];
#pragma unroll 4
    for (std::int64_t row = begin + threadIdx.y; row < end; row += kRows) {
      const A vg = widen(g[row * s.channels + channel]);
      mine.first += vg * ((widen(x[row * s.channels + channel]) - m) * r);
      mine.second += vg;
    }
  }
  finish_chunk(s, mine, partials);
}

template <class A>
__global__ void grad_total_kernel(Split s, const Pair<A>* partials, A* gw, A* gb) {
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= s.channels) return;
  Pair<A> total;
  for (std::int64_t chunk = 0; chunk < s.chunks; ++chunk) total.merge(partials[chunk * s.channels + channel]);
  gw[channel] = total.first;
  gb[channel] = total.second;
}

// Bytes: g and x once, gx once. `inverse`: 1 / rows in training; 0 when the statistics are fixed and pass no gradient.
template <int V, class T>
__global__ void __launch_bounds__(kThreads) grad_kernel(std::int64_t vectors, std::int64_t channels, const T* g, const T* x, const compute_t<T>* w,
                                                        const compute_t<T>* mean, const compute_t<T>* rstd, const compute_t<T>* gw, const compute_t<T>* gb,
                                                        compute_t<T> inverse, T* gx) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const std::int64_t channel = i * V % channels;
  const Vec<T, V> vx = load<V>(x + i * V);
  Vec<T, V> vg = load<V>(g + i * V);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const std::int64_t c = channel + j;
    vg.v[j] = convert<T>(w[c] * rstd[c] * (widen(vg.v[j]) - inverse * (gb[c] + (widen(vx.v[j]) - mean[c]) * rstd[c] * gw[c])));
  }
  store(gx + i * V, vg);
}

unsigned blocks_for(std::int64_t n) { return static_cast<unsigned>(ceil_div(n, kThreads)); }

/// Calls f.operator()<V>() with the widest vector that rows of `channels` elements and the addresses allow.
template <class T, class F, class... Pointers>
void with_vector(std::int64_t channels, F&& f, const Pointers*... pointers) {
  if (channels % kVector<T> == 0 && aligned_alike(pointers...)) return f.template operator()<kVector<T>>();
  f.template operator()<1>();
}

}  // namespace

void CudaBackend::batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum, bool training, Tensor& running_mean,
                             Tensor& running_var, Tensor& y, Tensor& mean, Tensor& rstd) {
  const std::int64_t channels = x.size(1);
  if (channels == 0) return;
  const detail::OpRange range("batch_norm");
  const Split s(x.numel() / channels, channels);
  const cudaStream_t on = stream();
  visit_float<CudaTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    A *pm = static_cast<A*>(mean.data()), *pr = static_cast<A*>(rstd.data());
    Tensor scratch;
    if (training) {
      scratch = workspace(static_cast<std::size_t>(s.chunks * channels) * sizeof(Moments<A>));
      moments_kernel<T><<<s.grid(), dim3(kChannels, kRows), 0, on>>>(s, px, static_cast<Moments<A>*>(scratch.data()));
      MT_LAUNCHED();
    }
    statistics_kernel<A><<<blocks_for(channels), kThreads, 0, on>>>(s, static_cast<const Moments<A>*>(scratch.data()), eps, momentum, training,
                                                                  static_cast<A*>(running_mean.data()), static_cast<A*>(running_var.data()), pm, pr);
    MT_LAUNCHED();
    if (x.numel() == 0) return;
    with_vector<T>(channels, [&]<int V>() {
      normalize_kernel<V, T><<<blocks_for(x.numel() / V), kThreads, 0, on>>>(x.numel() / V, channels, px, static_cast<const A*>(w.data()),
                                                                           static_cast<const A*>(b.data()), pm, pr, py);
    }, px, py);
    MT_LAUNCHED();
  });
}

void CudaBackend::batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd, bool training, Tensor& gx,
                                  Tensor& gw, Tensor& gb) {
  const std::int64_t channels = x.size(1);
  if (channels == 0) return;
  const detail::OpRange range("batch_norm_grad");
  const Split s(x.numel() / channels, channels);
  const cudaStream_t on = stream();
  visit_float<CudaTypes>("batch_norm", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T *pg = static_cast<const T*>(g.data()), *px = static_cast<const T*>(x.data());
    T* pgx = static_cast<T*>(gx.data());
    const A *pw = static_cast<const A*>(w.data()), *pm = static_cast<const A*>(mean.data()), *pr = static_cast<const A*>(rstd.data());
    A *pgw = static_cast<A*>(gw.data()), *pgb = static_cast<A*>(gb.data());
    const Tensor scratch = workspace(static_cast<std::size_t>(s.chunks * channels) * sizeof(Pair<A>));
    auto* partials = static_cast<Pair<A>*>(scratch.data());
    if (s.chunks > 0) {
      grad_sums_kernel<T><<<s.grid(), dim3(kChannels, kRows), 0, on>>>(s, pg, px, pm, pr, partials);
      MT_LAUNCHED();
    }
    grad_total_kernel<A><<<blocks_for(channels), kThreads, 0, on>>>(s, partials, pgw, pgb);
    MT_LAUNCHED();
    if (x.numel() == 0) return;
    const A inverse = training ? A(1) / static_cast<A>(s.rows) : A(0);
    with_vector<T>(channels, [&]<int V>() {
      grad_kernel<V, T><<<blocks_for(x.numel() / V), kThreads, 0, on>>>(x.numel() / V, channels, pg, px, pw, pm, pr, pgw, pgb, inverse, pgx);
    }, pg, px, pgx);
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
