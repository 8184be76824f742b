#pragma once
// Token sequences for language models: llm.c's files (memory-mapped), or the bytes of a text as tokens.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mantissa::train {

/// A sequence of token ids, all in [0, vocab). Copies and splits share the data.
class TokenDataset {
 public:
  /// llm.c's layout, little-endian: 256 int32 (magic, version, count, then unused), then the ids: uint16 for
  /// magic 20240520 version 1 (GPT-2), uint32 for magic 20240801 version 7 (LLaMA 3). The whole file is
  /// checked here. `vocab` 0 means one more than the largest id. The file is mapped: it must not shrink while
  /// it is in use.
  static TokenDataset open(const std::string& path, std::int64_t vocab = 0);
  /// The bytes of any file as tokens; vocab is 256. Mapped like the above.
  static TokenDataset open_text(const std::string& path);
  static TokenDataset from_bytes(std::vector<std::uint8_t> bytes);
  static TokenDataset from_tokens(const std::vector<std::int32_t>& tokens, std::int64_t vocab = 0);

  std::int64_t size() const { return size_; }
  std::int64_t vocab() const { return vocab_; }
  std::int64_t operator[](std::int64_t i) const;  // i in [0, size())
  /// Writes tokens [begin, begin + n) to `target`, as std::int32_t or std::int64_t; IndexError when outside.
  template <class T> void copy(std::int64_t begin, std::int64_t n, T* target) const;

  /// The tokens [begin, end).
  TokenDataset slice(std::int64_t begin, std::int64_t end) const;
  /// The first `fraction` of the tokens for training, the rest for validation.
  std::pair<TokenDataset, TokenDataset> split(double fraction) const;

 private:
  TokenDataset(std::shared_ptr<const void> owner, const void* data, int width, std::int64_t size, std::int64_t vocab)
      : owner_(std::move(owner)), data_(data), width_(width), size_(size), vocab_(vocab) {}

  std::shared_ptr<const void> owner_;
  const void* data_ = nullptr;
  int width_ = 1;  // bytes a token
  std::int64_t size_ = 0, vocab_ = 0;
};

extern template void TokenDataset::copy(std::int64_t, std::int64_t, std::int32_t*) const;
extern template void TokenDataset::copy(std::int64_t, std::int64_t, std::int64_t*) const;

/// Writes a file that TokenDataset::open reads: uint16 ids when all are below 2^16, else uint32.
void write_tokens(const std::string& path, std::span<const std::int32_t> tokens);

}  // namespace mantissa::train
