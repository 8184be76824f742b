#include "core/device.h"

#include <charconv>
#include <ostream>

#include "core/dtype.h"
#include "core/error.h"

namespace mantissa {

std::ostream& operator<<(std::ostream& out, Device d) { return out << to_string(d); }
std::ostream& operator<<(std::ostream& out, DType t) { return out << name(t); }

Device parse_device(const std::string& text) {
  if (text == "cpu") return cpu;
  if (text == "auto") return cuda_device_count() > 0 ? cuda(0) : cpu;
  int index = 0;
  bool valid = text == "cuda";
  if (text.starts_with("cuda:")) {
    const char *begin = text.data() + 5, *end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, index);
    valid = error == std::errc{} && stop == end && index >= 0;
  }
  MT_CHECK(ConfigError, valid, "device: '", text, "' is not one of cpu, cuda, cuda:<index>, auto");
  const int count = cuda_device_count();
  MT_CHECK(DeviceError, count > 0, "device: no GPU can be used: ", cuda_unavailable_reason(), "; use cpu");
  MT_CHECK(DeviceError, index < count, "device: there is no cuda:", index, "; this machine has ", count, " GPU(s)");
  return cuda(index);
}

}  // namespace mantissa
