#include "core/random.h"

#include <mutex>

namespace mantissa {
namespace {
std::mutex mutex;
PhiloxState state{.seed = 0, .offset = 0};
}  // namespace

void manual_seed(std::uint64_t seed) { set_random_state({seed, 0}); }

PhiloxState random_state() {
  const std::lock_guard lock(mutex);
  return state;
}

void set_random_state(PhiloxState s) {
  const std::lock_guard lock(mutex);
  state = s;
}

PhiloxState reserve_random(std::int64_t n) {
  const std::lock_guard lock(mutex);
  const PhiloxState start = state;
  state.offset += (static_cast<std::uint64_t>(n) + 3) / 4;
  return start;
}

}  // namespace mantissa
