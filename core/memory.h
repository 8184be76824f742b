#pragma once
// One caching allocator for every device, with accounting by category.
//
// Freed blocks stay in the cache and are reused in stream order: all work of a device runs on one stream, so memory
// freed on the host may be handed out again at once. When the source refuses, the cache is given back and the
// request is tried once more; then OutOfMemoryError, and the process can go on.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/device.h"

namespace mantissa {

enum class MemoryCategory : std::uint8_t {
  weights,
  working_copies,
  gradients,
  optimizer_state,
  activations,
  workspace,
  data
};
inline constexpr std::size_t kMemoryCategories = 7;
std::string_view name(MemoryCategory category);

/// While it lives, allocations of this thread are booked under `category` (default: activations).
class MemoryScope {
 public:
  explicit MemoryScope(MemoryCategory category);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  static MemoryCategory current();

 private:
  MemoryCategory previous_;
};

/// Figures in bytes. `peak_by_category` is the division at the moment of the total peak.
struct MemoryStats {
  std::array<std::int64_t, kMemoryCategories> held{}, peak_by_category{};
  std::int64_t total = 0, peak = 0;     // handed out now, and at most
  std::int64_t cached = 0;              // held from the source but free
  std::int64_t source_allocations = 0;  // calls to the driver or to the C library so far
};

class CachingAllocator {
 public:
  /// Where blocks come from; alloc returns nullptr when it refuses.
  class Source {
   public:
    virtual ~Source() = default;
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* data) = 0;
    virtual std::string describe() const = 0;  // free and total memory, for error messages
  };

  CachingAllocator(std::unique_ptr<Source> source, Device device);
  ~CachingAllocator();

  /// At least `bytes` bytes at a 256-byte boundary; nullptr for 0. Throws OutOfMemoryError.
  void* allocate(std::size_t bytes, MemoryCategory category);
  void release(void* data) noexcept;

  /// From open_pool to close_pool this thread's allocations come from memory of their own, which nothing else
  /// gets until drop_pool: work that was recorded may write there whenever it is replayed.
  int open_pool();
  void close_pool();
  void drop_pool(int pool) noexcept;

  MemoryStats stats() const;
  void reset_peak();
  void release_cache();
  /// Fills fresh memory with 0xFF bytes, which are NaN in every float type: shows reads of unwritten memory.
  void set_poison(void (*fill)(void* data, std::size_t bytes)) { poison_ = fill; }
  /// Test hook: the n-th allocation from now fails (0 turns it off).
  void fail_after(std::int64_t n) { fail_after_ = n; }

 private:
  struct Block {
    std::size_t size = 0;
    void *previous = nullptr, *next = nullptr;  // neighbours in the segment, for merging
    bool free = false, small = false;           // small: cut from a segment for small requests; the lists never mix
    int pool = 0;                               // 0: shared
    MemoryCategory category = MemoryCategory::activations;
  };
  using FreeList = std::set<std::pair<std::size_t, void*>>;
  FreeList& free_list(const Block& block) { return free_[block.pool][block.small ? 1 : 0]; }
  void merge_with_next(void* begin);
  void release_cache_locked();

  std::unique_ptr<Source> source_;
  Device device_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<int, std::array<FreeList, 2>> free_;  // by pool: large, small
  int newest_pool_ = 0;
  MemoryStats stats_;
  void (*poison_)(void*, std::size_t) = nullptr;
  std::int64_t fail_after_ = 0;
};

/// While it lives, this thread's allocations come from shared memory although it has opened a pool.
class SharedMemoryScope {
 public:
  SharedMemoryScope();
  ~SharedMemoryScope();
  SharedMemoryScope(const SharedMemoryScope&) = delete;
  SharedMemoryScope& operator=(const SharedMemoryScope&) = delete;

 private:
  const CachingAllocator* allocator_;
  int pool_;
};

/// Accounting of a device.
MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);
/// A printed table of held and peak bytes by category.
std::string memory_report(Device device);

/// The operation that allocations are made for, so that an out-of-memory error can name it.
class OpScope {
 public:
  explicit OpScope(const char* op) : previous_(current_) { current_ = op; }
  ~OpScope() { current_ = previous_; }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
  static const char* current() { return current_; }

 private:
  static thread_local constinit const char* current_;
  const char* previous_;
};

}  // namespace mantissa
