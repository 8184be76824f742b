#pragma once
// The graph: each recorded op is a Node that knows its inputs' nodes and a closure that turns the gradients of its
// outputs into those of its inputs. Nodes hold no data; what an op saves is exactly its closure's capture list, and
// only detached tensors are captured, so there are no cycles. Traversal and destruction are iterative.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "autograd/autocast.h"
#include "core/elementwise.h"
#include "core/tensor.h"

namespace mantissa {

/// While it lives, ops of this thread are not recorded.
class NoGrad {
 public:
  NoGrad() : NoGrad(false) {}
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 protected:
  explicit NoGrad(bool enabled);

 private:
  bool previous_;
};
/// The opposite, inside a NoGrad region (recomputation).
class EnableGrad : NoGrad {
 public:
  EnableGrad() : NoGrad(true) {}
};
bool grad_enabled();

struct BackwardOptions {
  Tensor seed = {};   // gradient of the root, of its shape and dtype; default: one, for a one-element root
  Tensor scale = {};  // f32 scalar on the root's device: multiplies the default seed, if `scale_if_f16` finds need
  const void* scale_owner = nullptr;  // marks the gradients as scaled by this scaler, so that nobody uses them unscaled
  bool retain_graph = false;          // keep the closures for another backward
};

/// Differentiates `root`; adds to the gradient of every leaf that requires it. Returns whether `scale` was applied: it
/// is only when some tensor of the graph is f16, since other types need no scaling.
bool backward(const Tensor& root, const BackwardOptions& options = {});

// ---- for ops --------------------------------------------------------------------------------------------------------

/// What every recorded op states about itself.
struct OpInfo {
  const char* name;
  Cast cast;
};

/// A detached tensor kept for backward, with its version: reading it after an in-place change throws.
class Saved {
 public:
  Saved() = default;
  const Tensor& get() const;
  bool defined() const { return tensor_.defined(); }
  /// True when nobody else holds the memory: backward may then overwrite it.
  bool sole_owner() const { return tensor_.defined() && tensor_.storage().use_count() == 1; }

 private:
  friend Saved save(const Tensor& x);
  Tensor tensor_;
  std::uint64_t version_ = 0;
};
Saved save(const Tensor& x);

struct TensorRef {
  TensorRef(const Tensor& x) : tensor(&x) {}  // NOLINT: implicit, so that record(op, y, {x, w, b}, ...) reads well
  const Tensor* tensor;
};

using Grads = std::span<const Tensor>;  // of an op's outputs; undefined where nothing arrived
class GradOut;
using BackwardFn = std::function<void(Grads g, GradOut& out)>;

/// Makes `y` the result of `op` on `inputs` when differentiation is on and an input (or `force`) asks for it.
Tensor record(const OpInfo& op, Tensor y, std::initializer_list<TensorRef> inputs, BackwardFn fn);
void record(const OpInfo& op, std::span<Tensor* const> outputs, std::span<const TensorRef> inputs, BackwardFn fn,
            bool force = false);
/// Whether record() would record: ops may skip what only backward needs.
bool needs_grad(std::initializer_list<TensorRef> inputs);

// ---- internals ------------------------------------------------------------------------------------------------------

struct Edge {
  std::shared_ptr<Node> node;
  int index = 0;
};

/// What a leaf has beyond a place in the graph.
struct Leaf {
  bool requires_grad = true;
  Tensor gradient;  // the buffer; it outlives zero_grad so that a steady step allocates nothing
  bool has_gradient = false;
  const void* scale_owner = nullptr;
  Tensor working;                // 16-bit copy of the parameter for Autocast ...
  std::uint64_t working_of = 0;  // ... made from this version
  Tensor* capture = nullptr;     // recomputation: the finished gradient goes here
  bool activation =
      false;  // recomputation: stands for the result of an op, which Autocast does not take for a parameter
  std::vector<std::function<void(const Tensor&)>> accumulated_hooks;
};

struct Node {
  using Hook = std::function<Tensor(const Tensor&)>;
  struct Output {
    Shape shape;
    Strides strides;
    DType dtype;
    Device device;
  };
  Node(const char* op_name, std::size_t outputs_count);
  ~Node();

  /// The result is activation(z), and z or the result was kept. Its only reader, if a product, may deliver the gradient
  /// of z instead of the result's: one kernel less.
  struct Activated {
    Activation kind;
    Saved kept;
    bool differentiated = false;  // the gradient that arrives is that of z
  };

  const char* name;
  Cast cast = Cast::keep;  // the op's Autocast rule
  std::uint64_t sequence;  // inputs are older than outputs
  AutocastState autocast;
  bool released = false;    // backward has dropped the closure
  bool recomputes = false;  // a checkpoint: which types its inside uses is known only in backward
  std::vector<Edge> inputs;
  std::vector<Output> outputs;
  BackwardFn fn;
  std::vector<std::pair<int, Hook>> hooks;  // output index, hook
  std::unique_ptr<Leaf> leaf;               // null for the result of an op
  std::unique_ptr<Activated> activated;     // null for most ops
};

/// The leaf data of a parameter; AutogradError naming `what` when the tensor is not a leaf.
Leaf& leaf_of(const Tensor& x, const char* what);
/// Called after each backward in which the leaf's gradient is complete (data parallel uses it).
void register_accumulated_hook(const Tensor& leaf, std::function<void(const Tensor& grad)> hook);

/// Where a backward rule delivers the gradients of its inputs.
class GradOut {
 public:
  bool wanted(int input) const;
  /// Gradient of an input, of its shape; converted to its dtype (leaves accumulate it in f32).
  void set(int input, Tensor g);
  /// Lets `write(buffer, accumulate)` produce the gradient in place: for a leaf straight in its f32 buffer, else in a
  /// fresh tensor with the input's layout and dtype. Does nothing when the gradient is not wanted.
  template <class F> void write(int input, F&& write_into) {
    if (!wanted(input)) return;
    Tensor buffer;
    const bool direct = begin_write(input, buffer);
    write_into(buffer, direct && accumulate_);
    end_write(input, std::move(buffer), direct);
  }
  /// What to multiply an input's gradient by before it is written, when that is left to this op; null: nothing. The
  /// caller then must do it.
  const Node::Activated* take_activation(int input);
  /// Whether the gradient of this op's result is already that of what its activation was applied to.
  bool take_differentiated();
  /// Whether saved tensors may be overwritten (the graph will not be used again).
  bool may_consume() const { return !retain_; }
  const BackwardOptions& options() const { return *options_; }

 private:
  friend bool backward(const Tensor& root, const BackwardOptions& options);
  struct Pending {
    std::vector<Tensor> grads;
    int uses = 0;  // readers in this graph; leaf: contributions still to come
  };
  using PendingMap = std::unordered_map<Node*, Pending>;
  GradOut(const Node& node, PendingMap& pending, const BackwardOptions& options)
      : node_(&node), pending_(&pending), options_(&options), retain_(options.retain_graph) {}
  bool begin_write(int input, Tensor& buffer);
  void end_write(int input, Tensor buffer, bool direct);
  static void finish_leaf(Node& node, Pending& pending, const BackwardOptions& options);

  const Node* node_;
  PendingMap* pending_;
  const BackwardOptions* options_;
  bool retain_;
  bool accumulate_ = false;
};

}  // namespace mantissa
