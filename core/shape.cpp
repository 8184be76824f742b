#include "core/shape.h"

#include <ostream>

namespace mantissa {

Shape::Shape(std::span<const std::int64_t> dims) {
  MT_CHECK(ShapeError, dims.size() <= kMaxRank, "shape: at most ", kMaxRank, " axes are supported, got ", dims.size());
  for (const auto dim : dims) dims_[static_cast<std::size_t>(rank_++)] = dim;
}

void Shape::push_back(std::int64_t dim) { insert(rank_, dim); }

void Shape::insert(int axis, std::int64_t dim) {
  MT_CHECK(ShapeError, rank_ < kMaxRank, "shape: at most ", kMaxRank, " axes are supported");
  for (int i = rank_; i > axis; --i) (*this)[i] = (*this)[i - 1];
  (*this)[axis] = dim;
  ++rank_;
}

void Shape::erase(int axis) {
  for (int i = axis; i + 1 < rank_; ++i) (*this)[i] = (*this)[i + 1];
  --rank_;
}

std::int64_t numel(const Shape& shape) {
  std::int64_t product = 1, nonzero = 1;
  for (const auto dim : shape) {
    MT_CHECK(ShapeError, dim >= 0, "shape: negative size in ", shape);
    // The product without the zeros must fit as well: strides are made of it.
    const bool overflow =
        dim > 0 && (__builtin_mul_overflow(nonzero, dim, &nonzero) || nonzero > (std::int64_t{1} << 62));
    MT_CHECK(ShapeError, !overflow, "shape: too many elements in ", shape);
    product *= dim;
  }
  return product;
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  std::uint64_t step = 1;  // wraps where there are no elements, or too many: then no stride is ever used
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(shape[i] > 0 ? shape[i] : 1);
  }
  return strides;
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  const int rank = a.rank() > b.rank() ? a.rank() : b.rank();
  Shape out;
  for (int i = 0; i < rank; ++i) {
    const int ia = i - (rank - a.rank()), ib = i - (rank - b.rank());
    const std::int64_t da = ia < 0 ? 1 : a[ia], db = ib < 0 ? 1 : b[ib];
    MT_CHECK(ShapeError, da == db || da == 1 || db == 1, op, ": shapes do not broadcast: ", a, " and ", b,
             "; each pair of sizes, counted from the right, must be equal or contain a 1");
    out.push_back(da == 1 ? db : da);
  }
  return out;
}

int normalize_axis(const char* op, int axis, int rank) {
  MT_CHECK(ShapeError, axis >= -rank && axis < rank, op, ": axis ", axis, " is out of range for rank ", rank);
  return axis < 0 ? axis + rank : axis;
}

std::string to_string(const Shape& shape) {
  std::string out = "[";
  for (int i = 0; i < shape.rank(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << to_string(shape); }

}  // namespace mantissa
