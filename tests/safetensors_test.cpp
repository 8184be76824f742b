// train/safetensors.h: round trips, Python's library both ways, and files that are broken in every way we could think
// of.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

#include "files.h"
#include "train/safetensors.h"

namespace mantissa::train {
namespace {

using testing::Bytes;
using testing::expect_error;
using Safetensors = testing::FileTest;

/// A file of a header text and data.
std::string file_of(const std::string& header, const std::string& data) {
  const std::uint64_t n = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &n, 8);
  return out + header + data;
}
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}
const std::string kGood = entry("x", "F32", "[2,3]", "[0,24]");

/// The bytes of a tensor in row-major order.
std::string raw(const Tensor& x) {
  const Tensor plain = x.detach().contiguous().to(cpu);
  const auto* data = static_cast<const char*>(plain.data());
  return {data, data + static_cast<std::size_t>(plain.numel()) * size_of(plain.dtype())};
}

TEST_F(Safetensors, EveryTypeAndLayoutComesBack) {
  manual_seed(mantissa::testing::seed());
  NamedTensors all;
  for (const DType dtype : {f64, f32, f16, bf16, i64, i32, u8, DType::boolean, DType::f8e4m3, DType::f8e5m2}) {
    const Tensor values = uniform({5, 7}, 0, 2, {f64, cpu});
    const Tensor x = dtype == DType::boolean ? values < full({}, 1, {f64, cpu}) : values.to(dtype);
    const std::string label(name(dtype));
    all.emplace_back(label, x);
    all.emplace_back(label + " transposed", x.transpose(0, 1));
    all.emplace_back(label + " part", x.slice(1, 1, 6, 2));
    all.emplace_back(label + " empty", x.slice(0, 2, 2));
    all.emplace_back(label + " scalar", x.select(0, 1).select(0, 2));
  }
  all.emplace_back("h\xc3\xa9llo \"quoted\" \\ /../", ones({2}));  // names are no paths
  save_file(path("all"), all, {{"format", "pt"}, {"note", "line\nbreak"}});
  Metadata metadata;
  const NamedTensors back = load_file(path("all"), cpu, &metadata);
  ASSERT_EQ(back.size(), all.size());
  for (const auto& [name, x] : all) {
    const auto it = std::ranges::find(back, name, [](const auto& named) { return named.first; });
    ASSERT_NE(it, back.end()) << name;
    EXPECT_EQ(it->second.dtype(), x.dtype());
    EXPECT_EQ(it->second.shape(), x.shape());
    EXPECT_EQ(raw(it->second), raw(x)) << name;
  }
  EXPECT_EQ(metadata, (Metadata{{"format", "pt"}, {"note", "line\nbreak"}}));
  for (const SafetensorsEntry& e : read_header(path("all")).entries)
    EXPECT_EQ(e.begin % static_cast<std::int64_t>(size_of(e.dtype)), 0) << e.name;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);  // no temporary file is left
}

TEST_F(Safetensors, NothingAtAllIsAFileToo) {
  save_file(path("none"), {});
  EXPECT_TRUE(load_file(path("none")).empty());
}

TEST_F(Safetensors, ModelsLoadByName) {
  manual_seed(mantissa::testing::seed());
  for (const Device device : mantissa::testing::devices()) {
    nn::MLP a({4, 8, 3}, device), b({4, 8, 3}, device);
    save_file(path("mlp"), a.named_parameters());
    EXPECT_TRUE(load_into(b.named_parameters(), path("mlp")).complete());
    for (std::size_t i = 0; i < a.parameters().size(); ++i) EXPECT_EQ(raw(a.parameters()[i]), raw(b.parameters()[i]));
    EXPECT_TRUE(b.parameters()[0].requires_grad());
    // Under Autocast the new values count: the old 16-bit copies do not.
    const Autocast scope(f16);
    const Tensor x = randn({2, 4}).to(device);
    EXPECT_EQ(a(x).to_vector<float>(), b(x).to_vector<float>());
  }
}

TEST_F(Safetensors, WhatDoesNotFitIsListedAndNothingChanges) {
  save_file(path("f"), {{"a", ones({2, 3})}, {"b", ones({4})}, {"extra", ones({1})}, {"ids", zeros({2}, {i64, cpu})}});
  const Tensor a = zeros({2, 3}), b = zeros({5}), c = zeros({1}), ids = zeros({2});
  const NamedTensors targets{{"a", a}, {"b", b}, {"c", c}, {"ids", ids}};
  expect_error<FormatError>([&] { load_into(targets, path("f")); },
                            {"missing c", "unexpected extra", "mismatched b: f32[4]@cpu in the file, f32[5]@cpu wanted",
                             "mismatched ids: i64[2]@cpu in the file, f32[2]@cpu wanted", path("f")});
  EXPECT_EQ(a.to_vector<float>(), std::vector<float>(6, 0));
  const LoadReport report = load_into(targets, path("f"), false);
  EXPECT_EQ(report.missing, std::vector<std::string>{"c"});
  EXPECT_EQ(report.extra, std::vector<std::string>{"extra"});
  EXPECT_EQ(report.mismatched.size(), 2u);
  EXPECT_EQ(a.to_vector<float>(), std::vector<float>(6, 1));
  // Float types are converted.
  save_file(path("h"), {{"a", full({2, 3}, 0.5).to(bf16)}});
  load_into({{"a", a}}, path("h"));
  EXPECT_EQ(a.to_vector<float>(), std::vector<float>(6, 0.5f));
  expect_error<ConfigError>([&] { load_into({{"a", a}, {"a", a}}, path("h")); }, {"'a' appears twice"});
  expect_error<ConfigError>([&] { load_into({{"a", Tensor{}}}, path("h")); }, {"'a' is undefined"});
}

TEST_F(Safetensors, BrokenFilesAreRefused) {
  const std::string data(24, '\1');
  const auto broken = [&](const std::string& bytes, const std::string& words) {
    const std::string file = write("broken", bytes);
    expect_error<FormatError>([&] { load_file(file); }, {words, file, "offset"});
    expect_error<FormatError>([&] { read_header(file); }, {words});
    const Tensor x = zeros({2, 3});
    expect_error<FormatError>([&] { load_into({{"x", x}}, file, false); }, {words});
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(6, 0));
  };
  const auto header = [&](const std::string& text, const std::string& words) { broken(file_of(text, data), words); };
  EXPECT_EQ(load_file(write("good", file_of("{" + kGood + "}", data)))[0].second.shape(), (Shape{2, 3}));
  EXPECT_EQ(load_file(write("good", file_of("{" + kGood + "}   ", data))).size(), 1u);
  broken("", "found a file of 0 bytes");
  broken("1234567", "found a file of 7 bytes");
  broken(std::string(8, '\0'), "a header of 0 bytes");
  broken(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + data, "a header of 18446744073709551615 bytes");
  broken(std::string("\x10\0\0\0\0\0\0\0{}", 10), "a header of 16 bytes, expected 2 to 2");
  broken("PK\3\4" + std::string(60, 'x'), "zip or pickle");
  broken("\x80\2}q\0(X\7" + std::string(60, 'x'), "zip or pickle");
  header(" {" + kGood + "}", "does not begin with '{'");
  header("[" + kGood + "]", "does not begin with '{'");
  header("{" + kGood, "what is no JSON");
  header("{" + kGood + "}}", "what is no JSON");
  header("{" + kGood + ",}", "what is no JSON");
  header("{" + entry("\xff", "F32", "[2,3]", "[0,24]") + "}", "what is no JSON");
  header("{" + kGood + "," + kGood + "}", "the name x twice");
  header(R"({"x":{"dtype":"F32","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", "the key dtype twice in x");
  header(R"({"x":{"dtype":"F32","shape":[2,3]}})", "without dtype, shape or data_offsets");
  header(R"({"x":{}})", "without dtype, shape or data_offsets");
  header(R"({"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24],"more":1}})", "the unknown key more");
  header(R"({"x":3})", "3 at the key x");
  header(R"({"x":null})", "null");
  header(R"({"x":[1]})", "an array");
  header(R"({"x":"F32"})", "a string");
  header("{" + entry("", "F32", "[2,3]", "[0,24]") + "}", "a name has 0 bytes");
  header("{" + entry(std::string(513, 'n'), "F32", "[2,3]", "[0,24]") + "}", "a name has 513 bytes");
  header("{" + entry("a\\u0000b", "F32", "[2,3]", "[0,24]") + "}", "control characters");
  header("{" + entry("x", "F33", "[2,3]", "[0,24]") + "}", "unknown dtype F33");
  header("{" + entry("x", "F32", "[2,-3]", "[0,24]") + "}", "-3");
  header("{" + entry("x", "F32", "[2,3.0]", "[0,24]") + "}", "3.0");
  header("{" + entry("x", "F32", "[2,true]", "[0,24]") + "}", "a truth value");
  header("{" + entry("x", "F32", "[2,[3]]", "[0,24]") + "}", "an array");
  header("{" + entry("x", "F32", "[2,\"3\"]", "[0,24]") + "}", "a string");
  header("{" + entry("x", "F32", "6", "[0,24]") + "}", "6 at the key shape");
  header("{" + entry("x", "F32", "[1,1,1,1,1,1,1,2,3]", "[0,24]") + "}", "more than 8 numbers");
  header("{" + entry("x", "F32", "[18446744073709551615]", "[0,24]") + "}", "18446744073709551615");
  header("{" + entry("x", "F32", "[281474976710657]", "[0,24]") + "}", "a size of 281474976710657");
  header("{" + entry("x", "F32", "[281474976710656,281474976710656]", "[0,24]") + "}", "overflows");
  header("{" + entry("x", "F32", "[2,4]", "[0,24]") + "}", "found 24 bytes for x, expected 32");
  header("{" + entry("x", "F32", "[2,3]", "[0]") + "}", "1 numbers, expected 2");
  header("{" + entry("x", "F32", "[2,3]", "[24,0]") + "}", "found x at 24 to 0");
  header("{" + entry("x", "F32", "[1,5]", "[4,24]") + "}", "expected it to begin at 0");
  header("{" + entry("x", "F32", "[2,3]", "[0,24]") + "," + entry("y", "F32", "[2]", "[16,24]") + "}",
         "found y at 16 to 24, expected it to begin at 24");
  header("{" + entry("x", "F32", "[2]", "[0,8]") + "," + entry("y", "F32", "[2]", "[16,24]") + "}",
         "found y at 16 to 24, expected it to begin at 8");
  header("{" + entry("x", "F32", "[2]", "[0,8]") + "}", "16 trailing bytes");
  header("{}", "24 trailing bytes");
  header("{" + entry("x", "F32", "[2,3,100000000]", "[0,2400000000]") + "}", "truncated");
  header(R"({"__metadata__":{"a":1},)" + kGood + "}", "1 at the key a");
  header(R"({"__metadata__":{"a":{}},)" + kGood + "}", "an object");
  header(R"({"__metadata__":{"a":"1","a":"2"},)" + kGood + "}", "the metadata key a twice");
  header(R"({"__metadata__":{},"__metadata__":{},)" + kGood + "}", "twice");
  header("{" + std::string(100000, '['), "what is no JSON");
  header("{\"x\":" + std::string(100000, '['), "an array");
  const std::string truth =
      write("truth", file_of("{" + entry("x", "BOOL", "[24]", "[0,24]") + "}", std::string(23, '\1') + '\2'));
  expect_error<FormatError>([&] { load_file(truth); }, {"neither 0 nor 1 in x"});
}

TEST_F(Safetensors, EveryTruncationAndManyFlipsAreRefusedOrHarmless) {
  save_file(path("model"), {{"a", randn({3, 4})}, {"b", ones({5}, {i64, cpu})}, {"c", zeros({0, 2})}}, {{"k", "v"}});
  const Bytes good = read(path("model"));
  for (std::size_t n = 0; n < good.size(); ++n)
    EXPECT_THROW(load_file(write("cut", good.substr(0, n))), FormatError) << n;
  EXPECT_THROW(load_file(write("cut", good + '\0')), FormatError);
  std::mt19937_64 random(mantissa::testing::seed());
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    Bytes bad = good;
    for (int k = 0; k < 1 + i % 3; ++k) bad[random() % bad.size()] = static_cast<char>(random());
    try {
      load_file(write("flipped", bad));
    } catch (const FormatError&) {
      ++refused;
    }
  }
  std::printf("%d of 3000 changed files were refused\n", refused);
  EXPECT_GT(refused, 1000);
}

TEST_F(Safetensors, BadNamesAndTargetsAreRefusedBeforeAnythingIsWritten) {
  save_file(path("f"), {{"x", ones({2})}});
  const Bytes before = read(path("f"));
  expect_error<ConfigError>([&] { save_file(path("f"), {{"x", ones({2})}, {"x", ones({2})}}); }, {"'x' appears twice"});
  expect_error<ConfigError>([&] { save_file(path("f"), {{"", ones({2})}}); }, {"has 0 bytes"});
  expect_error<ConfigError>([&] { save_file(path("f"), {{"a\nb", ones({2})}}); }, {"control characters"});
  expect_error<ConfigError>([&] { save_file(path("f"), {{"__metadata__", ones({2})}}); }, {"reserved"});
  expect_error<ConfigError>([&] { save_file(path("f"), {{"\xff", ones({2})}}); }, {"no UTF-8"});
  expect_error<ConfigError>([&] { save_file(path("f"), {{"x", Tensor{}}}); }, {"'x' is undefined"});
  EXPECT_EQ(read(path("f")), before);
  expect_error<IoError>(
      [&] {
        save_file(path("no/such/f"), {{"x", ones({2})}});
      },
      {"can not create", path("no/such/f")});
  expect_error<IoError>([&] { load_file(path("nothing")); }, {path("nothing")});
  expect_error<IoError>([&] { load_file(folder_.string()); }, {folder_.string()});
}

TEST_F(Safetensors, AFullDiskLeavesTheOldFile) {
  save_file(path("f"), {{"x", ones({2})}});
  const Bytes before = read(path("f"));
  // A limit on the size of files acts as a full disk does.
  struct rlimit old {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const std::size_t limit : {std::size_t{0}, std::size_t{5}, std::size_t{64}, std::size_t{5000}}) {
    const struct rlimit small { limit, old.rlim_max };
    ::setrlimit(RLIMIT_FSIZE, &small);
    std::string text;
    try {
      save_file(path("f"), {{"x", ones({4096})}});
    } catch (const IoError& error) {
      text = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_NE(text.find("save_file"), std::string::npos) << limit;
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read(path("f")), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Safetensors, PythonReadsOursAndWeReadPythons) {
  if (std::system("python3 -c 'import numpy, safetensors.numpy' >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "python3 with numpy and safetensors is not installed";
  manual_seed(mantissa::testing::seed());
  save_file(path("ours"),
            {{"f64", randn({3, 2}, {f64, cpu})},
             {"f32", randn({2, 3})},
             {"f16", randn({7}).to(f16)},
             {"i64", arange(5)},
             {"i32", arange(4).to(i32)},
             {"u8", arange(3).to(u8)},
             {"scalar", full({}, 2.5)},
             {"empty", zeros({0, 3})}},
            {{"format", "np"}});
  const std::string script = write("swap.py", R"(import sys
from safetensors.numpy import load_file, save_file
x = load_file(sys.argv[1])
assert sorted(x) == ["empty", "f16", "f32", "f64", "i32", "i64", "scalar", "u8"], sorted(x)
assert x["i64"].tolist() == [0, 1, 2, 3, 4] and x["scalar"].shape == () and x["empty"].shape == (0, 3)
save_file(x, sys.argv[2])
)");
  ASSERT_EQ(std::system(("python3 " + script + " " + path("ours") + " " + path("theirs")).c_str()), 0);
  const NamedTensors ours = load_file(path("ours")), theirs = load_file(path("theirs"));
  ASSERT_EQ(ours.size(), theirs.size());
  for (const auto& [name, x] : ours) {
    const auto it = std::ranges::find(theirs, name, [](const auto& named) { return named.first; });
    ASSERT_NE(it, theirs.end());
    EXPECT_EQ(it->second.shape(), x.shape());
    EXPECT_EQ(raw(it->second), raw(x)) << name;
  }
}

}  // namespace
}  // namespace mantissa::train
