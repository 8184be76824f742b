// Activation checkpointing: trade a second forward pass for the memory of the first one's intermediates.
#include "autograd/op_checks.h"
#include "autograd/ops.h"

namespace mantissa {

Tensor checkpoint(const std::function<Tensor(std::span<const Tensor>)>& fn, const std::vector<Tensor>& inputs) {
  const PhiloxState random = random_state();
  Tensor y;
  {
    const NoGrad no_grad;
    y = fn(inputs).detach();
  }
  std::vector<Saved> saved;
  for (const Tensor& x : inputs) saved.push_back(save(x));
  Tensor* outputs[] = {&y};
  const std::vector<TensorRef> references(inputs.begin(), inputs.end());
  // Recorded even when no input needs a gradient: parameters that fn reads may.
  record({"checkpoint", Cast::keep}, outputs, references, [fn, saved, random](Grads g, GradOut& out) {
    const PhiloxState now = random_state();
    set_random_state(random);
    const EnableGrad enable;  // Autocast is back already: backward restores the scope in which this was recorded
    std::vector<Tensor> again, grads(saved.size());
    for (std::size_t i = 0; i < saved.size(); ++i) {
      Tensor x = saved[i].get().detach();
      if (out.wanted(static_cast<int>(i))) {
        x.set_requires_grad();
        x.node()->leaf->capture = &grads[i];
      }
      again.push_back(std::move(x));
    }
    const Tensor result = fn(again);
    set_random_state(now);
    if (!result.requires_grad()) return;
    backward(result, {.seed = g[0], .scale_owner = out.options().scale_owner});
    for (std::size_t i = 0; i < grads.size(); ++i) out.set(static_cast<int>(i), grads[i]);
  }, true);
  if (y.node() != nullptr) y.node()->recomputes = true;
  return y;
}

}  // namespace mantissa
