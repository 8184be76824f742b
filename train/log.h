#pragma once
// The log of a run: one JSON object a line, appended, in the file at once.

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mantissa::train {

/// null, a truth value, a number, a text, or a list of numbers. JSON has no inf and NaN: they are written as
/// the texts "inf", "-inf" and "nan".
class LogValue {
 public:
  using Variant =
      std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, std::vector<double>>;
  LogValue() = default;
  LogValue(bool value) : value_(value) {}
  template <std::signed_integral T> LogValue(T value) : value_(static_cast<std::int64_t>(value)) {}
  template <std::unsigned_integral T>
  requires(!std::same_as<T, bool>) LogValue(T value) : value_(static_cast<std::uint64_t>(value)) {}
  LogValue(float value);  // the shortest decimals that read back as this float
  LogValue(double value) : value_(value) {}
  LogValue(const char* value) : value_(std::string(value)) {}
  LogValue(std::string_view value) : value_(std::string(value)) {}
  LogValue(std::string value) : value_(std::move(value)) {}
  LogValue(std::vector<double> values) : value_(std::move(values)) {}
  const Variant& value() const { return value_; }

 private:
  Variant value_;
};

using LogField = std::pair<std::string, LogValue>;

/// One line of JSON, without its newline. Bytes that are not UTF-8 are replaced.
std::string to_json_line(std::span<const LogField> fields);

/// Appends to a file; IoError when it can not be opened or written. Each line is one write in append mode, so
/// that several writers do not mix and a killed process loses nothing; a line cut short by an earlier crash
/// is closed first.
class JsonLog {
 public:
  explicit JsonLog(std::string path);
  ~JsonLog();
  JsonLog(JsonLog&& other) noexcept;
  JsonLog& operator=(JsonLog&& other) noexcept;

  /// log.write({{"step", 3}, {"loss", 2.5}});
  void write(std::initializer_list<LogField> fields) { write(std::span(fields.begin(), fields.size())); }
  void write(std::span<const LogField> fields);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace mantissa::train
