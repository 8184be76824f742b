#pragma once
// Where a tensor lives.

#include <cstdint>
#include <iosfwd>
#include <string>

namespace mantissa {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  constexpr bool is_cpu() const { return type == DeviceType::cpu; }
  constexpr bool is_cuda() const { return type == DeviceType::cuda; }
  constexpr bool operator==(const Device&) const = default;
};

inline constexpr Device cpu{};
constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }

inline std::string to_string(Device d) { return d.is_cpu() ? "cpu" : "cuda:" + std::to_string(d.index); }
std::ostream& operator<<(std::ostream& out, Device d);

/// "cpu", "cuda", "cuda:1" or "auto" (a GPU if there is one); anything else is a ConfigError.
Device parse_device(const std::string& text);
/// Number of usable GPUs; 0 without CUDA, and `cuda_unavailable_reason` says why.
int cuda_device_count();
std::string cuda_unavailable_reason();

}  // namespace mantissa
