#pragma once
// A module is a struct that holds tensors and other modules and names each once, in visit():
//
//   struct Mlp : mt::nn::Module {
//     mt::nn::Linear up{784, 256}, down{256, 10};
//     void visit(Visitor& v) override { v("up", up); v("down", down); }
//     Tensor operator()(const Tensor& x) { return down(mt::gelu(up(x))); }
//   };

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ops.h"

namespace mantissa::nn {

class Module;

/// Receives the parts of a module; used inside Module::visit only.
class Visitor {
 public:
  void operator()(const std::string& name, Tensor& parameter) {
    if (on_parameter) on_parameter(prefix + name, parameter);
  }
  /// State that is saved but not trained, such as running statistics.
  void buffer(const std::string& name, Tensor& tensor) {
    if (on_buffer) on_buffer(prefix + name, tensor);
  }
  void operator()(const std::string& name, Module& child);
  template <class M> void operator()(const std::string& name, std::vector<M>& children) {
    for (std::size_t i = 0; i < children.size(); ++i) (*this)(name + "." + std::to_string(i), children[i]);
  }
  template <class M> void operator()(const std::string& name, std::unique_ptr<M>& child) {
    if (child) (*this)(name, *child);
  }

  std::string prefix;
  std::function<void(const std::string&name, Tensor&tensor)> on_parameter, on_buffer;
  std::function<void(Module& module)> on_module;
};

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

class Module {
 public:
  using Visitor = nn::Visitor;
  Module() = default;
  virtual ~Module() = default;
  Module(Module&&) = default;
  Module& operator=(Module&&) = default;
  Module(const Module&) = delete;  // a copy would share its parameters unnoticed
  Module& operator=(const Module&) = delete;

  virtual void visit(Visitor& v) = 0;

  std::vector<Tensor> parameters();
  NamedTensors named_parameters();  // "blocks.0.attention.qkv.weight"
  NamedTensors named_buffers();
  std::int64_t num_parameters();

  /// Switches dropout and batch norm, here and in every child.
  void train(bool on = true);
  void eval() { train(false); }
  bool training() const { return training_; }

  /// Moves every parameter and buffer. Call it before an optimizer is made: it replaces the tensors.
  void to(Device device);

 private:
  bool training_ = true;
};

/// A trainable f32 leaf on `device`, booked as weights, with the values of `initial`.
Tensor parameter(const Tensor& initial, Device device = {});
/// A tensor of module state on `device`, not trained.
Tensor buffer(const Tensor& initial, Device device = {});

}  // namespace mantissa::nn
