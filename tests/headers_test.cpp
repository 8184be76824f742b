// The layers: who includes whom. That each public header compiles alone is the target headers_compile_alone.
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "support.h"

namespace fs = std::filesystem;

namespace {

/// The names in the #include lines of a file.
std::vector<std::string> includes(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::vector<std::string> found;
  while (std::getline(file, line))
    if (line.starts_with("#include ")) found.push_back(line.substr(10, line.find_first_of("\">", 10) - 10));
  return found;
}

const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"core", {"core"}},
    {"autograd", {"autograd", "core"}},
    {"nn", {"nn", "autograd", "core"}},
    {"optim", {"optim", "autograd", "core"}},
    {"train", {"train", "core"}},
    {"cuda", {"cuda", "core"}},
};

TEST(Layers, LowerNeverIncludesHigher) {
  const fs::path root = MANTISSA_SOURCE_DIR;
  int files = 0;
  for (const auto& [folder, allowed] : kMayInclude)
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file()) continue;
      ++files;
      for (const std::string& name : includes(entry.path())) {
        const std::string top = name.substr(0, name.find('/'));
        if (!kMayInclude.contains(top) || name.find('/') == std::string::npos) continue;
        EXPECT_TRUE(allowed.contains(top)) << entry.path() << " includes " << name;
      }
    }
  EXPECT_GT(files, 80);
}

TEST(Layers, PublicHeadersNeedOnlyTheStandardLibrary) {
  const fs::path root = MANTISSA_SOURCE_DIR;
  for (const auto& [folder, unused] : kMayInclude) {
    if (folder == "cuda") continue;
    for (const auto& entry : fs::directory_iterator(root / folder)) {
      if (entry.path().extension() != ".h") continue;
      for (const std::string& name : includes(entry.path())) {
        const bool ours = kMayInclude.contains(name.substr(0, name.find('/'))) && name.find('/') != std::string::npos;
        const bool standard = name.find('/') == std::string::npos &&
                              (name.find('.') == std::string::npos || name == "signal.h");  // POSIX
        EXPECT_TRUE(ours || standard) << entry.path() << " includes " << name;
      }
    }
  }
}

TEST(Layers, OnlyTheBackendsKnowTheirLibraries) {
  const fs::path root = MANTISSA_SOURCE_DIR;
  for (const std::string folder : {"core", "autograd", "nn", "optim", "train"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file()) continue;
      for (const std::string& name : includes(entry.path())) {
        EXPECT_FALSE(name.starts_with("cuda") || name.starts_with("cublas") || name.starts_with("cudnn"))
            << entry.path() << " includes " << name;
        if (name.starts_with("Eigen")) {
          EXPECT_EQ(entry.path().parent_path().filename(), "cpu") << entry.path();
        }
      }
    }
}

}  // namespace
