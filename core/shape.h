#pragma once
// Sizes and strides: a small value type without allocation.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string>

#include "core/error.h"

namespace mantissa {

inline constexpr int kMaxRank = 8;

class Shape {
 public:
  constexpr Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const std::int64_t> dims);

  constexpr int rank() const { return rank_; }
  constexpr bool empty() const { return rank_ == 0; }
  std::int64_t& operator[](int i) { return dims_[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  constexpr const std::int64_t* begin() const { return dims_.data(); }
  constexpr const std::int64_t* end() const { return dims_.data() + rank_; }
  std::int64_t* begin() { return dims_.data(); }
  std::int64_t* end() { return dims_.data() + rank_; }
  constexpr std::int64_t back() const { return dims_[static_cast<std::size_t>(rank_ - 1)]; }

  void push_back(std::int64_t dim);
  void insert(int axis, std::int64_t dim);
  void erase(int axis);

  constexpr bool operator==(const Shape& other) const {
    if (rank_ != other.rank_) return false;
    for (int i = 0; i < rank_; ++i)
      if ((*this)[i] != other[i]) return false;
    return true;
  }

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

using Strides = Shape;  // in elements; a broadcast axis has stride 0

/// Number of elements; ShapeError for a negative size or a product above 2^62.
std::int64_t numel(const Shape& shape);
/// Row-major strides.
Strides contiguous_strides(const Shape& shape);
/// NumPy's rule; ShapeError naming `op` and both shapes when they do not broadcast.
Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b);
/// Maps a negative axis to its positive one; ShapeError naming `op` when out of range.
int normalize_axis(const char* op, int axis, int rank);

std::string to_string(const Shape& shape);  // "[32,784]"
std::ostream& operator<<(std::ostream& out, const Shape& shape);

}  // namespace mantissa
