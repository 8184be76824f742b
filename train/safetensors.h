#pragma once
// Tensors in safetensors files (huggingface.co/docs/safetensors): a JSON header with names, dtypes, shapes and offsets,
// then the bytes, row-major and little-endian. Nothing in such a file is code, and Python's `safetensors` reads ours.
//
//   mt::train::save_file("model.safetensors", model.named_parameters());
//   mt::train::load_into(model.named_parameters(), "model.safetensors");
//
// Reading is strict: the bytes of the tensors must fill the file without gaps or overlaps, names are unique, and every
// claim of the header is checked against the size of the file before memory is taken for it.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace mantissa::train {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using Metadata = std::map<std::string, std::string>;

/// What a file says about a tensor; offsets in bytes from the end of the header.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t begin = 0, end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  Metadata metadata;
};

/// Writes the tensors, of any device and layout, and replaces `path` only when every byte is on the disk.
/// Names: 1 to 512 bytes of UTF-8 without control characters, each once; else ConfigError. IoError where the system
/// refuses; then `path` is what it was.
void save_file(const std::string& path, const NamedTensors& tensors, const Metadata& metadata = {});

/// Reads the header alone. FormatError naming file and offset for anything that is not as it must be.
SafetensorsHeader read_header(const std::string& path);
/// All tensors of a file, in the order of their bytes.
NamedTensors load_file(const std::string& path, Device device = {}, Metadata* metadata = nullptr);

struct LoadReport {
  std::vector<std::string> missing;     // wanted, but not in the file
  std::vector<std::string> extra;       // in the file, but not wanted
  std::vector<std::string> mismatched;  // "name: f32[3,4] in the file, f32[4,3] wanted"
  bool complete() const { return missing.empty() && extra.empty() && mismatched.empty(); }
};
/// Copies the values of a file into tensors by name; float types are converted into each other. Strict: FormatError
/// listing everything that does not fit, and then nothing is changed. Not strict: what fits is copied.
LoadReport load_into(const NamedTensors& targets, const std::string& path, bool strict = true);

}  // namespace mantissa::train
