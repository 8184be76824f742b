#include "autograd/graph.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/backend.h"

namespace mantissa {
namespace {

thread_local constinit bool recording = true;
std::atomic<std::uint64_t> next_sequence{1};

DType gradient_dtype(DType leaf) { return leaf == DType::f64 ? DType::f64 : DType::f32; }

Tensor converted(const Tensor& g, DType dtype) {
  if (g.dtype() == dtype) return g;
  Tensor y = empty_like(g, dtype);
  backend(g).copy(g, y);
  return y;
}

/// a + b of equal shape and dtype; in place when nobody else sees a.
void add_to(Tensor& a, const Tensor& b) {
  if (a.storage().use_count() == 1 && a.is_dense()) {
    backend(a).accumulate(b, a);
    return;
  }
  Tensor sum = empty_like(a);
  backend(a).binary(Add{}, a, b, sum);
  a = std::move(sum);
}

/// The leaf's buffer, allocated when absent or when someone else holds a cleared one.
void prepare_gradient(const Node& node) {
  Leaf& leaf = *node.leaf;
  if (leaf.has_gradient) return;
  if (leaf.gradient.defined() && leaf.gradient.storage().use_count() == 1) return;
  const MemoryScope scope(MemoryCategory::gradients);
  const Node::Output& o = node.outputs[0];
  // The buffer has the parameter's layout, so that the update runs through both as flat memory.
  const Tensor plain = empty(o.shape, {gradient_dtype(o.dtype), o.device});
  leaf.gradient = o.strides.rank() ? plain.view(o.shape, o.strides, 0) : plain;
}

void mark_scaled(Leaf& leaf, const BackwardOptions& options, const char* name) {
  MT_CHECK(AutogradError, !leaf.has_gradient || leaf.scale_owner == options.scale_owner, name,
           ": a gradient scaled by one scaler can not be added to one with another scale; call zero_grad() in between");
  leaf.scale_owner = options.scale_owner;
}

void add_to_leaf(const Node& node, const Tensor& g, const BackwardOptions& options) {
  Leaf& leaf = *node.leaf;
  mark_scaled(leaf, options, node.name);
  prepare_gradient(node);
  if (leaf.has_gradient) {
    backend(g).accumulate(g, leaf.gradient);
  } else {
    backend(g).copy(g, leaf.gradient);
    leaf.has_gradient = true;
  }
  leaf.gradient.bump_version();
}

}  // namespace

NoGrad::NoGrad(bool enabled) : previous_(recording) { recording = enabled; }
NoGrad::~NoGrad() { recording = previous_; }
bool grad_enabled() { return recording; }

Saved save(const Tensor& x) {
  Saved saved;
  if (x.defined()) {
    saved.tensor_ = x.detach();
    saved.version_ = x.version();
  }
  return saved;
}

const Tensor& Saved::get() const {
  MT_CHECK(AutogradError, !tensor_.defined() || tensor_.version() == version_,
           OpScope::current() ? OpScope::current() : "backward", ": a tensor that backward needs, ", tensor_,
           ", was changed in place: it is at version ", tensor_.defined() ? tensor_.version() : 0, ", saved at ",
           version_, "; run backward before the change (an optimizer step is one), or change a clone()");
  return tensor_;
}

Node::Node(const char* op_name, std::size_t outputs_count)
    : name(op_name), sequence(next_sequence.fetch_add(1, std::memory_order_relaxed)), outputs(outputs_count) {}

Node::~Node() {
  if (inputs.empty()) return;
  // A chain of a million nodes must not recurse a million deep.
  std::vector<std::shared_ptr<Node>> orphans;
  for (Edge& edge : inputs)
    if (edge.node) orphans.push_back(std::move(edge.node));
  while (!orphans.empty()) {
    const std::shared_ptr<Node> node = std::move(orphans.back());
    orphans.pop_back();
    if (node.use_count() > 1) continue;
    for (Edge& edge : node->inputs)
      if (edge.node) orphans.push_back(std::move(edge.node));
    node->inputs.clear();
  }
}

bool needs_grad(std::initializer_list<TensorRef> inputs) {
  return recording && std::ranges::any_of(inputs, [](const TensorRef& x) { return x.tensor->requires_grad(); });
}

void record(const OpInfo& op, std::span<Tensor* const> outputs, std::span<const TensorRef> inputs, BackwardFn fn,
            bool force) {
  if (!recording) return;
  if (!force && std::ranges::none_of(inputs, [](const TensorRef& x) { return x.tensor->requires_grad(); })) return;
  auto node = std::make_shared<Node>(op.name, outputs.size());
  node->cast = op.cast;
  node->autocast = autocast_state();
  node->inputs.reserve(inputs.size());
  for (const TensorRef& x : inputs)
    node->inputs.push_back(x.tensor->requires_grad() ? Edge{x.tensor->node(), x.tensor->output_index()} : Edge{});
  node->fn = std::move(fn);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Tensor& y = *outputs[i];
    node->outputs[i] = {y.shape(), y.is_dense() ? y.strides() : Strides{}, y.dtype(), y.device()};
    y.set_node(node, static_cast<int>(i));
  }
}

Tensor record(const OpInfo& op, Tensor y, std::initializer_list<TensorRef> inputs, BackwardFn fn) {
  Tensor* outputs[] = {&y};
  record(op, outputs, std::span(inputs.begin(), inputs.size()), std::move(fn));
  return y;
}

// ---- GradOut --------------------------------------------------------------------------------------------------------

bool GradOut::wanted(int input) const { return node_->inputs[static_cast<std::size_t>(input)].node != nullptr; }

void GradOut::set(int input, Tensor g) {
  const Edge& edge = node_->inputs[static_cast<std::size_t>(input)];
  if (edge.node == nullptr || !g.defined()) return;
  const Node::Output& target = edge.node->outputs[static_cast<std::size_t>(edge.index)];
  MT_ASSERT(g.shape() == target.shape, node_->name, ": gradient of input ", input, " is ", g,
            ", but the input has shape ", target.shape);
  Pending& pending = (*pending_)[edge.node.get()];
  const bool is_leaf = edge.node->leaf != nullptr;
  if (is_leaf && edge.node->hooks.empty() && edge.node->leaf->capture == nullptr) {
    add_to_leaf(*edge.node, g, *options_);
    return;
  }
  Tensor& slot = pending.grads[static_cast<std::size_t>(edge.index)];
  g = converted(g, is_leaf && edge.node->leaf->capture == nullptr ? gradient_dtype(target.dtype) : target.dtype);
  if (slot.defined()) {
    add_to(slot, g);
  } else {
    slot = std::move(g);
  }
}

const Node::Activated* GradOut::take_activation(int input) {
  const Edge& edge = node_->inputs[static_cast<std::size_t>(input)];
  if (edge.node == nullptr || edge.node->activated == nullptr || !edge.node->hooks.empty()) return nullptr;
  if (pending_->at(edge.node.get()).uses != 1) return nullptr;
  edge.node->activated->differentiated = true;
  return edge.node->activated.get();
}

bool GradOut::take_differentiated() {
  return node_->activated != nullptr && std::exchange(node_->activated->differentiated, false);
}

bool GradOut::begin_write(int input, Tensor& buffer) {
  const Edge& edge = node_->inputs[static_cast<std::size_t>(input)];
  const Node::Output& target = edge.node->outputs[static_cast<std::size_t>(edge.index)];
  Leaf* leaf = edge.node->leaf.get();
  const bool low = node_->cast == Cast::low && node_->autocast.enabled &&
                   node_->autocast.options.low_precision_weight_grad && target.dtype == DType::f32;
  if (leaf != nullptr && edge.node->hooks.empty() && leaf->capture == nullptr && !low) {
    mark_scaled(*leaf, *options_, edge.node->name);
    prepare_gradient(*edge.node);
    accumulate_ = leaf->has_gradient;
    buffer = leaf->gradient;
    return true;
  }
  const bool like_input = leaf == nullptr || leaf->activation;
  const DType dtype = like_input ? target.dtype : low ? node_->autocast.dtype : gradient_dtype(target.dtype);
  buffer = empty(target.shape, {dtype, target.device});
  if (target.strides.rank()) buffer = buffer.view(target.shape, target.strides, 0);
  return false;
}

void GradOut::end_write(int input, Tensor buffer, bool direct) {
  if (!direct) {
    set(input, std::move(buffer));
    return;
  }
  Leaf& leaf = *node_->inputs[static_cast<std::size_t>(input)].node->leaf;
  leaf.has_gradient = true;
  leaf.gradient.bump_version();
}

void GradOut::finish_leaf(Node& node, Pending& pending, const BackwardOptions& options) {
  Tensor& g = pending.grads[0];
  for (auto& [index, hook] : node.hooks) {
    if (!g.defined()) break;
    if (Tensor replaced = hook(g); replaced.defined()) {
      MT_CHECK(AutogradError, replaced.shape() == g.shape(), "gradient hook: returned ", replaced, " for a gradient ",
               g);
      g = converted(replaced, g.dtype());
    }
  }
  if (node.leaf->capture != nullptr) {
    *node.leaf->capture = std::move(g);
    return;
  }
  if (g.defined()) add_to_leaf(node, g, options);
  g = {};
  if (!node.leaf->has_gradient) return;
  for (auto& hook : node.leaf->accumulated_hooks) hook(node.leaf->gradient);
}

// ---- backward -------------------------------------------------------------------------------------------------------

bool backward(const Tensor& root, const BackwardOptions& options) {
  MT_CHECK(AutogradError, root.defined() && root.requires_grad(), "backward: ", root,
           " does not depend on a tensor that requires a gradient");
  MT_CHECK(ShapeError, options.seed.defined() || root.numel() == 1, "backward: the root must have one element, got ",
           root, "; reduce it, or pass a seed gradient");
  MT_CHECK(ShapeError, !options.seed.defined() || options.seed.shape() == root.shape(), "backward: the seed is ",
           options.seed, ", the root ", root);
  const NoGrad no_grad;
  GradOut::PendingMap pending;
  std::vector<std::shared_ptr<Node>> order, stack{root.node()};
  bool any_f16 = false;
  const auto visit = [&](const std::shared_ptr<Node>& node) -> GradOut::Pending& {
    const auto [it, fresh] = pending.try_emplace(node.get());
    if (fresh) {
      it->second.grads.resize(node->outputs.size());
      stack.push_back(node);
    }
    return it->second;
  };
  stack.clear();
  visit(root.node());
  while (!stack.empty()) {
    const std::shared_ptr<Node> node = std::move(stack.back());
    stack.pop_back();
    for (const auto& output : node->outputs) any_f16 |= output.dtype == DType::f16;
    any_f16 |= node->recomputes && node->autocast.enabled && node->autocast.dtype == DType::f16;
    MT_CHECK(AutogradError, !node->released, "backward: the graph of '", node->name,
             "' was used already and its saved tensors are gone; pass retain_graph = true to the first backward");
    for (const Edge& edge : node->inputs)
      if (edge.node) ++visit(edge.node).uses;
    order.push_back(node);
  }
  std::ranges::sort(order, [](const auto& a, const auto& b) { return a->sequence > b->sequence; });

  const bool scaled = options.scale.defined() && any_f16;
  BackwardOptions effective = options;
  if (!scaled) effective.scale_owner = options.scale.defined() ? nullptr : options.scale_owner;
  Tensor seed = options.seed;
  if (!seed.defined()) {
    if (scaled && options.scale.dtype() == root.dtype()) {
      seed = options.scale.reshape(root.shape());
    } else {
      seed = empty_like(root);
      scaled ? backend(root).copy(options.scale.reshape(root.shape()), seed) : backend(root).fill(1, seed);
    }
  }
  pending.at(root.node().get()).grads[static_cast<std::size_t>(root.output_index())] = std::move(seed);
  if (root.node()->leaf) pending.at(root.node().get()).uses = 1;

  for (auto& node : order) {
    GradOut::Pending& mine = pending.at(node.get());
    if (node->leaf != nullptr) {
      if (mine.uses > 0) GradOut::finish_leaf(*node, mine, effective);  // only when the root itself is a leaf
      continue;
    }
    std::vector<Tensor> grads = std::move(mine.grads);
    for (auto& [index, hook] : node->hooks) {
      Tensor& g = grads[static_cast<std::size_t>(index)];
      if (!g.defined()) continue;
      if (Tensor replaced = hook(g); replaced.defined()) {
        MT_CHECK(AutogradError, replaced.shape() == g.shape(), "gradient hook: returned ", replaced, " for a gradient ",
                 g);
        g = converted(replaced, g.dtype());
      }
    }
    if (std::ranges::any_of(grads, [](const Tensor& g) { return g.defined(); })) {
      const OpScope op(node->name);
      const Autocast cast(node->autocast);
      GradOut out(*node, pending, effective);
      node->fn(grads, out);
    }
    for (const Edge& edge : node->inputs) {
      if (edge.node == nullptr || edge.node->leaf == nullptr) continue;
      GradOut::Pending& leaf = pending.at(edge.node.get());
      if (--leaf.uses == 0) GradOut::finish_leaf(*edge.node, leaf, effective);
    }
    if (!options.retain_graph) {
      node->fn = nullptr;  // frees what the op saved, as the sweep passes
      node->activated.reset();
      node->released = true;
    }
    node.reset();
  }
  return scaled;
}

// ---- Tensor's part --------------------------------------------------------------------------------------------------

bool Tensor::requires_grad() const {
  return node_ != nullptr && (node_->leaf == nullptr || node_->leaf->requires_grad);
}
bool Tensor::is_leaf() const { return node_ == nullptr || node_->leaf != nullptr; }

Tensor& Tensor::set_requires_grad(bool value) {
  MT_CHECK(AutogradError, defined(), "set_requires_grad: the tensor is undefined");
  MT_CHECK(AutogradError, is_leaf(), "set_requires_grad: ", *this, " is the result of '", node_->name,
           "', not a leaf; detach() it first");
  MT_CHECK(DTypeError, !value || is_float(dtype_), "set_requires_grad: only float tensors have gradients, got ", *this);
  if (node_ == nullptr) {
    if (!value) return *this;
    node_ = std::make_shared<Node>("leaf", 1);
    node_->outputs[0] = {shape_, is_dense() ? strides_ : Strides{}, dtype_, device()};
    node_->leaf = std::make_unique<Leaf>();
    output_index_ = 0;
  }
  node_->leaf->requires_grad = value;
  return *this;
}

Leaf& leaf_of(const Tensor& x, const char* what) {
  MT_CHECK(AutogradError, x.defined() && x.node() != nullptr && x.node()->leaf != nullptr, what, ": ", x,
           " is not a leaf that requires a gradient");
  return *x.node()->leaf;
}

Tensor Tensor::grad() const {
  if (node_ == nullptr || node_->leaf == nullptr || !node_->leaf->has_gradient) return {};
  return node_->leaf->gradient;
}

void Tensor::set_grad(const Tensor& g) const {
  Leaf& leaf = leaf_of(*this, "set_grad");
  MT_CHECK(AutogradError, g.defined(), "set_grad: the gradient is undefined; zero_grad() clears one");
  MT_CHECK(DTypeError, is_float(g.dtype()), "set_grad: expected f64, f32, f16 or bf16, got ", g);
  MT_CHECK(ShapeError, g.shape() == shape_ && g.device() == device(), "set_grad: the gradient is ", g, ", the tensor ",
           *this);
  zero_grad();
  BackwardOptions options;
  add_to_leaf(*node_, g, options);
  leaf.scale_owner = nullptr;
}

void Tensor::zero_grad() const {
  if (node_ == nullptr || node_->leaf == nullptr) return;
  node_->leaf->has_gradient = false;
  node_->leaf->scale_owner = nullptr;
}

void Tensor::backward() const { mantissa::backward(*this); }

Tensor Tensor::detach() const {
  Tensor x = *this;
  x.node_.reset();
  x.output_index_ = 0;
  return x;
}

void Tensor::register_hook(std::function<Tensor(const Tensor&)> hook) const {
  MT_CHECK(AutogradError, requires_grad(), "register_hook: ", *this, " does not require a gradient");
  node_->hooks.emplace_back(output_index_, std::move(hook));
}

void register_accumulated_hook(const Tensor& leaf, std::function<void(const Tensor&)> hook) {
  leaf_of(leaf, "register_accumulated_hook").accumulated_hooks.push_back(std::move(hook));
}

}  // namespace mantissa
