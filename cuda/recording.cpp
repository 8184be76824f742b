// Recording: the stream captures what is queued as a CUDA graph; a replay is one launch.
#include "cuda/recording.h"

#include "cuda/cuda_check.h"

namespace mantissa {

CudaRecording::CudaRecording(CudaBackend& backend, std::shared_ptr<PinnedPool> pinned)
    : backend_(backend), pinned_(std::move(pinned)), random_from_(random_state()) {
  const MemoryScope scope(MemoryCategory::workspace);
  random_base_ = empty({static_cast<std::int64_t>(sizeof(PhiloxState))}, {DType::u8, backend.device()});
  backend.synchronize();
  pool_ = backend.allocator().open_pool();
  hold_pinned(*pinned_, true);
  // Relaxed: the allocator may ask the driver for memory meanwhile.
  const cudaError_t status = cudaStreamBeginCapture(backend.stream(), cudaStreamCaptureModeRelaxed);
  if (status == cudaSuccess) return;
  close_pools();
  backend.allocator().drop_pool(pool_);
  MT_CUDA_CHECK(status);
}

CudaRecording::~CudaRecording() {
  if (capturing_) {  // abandoned
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(backend_.stream(), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    close_pools();
    set_random_state(random_from_);
  }
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);  // the driver waits for replays in flight
  kept.clear();
  backend_.allocator().drop_pool(pool_);
}

void CudaRecording::close_pools() noexcept {
  backend_.allocator().close_pool();
  hold_pinned(*pinned_, false);
}

void CudaRecording::finish() {
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(backend_.stream(), &graph);
  capturing_ = false;
  close_pools();
  random_drawn_ = random_state().offset - random_from_.offset;
  set_random_state(random_from_);  // nothing has been drawn yet
  MT_CUDA_CHECK(ended);
  const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  MT_CUDA_CHECK(made);
  MT_CUDA_CHECK(cudaGraphUpload(executable_, backend_.stream()));
}

CudaBackend::RandomStart CudaRecording::random_start(PhiloxState state) {
  const bool from_stream = state.seed == random_from_.seed && state.offset >= random_from_.offset;
  if (!from_stream) return {state, nullptr};
  random_used_ = true;
  return {{0, state.offset - random_from_.offset}, static_cast<const PhiloxState*>(random_base_.data())};
}

void CudaRecording::launch() {
  if (random_drawn_ > 0) {
    const PhiloxState now = random_state();
    if (random_used_) set_random_base(backend_, now, static_cast<PhiloxState*>(random_base_.data()));
    set_random_state({now.seed, now.offset + random_drawn_});
  }
  MT_CUDA_CHECK(cudaGraphLaunch(executable_, backend_.stream()));
  ++backend_.counters.launches;
}

CudaRecording* CudaBackend::cuda_recording() const { return static_cast<CudaRecording*>(recording_.get()); }

CudaBackend::RandomStart CudaBackend::random_start(PhiloxState state) {
  return recording() ? cuda_recording()->random_start(state) : RandomStart{state};
}

bool CudaBackend::can_record() const { return true; }

void CudaBackend::begin_recording() {
  MT_CHECK(AutogradError, !recording(), "recording: another step is being recorded; recordings do not nest");
  recording_ = std::make_unique<CudaRecording>(*this, pinned_);
}

std::unique_ptr<Recording> CudaBackend::end_recording() {
  MT_ASSERT(recording(), "end_recording without begin_recording");
  std::unique_ptr<Recording> recording = std::move(recording_);
  static_cast<CudaRecording&>(*recording).finish();
  return recording;
}

void CudaBackend::abandon_recording() noexcept { recording_.reset(); }

}  // namespace mantissa
