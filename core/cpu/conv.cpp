// Convolution as im2col and one product per group, channels-last: the patches of a row are contiguous runs of
// channels. Images are taken a few at a time, so that what the product reads is still in the cache.
#include <omp.h>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/gemm.h"
#include "core/cpu/loops.h"
#include "core/cpu/scratch.h"

namespace mantissa {
namespace {

struct Geometry {
  std::int64_t n, c, h, w, o, kh, kw, oh, ow, cg, og, patch, pixels, image, step;
  Conv2dOptions options;
  bool direct;  // a 1x1 window with unit stride reads the image as it is

  Geometry(const Shape& x, const Shape& weight, const Shape& y, const Conv2dOptions& opt)
      : n(x[0]),
        c(x[1]),
        h(x[2]),
        w(x[3]),
        o(y[1]),
        kh(weight[2]),
        kw(weight[3]),
        oh(y[2]),
        ow(y[3]),
        cg(c / opt.groups),
        og(o / opt.groups),
        patch(kh * kw * cg),
        pixels(oh * ow),
        image(h * w * c),
        options(opt) {
    direct = kh == 1 && kw == 1 && opt.groups == 1 && opt.stride[0] == 1 && opt.stride[1] == 1 && opt.padding[0] == 0 &&
             opt.padding[1] == 0;
    constexpr std::int64_t kElements = std::int64_t{1} << 16;  // of the patches at one time
    step = std::clamp<std::int64_t>(kElements / std::max<std::int64_t>(1, pixels * patch), 1,
                                    std::max<std::int64_t>(n, 1));
  }
  std::int64_t chunks() const { return (n + step - 1) / step; }
  std::int64_t images(std::int64_t chunk) const { return std::min(step, n - chunk * step); }
  std::int64_t patch_elements() const { return direct ? 0 : step * pixels * patch; }
};

/// Chunks share the threads when there are enough of them; else each product uses all threads.
template <class F> void for_each_chunk(std::int64_t chunks, F&& f) {
  if (chunks >= omp_get_max_threads()) return parallel_tasks(chunks, f);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) f(chunk);
}

/// For every window of one output row: copy(patch offset, image offset, n) for runs inside, pad(patch offset,
/// n) for the rest.
template <class Copy, class Pad>
void for_each_run_of_row(const Geometry& s, std::int64_t row, std::int64_t group, Copy copy, Pad pad) {
  const bool whole = s.options.dilation[1] == 1 && s.options.groups == 1;  // neighbours of a window are contiguous
  for (std::int64_t column = 0; column < s.ow; ++column) {
    std::int64_t at = column * s.patch;
    const std::int64_t x0 = column * s.options.stride[1] - s.options.padding[1];
    for (std::int64_t i = 0; i < s.kh; ++i) {
      const std::int64_t y = row * s.options.stride[0] - s.options.padding[0] + i * s.options.dilation[0];
      if (y < 0 || y >= s.h) {
        pad(at, s.kw * s.cg);
        at += s.kw * s.cg;
      } else if (whole && x0 >= 0 && x0 + s.kw <= s.w) {
        copy(at, (y * s.w + x0) * s.c, s.kw * s.c);
        at += s.kw * s.c;
      } else {
        for (std::int64_t j = 0; j < s.kw; ++j, at += s.cg) {
          const std::int64_t x = x0 + j * s.options.dilation[1];
          if (x >= 0 && x < s.w) {
            copy(at, (y * s.w + x) * s.c + group * s.cg, s.cg);
          } else {
            pad(at, s.cg);
          }
        }
      }
    }
  }
}

template <class A> void im2col(const Geometry& s, const A* x, std::int64_t count, std::int64_t group, A* patches) {
  parallel_for(count * s.oh, std::max<std::int64_t>(1, kParallelGrain / std::max<std::int64_t>(1, s.ow * s.patch)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   A* base = patches + row * s.ow * s.patch;
                   const A* image = x + row / s.oh * s.image;
                   for_each_run_of_row(
                       s, row % s.oh, group,
                       [=](std::int64_t at, std::int64_t from, std::int64_t n) {
                         if (n < 16) {  // shorter than a call
                           for (std::int64_t k = 0; k < n; ++k) base[at + k] = image[from + k];
                         } else {
                           std::memcpy(base + at, image + from, static_cast<std::size_t>(n) * sizeof(A));
                         }
                       },
                       [=](std::int64_t at, std::int64_t n) { std::fill_n(base + at, n, A(0)); });
                 }
               });
}

/// Adds patches back to their pixels; windows overlap, so a thread owns whole images.
template <class A> void col2im(const Geometry& s, const A* patches, std::int64_t count, std::int64_t group, A* gx) {
  parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k)
      for (std::int64_t row = 0; row < s.oh; ++row) {
        const A* base = patches + (k * s.oh + row) * s.ow * s.patch;
        A* image = gx + k * s.image;
        for_each_run_of_row(
            s, row, group,
            [=](std::int64_t at, std::int64_t to, std::int64_t n) {
              const A* __restrict from = base + at;
              A* __restrict sums = image + to;
              for (std::int64_t i = 0; i < n; ++i) sums[i] += from[i];
            },
            [](std::int64_t, std::int64_t) {});
      }
  });
}

/// n elements in the compute type: in place, or widened into `buffer`.
template <class A, class T> const A* widened(const T* x, std::int64_t n, A* buffer) {
  if constexpr (std::is_same_v<A, T>) return x;
  parallel_for(n, kParallelGrain,
               [&](std::int64_t begin, std::int64_t end) { load_block<A>(x + begin, 1, end - begin, buffer + begin); });
  return buffer;
}

template <class A, class T> void narrowed(const A* from, T* to, std::int64_t n) {
  parallel_for(n, kParallelGrain,
               [&](std::int64_t begin, std::int64_t end) { store_block<A>(from + begin, to + begin, 1, end - begin); });
}

}  // namespace

void CpuBackend::conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const Geometry s(x.shape(), w.shape(), y.shape(), options);
  visit_float<CpuTypes>("conv2d", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    constexpr bool kWide = std::is_same_v<A, T>;
    const Scratch<A> weight(kWide ? 0 : w.numel());
    const A* pw = widened<A>(static_cast<const T*>(w.data()), w.numel(), weight.data());
    const ThreadScratch<A> patches(s.patch_elements()), input(kWide ? 0 : s.step * s.image),
        result(kWide ? 0 : s.step * s.pixels * s.o);
    for_each_chunk(s.chunks(), [&](std::int64_t chunk) {
      const std::int64_t count = s.images(chunk), first = chunk * s.step;
      const A* images = widened<A>(static_cast<const T*>(x.data()) + first * s.image, count * s.image, input.data());
      T* target = static_cast<T*>(y.data()) + first * s.pixels * s.o;
      A* out = result.data();
      if constexpr (kWide) out = target;
      for (std::int64_t group = 0; group < options.groups; ++group) {
        if (!s.direct) im2col(s, images, count, group, patches.data());
        gemm(count * s.pixels, s.og, s.patch, A(1), s.direct ? images : patches.data(), s.patch, 1,
             pw + group * s.og * s.patch, 1, s.patch, A(0), out + group * s.og, s.o);
      }
      if constexpr (!kWide) narrowed(out, target, count * s.pixels * s.o);
    });
  });
}

void CpuBackend::conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  if (g.numel() == 0) return fill(0, gx);
  const Geometry s(gx.shape(), w.shape(), g.shape(), options);
  visit_float<CpuTypes>("conv2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    constexpr bool kWide = std::is_same_v<A, T>;
    const Scratch<A> weight(kWide ? 0 : w.numel());
    const A* pw = widened<A>(static_cast<const T*>(w.data()), w.numel(), weight.data());
    const ThreadScratch<A> patches(s.patch_elements()), input(kWide ? 0 : s.step * s.pixels * s.o),
        sums(kWide ? 0 : s.step * s.image);
    for_each_chunk(s.chunks(), [&](std::int64_t chunk) {
      const std::int64_t count = s.images(chunk), first = chunk * s.step;
      const A* pg =
          widened<A>(static_cast<const T*>(g.data()) + first * s.pixels * s.o, count * s.pixels * s.o, input.data());
      T* target = static_cast<T*>(gx.data()) + first * s.image;
      A* out = sums.data();
      if constexpr (kWide) out = target;
      if (!s.direct) std::fill_n(out, count * s.image, A(0));
      for (std::int64_t group = 0; group < options.groups; ++group) {
        gemm(count * s.pixels, s.patch, s.og, A(1), pg + group * s.og, s.o, 1, pw + group * s.og * s.patch, s.patch, 1,
             A(0), s.direct ? out : patches.data(), s.patch);
        if (!s.direct) col2im(s, patches.data(), count, group, out);
      }
      if constexpr (!kWide) narrowed(out, target, count * s.image);
    });
  });
}

void CpuBackend::conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate,
                                    Tensor& gw) {
  if (gw.numel() == 0) return;
  const Geometry s(x.shape(), gw.shape(), g.shape(), options);
  visit_float<CpuTypes>("conv2d", g.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    constexpr bool kWide = std::is_same_v<A, T>;
    // A small weight is summed in several parts of fixed extent at once; a large one has enough work in each
    // product.
    const std::int64_t chunks = s.chunks(), size = gw.numel(),
                       parts = size <= (1 << 17) ? std::clamp<std::int64_t>(chunks, 1, 16) : 1;
    const ThreadScratch<A> patches(s.patch_elements()), wide_g(kWide ? 0 : s.step * s.pixels * s.o),
        wide_x(kWide ? 0 : s.step * s.image);
    const Scratch<A> sums(parts * size);
    for_each_chunk(parts, [&](std::int64_t part) {
      A* sum = sums.data() + part * size;
      std::fill_n(sum, size, A(0));
      for (std::int64_t chunk = part * chunks / parts; chunk < (part + 1) * chunks / parts; ++chunk) {
        const std::int64_t count = s.images(chunk), first = chunk * s.step;
        const A* pg =
            widened<A>(static_cast<const T*>(g.data()) + first * s.pixels * s.o, count * s.pixels * s.o, wide_g.data());
        const A* px = widened<A>(static_cast<const T*>(x.data()) + first * s.image, count * s.image, wide_x.data());
        for (std::int64_t group = 0; group < options.groups; ++group) {
          if (!s.direct) im2col(s, px, count, group, patches.data());
          gemm(s.og, s.patch, count * s.pixels, A(1), pg + group * s.og, 1, s.o, s.direct ? px : patches.data(),
               s.patch, 1, A(1), sum + group * s.og * s.patch, s.patch);
        }
      }
    });
    visit_float<CpuTypes>("conv2d", gw.dtype(), [&]<class TW>() {
      TW* pw = static_cast<TW*>(gw.data());
      parallel_for(size, kParallelGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          A total = accumulate ? static_cast<A>(pw[i]) : A(0);
          for (std::int64_t part = 0; part < parts; ++part) total += sums.data()[part * size + i];
          pw[i] = static_cast<TW>(total);
        }
      });
    });
  });
}

}  // namespace mantissa
