#pragma once
// Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011). Element i of a draw is lane i % 4 of the
// block with counter offset + i / 4, on every device, so a stream depends only on (seed, offset).

#include <cstdint>

#if defined(__CUDACC__)
#define MT_HD __host__ __device__
#else
#define MT_HD
#endif

namespace mantissa {

struct PhiloxState {
  std::uint64_t seed = 0, offset = 0;
};

struct Philox4 {
  std::uint32_t lane[4];
};

MT_HD inline Philox4 philox(std::uint64_t seed, std::uint64_t counter) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32), c2 = 0,
                c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0,
                        n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in [0, 1) from 24 bits, exact in f32.
MT_HD inline float uniform_from_bits(std::uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }

/// The process-wide stream that initialisers, dropout and rand() draw from; part of a checkpoint.
/// A draw of n elements advances the offset by ceil(n / 4).
void manual_seed(std::uint64_t seed);
PhiloxState random_state();
void set_random_state(PhiloxState state);
/// Reserves the counters of a draw of n elements and returns where it starts.
PhiloxState reserve_random(std::int64_t n);

}  // namespace mantissa
