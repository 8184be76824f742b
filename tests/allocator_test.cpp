// The caching allocator: alignment, reuse, splitting and merging, accounting, refusal and recovery, threads.

#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "step_support.h"

namespace mantissa {
namespace {

using namespace testing;

constexpr std::size_t kKiB = 1024, kMiB = 1024 * 1024;
constexpr auto kData = MemoryCategory::data;

/// Host memory with a limit, which remembers what it gave.
class Limited final : public CachingAllocator::Source {
 public:
  struct Record {
    std::size_t limit = std::size_t{1} << 40, held = 0;
    int allocations = 0, releases = 0, refusals = 0;
  };
  explicit Limited(Record& r) : record(r) {}
  ~Limited() override {  // what the test did not release
    for (const auto& [data, bytes] : sizes) std::free(data);
  }
  void* allocate(std::size_t bytes) override {
    if (record.held + bytes > record.limit) {
      ++record.refusals;
      return nullptr;
    }
    void* data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    sizes[data] = bytes;
    record.held += bytes;
    ++record.allocations;
    return data;
  }
  void release(void* data) override {
    record.held -= sizes.at(data);
    sizes.erase(data);
    ++record.releases;
    std::free(data);
  }
  std::string describe() const override { return "a test source with a limit"; }
  Record& record;
  std::map<void*, std::size_t> sizes;
};

struct Fixture {
  Limited::Record source;
  CachingAllocator allocator{std::make_unique<Limited>(source), cpu};
  void* get(std::size_t bytes, MemoryCategory category = kData) { return allocator.allocate(bytes, category); }
  std::int64_t held(MemoryCategory category) const {
    return allocator.stats().held[static_cast<std::size_t>(category)];
  }
};

TEST(Allocator, GivesAlignedMemoryThatMayBeWritten) {
  Fixture f;
  std::vector<std::pair<char*, std::size_t>> blocks;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{257}, 4 * kKiB - 1,
                                  kMiB, kMiB + 1, 10 * kMiB, 33 * kMiB + 5}) {
    char* data = static_cast<char*>(f.get(bytes));
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 256, 0u) << bytes;
    std::memset(data, static_cast<int>(blocks.size()), bytes);
    blocks.emplace_back(data, bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i)  // nobody wrote into another's block
    for (std::size_t at = 0; at < blocks[i].second; at += 97) ASSERT_EQ(blocks[i].first[at], static_cast<char>(i));
  for (const auto& [data, bytes] : blocks) f.allocator.release(data);
  EXPECT_EQ(f.allocator.stats().total, 0);
}

TEST(Allocator, NothingIsLegal) {
  Fixture f;
  EXPECT_EQ(f.get(0), nullptr);
  f.allocator.release(nullptr);
  EXPECT_EQ(f.source.allocations, 0);
}

TEST(Allocator, ReusesWhatWasFreed) {
  Fixture f;
  void* first = f.get(100 * kKiB);
  f.allocator.release(first);
  EXPECT_EQ(f.get(100 * kKiB), first);
  void* large = f.get(5 * kMiB);
  f.allocator.release(large);
  EXPECT_EQ(f.get(4 * kMiB), large) << "a smaller request fits as well";
  EXPECT_EQ(f.source.allocations, 2);
  EXPECT_EQ(f.allocator.stats().source_allocations, 2);
}

TEST(Allocator, TakesTheSmallestBlockThatFits) {
  Fixture f;
  void *a = f.get(40 * kKiB), *keep1 = f.get(256), *b = f.get(20 * kKiB), *keep2 = f.get(256);
  f.allocator.release(a);
  f.allocator.release(b);
  EXPECT_EQ(f.get(20 * kKiB), b);
  EXPECT_EQ(f.get(30 * kKiB), a);
  f.allocator.release(keep1);
  f.allocator.release(keep2);
}

TEST(Allocator, SplitsSegmentsAndMergesNeighbours) {
  Fixture f;
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(f.get(256 * kKiB));  // one 2 MiB segment
  EXPECT_EQ(f.source.allocations, 1);
  for (const int i : {1, 3, 5, 7, 0, 2, 6, 4})
    f.allocator.release(blocks[static_cast<std::size_t>(i)]);  // to both sides
  EXPECT_EQ(f.get(kMiB), blocks[0]) << "the pieces are one block again";
  f.allocator.release(blocks[0]);
  f.allocator.release_cache();
  EXPECT_EQ(f.source.held, 0u) << "a merged segment can be given back";
}

TEST(Allocator, KeepsSmallAndLargeApart) {
  Fixture f;
  void* large = f.get(2 * kMiB);
  f.allocator.release(large);
  void* small = f.get(kKiB);  // must not break up the large block
  EXPECT_NE(small, large);
  EXPECT_EQ(f.get(2 * kMiB), large);
}

TEST(Allocator, CountsByCategoryAndRemembersThePeak) {
  Fixture f;
  void* weights = f.get(1000, MemoryCategory::weights);
  void* activations = f.get(3 * kMiB, MemoryCategory::activations);
  EXPECT_EQ(f.held(MemoryCategory::weights), 1024);
  EXPECT_EQ(f.held(MemoryCategory::activations), static_cast<std::int64_t>(3 * kMiB));
  f.allocator.release(activations);
  void* gradients = f.get(2 * kMiB, MemoryCategory::gradients);
  const MemoryStats s = f.allocator.stats();
  EXPECT_EQ(s.total, static_cast<std::int64_t>(1024 + 2 * kMiB));
  EXPECT_EQ(s.peak, static_cast<std::int64_t>(1024 + 3 * kMiB));
  EXPECT_EQ(s.peak_by_category[static_cast<std::size_t>(MemoryCategory::activations)],
            static_cast<std::int64_t>(3 * kMiB));
  EXPECT_EQ(s.peak_by_category[static_cast<std::size_t>(MemoryCategory::gradients)], 0)
      << "the division at the moment of the peak";
  EXPECT_EQ(s.total + s.cached, static_cast<std::int64_t>(f.source.held));
  f.allocator.reset_peak();
  EXPECT_EQ(f.allocator.stats().peak, s.total);
  f.allocator.release(weights);
  f.allocator.release(gradients);
  EXPECT_EQ(f.allocator.stats().total, 0);
  EXPECT_EQ(f.allocator.stats().cached, static_cast<std::int64_t>(f.source.held));
}

TEST(Allocator, ReleaseCacheGivesBackWhatIsFreeOnly) {
  Fixture f;
  void *kept = f.get(kKiB), *large = f.get(20 * kMiB), *used = f.get(30 * kMiB);
  f.allocator.release(large);
  f.allocator.release_cache();
  EXPECT_EQ(f.source.releases, 1);
  std::memset(used, 1, 30 * kMiB);
  f.allocator.release(used);
  f.allocator.release(kept);
  f.allocator.release_cache();
  EXPECT_EQ(f.source.held, 0u);
  EXPECT_EQ(f.allocator.stats().cached, 0);
  EXPECT_NE(f.get(kKiB), nullptr) << "and works on";
}

TEST(Allocator, TheDestructorGivesEverythingBack) {
  Limited::Record source;
  {
    CachingAllocator allocator(std::make_unique<Limited>(source), cpu);
    for (const std::size_t bytes : {kKiB, 5 * kMiB, 50 * kMiB}) allocator.release(allocator.allocate(bytes, kData));
  }
  EXPECT_EQ(source.held, 0u);
}

TEST(Allocator, GivesBackTheCacheBeforeItRefuses) {
  Fixture f;
  f.source.limit = 50 * kMiB;
  f.allocator.release(f.get(40 * kMiB));
  void* data = f.get(48 * kMiB);  // only fits when the cached 40 MiB go back
  EXPECT_NE(data, nullptr);
  EXPECT_EQ(f.source.refusals, 1);
  EXPECT_EQ(f.source.releases, 1);
}

TEST(Allocator, RefusalNamesEveryFigureAndTheNextRequestWorks) {
  Fixture f;
  f.source.limit = 50 * kMiB;
  void* held = f.get(30 * kMiB);
  const OpScope op("linear");
  expect_error<OutOfMemoryError>([&] { f.get(30 * kMiB); },
                                 {"out of memory on cpu: linear requested 30.0 MiB", "held 30.0 MiB", "peak 30.0 MiB",
                                  "cached 0.0 MiB", "a test source with a limit", "smaller batch", "checkpointing"});
  EXPECT_EQ(f.allocator.stats().total, static_cast<std::int64_t>(30 * kMiB)) << "nothing was booked";
  void* small = f.get(20 * kMiB);  // half as much fits
  EXPECT_NE(small, nullptr);
  f.allocator.release(held);
  f.allocator.release(small);
  EXPECT_NE(f.get(30 * kMiB), nullptr) << "after one is freed the same request succeeds";
}

TEST(Allocator, TheHookFailsExactlyTheNthRequest) {
  Fixture f;
  f.allocator.fail_after(3);
  void *a = f.get(kKiB), *b = f.get(kKiB);
  EXPECT_THROW(f.get(kKiB), OutOfMemoryError);
  EXPECT_NE(f.get(kKiB), nullptr);
  f.allocator.fail_after(1);
  f.allocator.fail_after(0);
  EXPECT_NE(f.get(kKiB), nullptr);
  EXPECT_NE(a, b);
}

TEST(Allocator, RandomTraffic) {
  Fixture f;
  std::mt19937_64 random(seed());
  struct Live {
    unsigned char* data;
    std::size_t bytes;
    unsigned char mark;
  };
  std::vector<Live> live;
  std::int64_t least = 0;
  for (int i = 0; i < 20000; ++i) {
    if (live.size() < 40 || random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (4 + random() % 19));
      const auto mark = static_cast<unsigned char>(random());
      auto* data = static_cast<unsigned char*>(f.get(bytes, static_cast<MemoryCategory>(random() % kMemoryCategories)));
      std::memset(data, mark, std::min<std::size_t>(bytes, 512));
      data[bytes - 1] = mark;
      live.push_back({data, bytes, mark});
      least += static_cast<std::int64_t>(bytes);
    } else {
      std::swap(live[random() % live.size()], live.back());
      const Live block = live.back();
      live.pop_back();
      for (std::size_t at = 0; at < std::min<std::size_t>(block.bytes, 512); ++at)
        ASSERT_EQ(block.data[at], block.mark);
      ASSERT_EQ(block.data[block.bytes - 1], block.mark);
      f.allocator.release(block.data);
      least -= static_cast<std::int64_t>(block.bytes);
    }
    if (i % 1000 == 0) f.allocator.release_cache();
    const MemoryStats s = f.allocator.stats();
    std::int64_t by_category = 0;
    for (const std::int64_t bytes : s.held) by_category += bytes;
    ASSERT_EQ(by_category, s.total);
    ASSERT_GE(s.total, least);
    ASSERT_EQ(s.total + s.cached, static_cast<std::int64_t>(f.source.held));
  }
  for (const Live& block : live) f.allocator.release(block.data);
  f.allocator.release_cache();
  EXPECT_EQ(f.source.held, 0u) << "everything merged back into whole segments";
}

TEST(Allocator, ManyThreads) {
  Fixture f;
  std::atomic<int> damaged{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed() + t);
      std::vector<std::pair<unsigned char*, std::size_t>> mine;
      for (int i = 0; i < 2000; ++i) {
        if (mine.size() < 16) {
          const std::size_t bytes = 1 + random() % (64 * kKiB);
          auto* data = static_cast<unsigned char*>(f.get(bytes));
          data[0] = data[bytes / 2] = data[bytes - 1] = static_cast<unsigned char>(t);
          mine.emplace_back(data, bytes);
        } else {
          const auto [data, bytes] = mine[random() % mine.size()];
          std::erase(mine, std::pair(data, bytes));
          if (data[0] != t || data[bytes / 2] != t || data[bytes - 1] != t) ++damaged;
          f.allocator.release(data);
        }
      }
      for (const auto& [data, bytes] : mine) f.allocator.release(data);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(f.allocator.stats().total, 0);
  f.allocator.release_cache();
  EXPECT_EQ(f.source.held, 0u);
}

TEST(Allocator, ScopesAreOfTheThreadAndNest) {
  EXPECT_EQ(MemoryScope::current(), MemoryCategory::activations);
  {
    const MemoryScope outer(MemoryCategory::weights);
    {
      const MemoryScope inner(MemoryCategory::workspace);
      EXPECT_EQ(MemoryScope::current(), MemoryCategory::workspace);
    }
    std::thread([] { EXPECT_EQ(MemoryScope::current(), MemoryCategory::activations); }).join();
    EXPECT_EQ(MemoryScope::current(), MemoryCategory::weights);
  }
  EXPECT_EQ(MemoryScope::current(), MemoryCategory::activations);
}

}  // namespace
}  // namespace mantissa
