// Forward elementwise kernels, copies and conversions.
#include <limits>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

template <class To, class From> To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, bool>) {
    if constexpr (std::is_class_v<From>)
      return static_cast<float>(x) != 0;
    else
      return x != From(0);
  } else if constexpr (std::is_class_v<From>) {
    return convert<To>(static_cast<float>(x));  // widening is exact
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // C++ leaves values out of range undefined; here the nearest, and 0 for NaN.
    using Limits = std::numeric_limits<To>;
    if (x >= static_cast<From>(Limits::max())) return Limits::max();
    return x > static_cast<From>(Limits::min()) ? static_cast<To>(x) : x != x ? To(0) : Limits::min();
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace

void CpuBackend::unary(const UnaryOp& variant, const Tensor& x, Tensor& y) {
  std::visit(
      [&](auto op) {
        visit_float<CpuTypes>(op.name, x.dtype(),
                              [&]<class T>() { map_unary<compute_t<T>, T, T>(x, y, [op](auto v) { return op(v); }); });
      },
      variant);
}

void CpuBackend::binary(const BinaryOp& variant, const Tensor& a, const Tensor& b, Tensor& y) {
  std::visit(
      [&](auto op) {
        visit_float<CpuTypes>(op.name, y.dtype(), [&]<class T>() {
          map_binary<compute_t<T>, T, T, T>(a, b, y, [op](auto v, auto w) { return op(v, w); });
        });
      },
      variant);
}

void CpuBackend::fill(double value, Tensor& y) {
  visit_all<CpuTypes>("fill", y.dtype(), [&]<class T>() {
    const T v = convert<T>(value);
    const auto plan = make_plan<1>(y.shape(), {&y});
    T* py = static_cast<T*>(y.data());
    for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) py[at[0] + i * plan.inner_stride(0)] = v;
    });
  });
}

namespace {

template <class From, class To> void convert_runs(const StridedPlan<2>& plan, const From* px, To* py) {
  const std::int64_t sx = plan.inner_stride(0), sy = plan.inner_stride(1);
  for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
    const From* x = px + at[0];
    To* y = py + at[1];
    if constexpr (std::is_same_v<From, To>) {
      if (sx == 1 && sy == 1) {
        std::memcpy(y, x, static_cast<std::size_t>(n) * sizeof(To));
        return;
      }
    } else if constexpr (std::is_same_v<From, float> && (std::is_same_v<To, float16> || std::is_same_v<To, bfloat16>)) {
      if (sx == 1 && sy == 1) return narrow_block(x, y, n);
    } else if constexpr (std::is_same_v<To, float> &&
                         (std::is_same_v<From, float16> || std::is_same_v<From, bfloat16>)) {
      if (sx == 1 && sy == 1) return widen_block(x, y, n);
    }
    for (std::int64_t i = 0; i < n; ++i) y[i * sy] = convert<To>(x[i * sx]);
  });
}

}  // namespace

void CpuBackend::copy(const Tensor& x, Tensor& y) {
  counters.casts += x.dtype() != y.dtype();
  const auto plan = make_plan<2>(y.shape(), {&x, &y});
  visit_all<CpuTypes>("copy", x.dtype(), [&]<class From>() {
    visit_all<CpuTypes>("copy", y.dtype(), [&]<class To>() {
      convert_runs(plan, static_cast<const From*>(x.data()), static_cast<To*>(y.data()));
    });
  });
}

void CpuBackend::accumulate(const Tensor& x, Tensor& y) {
  visit_float<CpuTypes>("accumulate", x.dtype(), [&]<class X>() {
    visit_float<CpuTypes>("accumulate", y.dtype(), [&]<class Y>() {
      map_binary<compute_t<Y>, X, Y, Y>(x, y, y, [](auto v, auto w) { return w + v; });
    });
  });
}

void CpuBackend::compare(CompareOp op, const Tensor& a, const Tensor& b, Tensor& y) {
  const auto plan = make_plan<3>(y.shape(), {&a, &b, &y});
  visit_all<CpuTypes>("compare", a.dtype(), [&]<class T>() {
    using A = std::conditional_t<std::is_class_v<T>, float, T>;
    const T *pa = static_cast<const T*>(a.data()), *pb = static_cast<const T*>(b.data());
    bool* py = static_cast<bool*>(y.data());
    const auto run = [&](auto holds) {
      for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          py[at[2] + i * plan.inner_stride(2)] = holds(static_cast<A>(pa[at[0] + i * plan.inner_stride(0)]),
                                                       static_cast<A>(pb[at[1] + i * plan.inner_stride(1)]));
      });
    };
    switch (op) {
      case CompareOp::equal:
        return run([](A v, A w) { return v == w; });
      case CompareOp::not_equal:
        return run([](A v, A w) { return v != w; });
      case CompareOp::less:
        return run([](A v, A w) { return v < w; });
      case CompareOp::less_equal:
        return run([](A v, A w) { return v <= w; });
      case CompareOp::greater:
        return run([](A v, A w) { return v > w; });
      case CompareOp::greater_equal:
        return run([](A v, A w) { return v >= w; });
    }
  });
}

void CpuBackend::where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) {
  const auto plan = make_plan<4>(y.shape(), {&condition, &a, &b, &y});
  visit_all<CpuTypes>("where", y.dtype(), [&]<class T>() {
    const bool* pc = static_cast<const bool*>(condition.data());
    const T *pa = static_cast<const T*>(a.data()), *pb = static_cast<const T*>(b.data());
    T* py = static_cast<T*>(y.data());
    for_each_run(plan, [&](const std::int64_t* at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i)
        py[at[3] + i * plan.inner_stride(3)] = pc[at[0] + i * plan.inner_stride(0)]
                                                   ? pa[at[1] + i * plan.inner_stride(1)]
                                                   : pb[at[2] + i * plan.inner_stride(2)];
    });
  });
}

}  // namespace mantissa
