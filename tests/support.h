#pragma once
// What the tests share: devices to run on, fresh seeds that are printed, and the error measure of the numerics tests.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "mantissa/mantissa.h"

namespace mantissa::testing {

/// Fresh at every run, printed, and repeatable: MANTISSA_TEST_SEED=<seed>.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("MANTISSA_TEST_SEED");
    const std::uint64_t s =
        text ? std::strtoull(text, nullptr, 10)
             : static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) % 1000000;
    std::printf("MANTISSA_TEST_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return value;
}

/// CPU always; the first GPU when there is one.
inline std::vector<Device> devices() {
  std::vector<Device> all{cpu};
  if (cuda_device_count() > 0) all.push_back(cuda(0));
  return all;
}

/// Puts this first in a test that needs a GPU.
#define MT_NEEDS_GPU()                                                   \
  if (::mantissa::cuda_device_count() == 0) {                            \
    GTEST_SKIP() << "no GPU: " << ::mantissa::cuda_unavailable_reason(); \
  }

/// Ratio to perfect rounding: ||y - exact|| / ||round(exact) - exact|| in the dtype of y; 1 is the best there is.
/// `exact` is computed in f64 from the already rounded inputs. NaN never passes.
inline double rounding_ratio(const Tensor& y, const std::vector<double>& exact) {
  const std::vector<double> got = y.to_vector<double>();
  EXPECT_EQ(got.size(), exact.size());
  const std::vector<double> rounded =
      from_vector(exact, {static_cast<std::int64_t>(exact.size())}, {y.dtype(), cpu}).to_vector<double>();
  double error = 0, perfect = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    perfect += (rounded[i] - exact[i]) * (rounded[i] - exact[i]);
  }
  if (error == 0) return 0;
  return perfect > 0 ? std::sqrt(error / perfect) : INFINITY;
}

/// The text of the error that `f` throws, or "" when it throws nothing or another type.
template <class E, class F> std::string error_text(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Runs `f`, which must throw an E with every one of `parts` in its text, and a source location.
template <class E, class F> void expect_error(F&& f, const std::vector<std::string>& parts) {
  try {
    f();
    ADD_FAILURE() << "nothing was thrown; expected " << (parts.empty() ? "" : parts[0]);
  } catch (const E& error) {
    const std::string text = error.what();
    for (const std::string& part : parts) EXPECT_TRUE(contains(text, part)) << "'" << part << "' is not in: " << text;
    EXPECT_TRUE(contains(text, ".cpp:") || contains(text, ".h:") || contains(text, ".cu:"))
        << "no file and line in: " << text;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type was thrown: " << error.what();
  }
}

}  // namespace mantissa::testing
