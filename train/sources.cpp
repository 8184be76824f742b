// What ImageLoader and TokenLoader read from.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "core/random.h"
#include "train/loader.h"

namespace mantissa::train {
namespace {

/// Independent 64-bit numbers for one epoch of one seed, addressed by index.
class EpochStream {
 public:
  EpochStream(std::uint64_t seed, std::int64_t epoch) {
    // A key of its own, so that the order of the data is not correlated with what the process-wide stream
    // draws.
    const Philox4 key = philox(seed ^ 0xD1B54A32D192ED03ull, static_cast<std::uint64_t>(epoch));
    key_ = std::uint64_t{key.lane[1]} << 32 | key.lane[0];
  }
  /// Number `index`, uniform in [0, n).
  std::int64_t below(std::int64_t n, std::int64_t index) const {
    const Philox4 r = philox(key_, static_cast<std::uint64_t>(index));
    const std::uint64_t bits = std::uint64_t{r.lane[1]} << 32 | r.lane[0];
    __extension__ using Wide = unsigned __int128;  // the high half of bits * n: a bias below n / 2^64
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(Wide{bits} * static_cast<std::uint64_t>(n) >> 64));
  }

 private:
  std::uint64_t key_ = 0;
};

/// How the rows of an epoch divide into batches, and each batch among the ranks.
struct Division {
  std::int64_t rows, batch;  // of the epoch; of a rank
  int rank, ranks;
  bool drop_last;

  std::int64_t batches() const {
    const std::int64_t global = batch * ranks;
    return drop_last ? rows / global : (rows + global - 1) / global;
  }
  /// First row and number of rows of this rank; a last batch that is not full is spread evenly.
  std::pair<std::int64_t, std::int64_t> part(std::int64_t position) const {
    const std::int64_t global = batch * ranks, first = position * global, n = std::min(global, rows - first);
    const std::int64_t begin = n * rank / ranks, end = n * (rank + 1) / ranks;
    return {first + begin, end - begin};
  }
};

void check_division(const char* op, std::int64_t batch, int rank, int ranks) {
  MT_CHECK(ConfigError, batch > 0 && batch <= (std::int64_t{1} << 31), op, ": batch must be 1 to 2^31, got ", batch);
  MT_CHECK(ConfigError, ranks > 0 && rank >= 0 && rank < ranks, op, ": rank ", rank, " of ", ranks, " ranks");
}

class ImageSource final : public BatchSource {
 public:
  ImageSource(ImageDataset data, const ImageLoaderOptions& o) : data_(std::move(data)), options_(o) {
    constexpr const char* kOp = "ImageLoader";
    check_division(kOp, o.batch, o.rank, o.ranks);
    const Tensor &x = data_.images, &y = data_.labels;
    MT_CHECK(DTypeError, x.dtype() == DType::u8 && y.dtype() == DType::u8, kOp, ": images and labels must be u8, got ",
             x, " and ", y);
    MT_CHECK(ShapeError, x.rank() == 3 && y.rank() == 1 && x.size(0) == y.size(0), kOp,
             ": expected images [N,H,W] and labels [N], got ", x, " and ", y);
    MT_CHECK(DeviceError, x.device().is_cpu() && y.device().is_cpu() && x.is_contiguous() && y.is_contiguous(), kOp,
             ": the data set must be contiguous on the CPU, got ", x, " and ", y);
    MT_CHECK(ConfigError, !o.normalize || o.deviation > 0, kOp, ": deviation must be positive, got ", o.deviation);
    division_ = {x.size(0), o.batch, o.rank, o.ranks, o.drop_last};
    MT_CHECK(ConfigError, division_.batches() > 0, kOp, ": ", x.size(0), " images do not fill one batch of ", o.batch,
             " on each of ", o.ranks, " rank(s); use a smaller batch or drop_last = false");
    for (std::size_t byte = 0; byte < 256; ++byte) {
      normalized_[byte] = static_cast<float>((static_cast<double>(byte) / 255 - o.mean) / o.deviation);
    }
  }

  std::int64_t batches() const override { return division_.batches(); }

  BatchLayout layout(std::int64_t position) const override {
    const std::int64_t n = division_.part(position).second;
    return {{n, 1, data_.images.size(1), data_.images.size(2)},
            options_.normalize ? DType::f32 : DType::u8,
            {n},
            DType::i64};
  }

  void start_epoch(std::uint64_t seed, std::int64_t epoch) override {
    if (options_.shuffle) order_ = permutation(division_.rows, seed, epoch);
  }

  void fill(std::int64_t position, void* x, void* y) override {
    const auto [first, n] = division_.part(position);
    const std::int64_t pixels = data_.images.stride(0);
    const auto* images = data_.images.data<std::uint8_t>();
    const auto* labels = data_.labels.data<std::uint8_t>();
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t row = options_.shuffle ? order_[static_cast<std::size_t>(first + i)] : first + i;
      const std::uint8_t* image = images + row * pixels;
      if (options_.normalize) {
        std::transform(image, image + pixels, static_cast<float*>(x) + i * pixels,
                       [this](std::uint8_t byte) { return normalized_[byte]; });
      } else {
        std::copy_n(image, pixels, static_cast<std::uint8_t*>(x) + i * pixels);
      }
      static_cast<std::int64_t*>(y)[i] = labels[row];
    }
  }

 private:
  ImageDataset data_;
  ImageLoaderOptions options_;
  Division division_{};
  std::array<float, 256> normalized_{};
  std::vector<std::int64_t> order_;
};

class TokenSource final : public BatchSource {
 public:
  TokenSource(TokenDataset data, const TokenLoaderOptions& o) : data_(std::move(data)), options_(o) {
    constexpr const char* kOp = "TokenLoader";
    check_division(kOp, o.batch, o.rank, o.ranks);
    MT_CHECK(DTypeError, o.dtype == DType::i32 || o.dtype == DType::i64, kOp, ": tokens are i32 or i64, not ", o.dtype);
    MT_CHECK(ConfigError, o.context > 0 && o.steps >= 0, kOp, ": context must be positive and steps not negative, got ",
             o.context, " and ", o.steps);
    MT_CHECK(ConfigError, data_.size() > o.context, kOp, ": ", data_.size(), " tokens are shorter than one window of ",
             o.context, " and the token after it");
    const bool random = o.order == TokenOrder::random;
    division_ = {(data_.size() - 1) / o.context, o.batch, o.rank, o.ranks, o.drop_last};
    batches_ = division_.batches();
    if (random) {  // any number of batches can be drawn; all are full
      batches_ = o.steps > 0 ? o.steps : std::max<std::int64_t>(1, batches_);
      std::int64_t rows = 0;
      MT_CHECK(ConfigError, !__builtin_mul_overflow(batches_, o.batch * o.ranks, &rows), kOp, ": steps = ", o.steps,
               " is too large");
      division_.rows = rows;
      return;
    }
    MT_CHECK(ConfigError, batches_ > 0, kOp, ": ", division_.rows, " windows of ", o.context,
             " tokens do not fill one batch of ", o.batch, " on each of ", o.ranks,
             " rank(s); use a smaller batch, drop_last = false or TokenOrder::random");
    MT_CHECK(ConfigError, o.steps <= batches_, kOp, ": steps = ", o.steps, " but the tokens fill ", batches_,
             " batches an epoch in this order");
    if (o.steps > 0) batches_ = o.steps;
  }

  std::int64_t batches() const override { return batches_; }

  BatchLayout layout(std::int64_t position) const override {
    const Shape shape{division_.part(position).second, options_.context};
    return {shape, options_.dtype, shape, options_.dtype};
  }

  void start_epoch(std::uint64_t seed, std::int64_t epoch) override {
    stream_ = EpochStream(seed, epoch);
    if (options_.order == TokenOrder::shuffled) order_ = permutation(division_.rows, seed, epoch);
  }

  void fill(std::int64_t position, void* x, void* y) override {
    if (options_.dtype == DType::i32) {
      fill_as(position, static_cast<std::int32_t*>(x), static_cast<std::int32_t*>(y));
    } else {
      fill_as(position, static_cast<std::int64_t*>(x), static_cast<std::int64_t*>(y));
    }
  }

 private:
  template <class T> void fill_as(std::int64_t position, T* x, T* y) {
    const auto [first, n] = division_.part(position);
    const std::int64_t t = options_.context;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t begin = window(first + i);
      data_.copy(begin, t, x + i * t);
      data_.copy(begin + 1, t, y + i * t);
    }
  }

  /// Where window `row` of the epoch begins.
  std::int64_t window(std::int64_t row) const {
    switch (options_.order) {
      case TokenOrder::random:
        return stream_.below(data_.size() - options_.context, row);
      case TokenOrder::shuffled:
        return order_[static_cast<std::size_t>(row)] * options_.context;
      default:
        return row * options_.context;
    }
  }

  TokenDataset data_;
  TokenLoaderOptions options_;
  Division division_{};
  std::int64_t batches_ = 0;
  EpochStream stream_{0, 0};
  std::vector<std::int64_t> order_;
};

}  // namespace

std::vector<std::int64_t> permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  MT_CHECK(ConfigError, n >= 0, "permutation: n must not be negative, got ", n);
  const EpochStream stream(seed, epoch);
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  // Fisher-Yates.
  for (std::int64_t i = n - 1; i > 0; --i)
    std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(stream.below(i + 1, i))]);
  return order;
}

ImageLoader::ImageLoader(ImageDataset data, const ImageLoaderOptions& o)
    : Loader(std::make_unique<ImageSource>(std::move(data), o), o.seed, o.device, o.prefetch) {}

TokenLoader::TokenLoader(TokenDataset data, const TokenLoaderOptions& o)
    : Loader(std::make_unique<TokenSource>(std::move(data), o), o.seed, o.device, o.prefetch) {}

}  // namespace mantissa::train
