#include "train/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/error.h"
#include "train/file.h"

namespace mantissa::train {
namespace {

static_assert(std::endian::native == std::endian::little, "the bytes of tensors are written as they are");

constexpr std::int64_t kMostHeaderBytes = 100'000'000, kMostSize = std::int64_t{1} << 48;
constexpr std::size_t kMostTensors = 1'000'000, kMostNameBytes = 512;

constexpr std::pair<const char*, DType> kTypes[] = {
    {"F64", DType::f64},        {"F32", DType::f32},       {"F16", DType::f16}, {"BF16", DType::bf16},
    {"I64", DType::i64},        {"I32", DType::i32},       {"U8", DType::u8},   {"BOOL", DType::boolean},
    {"F8_E4M3", DType::f8e4m3}, {"F8_E5M2", DType::f8e5m2}};

std::optional<DType> type_named(std::string_view name) {
  for (const auto& [text, dtype] : kTypes)
    if (name == text) return dtype;
  return std::nullopt;
}
const char* name_of(DType dtype) {
  return std::ranges::find(kTypes, dtype, [](const auto& t) { return t.second; })->first;
}

/// Why a name is not allowed; empty: it is.
std::string name_problem(const std::string& name) {
  if (name.empty() || name.size() > kMostNameBytes)
    return "has " + std::to_string(name.size()) + " bytes, expected 1 to 512";
  if (std::ranges::any_of(name, [](unsigned char c) { return c < 32 || c == 127; })) return "has control characters";
  if (name == "__metadata__") return "is reserved";
  return "";
}

/// Takes the header apart while it is parsed: nothing is built that the format does not know.
///   {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
class HeaderParser {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  SafetensorsHeader header;
  std::string problem;
  std::size_t at = 0;  // offset of what is no JSON

  bool null() { return wrong("null"); }
  bool boolean(bool) { return wrong("a truth value"); }
  bool number_integer(number_integer_t n) { return wrong(std::to_string(n)); }
  bool number_float(number_float_t, const string_t& text) { return wrong(text); }
  bool binary(binary_t&) { return wrong("binary data"); }
  bool number_unsigned(number_unsigned_t n) {
    if (place_ != Place::list || n > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
      return wrong(std::to_string(n));
    if (list_.size() == static_cast<std::size_t>(kMaxRank)) return stop("more than 8 numbers in " + key_);
    list_.push_back(static_cast<std::int64_t>(n));
    return true;
  }
  bool string(string_t& text) {
    if (place_ == Place::metadata) {
      header.metadata.emplace(key_, text);
      return true;
    }
    if (place_ != Place::entry || key_ != "dtype") return wrong("a string");
    const std::optional<DType> dtype = type_named(text);
    if (!dtype) return stop("unknown dtype " + text.substr(0, 32));
    entry_.dtype = *dtype;
    return true;
  }
  bool start_object(std::size_t) {
    switch (place_) {
      case Place::outside:
        place_ = Place::header;
        return true;
      case Place::header:
        place_ = key_ == "__metadata__" ? Place::metadata : Place::entry;
        keys_.clear();
        return true;
      default:
        return wrong("an object");
    }
  }
  bool key(string_t& text) {
    if (place_ == Place::header) {
      const std::string why = text == "__metadata__" ? "" : name_problem(text);
      if (!why.empty()) return stop("a name " + why);
      if (!names_.insert(text).second) return stop("the name " + text + " twice");
      if (names_.size() > kMostTensors) return stop("more than a million tensors");
      entry_ = {};
      entry_.name = text;
    } else if (place_ == Place::metadata) {
      if (header.metadata.contains(text)) return stop("the metadata key " + text.substr(0, 64) + " twice");
    } else {
      if (text != "dtype" && text != "shape" && text != "data_offsets")
        return stop("the unknown key " + text.substr(0, 64) + " in " + entry_.name);
      if (!keys_.insert(text).second) return stop("the key " + text + " twice in " + entry_.name);
    }
    key_ = text;
    return true;
  }
  bool end_object() {
    if (place_ == Place::header) {
      place_ = Place::end;
      return true;
    }
    if (place_ == Place::entry) {
      if (keys_.size() != 3) return stop("an entry " + entry_.name + " without dtype, shape or data_offsets");
      header.entries.push_back(std::move(entry_));
    }
    place_ = Place::header;
    return true;
  }
  bool start_array(std::size_t) {
    if (place_ != Place::entry || key_ == "dtype") return wrong("an array");
    place_ = Place::list;
    list_.clear();
    return true;
  }
  bool end_array() {
    place_ = Place::entry;
    if (key_ == "shape") {
      for (const std::int64_t size : list_)
        if (size > kMostSize) return stop("a size of " + std::to_string(size) + " in the shape of " + entry_.name);
      entry_.shape = Shape(std::span<const std::int64_t>(list_));
      return true;
    }
    if (list_.size() != 2)
      return stop("data_offsets of " + entry_.name + " with " + std::to_string(list_.size()) + " numbers, expected 2");
    entry_.begin = list_[0];
    entry_.end = list_[1];
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    at = position > 0 ? position - 1 : 0;
    return stop("what is no JSON");
  }

 private:
  enum class Place { outside, header, metadata, entry, list, end };
  bool stop(std::string what) {
    if (problem.empty()) problem = std::move(what);
    return false;
  }
  bool wrong(const std::string& what) { return stop(what + (key_.empty() ? "" : " at the key " + key_.substr(0, 64))); }

  Place place_ = Place::outside;
  SafetensorsEntry entry_;
  std::string key_;
  std::vector<std::int64_t> list_;
  std::set<std::string> names_, keys_;
};

/// Reads n bytes or throws: the file may have shrunk since it was opened.
void read_exactly(const char* op, InputFile& file, void* target, std::int64_t n, std::int64_t offset) {
  const std::size_t got = file.read(target, static_cast<std::size_t>(n));
  MT_CHECK(FormatError, got == static_cast<std::size_t>(n), op, ": ", file.path(), ": offset ",
           offset + static_cast<std::int64_t>(got), ": found the end of the file, expected ",
           n - static_cast<std::int64_t>(got), " bytes more: truncated");
}

struct Opened {
  SafetensorsHeader header;
  std::int64_t data;  // offset of the first byte of the tensors
};

/// Reads and checks the header; the next read gets the bytes of the first tensor.
Opened open_header(const char* op, InputFile& file) {
  std::array<unsigned char, 8> prefix{};
  MT_CHECK(FormatError, file.size() >= 8, op, ": ", file.path(), ": offset 0: found a file of ", file.size(),
           " bytes, expected at least the 8 of the header's length");
  read_exactly(op, file, prefix.data(), 8, 0);
  MT_CHECK(FormatError,
           !(prefix[0] == 'P' && prefix[1] == 'K') &&
               !(prefix[0] == 0x80 && prefix[1] >= 2 && prefix[1] <= 5 && prefix[7] != 0),
           op, ": ", file.path(),
           ": offset 0: found a zip or pickle file; save the tensors with Python's safetensors.torch.save_file");
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), 8);
  const std::int64_t most = std::min(kMostHeaderBytes, file.size() - 8);
  MT_CHECK(FormatError, length >= 2 && length <= static_cast<std::uint64_t>(most), op, ": ", file.path(),
           ": offset 0: found a header of ", length, " bytes, expected 2 to ", most, " in a file of ", file.size());
  std::string text(static_cast<std::size_t>(length), '\0');
  read_exactly(op, file, text.data(), static_cast<std::int64_t>(length), 8);
  MT_CHECK(FormatError, text[0] == '{', op, ": ", file.path(),
           ": offset 8: found a header that does not begin with '{'");
  HeaderParser parser;
  const bool parsed = nlohmann::json::sax_parse(text, &parser);
  MT_CHECK(FormatError, parsed && parser.problem.empty(), op, ": ", file.path(), ": offset ", 8 + parser.at,
           ": the header has ", parser.problem);

  Opened opened{std::move(parser.header), 8 + static_cast<std::int64_t>(length)};
  std::ranges::sort(opened.header.entries,
                    [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::int64_t end = 0;
  for (const SafetensorsEntry& e : opened.header.entries) {
    MT_CHECK(FormatError, e.begin == end && e.end >= e.begin, op, ": ", file.path(), ": offset ", opened.data + end,
             ": found ", e.name, " at ", e.begin, " to ", e.end, ", expected it to begin at ", end,
             ": tensors must follow each other without gaps or overlaps");
    std::int64_t bytes = static_cast<std::int64_t>(size_of(e.dtype));
    for (const std::int64_t size : e.shape)
      MT_CHECK(FormatError, !__builtin_mul_overflow(bytes, size, &bytes), op, ": ", file.path(),
               ": offset 8: the shape ", e.shape, " of ", e.name, " overflows");
    MT_CHECK(FormatError, bytes == e.end - e.begin, op, ": ", file.path(), ": offset ", opened.data + e.begin,
             ": found ", e.end - e.begin, " bytes for ", e.name, ", expected ", bytes, " for ", name_of(e.dtype), " ",
             e.shape);
    end = e.end;
    MT_CHECK(FormatError, end <= file.size() - opened.data, op, ": ", file.path(), ": offset ", file.size(),
             ": found the end of the file, but ", e.name, " ends at ", opened.data + end, ": truncated");
  }
  MT_CHECK(FormatError, end == file.size() - opened.data, op, ": ", file.path(), ": offset ", opened.data + end,
           ": found ", file.size() - opened.data - end, " trailing bytes, expected the end of the file");
  return opened;
}

NamedTensors load(const char* op, const std::string& path, Device device, Metadata* metadata) {
  InputFile file(op, path);
  Opened opened = open_header(op, file);
  const MemoryScope scope(MemoryCategory::data);
  NamedTensors tensors;
  for (const SafetensorsEntry& e : opened.header.entries) {
    const Tensor x = empty(e.shape, {e.dtype, cpu});
    if (x.numel() > 0) read_exactly(op, file, x.data(), e.end - e.begin, opened.data + e.begin);
    if (e.dtype == DType::boolean) {
      const auto* bytes = static_cast<const std::uint8_t*>(x.data());
      const auto* bad = std::find_if(bytes, bytes + x.numel(), [](std::uint8_t b) { return b > 1; });
      MT_CHECK(FormatError, bad == bytes + x.numel(), op, ": ", path, ": offset ",
               opened.data + e.begin + (bad - bytes), ": found a truth value that is neither 0 nor 1 in ", e.name);
    }
    tensors.emplace_back(e.name, x.to(device));
  }
  if (metadata != nullptr) *metadata = std::move(opened.header.metadata);
  return tensors;
}

/// A file beside `path` that takes its place at commit(), and goes away without.
class Replacement {
 public:
  Replacement(const char* op, const std::string& path)
      : op_(op), path_(path), temporary_(path + ".tmp-" + std::to_string(::getpid())) {
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    MT_CHECK(IoError, descriptor_ >= 0, op_, ": can not create ", temporary_, ": ", system_error(errno));
  }
  ~Replacement() {
    if (descriptor_ < 0) return;
    ::close(descriptor_);
    ::unlink(temporary_.c_str());
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  void write(const void* data, std::size_t n) { write_all(op_, temporary_, descriptor_, data, n); }
  void commit() {
    MT_CHECK(IoError, ::fsync(descriptor_) == 0, op_, ": can not write ", temporary_,
             " to the disk: ", system_error(errno));
    MT_CHECK(IoError, ::rename(temporary_.c_str(), path_.c_str()) == 0, op_, ": can not rename ", temporary_, " to ",
             path_, ": ", system_error(errno));
    ::close(std::exchange(descriptor_, -1));
    std::filesystem::path folder = std::filesystem::path(path_).parent_path();
    if (folder.empty()) folder = ".";
    // The new name is on the disk when the folder is; a file system that can not do that has done what it can.
    if (const int d = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); d >= 0) {
      ::fsync(d);
      ::close(d);
    }
  }

 private:
  const char* op_;
  std::string path_, temporary_;
  int descriptor_ = -1;
};

void append_to(std::string& list, const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t kMostListed = 20;
  for (std::size_t i = 0; i < std::min(names.size(), kMostListed); ++i) list += std::string("; ") + what + names[i];
  if (names.size() > kMostListed) list += "; and " + std::to_string(names.size() - kMostListed) + " more " + what;
}

}  // namespace

void save_file(const std::string& path, const NamedTensors& tensors, const Metadata& metadata) {
  constexpr const char* kOp = "save_file";
  std::set<std::string> names;
  std::vector<const std::pair<std::string, Tensor>*> order;
  for (const auto& named : tensors) {
    const std::string why = name_problem(named.first);
    MT_CHECK(ConfigError, why.empty(), kOp, ": the name '", named.first, "' ", why);
    MT_CHECK(ConfigError, names.insert(named.first).second, kOp, ": the name '", named.first, "' appears twice");
    MT_CHECK(ConfigError, named.second.defined(), kOp, ": the tensor '", named.first, "' is undefined");
    order.push_back(&named);
  }
  // Wide types first, so that every tensor is aligned to its elements.
  std::ranges::stable_sort(
      order, [](const auto* a, const auto* b) { return size_of(a->second.dtype()) > size_of(b->second.dtype()); });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::int64_t offset = 0;
  for (const auto* named : order) {
    const Tensor& x = named->second;
    const std::int64_t end = offset + x.numel() * static_cast<std::int64_t>(size_of(x.dtype()));
    header[named->first] = {{"dtype", name_of(x.dtype())},
                            {"shape", std::vector<std::int64_t>(x.shape().begin(), x.shape().end())},
                            {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception& error) {
    MT_THROW(ConfigError, kOp, ": a name or the metadata is no UTF-8: ", error.what());
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t length = text.size();
  MT_CHECK(ConfigError, static_cast<std::int64_t>(length) <= kMostHeaderBytes, kOp, ": the header has ", length,
           " bytes, at most ", kMostHeaderBytes, " are allowed");
  Replacement file(kOp, path);
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto* named : order) {
    const Tensor x = named->second.detach().contiguous().to(cpu);
    if (x.numel() > 0) file.write(x.data(), static_cast<std::size_t>(x.numel()) * size_of(x.dtype()));
  }
  file.commit();
}

SafetensorsHeader read_header(const std::string& path) {
  InputFile file("read_header", path);
  return open_header("read_header", file).header;
}

NamedTensors load_file(const std::string& path, Device device, Metadata* metadata) {
  return load("load_file", path, device, metadata);
}

LoadReport load_into(const NamedTensors& targets, const std::string& path, bool strict) {
  constexpr const char* kOp = "load_into";
  std::map<std::string, Tensor> wanted;
  for (const auto& [name, x] : targets) {
    MT_CHECK(ConfigError, x.defined(), kOp, ": the tensor '", name, "' is undefined");
    MT_CHECK(ConfigError, wanted.emplace(name, x).second, kOp, ": the name '", name, "' appears twice");
  }
  LoadReport report;
  NamedTensors found = load(kOp, path, cpu, nullptr);
  std::vector<std::pair<Tensor, Tensor>> copies;
  for (const auto& [name, value] : found) {
    const auto target = wanted.find(name);
    if (target == wanted.end()) {
      report.extra.push_back(name);
      continue;
    }
    const Tensor& x = target->second;
    const bool convertible = value.dtype() == x.dtype() || (is_float(value.dtype()) && is_float(x.dtype()));
    if (value.shape() == x.shape() && convertible) {
      copies.emplace_back(x.detach(), value);
    } else {
      report.mismatched.push_back(name + ": " + to_string(value) + " in the file, " + to_string(x) + " wanted");
    }
    wanted.erase(target);
  }
  for (const auto& [name, x] : wanted) report.missing.push_back(name);
  if (strict && !report.complete()) {
    std::string problems;
    append_to(problems, "missing ", report.missing);
    append_to(problems, "unexpected ", report.extra);
    append_to(problems, "mismatched ", report.mismatched);
    MT_THROW(FormatError, kOp, ": ", path, ": the file does not fit", problems);
  }
  for (const auto& [target, value] : copies) target.copy_(value);
  return report;
}

}  // namespace mantissa::train
