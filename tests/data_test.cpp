// train/idx.h and train/tokens.h: files that are right, and files that are broken in every way we could think
// of.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/random.h"
#include "files.h"
#include "train/idx.h"
#include "train/loader.h"
#include "train/tokens.h"

namespace mantissa::train {
namespace {

namespace fs = std::filesystem;
using testing::Bytes;
using testing::expect_error;
using DataTest = testing::FileTest;

Bytes be32(std::uint32_t x) {
  return {static_cast<char>(x >> 24), static_cast<char>(x >> 16), static_cast<char>(x >> 8), static_cast<char>(x)};
}

Bytes idx(const std::vector<std::uint32_t>& sizes, const Bytes& data, int type = 8) {
  Bytes out = {0, 0, static_cast<char>(type), static_cast<char>(sizes.size())};
  for (const auto size : sizes) out += be32(size);
  return out + data;
}

Bytes counting(std::size_t n) {
  Bytes out(n, 0);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<char>(i * 7 + 1);
  return out;
}

Bytes gzip(const Bytes& data) {
  z_stream z{};
  deflateInit2(&z, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  Bytes out(deflateBound(&z, data.size()) + 64, 0);
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  z.avail_in = static_cast<uInt>(data.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  deflate(&z, Z_FINISH);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

Bytes changed(Bytes data, std::size_t at, char value) {
  data[at] = value;
  return data;
}
Bytes without_last(Bytes data, std::size_t n) { return data.substr(0, data.size() - n); }

// ---- IDX ----

TEST_F(DataTest, IdxPlainAndGzip) {
  const Bytes data = counting(2 * 3 * 4);
  for (const Bytes& file : {idx({2, 3, 4}, data), gzip(idx({2, 3, 4}, data))}) {
    const Tensor x = read_idx(write("x", file));
    EXPECT_EQ(x.shape(), Shape({2, 3, 4}));
    EXPECT_EQ(x.dtype(), DType::u8);
    EXPECT_EQ(std::memcmp(x.data(), data.data(), data.size()), 0);
  }
}

TEST_F(DataTest, IdxAcrossManyBuffers) {
  Bytes data(300'007, 0);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(philox(1, i).lane[0]);
  for (const Bytes& file : {idx({300'007}, data), gzip(idx({300'007}, data))}) {
    const Tensor x = read_idx(write("x", file));
    ASSERT_EQ(x.numel(), 300'007);
    EXPECT_EQ(std::memcmp(x.data(), data.data(), data.size()), 0);
  }
}

TEST_F(DataTest, IdxMalformed) {
  const Bytes good = idx({2, 3}, counting(6)), packed = gzip(good);
  struct Case {
    const char* what;
    Bytes file;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"empty file", "", {"offset 0", "found 0 bytes"}},
      {"three bytes", Bytes("\0\0\x08", 3), {"offset 0", "found 3 bytes"}},
      {"text", "Hello, world", {"magic 0x48656C6C"}},
      {"first byte not zero", changed(good, 0, 1), {"magic 0x01000802"}},
      {"second byte not zero", changed(good, 1, 9), {"magic 0x00090802"}},
      {"little-endian header", Bytes("\x02\x08\0\0", 4) + good.substr(4), {"magic 0x02080000"}},
      {"type 0", changed(good, 2, 0), {"offset 2", "type code 0x00", "0x08"}},
      {"signed bytes", changed(good, 2, 9), {"type code 0x09"}},
      {"int32", changed(good, 2, 12), {"type code 0x0C"}},
      {"float", changed(good, 2, 13), {"type code 0x0D"}},
      {"double", changed(good, 2, 14), {"type code 0x0E"}},
      {"rank 0", changed(good, 3, 0), {"offset 3", "rank 0"}},
      {"rank 9", idx(std::vector<std::uint32_t>(9, 1), "x"), {"offset 3", "rank 9", "1 to 8"}},
      {"rank 255", changed(good, 3, static_cast<char>(255)), {"rank 255"}},
      {"header cut at dimension 0", good.substr(0, 6), {"offset 4", "dimension 0 of 2"}},
      {"header cut at dimension 1", good.substr(0, 11), {"offset 8", "dimension 1 of 2"}},
      {"first dimension 0", idx({0, 3}, ""), {"offset 4", "dimension of 0"}},
      {"last dimension 0", idx({2, 0}, ""), {"offset 8", "dimension of 0"}},
      {"product overflows 64 bits", idx({0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu}, "x"), {"offset 8", "overflows"}},
      {"product just above 2^62", idx({1u << 31, 1u << 31, 2}, "x"), {"offset 12", "overflows"}},
      {"claims terabytes",
       idx({1u << 20, 1u << 20}, "x"),
       {"offset 12", "found 1 bytes", "1099511627776", "truncated"}},
      {"one byte short", without_last(good, 1), {"offset 12", "found 5 bytes", "expected 6"}},
      {"no data", without_last(good, 6), {"found 0 bytes", "expected 6"}},
      {"one byte too many", good + "x", {"offset 18", "1 trailing bytes"}},
      {"a second file behind", good + good, {"offset 18", "trailing"}},
      {"gzip of nothing", gzip(""), {"offset 0", "found 0 bytes"}},
      {"gzip of text", gzip("Hello, world"), {"magic 0x48656C6C"}},
      {"gzip: claims terabytes", gzip(idx({1u << 20, 1u << 20}, "x")), {"claims 1099511627776", "compressed"}},
      {"gzip: inside one byte short", gzip(without_last(good, 1)), {"found 5 bytes", "expected 6", "truncated"}},
      {"gzip: inside one byte too many", gzip(good + "x"), {"offset 18", "trailing"}},
      {"gzip: a bomb behind the data", gzip(good + Bytes(50'000'000, 0)), {"offset 18", "trailing"}},
      {"gzip: magic only", packed.substr(0, 2), {"gzip file", "truncated"}},
      {"gzip: cut in the header", packed.substr(0, 7), {"gzip file", "truncated"}},
      {"gzip: cut in the data", packed.substr(0, packed.size() / 2), {"gzip file", "truncated"}},
      {"gzip: cut before the checksum", without_last(packed, 8), {"gzip file", "truncated"}},
      {"gzip: cut in the length", without_last(packed, 1), {"gzip file", "truncated"}},
      {"gzip: wrong checksum",
       changed(packed, packed.size() - 8, static_cast<char>(packed[packed.size() - 8] ^ 1)),
       {"broken gzip", "CRC-32"}},
      {"gzip: wrong length", changed(packed, packed.size() - 1, 1), {"broken gzip"}},
      {"gzip: unknown method", changed(packed, 2, 7), {"broken gzip"}},
      {"gzip: reserved flags", changed(packed, 3, static_cast<char>(0xE0)), {"broken gzip"}},
      {"gzip: garbage behind", packed + "garbage", {"trailing bytes", "gzip stream"}},
      {"gzip: a second stream behind", packed + packed, {"trailing bytes", "gzip stream"}},
      {"gzip in gzip", gzip(packed), {"magic 0x1F8B"}},
  };
  EXPECT_GE(cases.size(), 40u);
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const std::string file = write("broken.idx", c.file);
    auto words = c.words;
    words.insert(words.end(), {"read_idx", file, "expected"});
    expect_error<FormatError>([&] { read_idx(file); }, words);
  }
}

TEST_F(DataTest, IdxEveryTruncationAndBitFlip) {
  const Bytes good = idx({2, 3}, counting(6));
  for (const Bytes& file : {good, gzip(good)}) {
    for (std::size_t n = 0; n < file.size(); ++n) {
      const std::string name = write("cut", file.substr(0, n));
      EXPECT_THROW(read_idx(name), FormatError) << n << " bytes";
    }
  }
  // Of the plain file, only flips of the data itself, or between dimensions of the same product, can go
  // unseen.
  const Bytes packed = gzip(good);
  for (const Bytes& file : {good, packed}) {
    for (std::size_t bit = 0; bit < file.size() * 8; ++bit) {
      const std::string name = write("flip", changed(file, bit / 8, static_cast<char>(file[bit / 8] ^ (1 << bit % 8))));
      try {
        const Tensor x = read_idx(name);
        EXPECT_TRUE(x.shape() == Shape({2, 3})) << "bit " << bit;
      } catch (const FormatError&) {
      }
    }
  }
}

TEST_F(DataTest, IdxNotAFile) {
  expect_error<IoError>([&] { read_idx(path("missing")); }, {"read_idx", path("missing"), "No such file"});
  expect_error<IoError>([&] { read_idx(folder_.string()); }, {"not a regular file"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_error<IoError>([&] { read_idx(path("pipe")); }, {"not a regular file"});
  expect_error<IoError>([&] { read_idx("/dev/zero"); }, {"not a regular file"});
}

// ---- Fashion-MNIST ----

TEST_F(DataTest, FashionMnist) {
  if (!fs::exists(kFashionMnistDirectory))
    GTEST_SKIP() << "no Fashion-MNIST files; to get them: " << kFashionMnistInstall;
  for (const auto& [split, n] : {std::pair{Split::train, 60'000}, {Split::test, 10'000}}) {
    const ImageDataset data = load_fashion_mnist(split);
    EXPECT_EQ(data.images.shape(), Shape({n, 28, 28}));
    ASSERT_EQ(data.size(), n);
    std::vector<int> count(10);
    for (int i = 0; i < n; ++i) ++count[data.labels.data<std::uint8_t>()[i]];
    EXPECT_EQ(count, std::vector<int>(10, n / 10));
    if (split == Split::test) continue;
    // The default normalisation is that of the training images.
    const auto* byte = data.images.data<std::uint8_t>();
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < data.images.numel(); ++i) {
      sum += byte[i] / 255.0;
      squares += byte[i] / 255.0 * (byte[i] / 255.0);
    }
    const auto pixels = static_cast<double>(data.images.numel());
    EXPECT_NEAR(sum / pixels, ImageLoaderOptions().mean, 1e-4);
    EXPECT_NEAR(std::sqrt(squares / pixels - sum / pixels * sum / pixels), ImageLoaderOptions().deviation, 1e-4);
  }
}

TEST_F(DataTest, FashionMnistMissingOrWrong) {
  const std::string folder = folder_.string();
  expect_error<IoError>([&] { load_fashion_mnist(Split::train, folder); },
                        {"apt-get install dataset-fashion-mnist", folder});
  const auto load = [&] { return load_fashion_mnist(Split::test, folder); };
  write("t10k-images-idx3-ubyte", idx({2, 28, 28}, counting(2 * 784)));
  expect_error<IoError>(load, {"t10k-labels-idx1-ubyte", "apt-get"});
  write("t10k-labels-idx1-ubyte", idx({2}, Bytes("\x09\x00", 2)));
  EXPECT_EQ(load().size(), 2);  // plain files will do
  const std::string labels = write("t10k-labels-idx1-ubyte.gz", gzip(idx({3}, Bytes(3, 1))));
  expect_error<FormatError>(load, {labels, "found 3 labels", "expected 2"});
  write("t10k-labels-idx1-ubyte.gz", gzip(idx({2}, Bytes("\x01\x0A", 2))));
  expect_error<FormatError>(load, {labels, "offset 9", "found label 10", "expected 0 to 9"});
  write("t10k-labels-idx1-ubyte.gz", gzip(idx({2, 1}, Bytes(2, 1))));
  expect_error<FormatError>(load, {labels, "found sizes [2,1]", "expected [N]"});
  const std::string images = write("t10k-images-idx3-ubyte.gz", gzip(idx({2, 28, 27}, counting(2 * 28 * 27))));
  expect_error<FormatError>(load, {images, "[2,28,27]", "[N,28,28]"});
}

// ---- tokens ----

Bytes le32(std::uint32_t x) {
  return {static_cast<char>(x), static_cast<char>(x >> 8), static_cast<char>(x >> 16), static_cast<char>(x >> 24)};
}

Bytes token_file(std::uint32_t magic, std::uint32_t version, std::uint32_t count, const Bytes& data) {
  return le32(magic) + le32(version) + le32(count) + Bytes(253 * 4, 0) + data;
}

TEST_F(DataTest, TokensBothWidths) {
  const std::vector<std::int32_t> small = {5, 0, 65'535, 7}, large = {5, 0, 128'255, 65'536};
  write_tokens(path("small"), small);
  write_tokens(path("large"), large);
  EXPECT_EQ(fs::file_size(path("small")), 1024u + 4 * 2);
  EXPECT_EQ(fs::file_size(path("large")), 1024u + 4 * 4);
  EXPECT_EQ(read(path("small")), token_file(20240520, 1, 4, Bytes("\5\0\0\0\xFF\xFF\7\0", 8)));
  for (const auto& [name, tokens] : {std::pair{"small", small}, {"large", large}}) {
    const TokenDataset data = TokenDataset::open(path(name));
    ASSERT_EQ(data.size(), 4);
    EXPECT_EQ(data.vocab(), *std::max_element(tokens.begin(), tokens.end()) + 1);
    std::vector<std::int32_t> back(4);
    data.copy(0, 4, back.data());
    EXPECT_EQ(back, tokens);
  }
  EXPECT_EQ(TokenDataset::open(path("small"), 70'000).vocab(), 70'000);
}

TEST_F(DataTest, TokensOfText) {
  const TokenDataset data = TokenDataset::open_text(write("text", "\xFFhello"));
  EXPECT_EQ(data.size(), 6);
  EXPECT_EQ(data.vocab(), 256);
  EXPECT_EQ(data[0], 255);
  EXPECT_EQ(data[1], 'h');
  expect_error<FormatError>([&] { TokenDataset::open_text(write("empty", "")); }, {"empty file", path("empty")});
  expect_error<IoError>([&] { TokenDataset::open_text(path("none")); }, {"No such file"});
}

TEST_F(DataTest, TokensMalformed) {
  const Bytes ids("\1\0\2\0\3\0", 6), wide = le32(1) + le32(2) + le32(3);
  struct Case {
    const char* what;
    Bytes file;
    std::int64_t vocab;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"empty", "", 0, {"offset 0", "0 bytes", "header of 1024"}},
      {"header cut", token_file(20240520, 1, 3, "").substr(0, 1023), 0, {"1023 bytes"}},
      {"text", Bytes(2000, 'a'), 0, {"offset 0", "magic 1633771873", "open_text"}},
      {"big-endian magic", token_file(__builtin_bswap32(20240520), 1, 3, ids), 0, {"magic"}},
      {"model file of llm.c", token_file(20240326, 3, 3, ids), 0, {"magic 20240326"}},
      {"evaluation file of llm.c", token_file(20240522, 1, 3, ids), 0, {"magic 20240522"}},
      {"version 2", token_file(20240520, 2, 3, ids), 0, {"offset 4", "version 2", "expected 1"}},
      {"version 1 of the wide format", token_file(20240801, 1, 3, wide), 0, {"offset 4", "version 1", "expected 7"}},
      {"count 0", token_file(20240520, 1, 0, ""), 0, {"offset 8", "count of 0"}},
      {"negative count", token_file(20240520, 1, 0xFFFFFFFFu, ids), 0, {"offset 8", "count of -1"}},
      {"count too large", token_file(20240520, 1, 4, ids), 0, {"offset 1030", "1032 bytes", "truncated"}},
      {"largest count", token_file(20240801, 7, 0x7FFFFFFFu, wide), 0, {"2147483647 tokens", "truncated"}},
      {"no data", token_file(20240520, 1, 3, ""), 0, {"offset 1024", "truncated"}},
      {"odd length", token_file(20240520, 1, 3, ids + "x"), 0, {"offset 1030", "1 trailing bytes"}},
      {"count too small", token_file(20240520, 1, 2, ids), 0, {"offset 1028", "2 trailing bytes"}},
      {"wide ids under the narrow magic", token_file(20240520, 1, 3, wide), 0, {"6 trailing bytes"}},
      {"narrow ids under the wide magic", token_file(20240801, 7, 3, ids), 0, {"truncated"}},
      {"id at the vocabulary",
       token_file(20240520, 1, 3, ids),
       3,
       {"offset 1028", "token 3", "less than 3", "vocabulary"}},
      {"wide id at the vocabulary", token_file(20240801, 7, 3, wide), 2, {"offset 1032", "token 3", "less than 2"}},
      {"id above 2^31", token_file(20240801, 7, 1, le32(0x80000000u)), 0, {"offset 1024", "token 2147483648"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const std::string file = write("broken.bin", c.file);
    auto words = c.words;
    words.insert(words.end(), {"TokenDataset::open", file, "expected"});
    expect_error<FormatError>([&] { TokenDataset::open(file, c.vocab); }, words);
  }
}

TEST_F(DataTest, TokensEveryTruncation) {
  const Bytes good = token_file(20240520, 1, 3, Bytes("\1\0\2\0\3\0", 6));
  for (std::size_t n = 0; n < good.size(); ++n) {
    const std::string name = write("cut", good.substr(0, n));
    EXPECT_THROW(TokenDataset::open(name), FormatError) << n << " bytes";
  }
}

TEST_F(DataTest, TokensSliceSplitAndRange) {
  std::vector<std::uint8_t> bytes(100);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  const auto [train, validation] = TokenDataset::from_bytes(bytes).split(0.9);
  EXPECT_EQ(train.size(), 90);
  EXPECT_EQ(validation.size(), 10);
  EXPECT_EQ(validation[0], 90);
  EXPECT_EQ(validation.vocab(), 256);
  EXPECT_EQ(TokenDataset::from_tokens({1, 70'000}).slice(1, 2)[0], 70'000);
  EXPECT_EQ(TokenDataset::from_bytes({}).size(), 0);
  expect_error<IndexError>([&, &v = validation] { v[10]; }, {"[10, 11)", "sequence of 10"});
  expect_error<IndexError>([&, &v = validation] { v[-1]; }, {"[-1, 0)"});
  expect_error<IndexError>([&, &v = validation] { v.slice(4, 11); }, {"[4, 11)"});
  for (const double fraction : {0.0, 1.0, -0.5, std::nan("")}) {
    expect_error<ConfigError>([&, &t = train] { t.split(fraction); }, {"split", "between 0 and 1"});
  }
  expect_error<IndexError>([] { TokenDataset::from_tokens({0, -1}); }, {"token 1 is -1"});
  expect_error<IndexError>([] { TokenDataset::from_tokens({0, 5}, 5); }, {"token 1 is 5", "0 to 4"});
  expect_error<ConfigError>([] { TokenDataset::from_tokens({0}, std::int64_t{1} << 32); }, {"vocab"});
  expect_error<IndexError>([&] { write_tokens(path("t"), std::vector<std::int32_t>{3, -2}); }, {"token 1 is -2"});
  expect_error<ConfigError>([&] { write_tokens(path("t"), {}); }, {"got 0"});
  expect_error<IoError>([&] { write_tokens(path("no/folder"), std::vector<std::int32_t>{3}); }, {"can not create"});
}

}  // namespace
}  // namespace mantissa::train
