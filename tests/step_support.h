#pragma once
// What the tests of the training step share: suites that run on every device, exact bytes, gradients by
// decree.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "autograd/graph.h"
#include "support.h"

namespace mantissa::testing {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// A suite with one instance a device: `MT_ON_DEVICES(Name)` after its first use as TEST_P(Name, Case).
class OnDevice : public ::testing::TestWithParam<Device> {
 protected:
  static Device device() { return GetParam(); }
  static TensorOptions on(DType dtype = DType::f32) { return {dtype, GetParam()}; }
};
inline std::string device_label(const ::testing::TestParamInfo<Device>& info) {
  return info.param.is_cpu() ? "cpu" : "cuda" + std::to_string(info.param.index);
}
#define MT_ON_DEVICES(Suite)                                                                    \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, ::testing::ValuesIn(::mantissa::testing::devices()), \
                           ::mantissa::testing::device_label)

/// The bytes of a dense tensor, in memory order; printed as a length and a checksum.
struct Bytes {
  std::vector<std::byte> value;
  bool operator==(const Bytes&) const = default;
};
inline void PrintTo(const Bytes& x, std::ostream* out) {
  std::uint64_t sum = 14695981039346656037ull;
  for (const std::byte b : x.value) sum = (sum ^ static_cast<std::uint64_t>(b)) * 1099511628211ull;
  *out << x.value.size() << " bytes with checksum " << std::hex << sum << std::dec;
}
inline Bytes bytes(const Tensor& x) {
  Bytes out{std::vector<std::byte>(static_cast<std::size_t>(x.numel()) * size_of(x.dtype()))};
  if (!out.value.empty()) backend(x).copy_to_host(x.detach().view({x.numel()}, {1}, x.offset()), out.value.data());
  return out;
}

/// Overwrites one element, counted in memory order, of a dense tensor.
inline void poke(const Tensor& x, std::int64_t index, double value) {
  x.detach().view({1}, {1}, x.offset() + index).fill_(value);
}

inline Tensor leaf(const Tensor& x) {
  Tensor y = x;
  y.set_requires_grad();
  return y;
}
inline Tensor leaf(const std::vector<double>& values, TensorOptions options) {
  return leaf(from_vector(values, {static_cast<std::int64_t>(values.size())}, options));
}

/// A loss whose gradient with respect to parameters[i] is exactly gradients[i] (none where that is
/// undefined). An f16 leaf takes part, so that a loss scaler scales it; the parameters' own path is f32, so
/// that no rounding blurs the result.
inline Tensor loss_with_gradients(const std::vector<Tensor>& parameters, const std::vector<Tensor>& gradients,
                                  DType marker = DType::f16) {
  Tensor loss = sum(leaf(zeros({1}, {marker, parameters[0].device()})).to(DType::f32));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (gradients[i].defined()) loss = loss + sum(parameters[i] * gradients[i]);
  return loss;
}

/// `MT_ONE_THREAD` in a file of whole runs of tiny models: threads would only wait for each other on a busy
/// machine.
class OneThread : public ::testing::Environment {
  void SetUp() override { set_num_threads(1); }
};
#define MT_ONE_THREAD                                         \
  [[maybe_unused]] ::testing::Environment* const one_thread = \
      ::testing::AddGlobalTestEnvironment(new ::mantissa::testing::OneThread)

}  // namespace mantissa::testing
