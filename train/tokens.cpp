#include "train/tokens.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "train/file.h"

namespace mantissa::train {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are mapped as they are");

constexpr std::int64_t kHeaderWords = 256, kHeaderBytes = kHeaderWords * 4;
constexpr std::int64_t kLargestVocab = std::int64_t{1} << 31;  // ids are handed out as int32

struct TokenFormat {
  std::int32_t magic, version;
  int width;
};
constexpr TokenFormat kFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

/// Maps a whole file, read-only. Null for an empty one.
std::shared_ptr<const void> map_file(const char* op, const InputFile& file) {
  if (file.size() == 0) return nullptr;
  const auto bytes = static_cast<std::size_t>(file.size());
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  MT_CHECK(IoError, data != MAP_FAILED, op, ": can not map ", file.path(), ": ", system_error(errno));
  return {data, [bytes](const void* mapped) { ::munmap(const_cast<void*>(mapped), bytes); }};
}

/// Calls f with a typed pointer to the ids.
template <class F> decltype(auto) visit_ids(const void* data, int width, F&& f) {
  switch (width) {
    case 1:
      return f(static_cast<const std::uint8_t*>(data));
    case 2:
      return f(static_cast<const std::uint16_t*>(data));
    default:
      return f(static_cast<const std::uint32_t*>(data));
  }
}

void check_vocab(const char* op, std::int64_t vocab) {
  MT_CHECK(ConfigError, vocab >= 0 && vocab <= kLargestVocab, op, ": vocab must be in [0, 2^31], got ", vocab);
}

/// Position of the largest id.
std::int64_t largest(const void* data, int width, std::int64_t n) {
  return visit_ids(data, width, [n](const auto* ids) { return std::max_element(ids, ids + n) - ids; });
}

}  // namespace

TokenDataset TokenDataset::open(const std::string& path, std::int64_t vocab) {
  constexpr const char* kOp = "TokenDataset::open";
  check_vocab(kOp, vocab);
  const InputFile file(kOp, path);
  MT_CHECK(FormatError, file.size() >= kHeaderBytes, kOp, ": ", path, ": offset 0: found a file of ", file.size(),
           " bytes, expected a header of ", kHeaderBytes, "; TokenDataset::open_text reads plain text");
  const std::shared_ptr<const void> mapped = map_file(kOp, file);
  std::int32_t header[3];
  std::memcpy(header, mapped.get(), sizeof header);
  const TokenFormat* format =
      std::find_if(std::begin(kFormats), std::end(kFormats), [&](const auto& f) { return f.magic == header[0]; });
  MT_CHECK(FormatError, format != std::end(kFormats), kOp, ": ", path, ": offset 0: found magic ", header[0],
           ", expected 20240520 (uint16) or 20240801 (uint32); TokenDataset::open_text reads plain text");
  MT_CHECK(FormatError, header[1] == format->version, kOp, ": ", path, ": offset 4: found version ", header[1],
           ", expected ", format->version, " for magic ", format->magic);
  MT_CHECK(FormatError, header[2] > 0, kOp, ": ", path, ": offset 8: found a count of ", header[2],
           " tokens, expected at least 1");
  const std::int64_t count = header[2], expected = kHeaderBytes + count * format->width;
  MT_CHECK(FormatError, file.size() >= expected, kOp, ": ", path, ": offset ", file.size(),
           ": found the end of the file, expected ", expected, " bytes for ", count, " tokens: truncated");
  MT_CHECK(FormatError, file.size() == expected, kOp, ": ", path, ": offset ", expected, ": found ",
           file.size() - expected, " trailing bytes, expected the end of the file after ", count, " tokens");

  const auto* ids = static_cast<const std::byte*>(mapped.get()) + kHeaderBytes;
  const std::int64_t limit = vocab > 0 ? vocab : kLargestVocab;
  const std::int64_t at = largest(ids, format->width, count);
  const std::int64_t id = visit_ids(ids, format->width, [at](const auto* p) { return std::int64_t{p[at]}; });
  MT_CHECK(FormatError, id<limit, kOp, ": ", path, ": offset ", kHeaderBytes + at * format->width, ": found token ", id,
                            ", expected less than ", limit, vocab> 0
                            ? " (the vocabulary)"
                            : "");
  return TokenDataset(mapped, ids, format->width, count, vocab > 0 ? vocab : id + 1);
}

TokenDataset TokenDataset::open_text(const std::string& path) {
  constexpr const char* kOp = "TokenDataset::open_text";
  const InputFile file(kOp, path);
  MT_CHECK(FormatError, file.size() > 0, kOp, ": ", path, ": offset 0: found an empty file, expected text");
  std::shared_ptr<const void> mapped = map_file(kOp, file);
  const void* data = mapped.get();
  return TokenDataset(std::move(mapped), data, 1, file.size(), 256);
}

TokenDataset TokenDataset::from_bytes(std::vector<std::uint8_t> bytes) {
  const auto owner = std::make_shared<const std::vector<std::uint8_t>>(std::move(bytes));
  return TokenDataset(owner, owner->data(), 1, static_cast<std::int64_t>(owner->size()), 256);
}

TokenDataset TokenDataset::from_tokens(const std::vector<std::int32_t>& tokens, std::int64_t vocab) {
  constexpr const char* kOp = "TokenDataset::from_tokens";
  check_vocab(kOp, vocab);
  const std::int64_t limit = vocab > 0 ? vocab : kLargestVocab;
  std::int64_t most = -1;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    MT_CHECK(IndexError, tokens[i] >= 0 && tokens[i] < limit, kOp, ": token ", i, " is ", tokens[i], ", expected 0 to ",
             limit - 1);
    most = std::max<std::int64_t>(most, tokens[i]);
  }
  const auto owner = std::make_shared<const std::vector<std::uint32_t>>(tokens.begin(), tokens.end());
  return TokenDataset(owner, owner->data(), 4, static_cast<std::int64_t>(owner->size()), vocab > 0 ? vocab : most + 1);
}

std::int64_t TokenDataset::operator[](std::int64_t i) const {
  std::int64_t id = 0;
  copy(i, 1, &id);
  return id;
}

template <class T> void TokenDataset::copy(std::int64_t begin, std::int64_t n, T* target) const {
  MT_CHECK(IndexError, begin >= 0 && n >= 0 && n <= size_ && begin <= size_ - n, "TokenDataset::copy: tokens [", begin,
           ", ", begin + n, ") of a sequence of ", size_);
  visit_ids(data_, width_, [&](const auto* ids) {
    std::transform(ids + begin, ids + begin + n, target, [](auto id) { return static_cast<T>(id); });
  });
}
template void TokenDataset::copy(std::int64_t, std::int64_t, std::int32_t*) const;
template void TokenDataset::copy(std::int64_t, std::int64_t, std::int64_t*) const;

TokenDataset TokenDataset::slice(std::int64_t begin, std::int64_t end) const {
  MT_CHECK(IndexError, begin >= 0 && begin <= end && end <= size_, "TokenDataset::slice: tokens [", begin, ", ", end,
           ") of a sequence of ", size_);
  return TokenDataset(owner_, static_cast<const std::byte*>(data_) + begin * width_, width_, end - begin, vocab_);
}

std::pair<TokenDataset, TokenDataset> TokenDataset::split(double fraction) const {
  MT_CHECK(ConfigError, fraction > 0 && fraction < 1, "TokenDataset::split: fraction must lie between 0 and 1, got ",
           fraction);
  const auto middle = static_cast<std::int64_t>(static_cast<double>(size_) * fraction);
  return {slice(0, middle), slice(middle, size_)};
}

void write_tokens(const std::string& path, std::span<const std::int32_t> tokens) {
  constexpr const char* kOp = "write_tokens";
  MT_CHECK(ConfigError, !tokens.empty() && tokens.size() <= std::numeric_limits<std::int32_t>::max(), kOp, ": ", path,
           ": the format holds 1 to 2^31 - 1 tokens, got ", tokens.size());
  const auto [low, high] = std::minmax_element(tokens.begin(), tokens.end());
  MT_CHECK(IndexError, *low >= 0, kOp, ": ", path, ": token ", low - tokens.begin(), " is ", *low,
           ", expected 0 or more");
  const TokenFormat& format = *high < (1 << 16) ? kFormats[0] : kFormats[1];
  std::vector<std::int32_t> header(kHeaderWords);
  header[0] = format.magic;
  header[1] = format.version;
  header[2] = static_cast<std::int32_t>(tokens.size());

  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  MT_CHECK(IoError, descriptor >= 0, kOp, ": can not create ", path, ": ", system_error(errno));
  const std::shared_ptr<const void> closer(nullptr, [descriptor](const void*) { ::close(descriptor); });
  write_all(kOp, path, descriptor, header.data(), kHeaderBytes);
  if (format.width == 4) {
    write_all(kOp, path, descriptor, tokens.data(), tokens.size() * 4);
    return;
  }
  std::vector<std::uint16_t> narrow;
  constexpr std::size_t kChunk = std::size_t{1} << 20;
  for (std::size_t begin = 0; begin < tokens.size(); begin += kChunk) {
    const auto part = tokens.subspan(begin, std::min(kChunk, tokens.size() - begin));
    narrow.resize(part.size());
    std::transform(part.begin(), part.end(), narrow.begin(),
                   [](std::int32_t id) { return static_cast<std::uint16_t>(id); });
    write_all(kOp, path, descriptor, narrow.data(), narrow.size() * 2);
  }
}

}  // namespace mantissa::train
