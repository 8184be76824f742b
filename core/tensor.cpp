#include "core/tensor.h"

#include <algorithm>
#include <cstring>
#include <ostream>

#include "core/backend.h"

namespace mantissa {

Storage::Storage(std::size_t n, Device d, MemoryCategory category)
    : bytes(n), device(d), allocator(&backend(d).allocator()) {
  data = static_cast<std::byte*>(allocator->allocate(n, category));
}

Storage::Storage(std::shared_ptr<void> keep, void* memory, std::size_t n, Device d)
    : data(static_cast<std::byte*>(memory)), bytes(n), device(d), owner(std::move(keep)) {}

Storage::~Storage() {
  if (allocator != nullptr) allocator->release(data);
}

Tensor::Tensor(std::shared_ptr<Storage> storage, const Shape& shape, const Strides& strides, std::int64_t offset,
               DType dtype)
    : storage_(std::move(storage)),
      shape_(shape),
      strides_(strides),
      offset_(offset),
      numel_(mantissa::numel(shape)),
      dtype_(dtype) {}

bool Tensor::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] == 1) continue;
    if (strides_[i] != expected) return numel_ == 0;
    expected *= shape_[i];
  }
  return true;
}

bool Tensor::is_dense() const {
  if (is_contiguous()) return true;
  // Walk the axes from the smallest stride up; each must begin where the previous one ended.
  std::int64_t expected = 1;
  unsigned seen = 0;
  for (int step = 0; step < rank(); ++step) {
    int found = -1;
    for (int i = 0; i < rank(); ++i) {
      if ((seen >> i & 1u) == 0 && (shape_[i] == 1 || strides_[i] == expected)) found = i;
      if (found >= 0) break;
    }
    if (found < 0) return false;
    seen |= 1u << found;
    expected *= shape_[found];
  }
  return true;
}

Tensor Tensor::view(const Shape& shape, const Strides& strides, std::int64_t offset) const {
  return Tensor(storage_, shape, strides, offset, dtype_);
}

std::string to_string(const Tensor& x) {
  if (!x.defined()) return "undefined";
  return to_string(x.dtype()) + to_string(x.shape()) + "@" + to_string(x.device());
}

std::ostream& operator<<(std::ostream& out, const Tensor& x) {
  out << to_string(x);
  if (!x.defined() || x.numel() > 64) return out;
  out << " {";
  bool first = true;
  for (const double value : x.to_vector<double>()) {
    out << (first ? "" : ", ") << detail::number_to_string(value);
    first = false;
  }
  return out << "}";
}

namespace {

Tensor allocate(const Shape& shape, const Strides& strides, DType dtype, Device device) {
  const std::int64_t n = numel(shape);
  std::size_t bytes = 0;
  MT_CHECK(ShapeError, !__builtin_mul_overflow(static_cast<std::size_t>(n), size_of(dtype), &bytes),
           "empty: too many bytes for ", dtype, shape);
  try {
    return Tensor(std::make_shared<Storage>(bytes, device, MemoryScope::current()), shape, strides, 0, dtype);
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(std::string(error.what()) + " for " + to_string(dtype) + to_string(shape));
  }
}

}  // namespace

Tensor empty(const Shape& shape, TensorOptions options) {
  return allocate(shape, contiguous_strides(shape), options.dtype, options.device);
}

Tensor empty_like(const Tensor& x, DType dtype) {
  return allocate(x.shape(), x.is_dense() ? x.strides() : contiguous_strides(x.shape()), dtype, x.device());
}
Tensor empty_like(const Tensor& x) { return empty_like(x, x.dtype()); }

Tensor full(const Shape& shape, double value, TensorOptions options) {
  Tensor x = empty(shape, options);
  backend(x).fill(value, x);
  return x;
}
Tensor zeros(const Shape& shape, TensorOptions options) { return full(shape, 0, options); }
Tensor ones(const Shape& shape, TensorOptions options) { return full(shape, 1, options); }
Tensor zeros_like(const Tensor& x) {
  Tensor y = empty_like(x);
  backend(y).fill(0, y);
  return y;
}

Tensor arange(std::int64_t n, TensorOptions options) {
  MT_CHECK(ShapeError, n >= 0, "arange: negative length ", n);
  std::vector<std::int64_t> values(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = i;
  return from_vector(values, {n}, options);
}

template <class T> Tensor from_vector(const std::vector<T>& values, const Shape& shape, TensorOptions options) {
  MT_CHECK(ShapeError, static_cast<std::int64_t>(values.size()) == numel(shape), "from_vector: ", values.size(),
           " values do not fill shape ", shape);
  Tensor x = empty(shape, {dtype_of<T>::value, cpu});
  if (!values.empty()) std::memcpy(x.data(), values.data(), values.size() * sizeof(T));
  if (options.dtype != x.dtype()) {
    Tensor y = empty(shape, {options.dtype, cpu});
    cpu_backend().copy(x, y);
    x = y;
  }
  if (options.device.is_cpu()) return x;
  Tensor y = empty(shape, options);
  backend(y).copy_from_host(x.data(), y);
  backend(y).synchronize();  // x's pageable memory goes away
  return y;
}
template Tensor from_vector(const std::vector<float>&, const Shape&, TensorOptions);
template Tensor from_vector(const std::vector<double>&, const Shape&, TensorOptions);
template Tensor from_vector(const std::vector<std::int64_t>&, const Shape&, TensorOptions);
template Tensor from_vector(const std::vector<std::int32_t>&, const Shape&, TensorOptions);
template Tensor from_vector(const std::vector<std::uint8_t>&, const Shape&, TensorOptions);

Strides channels_last_strides(const Shape& s) {
  MT_CHECK(ShapeError, s.rank() == 4, "channels_last_strides: expected [N,C,H,W], got ", s);
  const std::int64_t c = std::max<std::int64_t>(s[1], 1), h = std::max<std::int64_t>(s[2], 1),
                     w = std::max<std::int64_t>(s[3], 1);
  return {h * w * c, 1, w * c, c};
}

template <class T> std::vector<T> Tensor::to_vector() const {
  MT_CHECK(AutogradError, defined(), "to_vector: the tensor is undefined");
  Tensor source = *this;
  if (!is_contiguous()) {
    source = empty(shape_, {dtype_, device()});
    backend(*this).copy(*this, source);
  }
  Tensor host = source;
  if (!device().is_cpu()) {
    host = empty(shape_, {dtype_, cpu});
    backend(*this).copy_to_host(source, host.data());
  }
  std::vector<T> values(static_cast<std::size_t>(numel_));
  if (host.dtype() != dtype_of<T>::value) {
    Tensor converted = empty(shape_, {dtype_of<T>::value, cpu});
    cpu_backend().copy(host, converted);
    host = converted;
  }
  if (!values.empty()) std::memcpy(values.data(), host.data(), values.size() * sizeof(T));
  return values;
}
template std::vector<float> Tensor::to_vector() const;
template std::vector<double> Tensor::to_vector() const;
template std::vector<std::int64_t> Tensor::to_vector() const;

double Tensor::item() const {
  MT_CHECK(ShapeError, defined() && numel_ == 1, "item: expected a tensor of one element, got ", *this);
  return to_vector<double>()[0];
}

}  // namespace mantissa
