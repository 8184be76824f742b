#include "autograd/transaction.h"

#include <memory>
#include <unordered_map>

#include "core/backend.h"

namespace mantissa {
namespace {

struct Protected {
  std::weak_ptr<Storage> owner;  // a buffer that died needs no restoring
  Tensor copy;
  bool changed = false;  // since the last step
  Shape shape;
  Strides strides;
  std::int64_t offset = 0;
};
thread_local std::unordered_map<const Storage*, Protected> buffers;

}  // namespace

void protect_buffer(const Tensor& buffer) {
  Protected& entry = buffers[buffer.storage().get()];
  if (entry.changed && !entry.owner.expired()) return;
  if (entry.owner.expired() || !entry.copy.defined() || !(entry.copy.shape() == buffer.shape()))
    entry.copy = empty_like(buffer);
  entry.owner = buffer.storage();
  entry.shape = buffer.shape();
  entry.strides = buffer.strides();
  entry.offset = buffer.offset();
  entry.changed = true;
  backend(buffer).keep(buffer.storage());
  backend(buffer).keep(entry.copy.storage());
  backend(buffer).copy(buffer, entry.copy);
}

void finish_buffers(Device device, const StepState* state) {
  for (auto it = buffers.begin(); it != buffers.end();) {
    Protected& entry = it->second;
    const std::shared_ptr<Storage> owner = entry.owner.lock();
    if (owner == nullptr) {
      it = buffers.erase(it);
      continue;
    }
    if (entry.changed && owner->device == device) {
      Tensor target(owner, entry.shape, entry.strides, entry.offset, entry.copy.dtype());
      backend(device).restore_if_skipped(entry.copy, state, target);
      target.bump_version();
      entry.changed = false;
    }
    ++it;
  }
}

}  // namespace mantissa
