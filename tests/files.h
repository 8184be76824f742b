#pragma once
// What the tests of files share: a temporary folder, and errors with their words.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"

namespace mantissa::testing {

namespace fs = std::filesystem;
using Bytes = std::string;  // raw bytes of a file

/// A folder that goes away with the test.
class FileTest : public ::testing::Test {
 protected:
  FileTest() {
    std::string pattern = (fs::temp_directory_path() / "mantissa-data-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~FileTest() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const Bytes& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  static Bytes read(const std::string& file) {
    std::ostringstream out;
    out << std::ifstream(file, std::ios::binary).rdbuf();
    return out.str();
  }
  fs::path folder_;
};

/// Runs f, which must throw an E whose message has all the words.
template <class E, class F> void expect_error(F&& f, const std::vector<std::string>& words) {
  try {
    f();
    ADD_FAILURE() << "no error";
  } catch (const E& error) {
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks " << word;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "wrong class: " << error.what();
  }
}

}  // namespace mantissa::testing
