// The memory of a device in use: accounting by category, out-of-memory and what comes after it, unwritten
// memory, and that a steady training step asks the source for nothing.

#include <cstring>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;

class Memory : public OnDevice {
 protected:
  static CachingAllocator& allocator() { return backend(device()).allocator(); }
};
MT_ON_DEVICES(Memory);

TEST_P(Memory, TensorsAreAlignedAndCounted) {
  const std::int64_t before = memory_stats(device()).total;
  {
    const Tensor x = empty({1000, 1000}, on());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data()) % 256, 0u);
    EXPECT_GE(memory_stats(device()).total - before, 4000000);
    const Tensor view = x.slice(0, 0, 10);
    EXPECT_LT(memory_stats(device()).total - before, 4000000 + (1 << 20)) << "views cost nothing";
  }
  EXPECT_EQ(memory_stats(device()).total, before) << "nothing is leaked";
  EXPECT_EQ(empty({0, 5}, on()).data(), nullptr);
}

TEST_P(Memory, AViewKeepsItsStorage) {
  Tensor view;
  {
    const Tensor x = full({1000}, 3, on());
    view = x.slice(0, 990, 1000);
  }
  const Tensor other = zeros({1000}, on());  // would take the memory
  EXPECT_EQ(view.to_vector(), std::vector<float>(10, 3));
}

TEST_P(Memory, TrainingBooksEveryByteUnderItsCategory) {
  const auto held = [&](MemoryCategory c) { return memory_stats(device()).held[static_cast<std::size_t>(c)]; };
  const std::int64_t weights = held(MemoryCategory::weights), moments = held(MemoryCategory::optimizer_state),
                     working = held(MemoryCategory::working_copies), gradients = held(MemoryCategory::gradients);
  nn::MLP model({256, 512, 128}, device());
  const std::int64_t count = model.num_parameters();
  optim::AdamW adam(model.parameters());
  {
    const Autocast scope(DType::f16);
    optim::LossScaler scaler;
    scaler.backward(mean(square(model(ones({8, 256}, on())))));
    scaler.step(adam);
  }
  const std::int64_t slack = 4 * 256 + 4096;  // each tensor rounds up to 256 bytes; a few small states
  const auto within = [&](std::int64_t bytes, std::int64_t expected, const char* what) {
    EXPECT_GE(bytes, expected) << what;
    EXPECT_LE(bytes, expected + slack) << what;
  };
  within(held(MemoryCategory::weights) - weights, 4 * count, "weights");
  within(held(MemoryCategory::optimizer_state) - moments, 8 * count, "moments");
  within(held(MemoryCategory::working_copies) - working, 2 * count, "working copies");
  within(held(MemoryCategory::gradients) - gradients, 4 * count, "gradients");
  const std::string report = memory_report(device());
  for (const char* part : {"weights", "working copies", "gradients", "optimizer state", "activations", "workspace",
                           "total", "cached", "MiB"})
    EXPECT_TRUE(contains(report, part)) << report;
}

TEST_P(Memory, RefusalNamesTheOpAndTheShapeAndTheRunGoesOn) {
  const Tensor x = ones({64, 32}, on()), w = ones({16, 32}, on());
  allocator().fail_after(1);
  expect_error<OutOfMemoryError>(
      [&] { linear(x, w); }, {"out of memory on " + to_string(device()) + ": linear requested 0.0 MiB", "held", "peak",
                              "cached", "for f32[64,16]"});
  allocator().fail_after(1);
  expect_error<OutOfMemoryError>([&] { exp(x); }, {": exp requested", "for f32[64,32]"});
  EXPECT_EQ(linear(x, w).to_vector()[0], 32);
  Tensor p = leaf(ones({16, 32}, on()));
  const Tensor loss = sum(linear(x, p));
  allocator().fail_after(2);
  expect_error<OutOfMemoryError>([&] { backward(loss); }, {"out of memory on", " requested"});
  allocator().fail_after(0);
  p.zero_grad();
  backward(sum(linear(x, p)));
  EXPECT_EQ(p.grad().to_vector()[0], 64);
}

TEST_P(Memory, EveryAllocationOfAStepMayFail) {
  // Fails the first, second, ... allocation of a whole step until one passes. Whatever happened, the next
  // step works.
  manual_seed(3);
  nn::SmallCNN model({.width = 2, .hidden = 4, .dropout = 0.1}, device());
  optim::AdamW adam(model.parameters());
  optim::LossScaler scaler(optim::StaticScale{.scale = 16});
  const Tensor images = rand({2, 1, 28, 28}, on()), labels = zeros({2}, on(DType::i64));
  const auto step = [&] {
    const Autocast scope(DType::f16);
    scaler.backward(cross_entropy(model(images), labels));
    return scaler.step(adam);
  };
  EXPECT_TRUE(step().applied());
  int failures = 0;
  for (int n = 1;; ++n) {
    ASSERT_LT(n, 2000);
    allocator().fail_after(n);
    bool failed = false;
    try {
      step();
    } catch (const OutOfMemoryError&) {
      failed = true;
      ++failures;
    }
    allocator().fail_after(0);
    adam.zero_grad();
    if (!failed) break;
    if (n % 8 == 0) {
      ASSERT_TRUE(step().applied()) << n;
    }
  }
  EXPECT_GT(failures, 20);
  for (const Tensor& p : model.parameters())
    for (const float value : p.to_vector()) ASSERT_TRUE(std::isfinite(value));
  std::printf("a step survived the failure of each of its %d allocations\n", failures);
}

TEST_P(Memory, AbsurdSizesAreErrorsAndTheNextRequestWorks) {
  for (const Shape& shape :
       {Shape{std::int64_t{1} << 50}, Shape{std::int64_t{1} << 30, 1 << 20}, Shape{std::int64_t{1} << 60}})
    expect_error<OutOfMemoryError>([&] { empty(shape, on()); }, {"out of memory", "requested", "MiB", "held", "peak",
                                                                 "cached", "for f32" + to_string(shape)});
  expect_error<OutOfMemoryError>([&] { empty({std::int64_t{1} << 61}, on()); },
                                 {"out of memory", "for f32[2305843009213693952]"});  // 2^63 bytes
  expect_error<ShapeError>([&] { empty({std::int64_t{1} << 62}, on()); },
                           {"empty: too many bytes for f32[4611686018427387904]"});
  expect_error<ShapeError>(
      [&] {
        empty({std::int64_t{1} << 40, std::int64_t{1} << 40}, on());
      },
      {"shape: too many elements in [1099511627776,1099511627776]"});
  expect_error<ShapeError>([&] { empty({INT64_MAX}, on()); }, {"shape: too many elements"});
  expect_error<ShapeError>([&] { empty({0, INT64_MAX, INT64_MAX}, on()); }, {"shape: too many elements"});
  expect_error<ShapeError>([&] { empty({3, -1}, on()); }, {"shape: negative size in [3,-1]"});
  EXPECT_EQ(sum(ones({10}, on())).item(), 10);
}

TEST_P(Memory, PoisonShowsUnwrittenMemory) {
  if (device().is_cuda()) GTEST_SKIP() << "the hook writes host memory";
  allocator().set_poison([](void* data, std::size_t n) { std::memset(data, 0xFF, n); });
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (const double value : empty({1001}, on(dtype)).to_vector<double>()) ASSERT_TRUE(std::isnan(value)) << dtype;
  // A whole step reads nothing that it has not written.
  manual_seed(5);
  nn::SmallCNN cnn({.width = 3, .hidden = 5}, device());
  nn::GPT gpt({.vocabulary = 11, .context = 8, .width = 12, .layers = 2, .heads = 3, .dropout = 0.1}, device());
  const Tensor images = rand({3, 1, 28, 28}, on()), labels = zeros({3}, on(DType::i64)),
               tokens = zeros({2, 7}, on(DType::i64));
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    auto parameters = cnn.parameters();
    for (const Tensor& p : gpt.parameters()) parameters.push_back(p);
    optim::AdamW adam(parameters);
    optim::LossScaler scaler(optim::StaticScale{.scale = 16});
    const Autocast scope(precision);
    const Tensor loss = cross_entropy(cnn(images), labels) + gpt.loss(tokens, tokens);
    EXPECT_TRUE(std::isfinite(loss.item())) << precision;
    scaler.backward(loss);
    EXPECT_TRUE(scaler.step(adam).applied()) << precision;
    for (const Tensor& p : parameters)
      for (const float value : p.to_vector()) ASSERT_TRUE(std::isfinite(value)) << precision;
  }
  allocator().set_poison(nullptr);
}

TEST_P(Memory, ASteadyStepAsksTheSourceForNothing) {
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    manual_seed(5);
    nn::SmallCNN cnn({.width = 3, .hidden = 5}, device());
    nn::GPT gpt({.vocabulary = 11, .context = 8, .width = 12, .layers = 2, .heads = 3}, device());
    auto parameters = cnn.parameters();
    for (const Tensor& p : gpt.parameters()) parameters.push_back(p);
    optim::AdamW adam(parameters);
    optim::LossScaler scaler(optim::StaticScale{.scale = 16});
    const Tensor images = rand({3, 1, 28, 28}, on()), labels = zeros({3}, on(DType::i64)),
                 tokens = zeros({2, 7}, on(DType::i64));
    const auto step = [&] {
      const Autocast scope(precision);
      scaler.backward(cross_entropy(cnn(images), labels) + gpt.loss(tokens, tokens));
      adam.clip_grad_norm(1);
      scaler.step(adam);
    };
    for (int i = 0; i < 3; ++i) step();
    const MemoryStats before = memory_stats(device());
    allocator().reset_peak();
    for (int i = 0; i < 5; ++i) step();
    const MemoryStats after = memory_stats(device());
    EXPECT_EQ(after.source_allocations, before.source_allocations) << precision;
    EXPECT_EQ(after.total, before.total) << "and keeps nothing";
  }
}

}  // namespace
}  // namespace mantissa
