#include "nn/module.h"

#include "autograd/graph.h"

namespace mantissa::nn {
namespace {

Tensor stored(const Tensor& initial, Device device) {
  const MemoryScope scope(MemoryCategory::weights);
  const NoGrad no_grad;
  return initial.device() == device ? initial.detach().clone() : initial.detach().to(device);
}

}  // namespace

Tensor parameter(const Tensor& initial, Device device) {
  Tensor x = stored(initial, device);
  x.set_requires_grad();
  return x;
}

Tensor buffer(const Tensor& initial, Device device) { return stored(initial, device); }

void Visitor::operator()(const std::string& name, Module& child) {
  if (on_module) on_module(child);
  const std::string outer = prefix;
  prefix += name + ".";
  child.visit(*this);
  prefix = outer;
}

NamedTensors Module::named_parameters() {
  NamedTensors found;
  Visitor v;
  v.on_parameter = [&](const std::string& name, Tensor& x) { found.emplace_back(name, x); };
  visit(v);
  return found;
}

NamedTensors Module::named_buffers() {
  NamedTensors found;
  Visitor v;
  v.on_buffer = [&](const std::string& name, Tensor& x) { found.emplace_back(name, x); };
  visit(v);
  return found;
}

std::vector<Tensor> Module::parameters() {
  std::vector<Tensor> found;
  for (auto& [name, x] : named_parameters()) found.push_back(x);
  return found;
}

std::int64_t Module::num_parameters() {
  std::int64_t n = 0;
  for (const Tensor& x : parameters()) n += x.numel();
  return n;
}

void Module::train(bool on) {
  training_ = on;
  Visitor v;
  v.on_module = [on](Module& m) { m.training_ = on; };
  visit(v);
}

void Module::to(Device device) {
  Visitor v;
  v.on_parameter = [&](const std::string&, Tensor& x) {
    const bool trains = x.requires_grad();
    x = parameter(x, device);
    x.set_requires_grad(trains);
  };
  v.on_buffer = [&](const std::string&, Tensor& x) { x = buffer(x, device); };
  visit(v);
}

}  // namespace mantissa::nn
