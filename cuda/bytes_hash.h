#pragma once
// Hash and equality of a plain struct without padding, as the key of a cache of plans.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mantissa {

struct BytesHash {
  template <class P> std::size_t operator()(const P& p) const {
    static_assert(std::has_unique_object_representations_v<P> && sizeof(P) % 4 == 0);
    std::uint32_t words[sizeof(P) / 4];
    std::uint64_t h = 0x9E3779B97F4A7C15ull;
    std::memcpy(words, &p, sizeof words);
    for (const std::uint32_t w : words) h = (h ^ w) * 0xBF58476D1CE4E5B9ull, h ^= h >> 29;
    return static_cast<std::size_t>(h);
  }
};

struct BytesEqual {
  template <class P> bool operator()(const P& a, const P& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
};

}  // namespace mantissa
