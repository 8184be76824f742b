// Fill, copy between any strides and dtypes, and accumulation.
#include <cstring>

#include "cuda/kernels.h"
#include "cuda/map.cuh"

namespace mantissa {
namespace {

struct Identity {
  template <class T> __device__ T operator()(T x) const { return x; }
};

template <class Bits> struct Constant {
  Bits value;
  __device__ Bits operator()() const { return value; }
};

template <class To> struct Convert {
  template <class From> __device__ To operator()(From x) const { return convert<To>(x); }
};

template <class To> struct Accumulate {
  template <class From> __device__ To operator()(To y, From x) const {
    using A = std::conditional_t<std::is_same_v<From, double>, double, compute_t<To>>;
    return convert<To>(convert<A>(y) + convert<A>(x));
  }
};

/// One tile of a copy whose operands are contiguous along different axes: x along `t`, y along `i`.
template <class T> struct Transpose {
  static constexpr int kTile = sizeof(T) >= 4 ? 32 : 64;
  static constexpr int kPad = sizeof(T) >= 4 ? 1 : 4 / static_cast<int>(sizeof(T));  // an odd number of banks a row
  static constexpr int kRows = 8;
  std::int64_t i_size, t_size, x_stride, y_stride;  // x at i x_stride + t, y at t y_stride + i
  std::uint32_t i_tiles, t_tiles;
  Layout<2> batch;  // the other axes
};

// Bytes: x and y once. Rows of a tile are 64 to 256 bytes, read and written whole; shared memory turns it.
template <class T>
__global__ void __launch_bounds__(kWarp* Transpose<T>::kRows) transpose_kernel(Transpose<T> p, T* y, const T* x) {
  constexpr int kTile = Transpose<T>::kTile, kRows = Transpose<T>::kRows;
  __shared__ T tile[kTile][kTile + Transpose<T>::kPad];
  const std::uint32_t i_tile = blockIdx.x % p.i_tiles, rest = blockIdx.x / p.i_tiles;
  const std::int64_t i0 = static_cast<std::int64_t>(i_tile) * kTile;
  const std::int64_t t0 = static_cast<std::int64_t>(rest % p.t_tiles) * kTile;
  std::int64_t offset[2];
  p.batch.locate(rest / p.t_tiles, offset);
  x += offset[0] + i0 * p.x_stride + t0;
  y += offset[1] + t0 * p.y_stride + i0;
  const std::int64_t i_left = p.i_size - i0, t_left = p.t_size - t0;
  constexpr int kDown = kTile / kRows, kAlong = kTile / kWarp;
  T value[kDown][kAlong] = {};
#pragma unroll
  for (int a = 0; a < kDown; ++a) {
#pragma unroll
    for (int b = 0; b < kAlong; ++b) {
      const int i = threadIdx.y + a * kRows, t = threadIdx.x + b * kWarp;
      if (i < i_left && t < t_left) value[a][b] = x[i * p.x_stride + t];
    }
  }
#pragma unroll
  for (int a = 0; a < kDown; ++a) {
#pragma unroll
    for (int b = 0; b < kAlong; ++b) tile[threadIdx.y + a * kRows][threadIdx.x + b * kWarp] = value[a][b];
  }
  __syncthreads();
#pragma unroll
  for (int a = 0; a < kDown; ++a) {
#pragma unroll
    for (int b = 0; b < kAlong; ++b) {
      const int t = threadIdx.y + a * kRows, i = threadIdx.x + b * kWarp;
      if (i < i_left && t < t_left) y[t * p.y_stride + i] = tile[i][t];
    }
  }
}

/// Runs the tiled kernel when it fits the strides.
template <class T> bool try_transpose(CudaBackend& backend, const StridedPlan<2>& plan, T* y, const T* x) {
  const int inner = plan.rank - 1;
  if (plan.rank < 2 || plan.strides[1][inner] != 1 || plan.strides[0][inner] == 1) return false;
  int axis = inner;
  for (int d = 0; d < inner; ++d)
    if (plan.strides[0][d] == 1) axis = d;
  constexpr std::int64_t kWorthwhile = 8;
  if (axis == inner || plan.sizes[inner] < kWorthwhile || plan.sizes[axis] < kWorthwhile) return false;
  StridedPlan<2> batch;
  batch.numel = 1;
  for (int d = 0; d < inner; ++d) {
    if (d == axis) continue;
    batch.sizes[batch.rank] = plan.sizes[d];
    batch.numel *= plan.sizes[d];
    for (int k = 0; k < 2; ++k) batch.strides[k][batch.rank] = plan.strides[k][d];
    ++batch.rank;
  }
  if (batch.rank == 0) {
    batch.rank = 1;
    batch.sizes[0] = 1;
  }
  constexpr int kTile = Transpose<T>::kTile;
  const std::int64_t i_tiles = ceil_div(plan.sizes[inner], kTile), t_tiles = ceil_div(plan.sizes[axis], kTile);
  const std::int64_t blocks = i_tiles * t_tiles * batch.numel;
  if (blocks >= kMaxUnits) return false;
  const Transpose<T> p{plan.sizes[inner],
                       plan.sizes[axis],
                       plan.strides[0][inner],
                       plan.strides[1][axis],
                       static_cast<std::uint32_t>(i_tiles),
                       static_cast<std::uint32_t>(t_tiles),
                       Layout<2>(batch)};
  auto& counters = backend.counters;
  transpose_kernel<T>
      <<<static_cast<unsigned>(blocks), dim3(kWarp, Transpose<T>::kRows), 0, backend.stream()>>>(p, y, x);
  MT_LAUNCHED();
  return true;
}

template <class From, class To>
inline constexpr bool converts_often =
    !std::is_same_v<To, std::uint8_t> &&
    (std::is_same_v<To, float> || std::is_same_v<To, __half> ||
     std::is_same_v<To, __nv_bfloat16>)&&(std::is_same_v<From, float> || std::is_same_v<From, __half> ||
                                          std::is_same_v<From, __nv_bfloat16> || std::is_same_v<From, std::uint8_t>);

struct HostTypes {
  using f16 = float16;
  using bf16 = bfloat16;
  using f8e4m3 = float8_e4m3;
  using f8e5m2 = float8_e5m2;
};

}  // namespace

bool kernels_run_here() {
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, transpose_kernel<float>) == cudaSuccess;
  cudaGetLastError();
  return found;
}

void CudaBackend::fill(double value, Tensor& y) {
  const detail::OpRange range("fill");
  std::uint64_t bits = 0;
  visit_all<HostTypes>("fill", y.dtype(), [&]<class T>() {
    const T converted = [&] {
      if constexpr (std::is_same_v<T, bool>)
        return value != 0;
      else
        return static_cast<T>(value);
    }();
    std::memcpy(&bits, &converted, sizeof converted);
  });
  if (y.numel() == 0) return;
  if (y.is_dense() && (bits == 0 || size_of(y.dtype()) == 1)) {
    MT_CUDA_CHECK(cudaMemsetAsync(y.data(), static_cast<int>(bits),
                                  static_cast<std::size_t>(y.numel()) * size_of(y.dtype()), stream()));
    ++counters.launches;
    return;
  }
  visit_bits(y.dtype(),
             [&]<class Bits>() { map<MapPaths::kStrided, Bits>(*this, Constant<Bits>{static_cast<Bits>(bits)}, y); });
}

void CudaBackend::copy(const Tensor& x, Tensor& y) {
  const detail::OpRange range("copy");
  if (y.numel() == 0) return;
  if (x.dtype() == y.dtype()) {
    visit_bits(y.dtype(), [&]<class Bits>() {
      if (try_transpose(*this, make_plan<2>(y.shape(), {&x, &y}), data_as<Bits>(y), data_as<const Bits>(x))) return;
      map<MapPaths::kRows, Bits, Bits>(*this, Identity{}, y, x);
    });
    return;
  }
  ++counters.casts;
  visit_all<CudaTypes>("copy", x.dtype(), [&]<class From>() {
    visit_all<CudaTypes>("copy", y.dtype(), [&]<class To>() {
      constexpr MapPaths kPaths = converts_often<From, To> ? MapPaths::kStrided : MapPaths::kElements;
      if constexpr (!std::is_same_v<From, To>) map<kPaths, To, From>(*this, Convert<To>{}, y, x);
    });
  });
}

void CudaBackend::accumulate(const Tensor& x, Tensor& y) {
  const detail::OpRange range("accumulate");
  visit_float<CudaTypes>("accumulate", x.dtype(), [&]<class From>() {
    visit_float<CudaTypes>("accumulate", y.dtype(), [&]<class To>() {
      map<MapPaths::kStrided, To, To, From>(*this, Accumulate<To>{}, y, y, x);
    });
  });
}

}  // namespace mantissa
