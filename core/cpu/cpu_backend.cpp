#include "core/cpu/cpu_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace mantissa {
namespace {

constexpr std::size_t kAlignment = 256, kHugePage = std::size_t{2} << 20;

class HostMemory final : public CachingAllocator::Source {
 public:
  void* allocate(std::size_t bytes) override {
    const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
    void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (data != nullptr && bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // advice: refusal does not matter
    return data;
  }
  void release(void* data) override { std::free(data); }
  std::string describe() const override {
    const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
    const double free = page * static_cast<double>(sysconf(_SC_AVPHYS_PAGES)),
                 total = page * static_cast<double>(sysconf(_SC_PHYS_PAGES));
    return detail::message("the machine has ", static_cast<std::int64_t>(free / (1 << 20)), " MiB free of ",
                           static_cast<std::int64_t>(total / (1 << 20)), " MiB");
  }
};

}  // namespace

CpuBackend::CpuBackend() : allocator_(std::make_unique<HostMemory>(), cpu) {}

Backend& cpu_backend() {
  static CpuBackend& instance = *new CpuBackend;  // outlives every tensor, those in static variables too
  return instance;
}

Device CpuBackend::device() const { return cpu; }
CachingAllocator& CpuBackend::allocator() { return allocator_; }
void CpuBackend::synchronize() {}

std::shared_ptr<Storage> CpuBackend::pinned_storage(std::size_t bytes) {
  return std::make_shared<Storage>(bytes, cpu, MemoryCategory::data);
}

void CpuBackend::copy_from_host(const void* source, Tensor& y) {
  if (y.numel() > 0) std::memcpy(y.data(), source, static_cast<std::size_t>(y.numel()) * size_of(y.dtype()));
}
void CpuBackend::copy_to_host(const Tensor& x, void* target) {
  if (x.numel() > 0) std::memcpy(target, x.data(), static_cast<std::size_t>(x.numel()) * size_of(x.dtype()));
}
// Calls cost little here, so nothing is recorded.
bool CpuBackend::can_record() const { return false; }
void CpuBackend::begin_recording() {
  MT_THROW(DeviceError, "recording: the CPU runs work at once; ask can_record() first");
}
std::unique_ptr<Recording> CpuBackend::end_recording() { return nullptr; }
void CpuBackend::abandon_recording() noexcept {}

void CpuBackend::mirror_to_host(const Tensor& x, void* pinned) { copy_to_host(x, pinned); }

}  // namespace mantissa
