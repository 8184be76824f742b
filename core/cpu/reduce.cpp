// Reductions. The partition into partial results is fixed by the shape, so the result does not depend on the
// threads.
#include <limits>
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/lanes.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

/// The axes of x split into those that are kept and those that are reduced.
struct Axes {
  std::vector<std::int64_t> sizes, x_strides, y_strides;
  std::int64_t count() const {
    std::int64_t n = 1;
    for (const std::int64_t size : sizes) n *= size;
    return n;
  }
  void offsets(std::int64_t index, std::int64_t& x, std::int64_t& y) const {
    x = y = 0;
    for (std::size_t axis = sizes.size(); axis-- > 0;) {
      x += index % sizes[axis] * x_strides[axis];
      y += index % sizes[axis] * y_strides[axis];
      index /= sizes[axis];
    }
  }
};

template <class R, class A, class TX, class TY> class Reducer {
 public:
  Reducer(const Tensor& x, Tensor& y, bool accumulate, double factor)
      : px_(static_cast<const TX*>(x.data())),
        py_(static_cast<TY*>(y.data())),
        accumulate_(accumulate),
        factor_(static_cast<A>(factor)) {
    const auto plan = make_plan<2>(x.shape(), {&y, &x});
    inner_ = plan.inner();
    stride_ = plan.inner_stride(1);
    y_stride_ = plan.rank > 0 ? plan.inner_stride(0) : 0;
    for (int axis = 0; axis + 1 < plan.rank; ++axis) {
      Axes& axes = plan.strides[0][axis] == 0 ? reduced_ : kept_;
      axes.sizes.push_back(plan.sizes[axis]);
      axes.x_strides.push_back(plan.strides[1][axis]);
      axes.y_strides.push_back(plan.strides[0][axis]);
    }
  }

  void run() { y_stride_ == 0 ? along_rows() : across_rows(); }

 private:
  void store(TY* y, A value) const {
    value *= factor_;
    *y = static_cast<TY>(accumulate_ ? static_cast<A>(*y) + value : value);
  }

  // The innermost axis is reduced: each run of it gives one partial result.
  void along_rows() {
    const std::int64_t outputs = kept_.count(), rows = reduced_.count(), blocks = (inner_ + kBlock - 1) / kBlock,
                       runs = rows * blocks;
    const auto partial = [&](std::int64_t x_base, std::int64_t run) {
      std::int64_t at, unused;
      reduced_.offsets(run / blocks, at, unused);
      const std::int64_t first = run % blocks * kBlock, n = std::min(kBlock, inner_ - first);
      alignas(64) A buffer[kBlock];
      const A* values = load_block<A>(px_ + x_base + at + first * stride_, stride_, n, buffer);
      return lane_reduce<R, A>(n, [values](std::int64_t i) { return values[i]; });
    };
    const bool direct = outputs >= 256 || runs == 1;
    std::vector<A> partials(direct ? 0 : static_cast<std::size_t>(outputs * runs));
    if (!direct) {
      parallel_for(outputs * runs, std::max<std::int64_t>(1, kParallelGrain / std::min(inner_, kBlock)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       std::int64_t x_base, unused;
                       kept_.offsets(i / runs, x_base, unused);
                       partials[static_cast<std::size_t>(i)] = partial(x_base, i % runs);
                     }
                   });
    }
    parallel_for(outputs, direct ? std::max<std::int64_t>(1, kParallelGrain / (rows * inner_)) : outputs,
                 [&](std::int64_t begin, std::int64_t end) {
                   std::vector<A> values(static_cast<std::size_t>(runs));
                   for (std::int64_t output = begin; output < end; ++output) {
                     std::int64_t x_base, y_at;
                     kept_.offsets(output, x_base, y_at);
                     const A* parts = values.data();
                     if (direct) {
                       for (std::int64_t run = 0; run < runs; ++run)
                         values[static_cast<std::size_t>(run)] = partial(x_base, run);
                     } else {
                       parts = partials.data() + output * runs;
                     }
                     store(py_ + y_at, lane_reduce<R, A>(runs, [parts](std::int64_t i) { return parts[i]; }));
                   }
                 });
  }

  // The innermost axis is kept: rows are combined element by element, in chunks of a fixed number of rows.
  void across_rows() {
    constexpr std::int64_t kChunk = 256;
    const std::int64_t outer = kept_.count(), rows = reduced_.count(), blocks = (inner_ + kBlock - 1) / kBlock,
                       chunks = (rows + kChunk - 1) / kChunk;
    std::vector<A> partials(static_cast<std::size_t>(outer * chunks * inner_));
    const std::int64_t cost = std::min(rows, kChunk) * std::min(inner_, kBlock);
    parallel_for(outer * chunks * blocks, std::max<std::int64_t>(1, kParallelGrain / cost),
                 [&](std::int64_t begin, std::int64_t end) {
                   alignas(64) A buffer[kBlock];
                   for (std::int64_t task = begin; task < end; ++task) {
                     const std::int64_t block = task % blocks, chunk = task / blocks % chunks,
                                        o = task / blocks / chunks;
                     std::int64_t x_base, unused;
                     kept_.offsets(o, x_base, unused);
                     const std::int64_t first = block * kBlock, n = std::min(kBlock, inner_ - first);
                     A* sums = partials.data() + (o * chunks + chunk) * inner_ + first;
                     std::fill_n(sums, n, R::start);
                     for (std::int64_t row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) {
                       std::int64_t at;
                       reduced_.offsets(row, at, unused);
                       const A* values = load_block<A>(px_ + x_base + at + first * stride_, stride_, n, buffer);
                       for (std::int64_t i = 0; i < n; ++i) sums[i] = R::combine(sums[i], values[i]);
                     }
                   }
                 });
    for (std::int64_t o = 0; o < outer; ++o) {
      std::int64_t unused, y_at;
      kept_.offsets(o, unused, y_at);
      A* total = partials.data() + o * chunks * inner_;
      for (std::int64_t chunk = 1; chunk < chunks; ++chunk)
        for (std::int64_t i = 0; i < inner_; ++i) total[i] = R::combine(total[i], total[chunk * inner_ + i]);
      for (std::int64_t i = 0; i < inner_; ++i) store(py_ + y_at + i * y_stride_, total[i]);
    }
  }

  const TX* px_;
  TY* py_;
  bool accumulate_;
  A factor_;
  std::int64_t inner_ = 1, stride_ = 1, y_stride_ = 0;
  Axes kept_, reduced_;
};

}  // namespace

void CpuBackend::reduce(ReduceOp op, const Tensor& x, bool accumulate, Tensor& y) {
  if (y.numel() == 0) return;
  if (x.numel() == 0) {  // the empty sum; the mean of nothing is NaN, as in NumPy
    if (accumulate) return;
    constexpr double inf = std::numeric_limits<double>::infinity();
    fill(op == ReduceOp::sum    ? 0
         : op == ReduceOp::mean ? std::numeric_limits<double>::quiet_NaN()
         : op == ReduceOp::max  ? -inf
                                : inf,
         y);
    return;
  }
  const double factor = op == ReduceOp::mean ? static_cast<double>(y.numel()) / static_cast<double>(x.numel()) : 1;
  visit_float<CpuTypes>("reduce", x.dtype(), [&]<class TX>() {
    using A = compute_t<TX>;
    const auto with = [&]<class TY>() {
      switch (op) {
        case ReduceOp::sum:
        case ReduceOp::mean:
          return Reducer<SumOf<A>, A, TX, TY>(x, y, accumulate, factor).run();
        case ReduceOp::max:
          return Reducer<MaxOf<A>, A, TX, TY>(x, y, false, 1).run();
        case ReduceOp::min:
          return Reducer<MinOf<A>, A, TX, TY>(x, y, false, 1).run();
      }
    };
    if (y.dtype() == x.dtype()) return with.template operator()<TX>();
    if constexpr (std::is_same_v<TX, float>) {
      if (y.dtype() == DType::f16) return with.template operator()<float16>();
      if (y.dtype() == DType::bf16) return with.template operator()<bfloat16>();
    }
    MT_ASSERT(y.dtype() == dtype_of<A>::value, "reduce: from ", x, " to ", y);
    with.template operator()<A>();  // 16-bit input, f32 output
  });
}

void CpuBackend::argmax(const Tensor& x, int axis, Tensor& y) {
  if (y.numel() == 0) return;
  const std::int64_t n = x.shape()[axis], stride = x.strides()[axis];
  const Tensor first = x.view(y.shape(), x.strides(), x.offset());  // the axis itself is walked by hand
  const auto outputs = make_plan<2>(y.shape(), {&first, &y});
  visit_float<CpuTypes>("argmax", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    std::int64_t* py = static_cast<std::int64_t*>(y.data());
    for_each_run(outputs, [&](const std::int64_t* at, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        const T* v = px + at[0] + i * outputs.inner_stride(0);
        std::int64_t best = 0;
        A largest = static_cast<A>(v[0]);
        for (std::int64_t k = 1; k < n && largest == largest; ++k) {
          const A value = static_cast<A>(v[k * stride]);
          if (value > largest || value != value) {
            largest = value;
            best = k;
          }
        }
        py[at[1] + i * outputs.inner_stride(1)] = best;
      }
    });
  });
}

}  // namespace mantissa
