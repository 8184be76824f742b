#pragma once
// IDX, the file format of MNIST and its descendants, plain or gzipped, and the Fashion-MNIST images.
//
// A file is judged before anything is allocated for what it claims. Every broken file is a FormatError that
// names file, offset, found and expected; a file that can not be opened or read is an IoError.

#include <array>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace mantissa::train {

/// Reads an IDX file of unsigned bytes into a u8 tensor. gzip is recognised by its first two bytes.
Tensor read_idx(const std::string& path);

enum class Split : std::uint8_t { train, test };

/// Grey images with one label each.
struct ImageDataset {
  Tensor images;  // u8 [N,H,W]
  Tensor labels;  // u8 [N], below `classes`
  int classes = 0;
  std::int64_t size() const { return labels.defined() ? labels.size(0) : 0; }
};

/// Where Debian's package puts the files.
inline constexpr std::string_view kFashionMnistDirectory = "/usr/share/datasets/fashion-mnist";
/// What brings them.
inline constexpr std::string_view kFashionMnistInstall = "apt-get install dataset-fashion-mnist";
inline constexpr std::array<std::string_view, 10> kFashionMnistClasses = {
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"};

/// 60,000 or 10,000 images of 28 x 28, from `<name>.gz` or `<name>` in the directory; all labels are checked.
ImageDataset load_fashion_mnist(Split split, const std::string& directory = std::string(kFashionMnistDirectory));

}  // namespace mantissa::train
