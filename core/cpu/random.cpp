// Random draws and dropout; the stream is defined in core/random.h and equal on every device.
#include <cmath>

#include "core/cpu/cpu_backend.h"
#include "core/cpu/loops.h"

namespace mantissa {

namespace {

constexpr std::int64_t kCounters = 8;  // Philox blocks drawn at once: 32 elements

/// bits[4 k + lane] of the blocks counter + k. The same rounds as philox(), for eight counters side by side.
void philox_run(std::uint64_t seed, std::uint64_t counter, std::uint32_t* bits) {
  std::uint32_t c0[kCounters], c1[kCounters], c2[kCounters] = {}, c3[kCounters] = {};
  for (std::uint64_t k = 0; k < kCounters; ++k) {
    c0[k] = static_cast<std::uint32_t>(counter + k);
    c1[k] = static_cast<std::uint32_t>((counter + k) >> 32);
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::int64_t k = 0; k < kCounters; ++k) {
      const std::uint64_t p0 = 0xD2511F53ull * c0[k], p1 = 0xCD9E8D57ull * c2[k];
      c0[k] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[k] ^ k0;
      c2[k] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[k] ^ k1;
      c1[k] = static_cast<std::uint32_t>(p1);
      c3[k] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (std::int64_t k = 0; k < kCounters; ++k) {
    bits[4 * k] = c0[k];
    bits[4 * k + 1] = c1[k];
    bits[4 * k + 2] = c2[k];
    bits[4 * k + 3] = c3[k];
  }
}

}  // namespace

void CpuBackend::dropout(const Tensor& x, double p, PhiloxState state, Tensor& y) {
  visit_float<CpuTypes>("dropout", x.dtype(), [&]<class T>() {
    using A = compute_t<T>;
    const T* px = static_cast<const T*>(x.data());
    T* py = static_cast<T*>(y.data());
    const auto threshold = static_cast<float>(p);
    const A factor = p < 1 ? static_cast<A>(1 / (1 - p)) : A(0);
    parallel_for(x.numel(), kParallelGrain, [&](std::int64_t begin, std::int64_t end) {
      alignas(64) std::uint32_t bits[kBlock];
      alignas(64) A buffer[kBlock], result[kBlock];
      for (std::int64_t first = begin; first < end; first += kBlock) {
        const std::int64_t n = std::min(kBlock, end - first);
        for (std::int64_t i = 0; i < n; i += 4 * kCounters)
          philox_run(state.seed, state.offset + static_cast<std::uint64_t>((first + i) / 4), bits + i);
        const A* v = load_block<A>(px + first, 1, n, buffer);
        A* r = result_block<A>(py + first, 1, result);
        for (std::int64_t i = 0; i < n; ++i) r[i] = uniform_from_bits(bits[i]) >= threshold ? v[i] * factor : A(0);
        store_block<A>(r, py + first, 1, n);
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
        for (std::int64_t i = block * 4; i < std::min(y.numel(), block * 4 + 4); ++i)
          py[i] = static_cast<T>(value[i & 3]);
      }
    });
  });
}

}  // namespace mantissa
