#pragma once
// What the tests of error messages share: refuses() notes where each error was thrown, and the inventory
// compares that with every MT_CHECK and MT_THROW in the sources, so that no check goes without a test.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "step_support.h"

namespace mantissa::testing {

/// "autograd/ops.cpp:12": where the errors of this program were thrown.
inline std::set<std::string>& met() {
  static std::set<std::string> places;
  return places;
}

/// Expects `f` to throw exactly E with every part in its text, and notes the place.
template <class E, class F> void refuses(F&& f, const std::vector<std::string>& parts) {
  expect_error<E>(f, parts);
  const std::string text = error_text<E>(f);
  const auto open = text.rfind('['), close = text.rfind(']');
  if (open != std::string::npos && close != std::string::npos) met().insert(text.substr(open + 1, close - open - 1));
}

class ErrorsOnDevice : public OnDevice {
 protected:
  static Tensor f(const Shape& shape, DType dtype = DType::f32) { return ones(shape, on(dtype)); }
  static Tensor i(const Shape& shape, double value = 0, DType dtype = DType::i64) {
    return full(shape, value, on(dtype));
  }
  /// "f16[2,3]@cpu"
  static std::string is(const std::string& what) { return what + "@" + to_string(device()); }
};

struct Place {
  std::string file, text;
  int first, last;  // lines of the statement
};

/// Every MT_CHECK and MT_THROW of a source file.
inline std::vector<Place> places_in(const std::filesystem::path& path, const std::string& name) {
  std::ifstream in(path);
  const std::string source{std::istreambuf_iterator<char>(in), {}};
  std::vector<Place> places;
  for (const std::string& macro : {std::string("MT_CHECK("), std::string("MT_THROW(")}) {
    for (std::size_t at = source.find(macro); at != std::string::npos; at = source.find(macro, at + 1)) {
      int depth = 0;
      std::size_t end = at;
      bool quoted = false;
      for (; end < source.size(); ++end) {
        const char c = source[end];
        if (c == '"' && source[end - 1] != '\\' && source[end - 1] != '\'') quoted = !quoted;
        if (!quoted && c == '(') ++depth;
        if (!quoted && c == ')' && --depth == 0) break;
      }
      const auto line = [&](std::size_t to) {
        return 1 + static_cast<int>(std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
      };
      places.push_back({name, source.substr(at, end - at + 1), line(at), line(end)});
    }
  }
  return places;
}

/// Fails for every check of the sources whose "folder/file" `belongs` that no test of this program has met.
/// The last test.
inline void expect_every_check_met(const std::function<bool(const std::string& file)>& belongs) {
  namespace fs = std::filesystem;
  const fs::path root = MANTISSA_SOURCE_DIR;
  if (!fs::exists(root / "core/tensor.cpp")) GTEST_SKIP() << "the sources are not at " << root;
  if (::testing::GTEST_FLAG(filter) != "*") GTEST_SKIP() << "only some of the tests ran";
  // Out of reach here, by a part of the statement.
  std::vector<std::string> exempt;
  const int gpus = cuda_device_count();
  if (gpus == 0)
    exempt = {"different devices", "was used on", "parameters are on", "there is no cuda:", "captured step: "};
  if (gpus > 0) exempt.push_back("no GPU can be used");
  if (gpus < 2) exempt.push_back("copies between GPUs");
  const bool with_cuda = !contains(cuda_unavailable_reason(), "no CUDA backend");
  std::vector<Place> places;
  for (const char* folder : {"core", "autograd", "optim", "nn"}) {
    for (const auto& entry : fs::directory_iterator(root / folder)) {
      const std::string file = std::string(folder) + "/" + entry.path().filename().string();
      if (file == "core/error.h" || (file == "core/no_cuda.cpp" && with_cuda))
        continue;  // the macros; not in this build
      if (!belongs(file) || (entry.path().extension() != ".cpp" && entry.path().extension() != ".h")) continue;
      for (Place& place : places_in(entry.path(), file)) places.push_back(std::move(place));
    }
  }
  std::size_t hit = 0, excused = 0;
  for (const Place& place : places) {
    bool found = false;
    for (int line = place.first; line <= place.last && !found; ++line)
      found = std::ranges::any_of(
          met(), [&](const std::string& at) { return at.ends_with(place.file + ":" + std::to_string(line)); });
    const bool out_of_reach =
        std::ranges::any_of(exempt, [&](const std::string& part) { return contains(place.text, part); });
    hit += found;
    excused += !found && out_of_reach;
    EXPECT_TRUE(found || out_of_reach) << "no test meets " << place.file << ":" << place.first << ": " << place.text;
  }
  std::printf("checks: %zu, met %zu, out of reach on this machine %zu\n", places.size(), hit, excused);
  EXPECT_FALSE(places.empty());
}

/// The last suite of a program: parametrised ones run after the plain ones, in the order of their
/// instantiation.
#define MT_ERRORS_INVENTORY(belongs)                               \
  class Inventory : public ::testing::TestWithParam<int> {};       \
  INSTANTIATE_TEST_SUITE_P(Last, Inventory, ::testing::Values(0)); \
  TEST_P(Inventory, EveryCheckWasMet) { expect_every_check_met(belongs); }

}  // namespace mantissa::testing
