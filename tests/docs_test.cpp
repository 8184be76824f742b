// Every C++ block of the documentation is code that is compiled here or in an example.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "snippets.h"
#include "support.h"

using namespace mantissa;
namespace fs = std::filesystem;

namespace {

std::string read(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Without white space, so that indentation does not matter.
std::string squeezed(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (!std::isspace(static_cast<unsigned char>(c))) out += c;
  return out;
}

TEST(Docs, EveryCodeBlockIsCompiled) {
  const fs::path root = MANTISSA_SOURCE_DIR;
  std::string compiled = squeezed(read(root / "tests/snippets.h")) + squeezed(read(root / "autograd/ops.h"));
  for (const auto& entry : fs::directory_iterator(root / "examples"))
    if (entry.path().extension() == ".cpp") compiled += squeezed(read(entry.path()));
  std::vector<fs::path> pages{root / "README.md"};
  for (const auto& entry : fs::directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") pages.push_back(entry.path());
  int blocks = 0;
  for (const fs::path& page : pages) {
    std::istringstream lines(read(page));
    std::string line, block;
    bool inside = false;
    while (std::getline(lines, line)) {
      if (!inside) {
        inside = line == "```cpp";
        block.clear();
      } else if (line == "```") {
        inside = false;
        ++blocks;
        // A one-line declaration of the guide's imaginary op has nothing to compile against.
        if (block.find("cube(const Tensor& x)") != std::string::npos) continue;
        EXPECT_NE(compiled.find(squeezed(block)), std::string::npos) << page << ": this block is compiled nowhere:\n"
                                                                     << block;
      } else {
        block += line + "\n";
      }
    }
    EXPECT_FALSE(inside) << page << ": a code block does not end";
  }
  std::printf("%d blocks\n", blocks);
  EXPECT_GE(blocks, 5);
}

TEST(Docs, TheGuidesCodeRuns) {
  manual_seed(mantissa::testing::seed());
  snippets::train(cpu, randn({8, 784}), zeros({8}, {i64, cpu}));
  snippets::policies();
  Tensor x = randn({3, 5}, {f64, cpu}).set_requires_grad();
  const auto report = gradcheck([](std::span<const Tensor> in) { return snippets::softmax_last(in[0]); }, {x});
  EXPECT_TRUE(report.passed) << report.message;
  const snippets::Cube cube;
  EXPECT_NEAR(cube.grad(1.0, 2.0), 12, 1e-12);
}

TEST(Docs, LinksPointToFiles) {
  const fs::path root = MANTISSA_SOURCE_DIR;
  std::vector<fs::path> pages{root / "README.md"};
  for (const auto& entry : fs::directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") pages.push_back(entry.path());
  for (const fs::path& page : pages) {
    std::string text;  // without code
    std::istringstream lines(read(page));
    bool code = false;
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("```")) code = !code;
      if (!code) text += line + "\n";
    }
    for (std::size_t at = text.find("]("); at != std::string::npos; at = text.find("](", at + 1)) {
      const std::string target = text.substr(at + 2, text.find(')', at) - at - 2);
      if (target.starts_with("http")) continue;
      EXPECT_TRUE(fs::exists(page.parent_path() / target)) << page << " links to " << target;
    }
  }
}

}  // namespace
