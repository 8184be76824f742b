// Random draws and dropout; the stream is defined in core/random.h and equal on every device.
#include <cmath>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {

void CpuBackend::dropout(const Tensor& x, double p, PhiloxState state, Tensor& y) {
  visit_float<CpuTypes>("dropout", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    const auto threshold = static_cast<float>(p);
    const A factor = p < 1 ? static_cast<A>(1 / (1 - p)) : A(0);
    parallel_for((x.numel() + 3) / 4, kParallelGrain / 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        const Philox4 bits = philox(state.seed, state.offset + static_cast<std::uint64_t>(block));
        for (std::int64_t i = block * 4; i < std::min(x.numel(), block * 4 + 4); ++i)
          py[i] = uniform_from_bits(bits.lane[i & 3]) >= threshold ? static_cast<T>(static_cast<A>(px[i]) * factor) : T(0.0f);
      }
    });
  });
}

void CpuBackend::random(RandomKind kind, double a, double b, PhiloxState state, Tensor& y) {
  visit_float<CpuTypes>("random", y.dtype(), [&]<class T>() {
    T* py = static_cast<T*>(y.data());
    parallel_for((y.numel() + 3) / 4, kParallelGrain / 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        const Philox4 bits = philox(state.seed, state.offset + static_cast<std::uint64_t>(block));
        double value[4];
        for (int lane = 0; lane < 4; ++lane) {
          const double u = static_cast<double>(uniform_from_bits(bits.lane[lane]));
          value[lane] = kind == RandomKind::uniform ? a + (b - a) * u : u < a ? 1 : 0;
        }
        if (kind == RandomKind::normal) {  // Box-Muller, on (0, 1] for the logarithm
          for (int pair = 0; pair < 4; pair += 2) {
            const double u = static_cast<double>(uniform_from_bits(bits.lane[pair])) + 0x1p-24;
            const double angle = 6.283185307179586 * static_cast<double>(uniform_from_bits(bits.lane[pair + 1]));
            const double radius = std::sqrt(-2 * std::log(u));
            value[pair] = a + b * (radius * std::cos(angle));
            value[pair + 1] = a + b * (radius * std::sin(angle));
          }
        }
        for (std::int64_t i = block * 4; i < std::min(y.numel(), block * 4 + 4); ++i) py[i] = static_cast<T>(value[i & 3]);
      }
    });
  });
}

}  // namespace mantissa
