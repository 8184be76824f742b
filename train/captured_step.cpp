#include "train/captured_step.h"

#include <algorithm>

#include "core/backend.h"
#include "core/error.h"

namespace mantissa::train {
namespace {

constexpr std::size_t kMostShapes = 8;  // each keeps the memory of a whole step

/// Recording ends, whatever happens in between.
class Session {
 public:
  explicit Session(Backend& device) : device_(device) { device_.begin_recording(); }
  ~Session() {
    if (device_.recording()) device_.abandon_recording();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  Backend& device_;
};

}  // namespace

CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

void CapturedStep::reset() { recorded_.clear(); }

CapturedStep::Recorded& CapturedStep::find(std::span<const Tensor> inputs) {
  std::vector<Recorded::Like> like;
  for (const Tensor& x : inputs) like.push_back({x.shape(), x.strides(), x.dtype(), x.device()});
  const auto known = std::ranges::find(recorded_, like, &Recorded::like);
  if (known != recorded_.end()) {
    recorded_.splice(recorded_.begin(), recorded_, known);
    return recorded_.front();
  }
  if (recorded_.size() == kMostShapes) recorded_.pop_back();
  Recorded& fresh = recorded_.emplace_front();
  fresh.like = std::move(like);
  return fresh;
}

void CapturedStep::record(Recorded& entry, std::span<const Tensor> inputs) {
  std::vector<Tensor> held;
  {
    const MemoryScope scope(MemoryCategory::data);
    for (const Tensor& x : inputs) held.push_back(empty_like(x));
  }
  Backend& device = backend(inputs[0]);
  const Session session(device);
  Tensor result = step_(held);
  if (result.defined()) result = result.detach();
  entry.work = device.end_recording();
  entry.inputs = std::move(held);
  entry.result = std::move(result);
}

Tensor CapturedStep::run(std::span<const Tensor> inputs) {
  MT_CHECK(ShapeError, inputs.size() == arity_ && arity_ > 0, "captured step: the step takes ", arity_,
           " inputs (at least one), got ", inputs.size());
  for (const Tensor& x : inputs) {
    MT_CHECK(AutogradError, x.defined(), "captured step: an input is undefined");
    MT_CHECK(DeviceError, x.device() == inputs[0].device(), "captured step: inputs on ", inputs[0].device(), " and ",
             x.device());
    MT_CHECK(AutogradError, !x.requires_grad(), "captured step: the input ", x,
             " requires a gradient; compute it inside the step");
  }
  Backend& device = backend(inputs[0]);
  if (!device.can_record()) return step_(inputs);
  Recorded& entry = find(inputs);
  if (!entry.warm) {  // working copies, algorithms and plans are made by a plain step
    Tensor result = step_(inputs);
    entry.warm = true;
    return result;
  }
  if (entry.work == nullptr) record(entry, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) device.copy(inputs[i], entry.inputs[i]);
  entry.work->replay();
  ++replays_;
  if (!entry.result.defined()) return {};
  Tensor copy = empty_like(entry.result);
  device.copy(entry.result, copy);
  return copy;
}

}  // namespace mantissa::train
