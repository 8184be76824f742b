#pragma once
// A whole training step, scaler included, as one launch: recorded once as a CUDA graph, then replayed.
//
//   mt::train::CapturedStep step([&](const mt::Tensor& tokens, const mt::Tensor& targets) {
//     mt::Tensor loss;
//     {
//       const mt::Autocast scope(mt::f16);
//       loss = model.loss(tokens, targets);
//     }
//     scaler.backward(loss);
//     scaler.step(optimizer);
//     return loss;
//   });
//   for (auto [tokens, targets] : loader) mt::Tensor loss = step(tokens, targets);
//
// Replays give the bits that eager steps give: schedules, the scale, skipped steps, dropout and batch-norm statistics
// go on as they would. What the function does on the host (branches, printing, counting) happens only while it is
// recorded. The model, the optimizers and the scaler must outlive the object.

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace mantissa {
class Recording;
}

namespace mantissa::train {

class CapturedStep {
 public:
  /// A function of tensors that returns a tensor (undefined if it has nothing to say); it must not wait for the device.
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, CapturedStep>) explicit CapturedStep(F step)
      : CapturedStep(std::function(std::move(step)), 0) {}
  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  /// One step on these inputs, at least one, all on one device. The first call for each set of shapes and dtypes runs
  /// as it is, the second records, all later ones replay; on the CPU every call runs as it is. The result is a copy.
  /// ShapeError for another number of inputs; AutogradError where the step waits for the device while it is recorded.
  template <class... Inputs> Tensor operator()(const Inputs&... inputs) {
    return run(std::array<Tensor, sizeof...(Inputs)>{inputs...});
  }
  /// Forgets what was recorded and gives its memory back: after a change that the recording can not see, such as
  /// parameter groups, train() and eval(), or frozen layers.
  void reset();
  /// Steps that were replayed so far.
  std::int64_t replays() const { return replays_; }

 private:
  struct Recorded {
    struct Like {
      Shape shape;
      Strides strides;
      DType dtype;
      Device device;
      bool operator==(const Like&) const = default;
    };
    std::vector<Like> like;
    bool warm = false;           // a plain step has run
    std::vector<Tensor> inputs;  // where the recorded work reads
    Tensor result;
    std::unique_ptr<Recording> work;
  };
  using Step = std::function<Tensor(std::span<const Tensor>)>;

  template <class... Parameters>
  CapturedStep(std::function<Tensor(Parameters...)> f, int)
      : arity_(sizeof...(Parameters)), step_([f = std::move(f)](std::span<const Tensor> x) {
          return [&]<std::size_t... I>(std::index_sequence<I...>) { return f(x[I]...); }
          (std::index_sequence_for<Parameters...>{});
        }) {}
  Tensor run(std::span<const Tensor> inputs);
  Recorded& find(std::span<const Tensor> inputs);
  void record(Recorded& entry, std::span<const Tensor> inputs);

  std::size_t arity_;
  Step step_;
  std::list<Recorded> recorded_;  // most recently used first
  std::int64_t replays_ = 0;
};

}  // namespace mantissa::train
