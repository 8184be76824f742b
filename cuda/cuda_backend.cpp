// Start-up, memory, transfers and errors of the CUDA backend.
#include "cuda/cuda_backend.h"

#include <cudnn.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/cuda_check.h"
#include "cuda/kernels.h"

namespace mantissa {
namespace detail {
namespace {

std::mutex first_error_mutex;
std::string first_error;  // text of the first error that made a device unusable; empty: none so far

bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

/// Remembers the first fatal error; returns what to add to the message of a later one.
std::string note_error(bool sticky, const std::string& text) {
  const std::lock_guard lock(first_error_mutex);
  if (!first_error.empty()) return "the device has been unusable since an earlier error: " + first_error;
  if (sticky) first_error = text;
  return text;
}

std::string version(int v, int major, int minor) {
  return std::to_string(v / major) + "." + std::to_string(v % major / minor);
}

}  // namespace

void raise_cuda(cudaError_t status, const char* call, const char* file, int line) {
  cudaGetLastError();  // an error that does not stick is reported once
  const std::string text = message(call, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
  throw CudaError(with_location(note_error(is_sticky(status), text), file, line));
}

void raise_library(const char* status, const char* call, const char* file, int line) {
  const cudaError_t pending = cudaPeekAtLastError();  // libraries often fail because the device did
  if (is_sticky(pending)) raise_cuda(pending, call, file, line);
  throw CudaError(with_location(note_error(false, message(call, ": ", status)), file, line));
}

bool OpRange::enabled() {
  static const bool value = [] {
    const char* text = std::getenv("MANTISSA_NVTX");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return value;
}
void OpRange::push(const char* op) { nvtxRangePushA(op); }
void OpRange::pop() { nvtxRangePop(); }

}  // namespace detail

namespace {

constexpr std::size_t kStagingLimit = std::size_t{1} << 20;

/// Makes a device current for the calling thread.
void activate(int index) {
  int current = -1;
  MT_CUDA_CHECK(cudaGetDevice(&current));
  if (current != index) MT_CUDA_CHECK(cudaSetDevice(index));
}

class DeviceMemory final : public CachingAllocator::Source {
 public:
  explicit DeviceMemory(int index) : index_(index) {}
  void* allocate(std::size_t bytes) override {
    activate(index_);
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // does not stick: the process can go on
      return nullptr;
    }
    MT_CUDA_CHECK(status);
    return data;
  }
  void release(void* data) override {
    // Called from destructors too, so a failure (the device is lost) is left for the next launch to report.
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current != index_) cudaSetDevice(index_);
    cudaFree(data);
  }
  std::string describe() const override {
    std::size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return "the driver does not say how much memory is free";
    char text[96];
    std::snprintf(text, sizeof text, "%.1f MiB free of %.1f MiB on the device", static_cast<double>(free) / (1 << 20),
                  static_cast<double>(total) / (1 << 20));
    return text;
  }

 private:
  int index_;
};

}  // namespace

/// Pinned blocks of power-of-two sizes. A freed block is handed out again once the work queued before it was
/// freed is done.
class PinnedPool {
 public:
  PinnedPool(int index, cudaStream_t stream) : index_(index), stream_(stream) {}

  std::shared_ptr<void> allocate(const std::shared_ptr<PinnedPool>& self, std::size_t bytes) {
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    Block block = take(size);
    if (block.data == nullptr) {
      activate(index_);
      const cudaError_t status = cudaHostAlloc(&block.data, size, cudaHostAllocDefault);
      if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        MT_THROW(OutOfMemoryError, "pinned_storage: the system refused ", size, " bytes of page-locked host memory");
      }
      MT_CUDA_CHECK(status);
      MT_CUDA_CHECK(cudaEventCreateWithFlags(&block.done, cudaEventDisableTiming));
    }
    return {block.data, [self, size, done = block.done](void* data) { self->give_back(size, {data, done}); }};
  }

  /// While the stream records, an event on it would be part of the recording: freed blocks wait for the end.
  void hold(bool recording) noexcept {
    std::vector<std::pair<std::size_t, Block>> waiting;
    {
      const std::lock_guard lock(mutex_);
      recording_ = recording;
      waiting.swap(waiting_);
    }
    for (const auto& [size, block] : waiting) give_back(size, block);
  }

 private:
  struct Block {
    void* data = nullptr;
    cudaEvent_t done = nullptr;
  };

  Block take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    auto [it, end] = free_.equal_range(size);
    for (; it != end; ++it) {
      if (cudaEventQuery(it->second.done) != cudaSuccess) continue;
      const Block block = it->second;
      free_.erase(it);
      return block;
    }
    cudaGetLastError();  // "not ready" is no error
    return {};
  }

  void give_back(std::size_t size, Block block) noexcept {
    try {
      {
        const std::lock_guard lock(mutex_);
        if (recording_) return waiting_.emplace_back(size, block), void();
      }
      activate(index_);
      if (cudaEventRecord(block.done, stream_) != cudaSuccess) return;  // device lost: leak the block
      const std::lock_guard lock(mutex_);
      free_.insert({size, block});
    } catch (...) {
      // Leaked: the device is lost, or the host has no memory left for a list node.
    }
  }

  int index_;
  cudaStream_t stream_;
  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_;
  bool recording_ = false;
  std::vector<std::pair<std::size_t, Block>> waiting_;
};

void hold_pinned(PinnedPool& pool, bool recording) noexcept { pool.hold(recording); }

namespace {

/// Compares what is installed with what this build needs; throws DeviceError naming both.
cudaDeviceProp check_device(int index) {
  const std::string reason = cuda_unavailable_reason();
  MT_CHECK(DeviceError, reason.empty(), "cuda:", index, ": ", reason);
  const int count = cuda_device_count();
  MT_CHECK(DeviceError, index >= 0 && index < count, "cuda:", index, ": this machine has ", count, " usable GPU(s)");
  cudaDeviceProp p{};
  MT_CUDA_CHECK(cudaGetDeviceProperties(&p, index));
  MT_CHECK(DeviceError, p.major >= 8, "cuda:", index, ": ", static_cast<const char*>(p.name),
           " has compute capability ", p.major, ".", p.minor, "; 8.0 (Ampere) or newer is required, for bf16 and TF32");
  activate(index);
  MT_CHECK(DeviceError, kernels_run_here(), "cuda:", index, ": this build has no kernels for ",
           static_cast<const char*>(p.name), " (compute capability ", p.major, ".", p.minor,
           "); rebuild with -DCMAKE_CUDA_ARCHITECTURES=", p.major, p.minor);
  const auto cublas = static_cast<int>(cublasLtGetVersion());
  MT_CHECK(DeviceError, cublas / 10000 == CUBLAS_VERSION / 10000, "cuda:", index, ": found cuBLASLt ",
           detail::version(cublas, 10000, 100), "; this build needs ", detail::version(CUBLAS_VERSION, 10000, 100));
  const auto cudnn = static_cast<int>(cudnnGetVersion());
  MT_CHECK(DeviceError, cudnn / 10000 == CUDNN_MAJOR && cudnn >= 90000, "cuda:", index, ": found cuDNN ",
           detail::version(cudnn, 10000, 100), "; this build needs ", CUDNN_MAJOR, ".", CUDNN_MINOR);
  return p;
}

}  // namespace

CudaBackend::CudaBackend(int index)
    : index_(index),
      properties_(check_device(index)),
      allocator_(std::make_unique<DeviceMemory>(index), mantissa::cuda(index)) {
  MT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  MT_CUBLAS_CHECK(cublasLtCreate(&cublas_));
  pinned_ = std::make_shared<PinnedPool>(index, stream_);
}

CudaBackend::~CudaBackend() {
  cublasLtDestroy(cublas_);
  cudaStreamDestroy(stream_);
}

Device CudaBackend::device() const { return mantissa::cuda(index_); }
CachingAllocator& CudaBackend::allocator() { return allocator_; }

cudaStream_t CudaBackend::stream() const {
  activate(index_);
  return stream_;
}

Tensor CudaBackend::workspace(std::size_t bytes) {
  const MemoryScope scope(MemoryCategory::workspace);
  return empty({static_cast<std::int64_t>(bytes)}, {DType::u8, device()});
}

Tensor CudaBackend::constant(const void* source, std::size_t bytes) {
  const SharedMemoryScope shared;  // memory of a recording is written by every replay
  Tensor y = workspace(bytes);
  if (!recording()) {
    const std::shared_ptr<Storage> staging = pinned_storage(bytes);
    std::memcpy(staging->data, source, bytes);
    copy_from_host(staging->data, y);
    return y;
  }
  keep(y.storage());
  // Beside the stream: all work queued before the recording is done.
  cudaStream_t aside = nullptr;
  MT_CUDA_CHECK(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking));
  MT_CUDA_CHECK(cudaMemcpyAsync(y.data(), source, bytes, cudaMemcpyHostToDevice, aside));
  MT_CUDA_CHECK(cudaStreamSynchronize(aside));
  MT_CUDA_CHECK(cudaStreamDestroy(aside));
  return y;
}

void CudaBackend::synchronize() {
  MT_CHECK(AutogradError, !recording(),
           "recording: this step waits for the device (item(), to_vector(), printing, a StepResult, checks): "
           "do that outside the recorded step");
  ++counters.synchronizations;
  MT_CUDA_CHECK(cudaStreamSynchronize(stream()));
}

std::shared_ptr<Storage> CudaBackend::pinned_storage(std::size_t bytes) {
  std::shared_ptr<void> owner = pinned_->allocate(pinned_, bytes);
  void* data = owner.get();
  return std::make_shared<Storage>(std::move(owner), data, bytes, cpu);
}

void CudaBackend::copy_from_host(const void* source, Tensor& y) {
  const std::size_t bytes = static_cast<std::size_t>(y.numel()) * size_of(y.dtype());
  if (bytes == 0) return;
  ++counters.transfers;
  const cudaStream_t to = stream();
  cudaPointerAttributes attributes{};
  MT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, source));
  std::shared_ptr<void> staging;
  if (attributes.type == cudaMemoryTypeUnregistered) {
    if (bytes <= kStagingLimit ||
        recording()) {  // small pageable memory goes through a pinned block, so that nobody waits
      staging = pinned_->allocate(pinned_, bytes);
      std::memcpy(staging.get(), source, bytes);
      source = staging.get();
      keep(staging);
    } else {
      ++counters.synchronizations;
    }
  }
  MT_CUDA_CHECK(cudaMemcpyAsync(y.data(), source, bytes, cudaMemcpyHostToDevice, to));
}

void CudaBackend::copy_to_host(const Tensor& x, void* target) {
  mirror_to_host(x, target);
  synchronize();
}

void CudaBackend::mirror_to_host(const Tensor& x, void* pinned) {
  const std::size_t bytes = static_cast<std::size_t>(x.numel()) * size_of(x.dtype());
  if (bytes == 0) return;
  ++counters.transfers;
  MT_CUDA_CHECK(cudaMemcpyAsync(pinned, x.data(), bytes, cudaMemcpyDeviceToHost, stream()));
}

namespace {

struct Devices {
  int count = 0;
  std::string reason;  // why there is none
};

const Devices& devices() {
  static const Devices found = [] {
    Devices d;
    const cudaError_t status = cudaGetDeviceCount(&d.count);
    if (status == cudaSuccess && d.count > 0) return d;
    cudaGetLastError();
    d.count = 0;
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) {
      d.reason = "no NVIDIA driver is installed, or it is not running";
    } else if (status == cudaErrorInsufficientDriver) {
      d.reason = "the driver supports CUDA " + detail::version(driver, 1000, 10) + ", but this build needs CUDA " +
                 detail::version(CUDART_VERSION, 1000, 10) + "; update the driver";
    } else if (status == cudaSuccess || status == cudaErrorNoDevice) {
      d.reason = "the driver is there, but no GPU is visible (is CUDA_VISIBLE_DEVICES set?)";
    } else {
      d.reason = std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
    }
    return d;
  }();
  return found;
}

}  // namespace

int cuda_device_count() { return devices().count; }
std::string cuda_unavailable_reason() { return devices().reason; }

Backend& cuda_backend(int index) {
  // Never destroyed: tensors with static lifetime may outlive anything here.
  static std::mutex mutex;
  static auto& backends = *new std::map<int, std::unique_ptr<CudaBackend>>;
  static std::atomic<CudaBackend*> first = nullptr;
  if (CudaBackend* b = index == 0 ? first.load(std::memory_order_acquire) : nullptr) return *b;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaBackend>& b = backends[index];
  if (b == nullptr) b = std::make_unique<CudaBackend>(index);
  if (index == 0) first.store(b.get(), std::memory_order_release);
  return *b;
}

}  // namespace mantissa
