#include "train/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "train/file.h"

namespace mantissa::train {
namespace {

using Json = nlohmann::ordered_json;  // keeps the order of the fields

Json number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

struct ToJson {
  Json operator()(std::monostate) const { return nullptr; }
  Json operator()(double x) const { return number(x); }
  Json operator()(const std::vector<double>& values) const {
    Json list = Json::array();
    for (const double x : values) list.push_back(number(x));
    return list;
  }
  template <class T> Json operator()(const T& value) const { return value; }
};

}  // namespace

LogValue::LogValue(float value) {
  // Through its decimal text: 0.1f is logged as 0.1, not as 0.10000000149.
  double x = value;
  if (std::isfinite(value)) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    std::from_chars(text, end, x);
  }
  value_ = x;
}

std::string to_json_line(std::span<const LogField> fields) {
  Json object = Json::object();
  for (const auto& [key, value] : fields) {
    MT_CHECK(ConfigError, !object.contains(key), "JsonLog: the field \"", key, "\" appears twice");
    object[key] = std::visit(ToJson{}, value.value());
  }
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

JsonLog::JsonLog(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  MT_CHECK(IoError, descriptor_ >= 0, "JsonLog: can not open ", path_, ": ", system_error(errno));
  char last = '\n';
  const off_t size = ::lseek(descriptor_, 0, SEEK_END);
  if (size <= 0 || ::pread(descriptor_, &last, 1, size - 1) != 1 || last == '\n') return;
  try {
    write_all("JsonLog", path_, descriptor_, "\n", 1);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

JsonLog::~JsonLog() {
  if (descriptor_ >= 0) ::close(descriptor_);
}
JsonLog::JsonLog(JsonLog&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}
JsonLog& JsonLog::operator=(JsonLog&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

void JsonLog::write(std::span<const LogField> fields) {
  const std::string line = to_json_line(fields) + "\n";
  write_all("JsonLog", path_, descriptor_, line.data(), line.size());
}

}  // namespace mantissa::train
