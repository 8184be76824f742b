#include "train/loader.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/backend.h"

namespace mantissa::train {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned_bytes(const Shape& shape, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t aligned_bytes(const BatchLayout& b) {
  return aligned_bytes(b.x_shape, b.x_dtype) + aligned_bytes(b.y_shape, b.y_dtype);
}

/// A tensor on a part of `whole`, with a version counter of its own.
Tensor part_of(const std::shared_ptr<Storage>& whole, std::size_t offset, const Shape& shape, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
  auto storage = std::make_shared<Storage>(whole, whole->data + offset, bytes, whole->device);
  return Tensor(std::move(storage), shape, contiguous_strides(shape), 0, dtype);
}

}  // namespace

// Host buffers: `empty` ones wait for the thread, `ready` ones for the consumer, which queues one copy to the
// device, drops the buffer (the backend reuses it once that copy is done) and takes a fresh one. Only the
// consumer talks to the device.
struct Loader::Impl {
  struct Filled {
    std::shared_ptr<Storage> buffer;
    BatchLayout layout;
  };

  std::unique_ptr<BatchSource> source;
  Backend& device;
  LoaderState state;  // of the consumer
  std::int64_t batches;
  std::size_t buffer_bytes, buffers;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Storage>> empty;
  std::deque<Filled> ready;
  std::exception_ptr error;
  bool stopping = false;
  std::thread thread;

  Impl(std::unique_ptr<BatchSource> s, std::uint64_t seed, Device d, int prefetch)
      : source(std::move(s)), device(backend(d)), state{.seed = seed}, batches(source->batches()) {
    MT_CHECK(ConfigError, batches > 0, "Loader: the source has no batch");
    MT_CHECK(ConfigError, prefetch > 0 && prefetch <= 1024, "Loader: prefetch must be 1 to 1024, got ", prefetch);
    buffer_bytes = aligned_bytes(source->layout(0));
    buffers = static_cast<std::size_t>(prefetch);
    while (empty.size() < buffers) empty.push_back(fresh_buffer());
  }
  ~Impl() { stop(); }

  std::shared_ptr<Storage> fresh_buffer() {
    const MemoryScope scope(MemoryCategory::data);
    return device.pinned_storage(buffer_bytes);
  }

  void advance(LoaderState& s) const {
    if (++s.position < batches) return;
    s.position = 0;
    ++s.epoch;
  }

  /// Body of the thread.
  void run(LoaderState at) {
    try {
      source->start_epoch(at.seed, at.epoch);
      for (;;) {
        std::shared_ptr<Storage> buffer = take_empty();
        if (buffer == nullptr) return;
        const BatchLayout layout = source->layout(at.position);
        MT_CHECK(InternalError, aligned_bytes(layout) <= buffer->bytes, "Loader: batch ", at.position,
                 " is larger than batch 0");
        source->fill(at.position, buffer->data, buffer->data + aligned_bytes(layout.x_shape, layout.x_dtype));
        {
          const std::lock_guard lock(mutex);
          ready.push_back({std::move(buffer), layout});
        }
        changed.notify_all();
        const std::int64_t epoch = at.epoch;
        advance(at);
        if (at.epoch != epoch) source->start_epoch(at.seed, at.epoch);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
      changed.notify_all();
    }
  }

  std::shared_ptr<Storage> take_empty() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stopping || !empty.empty(); });
    if (stopping) return nullptr;
    std::shared_ptr<Storage> buffer = std::move(empty.front());
    empty.pop_front();
    return buffer;
  }

  Batch next() {
    if (!thread.joinable()) thread = std::thread([this, at = state] { run(at); });
    Filled* front = nullptr;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !ready.empty() || error; });
      if (ready.empty()) std::rethrow_exception(error);
      front = &ready.front();  // stays: only this thread takes from `ready`
    }
    // If one of these throws (out of memory), the batch stays where it is and can be asked for again.
    Batch batch = to_device(*front);
    std::shared_ptr<Storage> fresh = fresh_buffer();
    {
      const std::lock_guard lock(mutex);
      ready.pop_front();
      empty.push_back(std::move(fresh));
    }
    changed.notify_all();
    advance(state);
    return batch;
  }

  Batch to_device(const Filled& filled) {
    const BatchLayout& b = filled.layout;
    std::shared_ptr<Storage> whole = filled.buffer;  // on the CPU the batch keeps the buffer
    if (!device.device().is_cpu()) {
      const auto bytes = static_cast<std::int64_t>(aligned_bytes(b));
      whole = std::make_shared<Storage>(static_cast<std::size_t>(bytes), device.device(), MemoryCategory::data);
      Tensor target(whole, {bytes}, {1}, 0, DType::u8);
      device.copy_from_host(filled.buffer->data, target);
    }
    return {part_of(whole, 0, b.x_shape, b.x_dtype),
            part_of(whole, aligned_bytes(b.x_shape, b.x_dtype), b.y_shape, b.y_dtype)};
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  void restart(const LoaderState& at) {
    stop();
    for (Filled& filled : ready) empty.push_back(std::move(filled.buffer));
    ready.clear();
    while (empty.size() < buffers) empty.push_back(fresh_buffer());  // an error of the thread took one along
    error = nullptr;
    stopping = false;
    state = at;
  }
};

Loader::Loader(std::unique_ptr<BatchSource> source, std::uint64_t seed, Device device, int prefetch)
    : impl_(std::make_unique<Impl>(std::move(source), seed, device, prefetch)) {}
Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

Batch Loader::next() { return impl_->next(); }
std::int64_t Loader::batches() const { return impl_->batches; }
LoaderState Loader::state() const { return impl_->state; }

void Loader::set_state(const LoaderState& state) {
  MT_CHECK(ConfigError, state.epoch >= 0 && state.position >= 0 && state.position < batches(),
           "Loader::set_state: epoch ", state.epoch, ", position ", state.position,
           "; expected an epoch from 0 and a position in [0, ", batches(), ")");
  impl_->restart(state);
}

Loader::Iterator& Loader::Iterator::operator++() {
  done_ = loader_->epoch() != epoch_;
  batch_ = done_ ? Batch{} : loader_->next();
  return *this;
}

}  // namespace mantissa::train
