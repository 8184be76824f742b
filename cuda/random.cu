// Random draws and dropout. Element i, in row-major order, is lane i % 4 of the Philox block offset + i / 4.
#include "core/random.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"
#include "cuda/recording.h"

namespace mantissa {
namespace {

/// Block `quad` of a draw.
struct Draw {
  CudaBackend::RandomStart start;
  __device__ Philox4 operator()(std::int64_t quad) const {
    const std::uint64_t offset = start.state.offset + static_cast<std::uint64_t>(quad);
    return start.base == nullptr ? philox(start.state.seed, offset)
                                 : philox(start.base->seed, start.base->offset + offset);
  }
};

__global__ void random_base_kernel(PhiloxState state, PhiloxState* base) { *base = state; }

template <class A> struct Dropout {
  Draw draw;
  float p;
  A factor;
  template <int V> __device__ void drop(std::int64_t quad, A (&x)[V], int first = 0) const {
    const Philox4 bits = draw(quad);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[first + j] = uniform_from_bits(bits.lane[j]) >= p ? x[first + j] * factor : A(0);
  }
};

// Bytes: x and y once; floor = those / bandwidth. Two blocks of random numbers a thread.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(Dropout<compute_t<T>> f, std::int64_t n, bool aligned, const T* x, T* y) {
  constexpr int V = 8;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= n) return;
  const bool whole = aligned && i + V <= n;
  Vec<T, V> in{};
  if (whole) {
    in = load<V>(x + i);
  } else {
    for (int j = 0; j < V; ++j)
      if (i + j < n) in.v[j] = x[i + j];
  }
  compute_t<T> value[V];
#pragma unroll
  for (int j = 0; j < V; ++j) value[j] = widen(in.v[j]);
  f.drop(i / 4, value);
  f.drop(i / 4 + 1, value, 4);
  Vec<T, V> out;
#pragma unroll
  for (int j = 0; j < V; ++j) out.v[j] = convert<T>(value[j]);
  if (whole) return store(y + i, out);
  for (int j = 0; j < V; ++j)
    if (i + j < n) y[i + j] = out.v[j];
}

/// Box and Muller's transform, on (0, 1] for the logarithm.
__device__ inline void normal_pair(std::uint32_t bits0, std::uint32_t bits1, double& z0, double& z1) {
  const double u = static_cast<double>(uniform_from_bits(bits0)) + 0x1p-24;
  const double angle = 6.283185307179586 * static_cast<double>(uniform_from_bits(bits1));
  const double radius = ::sqrt(-2 * ::log(u));
  double sine, cosine;
  ::sincos(angle, &sine, &cosine);
  z0 = radius * cosine;
  z1 = radius * sine;
}

// Bytes: y once, but the arithmetic costs more: f64 as on the CPU, so that both draw the same values.
template <class T, RandomKind kKind>
__global__ void __launch_bounds__(kThreads) random_kernel(double a, double b, Draw draw, std::int64_t n, T* y) {
  const std::int64_t quad = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (quad * 4 >= n) return;
  const Philox4 bits = draw(quad);
  double value[4];
  if constexpr (kKind == RandomKind::normal) {
    normal_pair(bits.lane[0], bits.lane[1], value[0], value[1]);
    normal_pair(bits.lane[2], bits.lane[3], value[2], value[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = a + b * value[j];
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const double u = static_cast<double>(uniform_from_bits(bits.lane[j]));
      value[j] = kKind == RandomKind::uniform ? a + (b - a) * u : u < a ? 1.0 : 0.0;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (quad * 4 + j < n) y[quad * 4 + j] = convert<T>(value[j]);
}

}  // namespace

void set_random_base(CudaBackend& backend, PhiloxState state, PhiloxState* base) {
  auto& counters = backend.counters;
  random_base_kernel<<<1, 1, 0, backend.stream()>>>(state, base);
  MT_LAUNCHED();
}

void CudaBackend::dropout(const Tensor& x, double p, PhiloxState state, Tensor& y) {
  const detail::OpRange range("dropout");
  const std::int64_t n = x.numel();
  if (n == 0) return;
  visit_float<CudaTypes>("dropout", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const Dropout<A> f{{random_start(state)}, static_cast<float>(p), p < 1 ? static_cast<A>(1 / (1 - p)) : A(0)};
    const auto* from = static_cast<const T*>(x.data());
    auto* to = static_cast<T*>(y.data());
    dropout_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads * 8)), kThreads, 0, stream()>>>(
        f, n, aligned_alike(from, to), from, to);
    MT_LAUNCHED();
  });
}

void CudaBackend::random(RandomKind kind, double a, double b, PhiloxState state, Tensor& y) {
  const detail::OpRange range("random");
  const std::int64_t n = y.numel();
  if (n == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads * 4));
  const Draw start{random_start(state)};
  visit_float<CudaTypes>("random", y.dtype(), [&]<class T>() {
    auto* to = static_cast<T*>(y.data());
    switch (kind) {
      case RandomKind::uniform:
        random_kernel<T, RandomKind::uniform><<<blocks, kThreads, 0, stream()>>>(a, b, start, n, to);
        break;
      case RandomKind::normal:
        random_kernel<T, RandomKind::normal><<<blocks, kThreads, 0, stream()>>>(a, b, start, n, to);
        break;
      case RandomKind::bernoulli:
        random_kernel<T, RandomKind::bernoulli><<<blocks, kThreads, 0, stream()>>>(a, b, start, n, to);
        break;
    }
    MT_LAUNCHED();
  });
}

}  // namespace mantissa
