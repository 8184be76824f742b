// Activation checkpointing: trade a second forward pass for the memory of the first one's intermediates.
#include "autograd/op_checks.h"
#include "autograd/ops.h"

namespace mantissa {
namespace {

/// Puts the stream back where it was, also when recomputation throws.
class RandomAt {
 public:
  explicit RandomAt(PhiloxState state) : now_(random_state()) { set_random_state(state); }
  ~RandomAt() { set_random_state(now_); }
  RandomAt(const RandomAt&) = delete;
  RandomAt& operator=(const RandomAt&) = delete;

 private:
  PhiloxState now_;
};

}  // namespace

Tensor checkpoint(const std::function<Tensor(std::span<const Tensor>)>& fn, const std::vector<Tensor>& inputs) {
  const PhiloxState random = random_state();
  Tensor y;
  {
    const NoGrad no_grad;
    y = fn(inputs).detach();
  }
  std::vector<Saved> saved;
  std::vector<std::shared_ptr<Node>> parameters;  // null for an input that is the result of an op
  for (const Tensor& x : inputs) {
    saved.push_back(save(x));
    parameters.push_back(x.is_leaf() ? x.node() : nullptr);
  }
  Tensor* outputs[] = {&y};
  const std::vector<TensorRef> references(inputs.begin(), inputs.end());
  // Recorded even when no input needs a gradient: parameters that fn reads may.
  record(
      {"checkpoint", Cast::keep}, outputs, references,
      [fn, saved, parameters, random](Grads g, GradOut& out) {
        std::vector<Tensor> again, grads(saved.size());
        for (std::size_t i = 0; i < saved.size(); ++i) {
          Tensor x = saved[i].get().detach();
          if (out.wanted(static_cast<int>(i))) {
            x.set_requires_grad();
            Leaf& leaf = *x.node()->leaf;
            leaf.capture = &grads[i];
            leaf.activation = parameters[i] == nullptr;
            if (parameters[i] != nullptr) {  // the same data under the same version: its 16-bit copy serves here too
              leaf.working = parameters[i]->leaf->working;
              leaf.working_of = parameters[i]->leaf->working_of;
            }
          }
          again.push_back(std::move(x));
        }
        Tensor result;
        {
          const RandomAt same_numbers(random);
          const EnableGrad enable;  // Autocast is back already: backward restores the scope in which this was recorded
          result = fn(again);
        }
        if (!result.requires_grad()) return;
        backward(result, {.seed = g[0], .scale_owner = out.options().scale_owner});
        for (std::size_t i = 0; i < grads.size(); ++i) out.set(static_cast<int>(i), grads[i]);
      },
      true);
  if (y.node() != nullptr) y.node()->recomputes = true;
  return y;
}

}  // namespace mantissa
