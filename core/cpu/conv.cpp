// Convolution as im2col and one product per group, channels-last: the patches of a row are contiguous runs of channels.
#include <vector>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/loops.h"

namespace mantissa {
namespace {

struct Geometry {
  std::int64_t n, c, h, w, o, kh, kw, oh, ow, cg, og, patch;
  Conv2dOptions options;
  Geometry(const Shape& x, const Shape& weight, const Shape& y, const Conv2dOptions& opt)
      : n(x[0]), c(x[1]), h(x[2]), w(x[3]), o(y[1]), kh(weight[2]), kw(weight[3]), oh(y[2]), ow(y[3]), cg(c / opt.groups), og(o / opt.groups),
        patch(kh * kw * cg), options(opt) {}
  /// A 1x1 window with unit stride reads the image as it is.
  bool direct() const {
    return kh == 1 && kw == 1 && options.groups == 1 && options.stride[0] == 1 && options.stride[1] == 1 && options.padding[0] == 0 && options.padding[1] == 0;
  }
  /// Images whose patches together fill about a megabyte.
  std::int64_t images_at_once() const { return std::max<std::int64_t>(1, std::min(n, (std::int64_t{1} << 19) / std::max<std::int64_t>(1, oh * ow * patch))); }
};

/// f(patch address, image address or null for padding) for every window position of one output row.
template <class F>
void for_each_tap(const Geometry& s, std::int64_t image, std::int64_t row, std::int64_t group, F f) {
  for (std::int64_t column = 0; column < s.ow; ++column) {
    std::int64_t at = column * s.patch;
    for (std::int64_t i = 0; i < s.kh; ++i) {
      const std::int64_t y = row * s.options.stride[0] - s.options.padding[0] + i * s.options.dilation[0];
      for (std::int64_t j = 0; j < s.kw; ++j, at += s.cg) {
        const std::int64_t x = column * s.options.stride[1] - s.options.padding[1] + j * s.options.dilation[1];
        const bool inside = y >= 0 && y < s.h && x >= 0 && x < s.w;
        f(at, inside ? ((image * s.h + y) * s.w + x) * s.c + group * s.cg : std::int64_t{-1});
      }
    }
  }
}

template <class A>
void im2col(const Geometry& s, const A* x, std::int64_t image, std::int64_t count, std::int64_t group, A* patches) {
  parallel_for(count * s.oh, std::max<std::int64_t>(1, kParallelGrain / (s.ow * s.patch)), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      A* base = patches + row * s.ow * s.patch;
      for_each_tap(s, image + row / s.oh, row % s.oh, group, [&](std::int64_t at, std::int64_t from) {
        if (from < 0) {
          std::fill_n(base + at, s.cg, A(0));
        } else if (s.cg == 1) {
          base[at] = x[from];
        } else {
          std::memcpy(base + at, x + from, static_cast<std::size_t>(s.cg) * sizeof(A));
        }
      });
    }
  });
}

/// Adds patches back to their pixels; windows overlap, so a thread owns whole images.
template <class A>
void col2im(const Geometry& s, const A* patches, std::int64_t image, std::int64_t count, std::int64_t group, A* gx) {
  parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k)
      for (std::int64_t row = 0; row < s.oh; ++row) {
        const A* base = patches + (k * s.oh + row) * s.ow * s.patch;
        for_each_tap(s, image + k, row, group, [&](std::int64_t at, std::int64_t to) {
          if (to < 0) return;
          for (std::int64_t ch = 0; ch < s.cg; ++ch) gx[to + ch] += base[at + ch];
        });
      }
  });
}

/// A dense tensor as flat memory of the compute type.
template <class A, class T>
const A* flat_data(const Tensor& x, std::vector<A>& buffer) {
  if constexpr (std::is_same_v<A, T>) {
    return static_cast<const A*>(x.data());
  } else {
    buffer.resize(static_cast<std::size_t>(x.numel()));
    const T* p = static_cast<const T*>(x.data());
    parallel_for(x.numel(), kParallelGrain, [&](std::int64_t begin, std::int64_t end) { load_block<A>(p + begin, 1, end - begin, buffer.data() + begin); });
    return buffer.data();
  }
}

template <class A>
class Scratch {
 public:
  explicit Scratch(std::int64_t n) {
    const MemoryScope scope(MemoryCategory::workspace);
    memory_ = empty({std::max<std::int64_t>(n, 1)}, {dtype_of<A>::value, cpu});
  }
  A* data() { return static_cast<A*>(memory_.data()); }

 private:
  Tensor memory_;
};

template <class A, class T>
void store_flat(const A* from, T* to, std::int64_t n) {
  parallel_for(n, kParallelGrain, [&](std::int64_t begin, std::int64_t end) { store_block<A>(from + begin, to + begin, 1, end - begin); });
}

}  // namespace

void CpuBackend::conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Geometry s(x.shape(), w.shape(), y.shape(), options);
  visit_float<CpuTypes>("conv2d", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    std::vector<A> bx, bw;
    const A *px = flat_data<A, T>(x, bx), *pw = flat_data<A, T>(w, bw);
    T* py = static_cast<T*>(y.data());
    const std::int64_t step = s.images_at_once(), pixels = s.oh * s.ow;
    Scratch<A> patches(s.direct() ? 0 : step * pixels * s.patch), result(std::is_same_v<A, T> ? 0 : step * pixels * s.o);
    for (std::int64_t image = 0; image < s.n; image += step) {
      const std::int64_t count = std::min(step, s.n - image), rows = count * pixels;
      A* out = result.data();
      if constexpr (std::is_same_v<A, T>) out = py + image * pixels * s.o;
      for (std::int64_t group = 0; group < options.groups; ++group) {
        const A* a = px + image * s.h * s.w * s.c;
        if (!s.direct()) {
          im2col(s, px, image, count, group, patches.data());
          a = patches.data();
        }
        gemm(rows, s.og, s.patch, A(1), a, s.patch, 1, pw + group * s.og * s.patch, 1, s.patch, A(0), out + group * s.og, s.o);
      }
      if constexpr (!std::is_same_v<A, T>) store_flat(out, py + image * pixels * s.o, rows * s.o);
    }
  });
}

void CpuBackend::conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const Geometry s(gx.shape(), w.shape(), g.shape(), options);
  visit_float<CpuTypes>("conv2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    std::vector<A> bg, bw;
    const A *pg = flat_data<A, T>(g, bg), *pw = flat_data<A, T>(w, bw);
    T* pgx = static_cast<T*>(gx.data());
    const std::int64_t step = s.images_at_once(), pixels = s.oh * s.ow, image_size = s.h * s.w * s.c;
    Scratch<A> patches(s.direct() ? 0 : step * pixels * s.patch), sums(step * image_size);
    for (std::int64_t image = 0; image < s.n; image += step) {
      const std::int64_t count = std::min(step, s.n - image), rows = count * pixels;
      A* out = sums.data();
      if constexpr (std::is_same_v<A, T>) out = pgx + image * image_size;
      if (!s.direct()) std::fill_n(out, count * image_size, A(0));
      for (std::int64_t group = 0; group < options.groups; ++group) {
        A* target = s.direct() ? out : patches.data();
        gemm(rows, s.patch, s.og, A(1), pg + image * pixels * s.o + group * s.og, s.o, 1, pw + group * s.og * s.patch, s.patch, 1, A(0), target, s.patch);
        if (!s.direct()) col2im(s, patches.data(), 0, count, group, out);
      }
      if constexpr (!std::is_same_v<A, T>) store_flat(out, pgx + image * image_size, count * image_size);
    }
  });
}

void CpuBackend::conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate, Tensor& gw) {
  if (gw.numel() == 0) return;
  const Geometry s(x.shape(), gw.shape(), g.shape(), options);
  visit_float<CpuTypes>("conv2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    std::vector<A> bg, bx;
    const A *pg = flat_data<A, T>(g, bg), *px = flat_data<A, T>(x, bx);
    const std::int64_t step = s.images_at_once(), pixels = s.oh * s.ow;
    Scratch<A> patches(s.direct() ? 0 : step * pixels * s.patch), sums(gw.numel());
    std::fill_n(sums.data(), gw.numel(), A(0));
    for (std::int64_t image = 0; image < s.n; image += step) {
      const std::int64_t count = std::min(step, s.n - image), rows = count * pixels;
      for (std::int64_t group = 0; group < options.groups; ++group) {
        const A* a = px + image * s.h * s.w * s.c;
        if (!s.direct()) {
          im2col(s, px, image, count, group, patches.data());
          a = patches.data();
        }
        gemm(s.og, s.patch, rows, A(1), pg + image * pixels * s.o + group * s.og, 1, s.o, a, s.patch, 1, A(1), sums.data() + group * s.og * s.patch, s.patch);
      }
    }
    visit_float<CpuTypes>("conv2d", gw.dtype(), [&]<class TW>() {
      TW* pw = static_cast<TW*>(gw.data());
      for (std::int64_t i = 0; i < gw.numel(); ++i) pw[i] = static_cast<TW>(accumulate ? static_cast<A>(pw[i]) + sums.data()[i] : sums.data()[i]);
    });
  });
}

}  // namespace mantissa
