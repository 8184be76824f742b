// Batched matrix products with epilogues. 16-bit operands are widened to f32, multiplied there, and rounded
// once.
#include <omp.h>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/loops.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

/// Whether the last two axes can be passed to a product as they are.
bool fits(const Tensor& x) {
  const std::int64_t rows = x.size(-2), columns = x.size(-1);
  return (x.stride(-1) == 1 && (x.stride(-2) >= columns || rows == 1)) ||
         (x.stride(-2) == 1 && (x.stride(-1) >= rows || columns == 1));
}

/// A copy of x in the compute type that keeps the layout of the last two axes; what is broadcast is copied
/// once.
Tensor widened(CpuBackend& backend, const Tensor& x) {
  const MemoryScope scope(MemoryCategory::workspace);
  Shape shape = x.shape();
  for (int i = 0; i + 2 < x.rank(); ++i)
    if (x.strides()[i] == 0) shape[i] = 1;
  Strides strides = contiguous_strides(shape);
  if (x.stride(-1) != 1 && x.stride(-2) == 1) {
    strides[x.rank() - 2] = 1;
    strides[x.rank() - 1] = std::max<std::int64_t>(x.size(-2), 1);
  }
  Tensor y = empty(shape, {compute_dtype(x.dtype()), cpu}).view(shape, strides, 0);
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

/// What happens to a finished product before it is rounded into y.
template <class A, class TY> class Epilogue {
 public:
  Epilogue(const MatmulOptions& o, Tensor& y, bool in_place)
      : o_(o),
        py_(static_cast<TY*>(y.data())),
        m_(y.size(-2)),
        n_(y.size(-1)),
        row_(y.stride(-2)),
        column_(y.stride(-1)),
        in_place_(in_place),
        bias_(o.bias != nullptr ? n_ : 0) {
    if (o.bias == nullptr) return;
    visit_float<CpuTypes>("matmul", o.bias->dtype(), [&]<class TB>() {
      const TB* from = static_cast<const TB*>(o.bias->data());
      for (std::int64_t i = 0; i < n_; ++i) bias_.data()[i] = static_cast<A>(from[i * o.bias->stride(0)]);
    });
  }

  /// On rows [first_row, first_row + rows) of product `index` of the batch, in c; the product begins at
  /// offset `at` of y.
  void operator()(std::int64_t index, std::int64_t first_row, std::int64_t rows, A* c, std::int64_t ldc,
                  std::int64_t at) const {
    parallel_for(rows, std::max<std::int64_t>(1, kParallelGrain / n_), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        for (std::int64_t first = 0; first < n_; first += kBlock) {
          const std::int64_t row = first_row + i;
          block((index * m_ + row) * n_ + first, c + i * ldc + first, at + row * row_ + first * column_, first,
                std::min(kBlock, n_ - first));
        }
    });
  }

 private:
  void block(std::int64_t dense, A* values, std::int64_t at, std::int64_t first, std::int64_t n) const {
    alignas(64) A buffer[kBlock];
    if (o_.bias != nullptr) {
      const A* bias = bias_.data() + first;
      for (std::int64_t i = 0; i < n; ++i) values[i] += bias[i];
    }
    if (o_.pre_activation != nullptr) store_block<A>(values, static_cast<TY*>(o_.pre_activation->data()) + dense, 1, n);
    if (o_.activation == Activation::relu)
      for (std::int64_t i = 0; i < n; ++i) values[i] = Relu{}(values[i]);
    if (o_.activation == Activation::gelu_tanh)
      for (std::int64_t i = 0; i < n; ++i) values[i] = GeluTanh{}(values[i]);
    if (o_.grad_activation != Activation::none) {
      const A* saved = load_block<A>(static_cast<const TY*>(o_.grad_input->data()) + dense, 1, n, buffer);
      for (std::int64_t i = 0; i < n; ++i)
        values[i] = o_.grad_activation == Activation::relu ? Relu{}.grad(values[i], saved[i])
                                                           : GeluTanh{}.grad(values[i], saved[i]);
    }
    if (in_place_) return;
    TY* out = py_ + at;
    if (o_.accumulate) {
      const A* old = load_block<A>(out, column_, n, buffer);
      for (std::int64_t i = 0; i < n; ++i) values[i] += old[i];
    }
    store_block<A>(values, out, column_, n);
  }

  const MatmulOptions& o_;
  TY* py_;
  std::int64_t m_, n_, row_, column_;
  bool in_place_;
  Scratch<A> bias_;
};

/// Rows [first, first + rows) of a matrix [m, k] in the compute type: in place, or widened into `buffer`.
template <class A, class TA> struct RowBlock {
  const A* data;
  std::int64_t row, column;
  RowBlock(const TA* a, std::int64_t a_row, std::int64_t a_column, std::int64_t first, std::int64_t rows,
           std::int64_t k, A* buffer) {
    if constexpr (std::is_same_v<A, TA>) {
      data = a + first * a_row;
      row = a_row;
      column = a_column;
    } else {
      const bool by_rows = a_column == 1;
      row = by_rows ? k : 1;
      column = by_rows ? 1 : rows;
      const std::int64_t outer = by_rows ? rows : k, inner = by_rows ? k : rows, stride = by_rows ? a_row : a_column;
      parallel_for(outer, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(inner, 1)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                       load_block<A>(a + first * a_row + i * stride, 1, inner, buffer + i * inner);
                   });
      data = buffer;
    }
  }
};

/// b is of the compute type. Blocks of rows share the threads, each with its epilogue while it is in the
/// cache; where there are too few of them, and for plain f32 products, the threads work inside the product.
template <class A, class TA, class TY>
void multiply(const Tensor& a, const Tensor& b, const MatmulOptions& o, Tensor& y) {
  const std::int64_t m = y.size(-2), n = y.size(-1), k = a.size(-1), batch = y.numel() / (m * n);
  const TA* pa = static_cast<const TA*>(a.data());
  const A* pb = static_cast<const A*>(b.data());
  TY* py = static_cast<TY*>(y.data());
  const bool plain = o.bias == nullptr && o.activation == Activation::none && o.grad_activation == Activation::none &&
                     !o.pre_activation;
  const bool by_rows = y.stride(-1) == 1 && (y.stride(-2) >= n || m == 1);
  const bool by_columns =
      plain && std::is_same_v<A, TA> && !by_rows && y.stride(-2) == 1 && y.stride(-1) >= m;  // y^T = b^T a^T
  const bool in_place = std::is_same_v<A, TY> && (by_columns || (by_rows && (plain || !o.accumulate)));
  const bool whole = in_place && plain && std::is_same_v<A, TA>;
  const std::int64_t block = whole ? m : std::min<std::int64_t>(m, 256), blocks = (m + block - 1) / block,
                     tasks = batch * blocks;
  const double work = static_cast<double>(block) * static_cast<double>(n) * static_cast<double>(k);
  const bool shared = tasks > 1 && tasks >= omp_get_max_threads() && !(whole && work > 4e6);
  const std::int64_t size_a = std::is_same_v<A, TA> ? 0 : block * k, size_c = in_place ? 0 : block * n;
  const ThreadScratch<A> each(shared ? size_a + size_c : 0);
  const Scratch<A> one(shared ? 0 : size_a + size_c);
  const Epilogue<A, TY> epilogue(o, y, in_place);
  const A alpha = static_cast<A>(o.alpha), beta = in_place && o.accumulate ? A(1) : A(0);
  const auto run = [&](std::int64_t task) {
    const std::int64_t index = task / blocks, first = task % blocks * block, rows = std::min(block, m - first),
                       at = batch_offset(y, index);
    A* buffer = shared ? each.data() : one.data();
    const RowBlock<A, TA> left(pa + batch_offset(a, index), a.stride(-2), a.stride(-1), first, rows, k, buffer);
    const A* right = pb + batch_offset(b, index);
    A* c = buffer + size_a;
    std::int64_t ldc = n;
    if constexpr (std::is_same_v<A, TY>) {
      if (in_place) {
        c = py + at + first * y.stride(-2);
        ldc = by_columns ? y.stride(-1) : std::max(y.stride(-2), n);
      }
    }
    if (in_place && by_columns) {
      gemm(n, rows, k, alpha, right, b.stride(-1), b.stride(-2), left.data, left.column, left.row, beta, c, ldc);
    } else {
      gemm(rows, n, k, alpha, left.data, left.row, left.column, right, b.stride(-2), b.stride(-1), beta, c, ldc);
    }
    if (!in_place || !plain) epilogue(index, first, rows, c, ldc, at);
  };
  if (shared) {
    const std::int64_t grain = std::max<std::int64_t>(1, static_cast<std::int64_t>(2e5 / (work + 1)));
    parallel_for(tasks, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin; task < end; ++task) run(task);
    });
  } else {
    for (std::int64_t task = 0; task < tasks; ++task) run(task);
  }
}

}  // namespace

void CpuBackend::matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor left = fits(a) ? a : widened(*this, a);
  const Tensor right = fits(b) && !is_low_precision(b.dtype()) ? b : widened(*this, b);
  visit_float<CpuTypes>("matmul", left.dtype(), [&]<class TA>() {
    using A = compute_t<TA>;
    if (y.dtype() == dtype_of<A>::value) return multiply<A, TA, A>(left, right, options, y);
    if constexpr (std::is_same_v<A, float>)
      visit_float<CpuTypes>("matmul", y.dtype(), [&]<class TY>() {
        if constexpr (std::is_same_v<compute_t<TY>, float>) multiply<A, TA, TY>(left, right, options, y);
      });
  });
}

}  // namespace mantissa
