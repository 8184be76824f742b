#include "optim/optimizer.h"

#include <cmath>
#include <cstring>
#include <set>

#include "autograd/graph.h"
#include "autograd/transaction.h"

namespace mantissa {

std::string to_string(Verdict verdict) {
  constexpr const char* names[] = {
      "pending", "applied", "skipped: overflow", "skipped: NaN", "skipped at the floor", "nothing to do"};
  return names[static_cast<std::size_t>(verdict)];
}

namespace optim {

Schedule constant(double lr, std::int64_t warmup) { return {.base = lr, .warmup = warmup}; }
Schedule linear_decay(double lr, std::int64_t total, std::int64_t warmup, double final) {
  return {.base = lr, .final = final, .warmup = warmup, .total = total, .decay = Schedule::Decay::linear};
}
Schedule cosine_decay(double lr, std::int64_t total, std::int64_t warmup, double final) {
  return {.base = lr, .final = final, .warmup = warmup, .total = total, .decay = Schedule::Decay::cosine};
}
Schedule step_decay(double lr, std::int64_t every, double factor, std::int64_t warmup) {
  return {.base = lr, .warmup = warmup, .every = every, .factor = factor, .decay = Schedule::Decay::step};
}

namespace {

void check_schedule(const Schedule& s) {
  for (const double rate : {s.base, s.final})
    MT_CHECK(ConfigError, std::isfinite(rate) && rate >= 0,
             "schedule: the learning rate must be finite and not negative, got ", rate);
  MT_CHECK(ConfigError, std::isfinite(s.factor) && s.factor >= 0,
           "schedule: the factor must be finite and not negative, got ", s.factor);
  MT_CHECK(ConfigError, s.warmup >= 0 && s.every > 0,
           "schedule: warmup must not be negative and `every` positive, got ", s.warmup, " and ", s.every);
  const bool ends = s.decay == Schedule::Decay::linear || s.decay == Schedule::Decay::cosine;
  MT_CHECK(ConfigError, !ends || s.total > s.warmup, "schedule: total (", s.total, ") must exceed warmup (", s.warmup,
           ")");
}

std::vector<ParamGroup> one_group(std::vector<Tensor> parameters, double weight_decay) {
  return {ParamGroup{std::move(parameters), 1, weight_decay}};
}

/// Device memory for a plain struct.
template <class T> Tensor room_for(Device device) {
  const MemoryScope scope(MemoryCategory::optimizer_state);
  return empty({static_cast<std::int64_t>(sizeof(T))}, {DType::u8, device});
}

/// The update kernel wrote p, and its working copy in the same pass.
void mark_updated(const Tensor& p, bool working) {
  p.bump_version();
  if (!working) return;
  Leaf& leaf = *p.node()->leaf;
  leaf.working.bump_version();
  leaf.working_of = p.version();
}

}  // namespace

StepState StepResult::read() const {
  MT_CHECK(AutogradError, source_ != nullptr, "StepResult: empty; it comes from step()");
  MT_CHECK(AutogradError, source_->ticket == ticket_,
           "StepResult: read too late: the optimizer has taken another step since");
  StepState state;
  backend(source_->state).copy_to_host(source_->state, &state);
  return state;
}
Verdict StepResult::verdict() const { return read().verdict; }
double StepResult::grad_norm() const { return read().grad_norm; }
double StepResult::learning_rate() const { return static_cast<double>(read().learning_rate); }
std::int64_t StepResult::applied_steps() const { return read().applied; }

Optimizer::Optimizer(std::vector<ParamGroup> groups, const Schedule& schedule, int moments)
    : groups_(std::move(groups)), moments_per_parameter_(moments) {
  set_schedule(schedule);
  std::set<const Node*> seen;
  bool first = true;
  for (const ParamGroup& group : groups_) {
    MT_CHECK(ConfigError, group.weight_decay >= 0 && group.lr_scale >= 0,
             "optimizer: weight_decay and lr_scale must not be negative, got ", group.weight_decay, " and ",
             group.lr_scale);
    for (const Tensor& p : group.parameters) {
      leaf_of(p, "optimizer");
      MT_CHECK(DTypeError, p.dtype() == DType::f32 || p.dtype() == DType::f64,
               "optimizer: parameters are f32 masters, got ", p, "; keep them in f32 and use Autocast");
      MT_CHECK(ConfigError, p.is_dense() && p.offset() == 0, "optimizer: ", p, " is a view with gaps");
      MT_CHECK(ConfigError, seen.insert(p.node().get()).second, "optimizer: a parameter ", p, " appears twice");
      MT_CHECK(DeviceError, first || p.device() == device_, "optimizer: parameters are on ", device_, " and ",
               p.device());
      device_ = p.device();
      first = false;
      const MemoryScope scope(MemoryCategory::optimizer_state);
      moments_.push_back({p.node().get(), moments > 0 ? zeros_like(p.detach()) : Tensor{},
                          moments > 1 ? zeros_like(p.detach()) : Tensor{}});
    }
  }
  MT_CHECK(ConfigError, !first, "optimizer: no parameters were given");
  reset_state({});
}

void Optimizer::reset_state(const StepState& state) {
  if (!source_->state.defined()) {  // later it stays where it is: a recorded step refers to it
    source_->state = room_for<StepState>(device_);
    source_->mirror = backend(device_).pinned_storage(sizeof state);
  }
  backend(device_).copy_from_host(&state, source_->state);
  backend(device_).synchronize();
  std::memcpy(source_->mirror->data, &state, sizeof state);
}

const StepRules* Optimizer::device_rules() {
  Backend& device = backend(device_);
  const auto upload = [&device](const StepRules& rules, std::optional<StepRules>& uploaded, Tensor& target) {
    if (uploaded == rules) return;
    uploaded = rules;
    device.copy_from_host(&*uploaded, target);
  };
  const SharedMemoryScope shared;  // memory of a recording is written by every replay
  if (!device.recording()) {
    if (!device_rules_.defined()) device_rules_ = room_for<StepRules>(device_);
    upload(rules_, uploaded_, device_rules_);
    return static_cast<const StepRules*>(device_rules_.data());
  }
  // A recorded step has rules of its own, whose schedule follows ours.
  Tensor own = room_for<StepRules>(device_);
  device.before_replay([this, upload, own, rules = rules_, uploaded = std::optional<StepRules>{}]() mutable {
    rules.schedule = rules_.schedule;
    upload(rules, uploaded, own);
  });
  return static_cast<const StepRules*>(own.data());
}

void Optimizer::record_host_part(const std::vector<Updated>& updated) {
  struct Recorded {
    Tensor parameter, working;
    std::weak_ptr<Storage> gradient;
  };
  std::vector<Recorded> recorded;
  for (const auto& [p, working] : updated) {
    const Leaf& leaf = *p->node()->leaf;
    recorded.push_back({*p, working ? leaf.working : Tensor{}, leaf.gradient.storage()});
  }
  std::vector<std::pair<double, double>> settings;
  for (const ParamGroup& group : groups_) settings.emplace_back(group.lr_scale, group.weight_decay);
  Backend& device = backend(device_);
  device.keep(source_->state.storage());
  device.keep(source_->mirror);
  for (const Moments& m : moments_) {
    device.keep(m.first.storage());
    device.keep(m.second.storage());
  }
  device.before_replay([this, recorded = std::move(recorded), settings = std::move(settings)] {
    for (std::size_t i = 0; i < settings.size(); ++i)
      MT_CHECK(ConfigError, std::pair(groups_[i].lr_scale, groups_[i].weight_decay) == settings[i],
               "captured step: lr_scale or weight_decay of group ", i,
               " changed since the step was recorded; reset() it to record again");
    for (const auto& [p, working, gradient] : recorded) {
      const Leaf& leaf = *p.node()->leaf;
      MT_CHECK(AutogradError, !working.defined() || working.storage() == leaf.working.storage(),
               "captured step: the 16-bit copy of ", p,
               " was replaced since the step was recorded (Autocast to another dtype?); reset() it to record again");
      MT_CHECK(AutogradError, gradient.lock() == leaf.gradient.storage(), "captured step: the gradient buffer of ", p,
               " was replaced since the step was recorded (is an old grad() still held?); reset() it to record again");
      if (working.defined() && leaf.working_of != p.version()) {  // somebody wrote to the parameter
        Tensor stale = working;
        backend(p).copy(p, stale);
      }
      mark_updated(p, working.defined());
    }
    ++source_->ticket;
  });
}

bool Optimizer::has_gradients_scaled_by(const void* owner) const {
  for (const ParamGroup& group : groups_)
    for (const Tensor& p : group.parameters)
      if (p.requires_grad() && p.grad().defined() && p.node()->leaf->scale_owner == owner) return true;
  return false;
}

std::vector<Tensor> Optimizer::parameters() const {
  std::vector<Tensor> all;
  for (const ParamGroup& group : groups_) all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  return all;
}

StepState* Optimizer::device_state() const { return static_cast<StepState*>(source_->state.data()); }

std::int64_t Optimizer::applied_steps() const {
  StepState state;
  backend(device_).copy_to_host(source_->state, &state);
  return state.applied;
}

void Optimizer::set_schedule(const Schedule& schedule) {
  check_schedule(schedule);
  rules_.schedule = schedule;
}

void Optimizer::clip_grad_norm(double max_norm) {
  MT_CHECK(ConfigError, max_norm > 0, "clip_grad_norm: the limit must be positive, got ", max_norm);
  rules_.max_norm = max_norm;
}
void Optimizer::clip_grad_value(double max_value) {
  MT_CHECK(ConfigError, max_value > 0, "clip_grad_value: the limit must be positive, got ", max_value);
  rules_.max_value = max_value;
}

void Optimizer::zero_grad() {
  for (const ParamGroup& group : groups_)
    for (const Tensor& p : group.parameters) p.zero_grad();
}

StepResult Optimizer::step() { return step(nullptr, nullptr, {}, nullptr, false); }

StepResult Optimizer::step(ScaleState* scale, ScaleState* scale_mirror, const ScaleRule& rule, const void* owner,
                           bool update_scale) {
  std::vector<Tensor> gradients;
  std::vector<UpdateTensor> tensors;
  std::vector<Updated> updated;
  std::size_t index = 0;
  bool scaled = false;
  for (const ParamGroup& group : groups_) {
    for (const Tensor& p : group.parameters) {
      MT_CHECK(ConfigError, index < moments_.size() && moments_[index].parameter == p.node().get(),
               "optimizer: the parameters of its groups have changed since it was made: found ", p,
               "; make a new optimizer");
      const Moments& moments = moments_[index++];
      Leaf& leaf = *p.node()->leaf;
      if (!leaf.has_gradient || !leaf.requires_grad) continue;
      MT_CHECK(
          AutogradError, leaf.scale_owner == nullptr || leaf.scale_owner == owner,
          "optimizer: the gradients carry a loss scale; call scaler.step(optimizer) of the scaler that scaled them");
      if (tensors.empty()) scaled = leaf.scale_owner != nullptr;
      MT_CHECK(AutogradError, (leaf.scale_owner != nullptr) == scaled,
               "scaler.step: some gradients are scaled and some are not");
      UpdateTensor t{.parameter = p.data(),
                     .gradient = leaf.gradient.data(),
                     .state1 = moments.first.data(),
                     .state2 = moments.second.data(),
                     .numel = p.numel(),
                     .dtype = p.dtype(),
                     .lr_scale = static_cast<float>(group.lr_scale),
                     .weight_decay = static_cast<float>(group.weight_decay)};
      const bool working = leaf.working.defined() && leaf.working_of == p.version();
      if (working) {
        t.working = leaf.working.data();
        t.working_dtype = leaf.working.dtype();
      }
      updated.push_back({&p, working});
      gradients.push_back(leaf.gradient);
      tensors.push_back(t);
    }
  }
  rules_.scaled = scaled;
  rules_.scale_rule = rule;
  rules_.empty = tensors.empty();
  Backend& device = backend(device_);
  const OpScope op("optimizer step");
  const StepRules* rules = device_rules();
  if (!tensors.empty()) device.check_gradients(gradients, device_state());
  device.decide(rules, device_state(), scale, update_scale,
                static_cast<StepState*>(static_cast<void*>(source_->mirror->data)), scale_mirror);
  if (!tensors.empty()) {
    update(tensors, device_state());
    for (const auto& [p, working] : updated) mark_updated(*p, working);
    finish_buffers(device_, device_state());
  }
  if (device.recording()) record_host_part(updated);
  zero_grad();
  rules_.max_norm = rules_.max_value = 0;
  ++source_->ticket;
  return last_result();
}

StepResult Optimizer::last_result() const {
  StepResult result;
  result.source_ = source_;
  result.ticket_ = source_->ticket;
  return result;
}

StateDict Optimizer::state_dict() const {
  StateDict state{{"applied", from_vector(std::vector<std::int64_t>{applied_steps()}, {}, {DType::i64, cpu})}};
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    if (moments_[i].first.defined()) state.emplace_back("state1." + std::to_string(i), moments_[i].first.clone());
    if (moments_[i].second.defined()) state.emplace_back("state2." + std::to_string(i), moments_[i].second.clone());
  }
  return state;
}

void Optimizer::load_state_dict(const StateDict& state) {
  std::vector<std::pair<Tensor, Tensor>> copies;
  std::set<std::string> expected{"applied"}, found;
  std::string problems;
  const auto expect = [&](const std::string& key, const Tensor& target) {
    expected.insert(key);
    for (const auto& [name, value] : state) {
      if (name != key) continue;
      if (!value.defined() || !(value.shape() == target.shape()))
        problems += "; " + key + " is " + to_string(value) + ", expected " + to_string(target);
      copies.emplace_back(target, value);
    }
  };
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    if (moments_[i].first.defined()) expect("state1." + std::to_string(i), moments_[i].first);
    if (moments_[i].second.defined()) expect("state2." + std::to_string(i), moments_[i].second);
  }
  StepState fresh;
  for (const auto& [name, value] : state) {
    found.insert(name);
    if (!expected.contains(name)) problems += "; unexpected " + name;
    if (name != "applied") continue;
    if (!value.defined() || value.dtype() != DType::i64 || value.numel() != 1) {
      problems += "; applied is " + to_string(value) + ", expected one i64";
    } else if (fresh.applied = value.to_vector<std::int64_t>()[0]; fresh.applied < 0) {
      problems += "; applied is " + std::to_string(fresh.applied);
    }
  }
  for (const auto& name : expected)
    if (!found.contains(name)) problems += "; missing " + name;
  MT_CHECK(ConfigError, problems.empty(), "load_state_dict: the state does not fit this optimizer", problems);
  for (const auto& [target, value] : copies) target.copy_(value);
  reset_state(fresh);
  ++source_->ticket;
}

namespace {
const SGDOptions& checked(const SGDOptions& o) {
  MT_CHECK(ConfigError, o.momentum >= 0 && o.momentum < 1, "SGD: momentum must lie in [0, 1), got ", o.momentum);
  MT_CHECK(ConfigError, !o.nesterov || (o.momentum > 0 && o.dampening == 0),
           "SGD: nesterov needs momentum and no dampening");
  return o;
}
const AdamOptions& checked(const AdamOptions& o) {
  MT_CHECK(ConfigError, o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1,
           "Adam: betas must lie in [0, 1), got ", o.beta1, " and ", o.beta2);
  MT_CHECK(ConfigError, o.eps >= 0, "Adam: eps must not be negative, got ", o.eps);
  return o;
}
/// Weight decay for matrices, none for biases and norms.
std::vector<ParamGroup> decay_groups(const std::vector<Tensor>& parameters, double weight_decay) {
  std::vector<ParamGroup> groups{{{}, 1, weight_decay}, {{}, 1, 0}};
  for (const Tensor& p : parameters) groups[p.rank() >= 2 ? 0 : 1].parameters.push_back(p);
  return groups;
}
}  // namespace

SGD::SGD(std::vector<Tensor> parameters, const SGDOptions& o)
    : SGD(one_group(std::move(parameters), o.weight_decay), o) {}
SGD::SGD(std::vector<ParamGroup> groups, const SGDOptions& o)
    : Optimizer(std::move(groups), constant(checked(o).lr), o.momentum != 0 ? 1 : 0),
      rule_{o.momentum, o.dampening, o.nesterov} {}
void SGD::update(std::span<const UpdateTensor> tensors, const StepState* state) {
  backend(parameters()[0]).sgd_update(tensors, rule_, state);
}

Adam::Adam(std::vector<Tensor> parameters, const AdamOptions& o)
    : Adam(one_group(std::move(parameters), o.weight_decay), o, false) {}
Adam::Adam(std::vector<ParamGroup> groups, const AdamOptions& o) : Adam(std::move(groups), o, false) {}
Adam::Adam(std::vector<ParamGroup> groups, const AdamOptions& o, bool decoupled)
    : Optimizer(std::move(groups), constant(checked(o).lr), 2), rule_{o.beta1, o.beta2, o.eps, decoupled} {}
void Adam::update(std::span<const UpdateTensor> tensors, const StepState* state) {
  backend(parameters()[0]).adam_update(tensors, rule_, state);
}

AdamW::AdamW(const std::vector<Tensor>& parameters, const AdamOptions& o)
    : Adam(decay_groups(parameters, o.weight_decay), o, true) {}
AdamW::AdamW(std::vector<ParamGroup> groups, const AdamOptions& o) : Adam(std::move(groups), o, true) {}

}  // namespace optim
}  // namespace mantissa
