// train/loader.h: what batches hold, that it depends on the cursor alone, resuming, errors of the reading
// thread.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "core/backend.h"
#include "files.h"
#include "train/loader.h"

namespace mantissa::train {
namespace {

using testing::expect_error;

ImageDataset images(std::int64_t n, std::int64_t side = 2) {
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(n * side * side)), labels(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < pixels.size(); ++i)
    pixels[i] = static_cast<std::uint8_t>(i / static_cast<std::size_t>(side * side));
  for (std::size_t i = 0; i < labels.size(); ++i)
    labels[i] = static_cast<std::uint8_t>(i);  // the label tells which image it is
  return {from_vector(pixels, {n, side, side}, {DType::u8}), from_vector(labels, {n}, {DType::u8}), 256};
}

TokenDataset counting_tokens(std::int32_t n) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return TokenDataset::from_tokens(ids);
}

template <class T = std::int64_t> std::vector<std::int64_t> values(const Tensor& x) {
  return {x.data<T>(), x.data<T>() + x.numel()};
}

/// The labels of an epoch, in order.
std::vector<std::int64_t> labels_of_epoch(Loader& loader) {
  std::vector<std::int64_t> all;
  for (const auto& [x, y] : loader) {
    const auto part = values(y);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(Permutation, IsOneAndDependsOnSeedAndEpoch) {
  std::set<std::vector<std::int64_t>> seen;
  for (const std::uint64_t seed : {0u, 1u, 2u}) {
    for (const std::int64_t epoch : {0, 1, 2}) {
      const auto order = permutation(1000, seed, epoch);
      EXPECT_EQ(order, permutation(1000, seed, epoch));
      seen.insert(order);
      auto sorted = order;
      std::sort(sorted.begin(), sorted.end());
      for (std::int64_t i = 0; i < 1000; ++i) ASSERT_EQ(sorted[static_cast<std::size_t>(i)], i);
    }
  }
  EXPECT_EQ(seen.size(), 9u);
  EXPECT_TRUE(permutation(0, 1, 1).empty());
  EXPECT_EQ(permutation(1, 1, 1), std::vector<std::int64_t>{0});
}

TEST(Permutation, EveryOrderIsEquallyLikely) {
  std::map<std::vector<std::int64_t>, int> count;
  for (std::int64_t epoch = 0; epoch < 6000; ++epoch) ++count[permutation(3, 7, epoch)];
  ASSERT_EQ(count.size(), 6u);
  double chi2 = 0;
  for (const auto& [order, n] : count) chi2 += (n - 1000.0) * (n - 1000.0) / 1000.0;
  EXPECT_LT(chi2, 20.5);  // 5 degrees of freedom, p = 0.001
}

TEST(ImageLoader, ValuesShapesAndEpochs) {
  ImageLoader loader(images(10), {.batch = 4, .drop_last = false, .mean = 0.5, .deviation = 0.25, .seed = 3});
  EXPECT_EQ(loader.batches(), 3);
  std::vector<std::int64_t> sizes, first;
  for (auto [x, y] : loader) {
    sizes.push_back(y.numel());
    ASSERT_EQ(x.shape(), Shape({y.numel(), 1, 2, 2}));
    ASSERT_EQ(x.dtype(), DType::f32);
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const auto label = y.data<std::int64_t>()[i];
      first.push_back(label);
      for (std::int64_t p = 0; p < 4; ++p) {
        EXPECT_FLOAT_EQ(x.data<float>()[i * 4 + p],
                        static_cast<float>((static_cast<double>(label) / 255 - 0.5) / 0.25));
      }
    }
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 4, 2}));
  EXPECT_EQ(first, permutation(10, 3, 0));
  EXPECT_EQ(loader.epoch(), 1);
  EXPECT_EQ(labels_of_epoch(loader), permutation(10, 3, 1));
  EXPECT_EQ(loader.state(), (LoaderState{3, 2, 0}));
}

TEST(ImageLoader, DropLastRawBytesAndInOrder) {
  ImageLoader loader(images(10), {.batch = 4, .shuffle = false, .normalize = false});
  EXPECT_EQ(loader.batches(), 2);
  const auto [x, y] = loader.next();
  EXPECT_EQ(x.dtype(), DType::u8);
  EXPECT_EQ(values(y), (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(values<std::uint8_t>(x), (std::vector<std::int64_t>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}));
}

TEST(ImageLoader, DoesNotDependOnPrefetchOrTiming) {
  ImageLoader one(images(50), {.batch = 7, .seed = 5, .prefetch = 1}),
      many(images(50), {.batch = 7, .seed = 5, .prefetch = 20});
  for (int i = 0; i < 25; ++i) {
    const Batch a = one.next();
    if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const Batch b = many.next();
    ASSERT_EQ(values(a.y), values(b.y)) << i;
  }
}

TEST(ImageLoader, BatchesStayValid) {
  ImageLoader loader(images(40), {.batch = 4, .shuffle = false, .prefetch = 2});
  std::vector<Batch> kept;
  for (const Batch& batch : loader) kept.push_back(batch);
  for (std::int64_t i = 0; i < 10; ++i) EXPECT_EQ(values(kept[static_cast<std::size_t>(i)].y)[0], 4 * i);
  kept[0].x.bump_version();
  EXPECT_EQ(kept[0].y.version(), 0u);  // x and y have versions of their own
}

TEST(ImageLoader, RanksShareABatch) {
  for (const bool drop_last : {true, false}) {
    ImageLoader whole(images(22), {.batch = 6, .drop_last = drop_last, .seed = 9});
    ImageLoader left(images(22), {.batch = 3, .drop_last = drop_last, .seed = 9, .rank = 0, .ranks = 2});
    ImageLoader right(images(22), {.batch = 3, .drop_last = drop_last, .seed = 9, .rank = 1, .ranks = 2});
    ASSERT_EQ(whole.batches(), left.batches());
    for (std::int64_t i = 0; i < 2 * whole.batches(); ++i) {
      auto parts = values(left.next().y);
      const auto rest = values(right.next().y);
      parts.insert(parts.end(), rest.begin(), rest.end());
      EXPECT_EQ(values(whole.next().y), parts);
    }
  }
}

TEST(ImageLoader, BadOptions) {
  const auto make = [](const ImageLoaderOptions& options) {
    return [options] { ImageLoader loader(images(10), options); };
  };
  expect_error<ConfigError>(make({.batch = 0}), {"batch", "0"});
  expect_error<ConfigError>(make({.batch = 11}), {"10 images do not fill one batch of 11", "drop_last"});
  expect_error<ConfigError>(make({.batch = 6, .ranks = 2}), {"2 rank(s)"});
  expect_error<ConfigError>(make({.batch = 1, .rank = 2, .ranks = 2}), {"rank 2 of 2"});
  expect_error<ConfigError>(make({.batch = 1, .deviation = 0}), {"deviation"});
  expect_error<ConfigError>(make({.batch = 1, .prefetch = 0}), {"prefetch"});
  ImageDataset data = images(10);
  data.labels = images(9).labels;
  expect_error<ShapeError>([&] { ImageLoader loader(data); }, {"u8[10,2,2]@cpu", "u8[9]@cpu"});
  data.labels = from_vector(std::vector<std::int64_t>(10), {10}, {DType::i64});
  expect_error<DTypeError>([&] { ImageLoader loader(data); }, {"i64[10]@cpu"});
}

TEST(TokenLoader, SequentialAndTargets) {
  for (const DType dtype : {DType::i32, DType::i64}) {
    TokenLoader loader(counting_tokens(26),
                       {.batch = 2, .context = 5, .order = TokenOrder::sequential, .drop_last = false, .dtype = dtype});
    EXPECT_EQ(loader.batches(), 3);
    std::int64_t next = 0;
    for (const auto& [x, y] : loader) {
      ASSERT_EQ(x.shape(), y.shape());
      ASSERT_EQ(x.dtype(), dtype);
      const auto tokens = dtype == DType::i32 ? values<std::int32_t>(x) : values(x);
      const auto targets = dtype == DType::i32 ? values<std::int32_t>(y) : values(y);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_EQ(tokens[i], next++);
        EXPECT_EQ(targets[i], next);
      }
    }
    EXPECT_EQ(next, 25);
  }
}

TEST(TokenLoader, ShuffledCoversEveryTokenOnce) {
  TokenLoader loader(counting_tokens(41), {.batch = 2, .context = 5, .order = TokenOrder::shuffled, .seed = 4});
  std::vector<std::vector<std::int64_t>> epochs;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<std::int64_t> all;
    for (const auto& [x, y] : loader) {
      const auto part = values<std::int32_t>(x);
      all.insert(all.end(), part.begin(), part.end());
    }
    epochs.push_back(all);
    std::sort(all.begin(), all.end());
    for (std::int64_t i = 0; i < 40; ++i) ASSERT_EQ(all[static_cast<std::size_t>(i)], i);
  }
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST(TokenLoader, RandomReachesEveryWindow) {
  TokenLoader loader(counting_tokens(13), {.batch = 50, .context = 4, .steps = 20, .seed = 1});
  EXPECT_EQ(loader.batches(), 20);
  std::set<std::int64_t> starts;
  std::vector<std::int64_t> first_epoch, second_epoch;
  for (auto* epoch : {&first_epoch, &second_epoch}) {
    for (const auto& [x, y] : loader) {
      for (std::int64_t i = 0; i < 50; ++i) epoch->push_back(x.data<std::int32_t>()[i * 4]);
      EXPECT_EQ(y.data<std::int32_t>()[3], x.data<std::int32_t>()[3] + 1);
    }
    starts.insert(epoch->begin(), epoch->end());
  }
  EXPECT_EQ(starts, (std::set<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));  // 13 tokens, windows of 4 and a target
  EXPECT_NE(first_epoch, second_epoch);
}

TEST(TokenLoader, ShortestAndBadOptions) {
  TokenLoader shortest(counting_tokens(5), {.batch = 3, .context = 4});
  EXPECT_EQ(shortest.batches(), 1);
  EXPECT_EQ(values<std::int32_t>(shortest.next().y), (std::vector<std::int64_t>{1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}));
  const auto make = [](const TokenLoaderOptions& options) {
    return [options] { TokenLoader loader(counting_tokens(20), options); };
  };
  expect_error<ConfigError>(make({.context = 20}), {"20 tokens", "shorter than one window of 20"});
  expect_error<ConfigError>(make({.context = 0}), {"context"});
  expect_error<ConfigError>(make({.context = 4, .steps = -1}), {"steps"});
  expect_error<ConfigError>(make({.batch = 5, .context = 4, .order = TokenOrder::shuffled}),
                            {"4 windows", "batch of 5"});
  expect_error<ConfigError>(make({.batch = 1, .context = 4, .order = TokenOrder::sequential, .steps = 5}),
                            {"steps = 5", "4 batches"});
  expect_error<DTypeError>(make({.context = 4, .dtype = DType::f32}), {"f32"});
  expect_error<ConfigError>(make({.context = 4, .steps = std::int64_t{1} << 62}), {"too large"});
}

TEST(Loader, ResumeInsideAnEpochEqualsUnbroken) {
  const auto make = [] {
    return TokenLoader(counting_tokens(1000), {.batch = 3, .context = 7, .order = TokenOrder::shuffled, .seed = 11});
  };
  TokenLoader unbroken = make();
  std::vector<std::vector<std::int64_t>> expected;
  std::vector<LoaderState> states;
  for (std::int64_t i = 0; i < 2 * unbroken.batches(); ++i) {
    states.push_back(unbroken.state());
    expected.push_back(values<std::int32_t>(unbroken.next().x));
  }
  TokenLoader resumed = make();
  for (const std::size_t at :
       {std::size_t{20}, std::size_t{0}, states.size() / 2 - 1, states.size() / 2, states.size() - 3}) {
    resumed.set_state(states[at]);
    EXPECT_EQ(resumed.state(), states[at]);
    for (std::size_t i = at; i < std::min(at + 10, states.size()); ++i)
      ASSERT_EQ(values<std::int32_t>(resumed.next().x), expected[i]) << i;
  }
  // A loop runs the rest of the epoch, and an early exit can be continued.
  resumed.set_state(states[5]);
  std::size_t i = 5;
  for (const auto& [x, y] : resumed) {
    EXPECT_EQ(values<std::int32_t>(x), expected[i++]);
    if (i == 10) break;
  }
  EXPECT_EQ(resumed.state(), states[10]);
  for (const auto& [x, y] : resumed) EXPECT_EQ(values<std::int32_t>(x), expected[i++]);
  EXPECT_EQ(i, states.size() / 2);
  EXPECT_EQ(resumed.state(), (LoaderState{11, 1, 0}));
}

TEST(Loader, StateSelectsTheSeed) {
  ImageLoader a(images(30), {.batch = 30, .seed = 1}), b(images(30), {.batch = 30, .seed = 2});
  b.next();
  b.set_state({.seed = 1});
  EXPECT_EQ(values(a.next().y), values(b.next().y));
  for (const LoaderState& bad : {LoaderState{1, -1, 0}, LoaderState{1, 0, -1}, LoaderState{1, 0, 1}}) {
    expect_error<ConfigError>([&] { b.set_state(bad); }, {"Loader::set_state"});
  }
}

/// Batch i is the number i; one of them can not be read.
class FailingSource final : public BatchSource {
 public:
  explicit FailingSource(std::int64_t bad) : bad_(bad) {}
  std::int64_t batches() const override { return 8; }
  BatchLayout layout(std::int64_t) const override { return {{1}, DType::i64, {0}, DType::i64}; }
  void start_epoch(std::uint64_t, std::int64_t epoch) override {
    if (epoch == 2) MT_THROW(IoError, "the second epoch is missing");
  }
  void fill(std::int64_t position, void* x, void*) override {
    if (position == bad_) MT_THROW(FormatError, "batch 5 is broken");
    std::memcpy(x, &position, sizeof position);
  }

 private:
  std::int64_t bad_;
};

TEST(Loader, AnErrorOfTheThreadArrivesInOrder) {
  for (const int prefetch : {1, 2, 16}) {
    Loader loader(std::make_unique<FailingSource>(5), 0, cpu, prefetch);
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(values(loader.next().x)[0], i);
    for (int repeat = 0; repeat < 2; ++repeat) expect_error<FormatError>([&] { loader.next(); }, {"batch 5 is broken"});
    EXPECT_EQ(loader.state().position, 5);
    loader.set_state({.position = 6});  // skip it
    EXPECT_EQ(values(loader.next().x)[0], 6);
    expect_error<FormatError>(
        [&] {
          for (int i = 0; i < 8; ++i) loader.next();
        },
        {"batch 5 is broken"});
  }
  Loader loader(std::make_unique<FailingSource>(-1), 0);
  for (int i = 0; i < 16; ++i) loader.next();
  expect_error<IoError>([&] { loader.next(); }, {"second epoch"});
}

TEST(Loader, TheGpuGetsTheSameWithoutWaiting) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  const Device gpu = cuda(0);
  ImageLoader here(images(200, 28), {.batch = 32, .drop_last = false, .seed = 8});
  ImageLoader there(images(200, 28), {.batch = 32, .drop_last = false, .seed = 8, .device = gpu, .prefetch = 2});
  const std::int64_t waits = backend(gpu).counters.synchronizations;
  std::vector<Batch> batches;
  for (int i = 0; i < 30; ++i) batches.push_back(there.next());
  EXPECT_EQ(backend(gpu).counters.synchronizations, waits);
  for (const Batch& batch : batches) {
    const Batch expected = here.next();
    EXPECT_EQ(batch.x.device(), gpu);
    EXPECT_EQ(batch.x.to_vector(), expected.x.to_vector());
    EXPECT_EQ(batch.y.to_vector<std::int64_t>(), expected.y.to_vector<std::int64_t>());
  }
}

TEST(Loader, StopsCleanlyAtAnyMoment) {
  for (int taken = 0; taken < 12; ++taken) {
    ImageLoader loader(images(64), {.batch = 2, .prefetch = 4});
    for (int i = 0; i < taken; ++i) loader.next();
    if (taken % 3 == 0) loader.set_state({});
    Loader moved = std::move(loader);
    moved.next();
  }
}

}  // namespace
}  // namespace mantissa::train
