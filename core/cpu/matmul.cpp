// Batched matrix products with epilogues. 16-bit operands are widened to f32, multiplied there, and rounded once.
#include <omp.h>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

/// x in the compute type with the same geometry: x itself, or a widened copy that keeps the layout of the last two axes.
Tensor widened(CpuBackend& backend, const Tensor& x) {
  if (!is_low_precision(x.dtype())) return x;
  const MemoryScope scope(MemoryCategory::workspace);
  // Broadcast batch axes are widened once.
  Shape shape = x.shape();
  for (int i = 0; i + 2 < x.rank(); ++i)
    if (x.strides()[i] == 0) shape[i] = 1;
  const bool column_major = x.stride(-1) != 1;
  Strides strides = contiguous_strides(shape);
  if (column_major) {
    strides[x.rank() - 2] = 1;
    strides[x.rank() - 1] = std::max<std::int64_t>(x.size(-2), 1);
  }
  Tensor y = empty(shape, {DType::f32, cpu}).view(shape, strides, 0);
  const std::int64_t casts = backend.counters.casts;
  backend.copy(x.view(shape, x.strides(), x.offset()), y);
  backend.counters.casts = casts;  // part of the product, not a cast of its own
  for (int i = 0; i + 2 < x.rank(); ++i)
    if (x.strides()[i] == 0) strides[i] = 0;
  return y.view(x.shape(), strides, 0);
}

std::int64_t batch_offset(const Tensor& x, std::int64_t index) {
  std::int64_t offset = 0;
  for (int axis = x.rank() - 3; axis >= 0; --axis) {
    offset += index % x.shape()[axis] * x.strides()[axis];
    index /= x.shape()[axis];
  }
  return offset;
}

/// activation(y + bias) on rows of the product, before it is rounded.
template <class A>
void epilogue_row(A* y, std::int64_t n, const A* bias, Activation activation) {
  if (bias != nullptr)
    for (std::int64_t i = 0; i < n; ++i) y[i] += bias[i];
  if (activation == Activation::relu)
    for (std::int64_t i = 0; i < n; ++i) y[i] = Relu{}(y[i]);
  if (activation == Activation::gelu_tanh)
    for (std::int64_t i = 0; i < n; ++i) y[i] = GeluTanh{}(y[i]);
}

template <class A, class TY>
void multiply(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  const std::int64_t m = y.size(-2), n = y.size(-1), k = a.size(-1), batch = m * n > 0 ? y.numel() / (m * n) : 0;
  const A *pa = static_cast<const A*>(a.data()), *pb = static_cast<const A*>(b.data());
  TY* py = static_cast<TY*>(y.data());
  const bool plain = o.bias == nullptr && o.activation == Activation::none && o.grad_activation == Activation::none && !o.pre_activation;
  const bool in_place = std::is_same_v<A, TY> && y.stride(-1) == 1 && (plain || !o.accumulate);
  A bias_buffer[kBlock];
  std::vector<A> bias;
  if (o.bias != nullptr) {
    bias.resize(static_cast<std::size_t>(n));
    visit_float<CpuTypes>("matmul", o.bias->dtype(), [&]<class TB>() {
      for (std::int64_t i = 0; i < n; i += kBlock) {
        const std::int64_t count = std::min(kBlock, n - i);
        const A* values = load_block<A>(static_cast<const TB*>(o.bias->data()) + i * o.bias->stride(0), o.bias->stride(0), count, bias_buffer);
        std::copy_n(values, count, bias.begin() + i);
      }
    });
  }
  const auto product = [&](std::int64_t index) {
    const std::int64_t at_y = batch_offset(y, index);
    Tensor scratch;
    A* c = nullptr;
    std::int64_t ldc = n;
    if (in_place) {
      if constexpr (std::is_same_v<A, TY>) c = py + at_y;
      ldc = y.stride(-2);
    } else {
      const MemoryScope scope(MemoryCategory::workspace);
      scratch = empty({m, n}, {dtype_of<A>::value, cpu});
      c = static_cast<A*>(scratch.data());
    }
    gemm(m, n, k, static_cast<A>(o.alpha), pa + batch_offset(a, index), a.stride(-2), a.stride(-1), pb + batch_offset(b, index), b.stride(-2), b.stride(-1),
         in_place && o.accumulate ? A(1) : A(0), c, ldc);
    if (in_place && plain) return;
    parallel_for(m, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(n, 1)), [&](std::int64_t begin, std::int64_t end) {
      alignas(64) A buffer[kBlock];
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t first = 0; first < n; first += kBlock) {
          const std::int64_t count = std::min(kBlock, n - first);
          A* values = c + row * ldc + first;
          if (o.pre_activation != nullptr) {
            if (!bias.empty()) epilogue_row<A>(values, count, bias.data() + first, Activation::none);
            TY* pre = static_cast<TY*>(o.pre_activation->data()) + (index * m + row) * n + first;
            store_block<A>(values, pre, 1, count);
            epilogue_row<A>(values, count, nullptr, o.activation);
          } else {
            epilogue_row<A>(values, count, bias.empty() ? nullptr : bias.data() + first, o.activation);
          }
          if (o.grad_activation != Activation::none) {
            const A* saved = load_block<A>(static_cast<const TY*>(o.grad_input->data()) + (index * m + row) * n + first, 1, count, buffer);
            for (std::int64_t i = 0; i < count; ++i)
              values[i] = o.grad_activation == Activation::relu ? Relu{}.grad(values[i], saved[i]) : GeluTanh{}.grad(values[i], saved[i]);
          }
          if (in_place) continue;
          TY* out = py + at_y + row * y.stride(-2) + first * y.stride(-1);
          if (o.accumulate) {
            const A* old = load_block<A>(out, y.stride(-1), count, buffer);
            for (std::int64_t i = 0; i < count; ++i) values[i] += old[i];
          }
          store_block<A>(values, out, y.stride(-1), count);
        }
      }
    });
  };
  // Many small products share the threads; few large ones use them inside.
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  if (batch >= omp_get_max_threads() && batch > 1 && work < 4e6) {
#pragma omp parallel for schedule(static)
    for (std::int64_t index = 0; index < batch; ++index) product(index);
  } else {
    for (std::int64_t index = 0; index < batch; ++index) product(index);
  }
}

}  // namespace

void CpuBackend::matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor wa = widened(*this, a), wb = widened(*this, b);
  visit_float<CpuTypes>("matmul", y.dtype(), [&]<class T>() { multiply<compute_t<T>, T>(wa, wb, options, y); });
}

}  // namespace mantissa
