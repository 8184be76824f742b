#pragma once
// Batches for the training loop:
//
//   for (auto [x, y] : loader) { ... }    // one epoch, or the rest of it after a resume
//
// A thread of the loader reads ahead into pinned memory; the training thread only queues the copies to the
// device and never waits for them. What a batch holds depends on (seed, epoch, position) alone, never on
// threads or timing.

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "train/idx.h"
#include "train/tokens.h"

namespace mantissa::train {

struct Batch {
  Tensor x, y;
};

/// Where a loader stands: the next batch is number `position` of `epoch`. Belongs into the checkpoint.
struct LoaderState {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0, position = 0;
  bool operator==(const LoaderState&) const = default;
};

struct BatchLayout {
  Shape x_shape;
  DType x_dtype = DType::f32;
  Shape y_shape;
  DType y_dtype = DType::i64;
};

/// What a loader reads from; derive from it for data of your own. start_epoch and fill are called by the
/// loader's thread, one at a time. What they throw arrives at the consumer, after the batches before it.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual std::int64_t batches() const = 0;  // an epoch
  virtual BatchLayout layout(std::int64_t position) const = 0;
  virtual void start_epoch(std::uint64_t seed, std::int64_t epoch) = 0;
  /// Writes all of batch `position` of the epoch, row-major; the addresses are aligned to 256 bytes.
  virtual void fill(std::int64_t position, void* x, void* y) = 0;
};

/// Reads batches ahead. One thread at a time may use it.
class Loader {
 public:
  Loader(std::unique_ptr<BatchSource> source, std::uint64_t seed, Device device = cpu, int prefetch = 3);
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  /// The next batch; after the last one of an epoch follows the first of the next.
  Batch next();
  std::int64_t batches() const;  // an epoch
  std::int64_t epoch() const { return state().epoch; }
  LoaderState state() const;
  /// Continues at `state`; what was read ahead is dropped, and so is an error of the thread.
  void set_state(const LoaderState& state);

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Loader& loader) : loader_(&loader), epoch_(loader.epoch()), batch_(loader.next()) {}
    const Batch& operator*() const { return batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return done_; }

   private:
    Loader* loader_;
    std::int64_t epoch_;
    Batch batch_;
    bool done_ = false;
  };
  /// Goes on where the loader stands, to the end of that epoch; a loop that was left early can be continued.
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() { return {}; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// 0, ..., n - 1 in an order that depends on (seed, epoch) only.
std::vector<std::int64_t> permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

struct ImageLoaderOptions {
  std::int64_t batch = 64;                   // images a rank
  bool shuffle = true;                       // a new order each epoch
  bool drop_last = true;                     // drop the images that do not fill a batch; else the last batch is smaller
  bool normalize = true;                     // x = (byte / 255 - mean) / deviation as f32; else x is the bytes (u8)
  double mean = 0.2860, deviation = 0.3530;  // of Fashion-MNIST's training images
  std::uint64_t seed = 0;
  Device device = cpu;
  int rank = 0, ranks = 1;  // each rank takes its part of a global batch of batch * ranks images
  int prefetch = 3;         // batches read ahead
};

/// x: f32 or u8 [B,1,H,W], y: i64 [B].
class ImageLoader : public Loader {
 public:
  explicit ImageLoader(ImageDataset data, const ImageLoaderOptions& options = {});
};

enum class TokenOrder : std::uint8_t {
  random,      // each window starts anywhere
  shuffled,    // windows side by side, in a new order each epoch: every token once
  sequential,  // windows side by side, in order
};

struct TokenLoaderOptions {
  std::int64_t batch = 16;      // windows a rank
  std::int64_t context = 1024;  // tokens a window
  TokenOrder order = TokenOrder::random;
  bool drop_last = true;     // shuffled, sequential: drop the windows that do not fill a batch
  std::int64_t steps = 0;    // batches an epoch; 0: as many as it takes to see about every token once
  DType dtype = DType::i32;  // of tokens and targets: i32 or i64
  std::uint64_t seed = 0;
  Device device = cpu;
  int rank = 0, ranks = 1;  // each rank takes its part of a global batch of batch * ranks windows
  int prefetch = 3;
};

/// x: tokens [B,T], y: the tokens that follow each, [B,T].
class TokenLoader : public Loader {
 public:
  explicit TokenLoader(TokenDataset data, const TokenLoaderOptions& options = {});
  /// Of a token file (TokenDataset::open).
  explicit TokenLoader(const std::string& path, const TokenLoaderOptions& options = {})
      : TokenLoader(TokenDataset::open(path), options) {}
};

}  // namespace mantissa::train
