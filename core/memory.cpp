#include "core/memory.h"

#include <cstdio>

#include "core/backend.h"

namespace mantissa {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kSmallLimit = std::size_t{1} << 20;  // requests up to this share small segments
constexpr std::size_t kSmallSegment = std::size_t{2} << 20;
constexpr std::size_t kLargeLimit = std::size_t{10} << 20;  // requests up to this share 20 MiB segments
constexpr std::size_t kLargeSegment = std::size_t{20} << 20;

constexpr std::size_t kAddressSpace = std::size_t{1} << 46;  // no device has more; rounding up must not overflow

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }
constexpr std::size_t segment_size(std::size_t size) {
  return size <= kSmallLimit ? kSmallSegment : size < kLargeLimit ? kLargeSegment : round_up(size, kSmallSegment);
}
void* offset_by(void* p, std::size_t n) { return static_cast<std::byte*>(p) + n; }

thread_local constinit MemoryCategory current_category = MemoryCategory::activations;

/// The pool that this thread has opened.
struct OpenPool {
  const CachingAllocator* allocator = nullptr;
  int pool = 0;
};
thread_local constinit OpenPool open{};

std::string mebibytes(double bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f MiB", bytes / (1 << 20));
  return text;
}
std::string mebibytes(std::int64_t bytes) { return mebibytes(static_cast<double>(bytes)); }

}  // namespace

thread_local constinit const char* OpScope::current_ = nullptr;

std::string_view name(MemoryCategory category) {
  constexpr std::string_view names[kMemoryCategories] = {
      "weights", "working copies", "gradients", "optimizer state", "activations", "workspace", "data"};
  return names[static_cast<std::size_t>(category)];
}

MemoryScope::MemoryScope(MemoryCategory category) : previous_(current_category) { current_category = category; }
MemoryScope::~MemoryScope() { current_category = previous_; }
MemoryCategory MemoryScope::current() { return current_category; }

CachingAllocator::CachingAllocator(std::unique_ptr<Source> source, Device device)
    : source_(std::move(source)), device_(device) {}

CachingAllocator::~CachingAllocator() { release_cache(); }

void* CachingAllocator::allocate(std::size_t bytes, MemoryCategory category) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const std::size_t size = bytes < kAddressSpace ? round_up(bytes, kAlignment) : bytes;
  const bool small = size <= kSmallLimit;
  const int pool = open.allocator == this ? open.pool : 0;
  FreeList& list = free_list({.small = small, .pool = pool});
  void* data = nullptr;
  const bool refuse = (fail_after_ > 0 && --fail_after_ == 0) || bytes >= kAddressSpace;
  if (const auto best = list.lower_bound({size, nullptr}); !refuse && best != list.end()) {
    data = best->second;
    list.erase(best);
    stats_.cached -= static_cast<std::int64_t>(blocks_.at(data).size);
  } else {
    const std::size_t segment = refuse ? 0 : segment_size(size);
    if (!refuse) data = source_->allocate(segment);
    if (data == nullptr && !refuse) {
      release_cache_locked();
      data = source_->allocate(segment);
    }
    if (data == nullptr) {
      const char* op = OpScope::current();
      MT_THROW(OutOfMemoryError, "out of memory on ", to_string(device_), ": ", op ? op : "allocation", " requested ",
               mebibytes(static_cast<double>(bytes)), "; held ", mebibytes(stats_.total), ", peak ",
               mebibytes(stats_.peak), ", cached ", mebibytes(stats_.cached), "; ", source_->describe(),
               "; try a smaller batch or activation checkpointing");
    }
    ++stats_.source_allocations;
    blocks_[data] = {.size = segment, .small = small, .pool = pool};
  }
  Block& block = blocks_.at(data);  // references into an unordered_map survive insertion
  const std::size_t rest = block.size - size;
  if (rest >= (small ? kAlignment : kSmallLimit)) {
    void* tail = offset_by(data, size);
    void* after = block.next;
    block.size = size;
    block.next = tail;
    if (after != nullptr) blocks_.at(after).previous = tail;
    list.insert({rest, tail});
    stats_.cached += static_cast<std::int64_t>(rest);
    blocks_[tail] = {.size = rest, .previous = data, .next = after, .free = true, .small = small, .pool = pool};
  }
  block.free = false;
  block.category = category;
  stats_.held[static_cast<std::size_t>(category)] += static_cast<std::int64_t>(block.size);
  stats_.total += static_cast<std::int64_t>(block.size);
  if (stats_.total > stats_.peak) {
    stats_.peak = stats_.total;
    stats_.peak_by_category = stats_.held;
  }
  if (poison_ != nullptr) poison_(data, block.size);
  return data;
}

void CachingAllocator::merge_with_next(void* begin) {
  Block& block = blocks_.at(begin);
  void* next = block.next;
  if (next == nullptr || !blocks_.at(next).free) return;
  const Block absorbed = blocks_.at(next);
  free_list(absorbed).erase({absorbed.size, next});
  blocks_.erase(next);
  block.size += absorbed.size;
  block.next = absorbed.next;
  if (absorbed.next != nullptr) blocks_.at(absorbed.next).previous = begin;
}

void CachingAllocator::release(void* data) noexcept {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(data);
  const auto size = static_cast<std::int64_t>(block.size);
  stats_.held[static_cast<std::size_t>(block.category)] -= size;
  stats_.total -= size;
  stats_.cached += size;
  block.free = true;
  merge_with_next(data);
  void* begin = data;
  if (void* previous = block.previous; previous != nullptr && blocks_.at(previous).free) {
    Block& before = blocks_.at(previous);
    free_list(before).erase({before.size, previous});
    // `data` is not in a free list yet, so that erasing it there does nothing.
    merge_with_next(previous);
    begin = previous;
  }
  const Block& merged = blocks_.at(begin);
  free_list(merged).insert({merged.size, begin});
}

int CachingAllocator::open_pool() {
  const std::lock_guard lock(mutex_);
  MT_ASSERT(open.allocator == nullptr, "this thread has opened a memory pool already");
  open = {this, ++newest_pool_};
  return newest_pool_;
}

void CachingAllocator::close_pool() { open = {}; }

void CachingAllocator::drop_pool(int pool) noexcept {
  const std::lock_guard lock(mutex_);
  const auto lists = free_.extract(pool);
  for (auto& [data, block] : blocks_)
    if (block.pool == pool) block.pool = 0;
  if (lists.empty()) return;
  for (const std::size_t small : {0, 1}) free_[0][small].merge(lists.mapped()[small]);
}

SharedMemoryScope::SharedMemoryScope() : allocator_(open.allocator), pool_(open.pool) { open = {}; }
SharedMemoryScope::~SharedMemoryScope() { open = {allocator_, pool_}; }

MemoryStats CachingAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void CachingAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.total;
  stats_.peak_by_category = stats_.held;
}

void CachingAllocator::release_cache() {
  const std::lock_guard lock(mutex_);
  release_cache_locked();
}

void CachingAllocator::release_cache_locked() {
  for (FreeList& list : free_[0]) {
    for (auto it = list.begin(); it != list.end();) {
      const auto [size, data] = *it;
      const Block& block = blocks_.at(data);
      if (block.previous != nullptr || block.next != nullptr) {
        ++it;
        continue;
      }
      source_->release(data);
      stats_.cached -= static_cast<std::int64_t>(size);
      blocks_.erase(data);
      it = list.erase(it);
    }
  }
}

MemoryStats memory_stats(Device device) { return backend(device).allocator().stats(); }
void reset_peak_memory(Device device) { backend(device).allocator().reset_peak(); }

std::string memory_report(Device device) {
  const MemoryStats s = memory_stats(device);
  std::string out = "memory of " + to_string(device) + "     held          at peak\n";
  const auto row = [&](std::string_view label, std::int64_t held, std::int64_t peak) {
    char line[96];
    std::snprintf(line, sizeof line, "  %-16.*s %14s %14s\n", static_cast<int>(label.size()), label.data(),
                  mebibytes(held).c_str(), mebibytes(peak).c_str());
    out += line;
  };
  for (std::size_t i = 0; i < kMemoryCategories; ++i)
    row(name(static_cast<MemoryCategory>(i)), s.held[i], s.peak_by_category[i]);
  row("total", s.total, s.peak);
  row("cached", s.cached, s.cached);
  return out;
}

}  // namespace mantissa
