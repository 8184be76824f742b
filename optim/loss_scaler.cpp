#include "optim/loss_scaler.h"

#include <cmath>
#include <cstring>

#include "autograd/graph.h"

namespace mantissa::optim {
namespace {

// The seed of backward is read straight from the state: its first member is the scale.
static_assert(offsetof(ScaleState, scale) == 0);

void check_power_of_two(const char* what, double x, bool any) {
  int exponent = 0;
  MT_CHECK(ConfigError, std::isfinite(x) && x > 0, "LossScaler: ", what, " must be positive and finite, got ", x);
  MT_CHECK(ConfigError, any || std::frexp(x, &exponent) == 0.5, "LossScaler: ", what,
           " must be a power of two so that scaling is exact, got ", x, "; set any_factor to allow it");
}

ScaleRule checked(const DynamicScale& p) {
  check_power_of_two("initial", p.initial, p.any_factor);
  check_power_of_two("growth", p.growth, p.any_factor);
  check_power_of_two("backoff", p.backoff, p.any_factor);
  check_power_of_two("floor", p.floor, p.any_factor);
  check_power_of_two("cap", p.cap, p.any_factor);
  MT_CHECK(ConfigError, p.growth >= 1 && p.backoff <= 1,
           "LossScaler: growth must be at least 1 and backoff at most 1, got ", p.growth, " and ", p.backoff);
  MT_CHECK(ConfigError, p.growth_interval > 0 && p.hysteresis > 0,
           "LossScaler: growth_interval and hysteresis must be positive, got ", p.growth_interval, " and ",
           p.hysteresis);
  // Below 2^-126 the reciprocal of the scale, above 2^127 the scale itself, would not be finite in f32.
  MT_CHECK(ConfigError, p.floor >= 0x1p-126 && p.cap <= 0x1p127 && p.floor <= p.initial && p.initial <= p.cap,
           "LossScaler: need 2^-126 <= floor <= initial <= cap <= 2^127, got ", p.floor, ", ", p.initial, ", ", p.cap);
  return {p.growth, p.backoff, p.growth_interval, p.hysteresis, p.refill_hysteresis, p.floor, p.cap};
}

}  // namespace

LossScaler::LossScaler(const DynamicScale& p, Options options) : rule_(checked(p)), options_(options) {
  initial_.scale = static_cast<float>(p.initial);
  initial_.hysteresis_left = static_cast<std::int32_t>(p.hysteresis);
}

LossScaler::LossScaler(const StaticScale& p, Options options)
    : LossScaler(
          DynamicScale{
              .initial = p.scale, .growth = 1, .backoff = 1, .floor = p.scale, .cap = p.scale, .any_factor = true},
          options) {}

void LossScaler::prepare(Device device) {
  if (device_state_.defined()) {
    MT_CHECK(DeviceError, device_state_.device() == device, "LossScaler: was used on ", device_state_.device(),
             ", now on ", device);
    return;
  }
  const MemoryScope scope(MemoryCategory::optimizer_state);
  device_state_ = empty({static_cast<std::int64_t>(sizeof(ScaleState))}, {DType::u8, device});
  mirror_ = backend(device).pinned_storage(sizeof(ScaleState));
  load_state(initial_);
}

void LossScaler::backward(const Tensor& loss) {
  MT_CHECK(AutogradError, loss.defined(), "LossScaler.backward: the loss is undefined");
  MT_CHECK(DTypeError, compute_dtype(loss.dtype()) == loss.dtype(),
           "LossScaler.backward: the loss must be f32 (or f64), got ", loss, "; a scaled 16-bit loss overflows");
  prepare(loss.device());
  BackwardOptions options;
  if (options_.enabled) {
    options.scale = Tensor(device_state_.storage(), {}, {}, 0, DType::f32);
    options.scale_owner = this;
  }
  mantissa::backward(loss, options);
}

void LossScaler::stop_at_streak(const Optimizer& optimizer) const {
  if (options_.max_streak <= 0) return;
  StepState last;
  std::memcpy(&last, optimizer.source_->mirror->data, sizeof last);
  MT_CHECK(NonFiniteError, last.streak < options_.max_streak, "LossScaler: ", last.streak,
           " steps in a row were skipped (", to_string(last.verdict), "; ", last.nans, " NaN and ", last.infs,
           " inf gradient elements at scale ", last.scale, ", floor ", rule_.floor,
           "); this is not a scaling problem: look at the inputs, the learning rate, and the model");
}

StepResult LossScaler::step(Optimizer& optimizer) { return step({&optimizer})[0]; }

std::vector<StepResult> LossScaler::step(std::initializer_list<Optimizer*> optimizers) {
  std::vector<StepResult> results;
  // The scale is adapted once, by the last optimizer whose gradients carry it: the others have nothing to say about it.
  const Optimizer* last = nullptr;
  for (const Optimizer* optimizer : optimizers) {
    stop_at_streak(*optimizer);
    backend(optimizer->device_).before_replay([this, optimizer] { stop_at_streak(*optimizer); });
    prepare(optimizer->device_);
    if (optimizer->has_gradients_scaled_by(this)) last = optimizer;
  }
  auto* state = static_cast<ScaleState*>(device_state_.data());
  auto* mirror = static_cast<ScaleState*>(static_cast<void*>(mirror_->data));
  for (Optimizer* optimizer : optimizers)
    results.push_back(optimizer->step(state, optimizer == last ? mirror : nullptr, rule_, this, optimizer == last));
  backend(device_state_).keep(device_state_.storage());
  backend(device_state_).keep(mirror_);
  return results;
}

ScaleState LossScaler::state() const {
  if (!device_state_.defined()) return initial_;
  ScaleState state;
  backend(device_state_).copy_to_host(device_state_, &state);
  return state;
}
double LossScaler::scale() const { return static_cast<double>(state().scale); }

ScaleState LossScaler::recent_state() const {
  if (!mirror_) return initial_;
  ScaleState state;
  std::memcpy(&state, mirror_->data, sizeof state);
  return state;
}

void LossScaler::load_state(const ScaleState& state) {
  MT_CHECK(ConfigError,
           std::isfinite(state.scale) && static_cast<double>(state.scale) >= rule_.floor &&
               static_cast<double>(state.scale) <= rule_.cap,
           "LossScaler.load_state: scale ", state.scale, " is outside [", rule_.floor, ", ", rule_.cap, "]");
  MT_CHECK(ConfigError,
           state.clean_steps >= 0 && state.hysteresis_left >= 0 && state.hysteresis_left <= rule_.hysteresis,
           "LossScaler.load_state: counters out of range: ", state.clean_steps, " clean steps, hysteresis ",
           state.hysteresis_left);
  initial_ = state;
  if (!device_state_.defined()) return;
  Backend& device = backend(device_state_);
  device.copy_from_host(&state, device_state_);
  device.synchronize();
  std::memcpy(mirror_->data, &state, sizeof state);
}

}  // namespace mantissa::optim
