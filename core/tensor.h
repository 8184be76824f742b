#pragma once
// Tensor: a value-semantic handle on shared storage, with shape, strides, offset, dtype, device and, when it takes
// part in differentiation, its place in the graph. Copying a handle shares the data; views share storage and version.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"
#include "core/float_types.h"
#include "core/memory.h"
#include "core/shape.h"

namespace mantissa {

struct Node;  // autograd/graph.h

/// A block of device memory. `version` counts in-place writes, so that backward can tell a changed saved tensor.
struct Storage {
  Storage(std::size_t bytes, Device device, MemoryCategory category);           // from the device's allocator
  Storage(std::shared_ptr<void> owner, void* data, std::size_t bytes, Device);  // borrowed: mapped file, pinned memory
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Device device;
  std::atomic<std::uint64_t> version{0};
  std::shared_ptr<void> owner;            // keeps borrowed memory alive
  CachingAllocator* allocator = nullptr;  // null for borrowed memory
};

struct TensorOptions {
  DType dtype = DType::f32;
  Device device = {};
};

class Tensor {
 public:
  Tensor() = default;  // undefined: no storage
  Tensor(std::shared_ptr<Storage> storage, const Shape& shape, const Strides& strides, std::int64_t offset,
         DType dtype);

  bool defined() const { return storage_ != nullptr; }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return shape_; }
  const Strides& strides() const { return strides_; }
  int rank() const { return shape_.rank(); }
  /// Size of an axis; negative axes count from the end.
  std::int64_t size(int axis) const { return shape_[axis < 0 ? axis + rank() : axis]; }
  std::int64_t stride(int axis) const { return strides_[axis < 0 ? axis + rank() : axis]; }
  std::int64_t numel() const { return numel_; }
  std::int64_t offset() const { return offset_; }
  DType dtype() const { return dtype_; }
  Device device() const { return storage_ ? storage_->device : Device{}; }
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  std::uint64_t version() const { return storage_->version.load(std::memory_order_relaxed); }
  void bump_version() const { storage_->version.fetch_add(1, std::memory_order_relaxed); }

  bool is_contiguous() const;  // row-major without gaps
  /// Every element of [data, data + numel) belongs to the tensor exactly once: row-major up to a permutation.
  bool is_dense() const;

  /// Address of element 0. The typed form checks that T matches the dtype.
  void* data() const {
    return storage_ ? storage_->data + offset_ * static_cast<std::int64_t>(size_of(dtype_)) : nullptr;
  }
  template <class T> T* data() const {
    check_type<T>();
    return static_cast<T*>(data());
  }

  // Differentiation; defined in autograd/. A leaf is a tensor that no recorded op produced.
  bool requires_grad() const;
  Tensor& set_requires_grad(bool value = true);  // leaves of float dtype only
  bool is_leaf() const;
  /// The accumulated gradient of a leaf (undefined before backward): f32 for f32, f16 and bf16 leaves, f64 for f64.
  Tensor grad() const;
  void set_grad(const Tensor& g) const;
  void zero_grad() const;
  /// Differentiates this one-element tensor; adds to the grad() of every leaf that requires it.
  void backward() const;
  /// The same data outside the graph.
  Tensor detach() const;
  /// Called with each finished gradient of this tensor; a defined return value replaces it.
  void register_hook(std::function<Tensor(const Tensor&)> hook) const;

  // Reading back waits for the device.
  double item() const;                                          // the value of a one-element tensor
  template <class T = float> std::vector<T> to_vector() const;  // all elements in row-major order, converted to T
  Tensor to(Device device) const;  // no copy when already there; not differentiable across devices
  Tensor to(DType dtype) const;    // differentiable cast; no copy when already of that type

  // Views and copies; differentiable. Defined in autograd/ops_shape.cpp, documented in autograd/ops.h.
  Tensor reshape(const Shape& shape) const;
  Tensor permute(const Shape& axes) const;
  Tensor transpose(int a, int b) const;
  Tensor slice(int axis, std::int64_t begin, std::int64_t end, std::int64_t step = 1) const;
  Tensor select(int axis, std::int64_t index) const;
  Tensor expand(const Shape& shape) const;
  Tensor squeeze(int axis) const;
  Tensor unsqueeze(int axis) const;
  Tensor contiguous() const;
  Tensor clone() const;

  // In-place writes; leave the graph alone, bump the version, refuse leaves that require a gradient unless NoGrad.
  void fill_(double value) const;
  void copy_(const Tensor& source) const;  // broadcasts, casts, crosses devices

  // For ops: the same storage under another geometry, outside the graph.
  Tensor view(const Shape& shape, const Strides& strides, std::int64_t offset) const;
  const std::shared_ptr<Node>& node() const { return node_; }
  int output_index() const { return output_index_; }
  void set_node(std::shared_ptr<Node> node, int output_index) {
    node_ = std::move(node);
    output_index_ = output_index;
  }

 private:
  template <class T> void check_type() const;

  std::shared_ptr<Storage> storage_;
  std::shared_ptr<Node> node_;
  Shape shape_;
  Strides strides_;
  std::int64_t offset_ = 0, numel_ = 0;
  int output_index_ = 0;
  DType dtype_ = DType::f32;
};

/// "f16[32,784]@cuda:0", the way tensors appear in messages.
std::string to_string(const Tensor& x);
std::ostream& operator<<(std::ostream& out, const Tensor& x);  // the same, then the values when there are few

// Creation. All outside the graph; call set_requires_grad() to make a leaf.
Tensor empty(const Shape& shape, TensorOptions options = {});
/// Uninitialised, with x's device and layout (dense layouts such as channels-last are kept).
Tensor empty_like(const Tensor& x);
Tensor empty_like(const Tensor& x, DType dtype);
Tensor zeros(const Shape& shape, TensorOptions options = {});
Tensor zeros_like(const Tensor& x);
Tensor ones(const Shape& shape, TensorOptions options = {});
Tensor full(const Shape& shape, double value, TensorOptions options = {});
Tensor arange(std::int64_t n, TensorOptions options = {DType::i64, {}});
/// Copies `values` (row-major, numel(shape) of them), converting to options.dtype.
template <class T> Tensor from_vector(const std::vector<T>& values, const Shape& shape, TensorOptions options = {});
/// Channels-last: logical [N,C,H,W], physical N,H,W,C: the layout that convolutions produce.
Strides channels_last_strides(const Shape& nchw);

template <class T> struct dtype_of;  // the DType of a C++ element type
template <> struct dtype_of<double> { static constexpr DType value = DType::f64; };
template <> struct dtype_of<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of<float16> { static constexpr DType value = DType::f16; };
template <> struct dtype_of<bfloat16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of<float8_e4m3> { static constexpr DType value = DType::f8e4m3; };
template <> struct dtype_of<float8_e5m2> { static constexpr DType value = DType::f8e5m2; };
template <> struct dtype_of<std::int64_t> { static constexpr DType value = DType::i64; };
template <> struct dtype_of<std::int32_t> { static constexpr DType value = DType::i32; };
template <> struct dtype_of<std::uint8_t> { static constexpr DType value = DType::u8; };
template <> struct dtype_of<bool> { static constexpr DType value = DType::boolean; };

template <class T> void Tensor::check_type() const {
  MT_CHECK(DTypeError, dtype_ == dtype_of<std::remove_const_t<T>>::value, "data: asked for ",
           name(dtype_of<std::remove_const_t<T>>::value), " of ", *this);
}

extern template std::vector<float> Tensor::to_vector() const;
extern template std::vector<double> Tensor::to_vector() const;
extern template std::vector<std::int64_t> Tensor::to_vector() const;

}  // namespace mantissa
