// Convolution on cuDNN, channels-last. Only deterministic algorithms that sum products, in the order in which
// the library proposes them for a problem, so results do not depend on timing.
#include <algorithm>
#include <cmath>
#include <span>
#include <unordered_map>
#include <vector>

#include "cuda/bytes_hash.h"
#include "cuda/cuda_check.h"
#include "cuda/cudnn_state.h"

namespace mantissa {
namespace {

enum class Direction : std::int32_t { forward, grad_input, grad_weight };

/// Compared and hashed as bytes, so it has no padding.
struct Problem {
  Direction direction;
  std::int32_t dtype, channels_first, tf32;
  std::int32_t n, c, h, w, o, kh, kw, oh, ow;
  std::int32_t stride[2], padding[2], dilation[2], groups;
};

/// Owns a descriptor of the library.
template <class T, auto kCreate, auto kDestroy> class Descriptor {
 public:
  Descriptor() { MT_CUDNN_CHECK(kCreate(&value_)); }
  ~Descriptor() { kDestroy(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator T() const { return value_; }

 private:
  T value_ = nullptr;
};
using TensorDescriptor = Descriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
using FilterDescriptor = Descriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
using ConvolutionDescriptor =
    Descriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor, cudnnDestroyConvolutionDescriptor>;

cudnnDataType_t cudnn_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDNN_DATA_DOUBLE;
    case DType::f32:
      return CUDNN_DATA_FLOAT;
    case DType::f16:
      return CUDNN_DATA_HALF;
    default:
      return CUDNN_DATA_BFLOAT16;
  }
}

// Winograd and FFT transform their input: they round more than once, and one inf or NaN spreads to
// neighbours.
bool sums_products(cudnnConvolutionFwdAlgo_t a) { return a <= CUDNN_CONVOLUTION_FWD_ALGO_DIRECT; }
bool sums_products(cudnnConvolutionBwdDataAlgo_t a) { return a <= CUDNN_CONVOLUTION_BWD_DATA_ALGO_1; }
bool sums_products(cudnnConvolutionBwdFilterAlgo_t a) {
  return a <= CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1 || a == CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3;
}

bool refused(cudnnStatus_t status) { return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED; }

struct Algorithm {
  int id;
  cudnnMathType_t math;
  std::size_t workspace;
};

/// The descriptors of a problem and the algorithms for it; the first is used until the library refuses it.
class Plan {
 public:
  Plan(cudnnHandle_t handle, const Problem& p) : direction_(p.direction) {
    const cudnnDataType_t type = cudnn_type(static_cast<DType>(p.dtype));
    const auto layout = p.channels_first != 0 ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC;
    MT_CUDNN_CHECK(cudnnSetTensor4dDescriptor(x_, layout, type, p.n, p.c, p.h, p.w));
    MT_CUDNN_CHECK(cudnnSetTensor4dDescriptor(y_, layout, type, p.n, p.o, p.oh, p.ow));
    MT_CUDNN_CHECK(cudnnSetFilter4dDescriptor(w_, type, layout, p.o, p.c / p.groups, p.kh, p.kw));
    MT_CUDNN_CHECK(cudnnSetConvolution2dDescriptor(convolution_, p.padding[0], p.padding[1], p.stride[0], p.stride[1],
                                                   p.dilation[0], p.dilation[1], CUDNN_CROSS_CORRELATION,
                                                   type == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT));
    MT_CUDNN_CHECK(cudnnSetConvolutionGroupCount(convolution_, p.groups));
    // FMA_MATH keeps f32 products in f32; the default may use TF32. No type is ever narrowed to f16.
    math_ = is_low_precision(static_cast<DType>(p.dtype)) ? CUDNN_TENSOR_OP_MATH
            : p.tf32 != 0                                 ? CUDNN_DEFAULT_MATH
                                                          : CUDNN_FMA_MATH;
    MT_CUDNN_CHECK(cudnnSetConvolutionMathType(convolution_, math_));
    find(handle);
  }

  bool usable() const { return !algorithms_.empty(); }

  /// Drops algorithms from the front that turn -inf into a finite number (cuDNN 9 has such ones for f16 and few
  /// channels): an overflow must not hide from the loss scaler. Waits for the device; the sizes are those of x, w, y.
  void drop_those_that_lose_infinities(cudnnHandle_t handle, CudaBackend& backend, const std::int64_t (&sizes)[3],
                                       DType dtype) {
    Tensor tensors[3];
    try {
      for (int i = 0; i < 3; ++i) tensors[i] = empty({sizes[i]}, {dtype, backend.device()});
    } catch (const OutOfMemoryError&) {
      return;  // no room for the question
    }
    const int infinite = direction_ == Direction::forward ? 0 : 2;
    for (int i = 0; i < 3; ++i) backend.fill(i == infinite ? -INFINITY : 1, tensors[i]);
    const Tensor& y = tensors[direction_ == Direction::forward ? 2 : direction_ == Direction::grad_input ? 0 : 1];
    const double one64 = 1, zero64 = 0;
    const float one32 = 1, zero32 = 0;
    const bool wide = dtype == DType::f64;
    const void* alpha = wide ? static_cast<const void*>(&one64) : &one32;
    const void* beta = wide ? static_cast<const void*>(&zero64) : &zero32;
    for (; usable(); algorithms_.erase(algorithms_.begin())) {
      if (!run(handle, backend, alpha, tensors[0].data(), tensors[1].data(), tensors[2].data(), beta)) return;
      const std::vector<float> some = y.slice(0, 0, std::min<std::int64_t>(y.numel(), 16384)).to_vector<float>();
      if (std::ranges::any_of(some, [](float v) { return !std::isfinite(v); })) return;
    }
  }

  /// False when no algorithm takes the problem after all.
  bool run(cudnnHandle_t handle, CudaBackend& backend, const void* alpha, void* x, void* w, void* y, const void* beta) {
    for (; usable(); algorithms_.erase(algorithms_.begin())) {
      const Algorithm a = algorithms_.front();
      const Tensor scratch = backend.workspace(a.workspace);
      MT_CUDNN_CHECK(cudnnSetConvolutionMathType(convolution_, a.math));
      const cudnnStatus_t status = call(handle, a, alpha, x, w, y, scratch.data(), beta);
      if (refused(status)) continue;
      MT_CUDNN_CHECK(status);
      return true;
    }
    return false;
  }

 private:
  static constexpr std::size_t kWorkspaceLimit = std::size_t{256} << 20;

  void find(cudnnHandle_t handle) {
    switch (direction_) {
      case Direction::forward:
        return collect<cudnnConvolutionFwdAlgoPerf_t>([&](int most, int* count, auto* found) {
          return cudnnGetConvolutionForwardAlgorithm_v7(handle, x_, w_, convolution_, y_, most, count, found);
        });
      case Direction::grad_input:
        return collect<cudnnConvolutionBwdDataAlgoPerf_t>([&](int most, int* count, auto* found) {
          return cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, w_, y_, convolution_, x_, most, count, found);
        });
      case Direction::grad_weight:
        return collect<cudnnConvolutionBwdFilterAlgoPerf_t>([&](int most, int* count, auto* found) {
          return cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, x_, y_, convolution_, w_, most, count, found);
        });
    }
  }

  template <class Perf, class Propose> void collect(const Propose& propose) {
    constexpr int kMost = 16;
    Perf found[kMost];
    int count = 0;
    const cudnnStatus_t status = propose(kMost, &count, found);
    if (refused(status) || CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_BAD_PARAM) return;
    MT_CUDNN_CHECK(status);
    for (const Perf& f : std::span(found, static_cast<std::size_t>(count))) {
      if (f.status != CUDNN_STATUS_SUCCESS || f.determinism != CUDNN_DETERMINISTIC) continue;
      if (!sums_products(f.algo) || f.mathType == CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION) continue;
      // Where f32 is asked for, no proposal may widen that to TF32.
      const cudnnMathType_t math = math_ == CUDNN_FMA_MATH ? math_ : f.mathType;
      algorithms_.push_back({static_cast<int>(f.algo), math, f.memory});
    }
    std::stable_partition(algorithms_.begin(), algorithms_.end(),
                          [](const Algorithm& a) { return a.workspace <= kWorkspaceLimit; });
  }

  cudnnStatus_t call(cudnnHandle_t handle, const Algorithm& a, const void* alpha, void* x, void* w, void* y,
                     void* scratch, const void* beta) const {
    switch (direction_) {
      case Direction::forward:
        return cudnnConvolutionForward(handle, alpha, x_, x, w_, w, convolution_,
                                       static_cast<cudnnConvolutionFwdAlgo_t>(a.id), scratch, a.workspace, beta, y_, y);
      case Direction::grad_input:
        return cudnnConvolutionBackwardData(handle, alpha, w_, w, y_, y, convolution_,
                                            static_cast<cudnnConvolutionBwdDataAlgo_t>(a.id), scratch, a.workspace,
                                            beta, x_, x);
      default:
        return cudnnConvolutionBackwardFilter(handle, alpha, x_, x, y_, y, convolution_,
                                              static_cast<cudnnConvolutionBwdFilterAlgo_t>(a.id), scratch, a.workspace,
                                              beta, w_, w);
    }
  }

  Direction direction_;
  TensorDescriptor x_, y_;
  FilterDescriptor w_;
  ConvolutionDescriptor convolution_;
  cudnnMathType_t math_ = CUDNN_DEFAULT_MATH;
  std::vector<Algorithm> algorithms_;
};

}  // namespace

struct ConvolutionPlans {
  std::unordered_map<Problem, Plan, BytesHash, BytesEqual> of;
};

CudnnState& cudnn_state(const CudaBackend& backend) {
  const cudaStream_t stream = backend.stream();
  // Never destroyed: backends are not either, and the library may be gone when statics are.
  static std::mutex mutex;
  static auto& states = *new std::unordered_map<int, CudnnState>;
  const std::lock_guard lock(mutex);
  CudnnState& state = states[backend.device().index];
  if (state.handle != nullptr) return state;
  cudnnHandle_t created = nullptr;
  MT_CUDNN_CHECK(cudnnCreate(&created));
  if (const cudnnStatus_t status = cudnnSetStream(created, stream); status != CUDNN_STATUS_SUCCESS) {
    cudnnDestroy(created);
    MT_CUDNN_CHECK(status);
  }
  state.convolutions = std::make_shared<ConvolutionPlans>();
  state.handle = created;
  return state;
}

cudnnHandle_t cudnn_handle(const CudaBackend& backend) { return cudnn_state(backend).handle; }

namespace {

constexpr std::int64_t kMostElements = (std::int64_t{1} << 31) - 1;  // of a tensor that the library takes

std::int32_t small(std::int64_t n) {
  MT_CHECK(ShapeError, n >= 0 && n <= kMostElements, "conv2d: a size of ", n, " is more than the GPU library takes");
  return static_cast<std::int32_t>(n);
}

/// One convolution: x, w, y, the one of them that is written, and whether the result is added to it.
struct Call {
  Direction direction;
  const Tensor* tensors[3];
  const Conv2dOptions& options;
  bool accumulate;

  int output() const { return direction == Direction::forward ? 2 : direction == Direction::grad_input ? 0 : 1; }
};

/// What the library is asked for: a layout, and the dtype of all three tensors.
struct Variant {
  bool channels_first;
  DType dtype;
  bool tf32;
};

Problem problem_of(const Call& call, const Variant& variant) {
  const auto& [x, w, y] = call.tensors;
  const Conv2dOptions& o = call.options;
  Problem p{};
  for (const Tensor* t : call.tensors) small(t->numel());
  p.direction = call.direction;
  p.dtype = static_cast<std::int32_t>(variant.dtype);
  p.channels_first = variant.channels_first;
  p.tf32 = variant.tf32;
  p.n = small(x->size(0)), p.c = small(x->size(1)), p.h = small(x->size(2)), p.w = small(x->size(3));
  p.o = small(w->size(0)), p.kh = small(w->size(2)), p.kw = small(w->size(3));
  p.oh = small(y->size(2)), p.ow = small(y->size(3));
  for (int i = 0; i < 2; ++i) {
    p.stride[i] = small(o.stride[i]);
    p.padding[i] = small(o.padding[i]);
    p.dilation[i] = small(o.dilation[i]);
  }
  p.groups = small(o.groups);
  return p;
}

/// Whether the library can read the tensor in place: its vector loads need addresses of whole 16 bytes.
bool fits(const Tensor& x, const Variant& variant) {
  return !variant.channels_first && x.dtype() == variant.dtype && reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
}

/// False when the library refuses the variant. Tensors that do not fit it are copied.
bool try_variant(CudaBackend& backend, const Call& call, const Variant& variant) {
  CudnnState& state = cudnn_state(backend);
  const std::lock_guard lock(state.mutex);
  const Problem problem = problem_of(call, variant);
  const MemoryScope scope(MemoryCategory::workspace);
  const auto [found, fresh] = state.convolutions->of.try_emplace(problem, state.handle, problem);
  Plan& plan = found->second;
  if (fresh && !backend.recording()) {
    const std::int64_t sizes[] = {call.tensors[0]->numel(), call.tensors[1]->numel(), call.tensors[2]->numel()};
    const BackendCounters counters = backend.counters;
    plan.drop_those_that_lose_infinities(state.handle, backend, sizes, variant.dtype);
    backend.counters = counters;  // none of this belongs to the program
  }
  if (!plan.usable()) return false;
  const std::int64_t casts = backend.counters.casts;
  Tensor copies[3];
  void* data[3];
  for (int i = 0; i < 3; ++i) {
    const Tensor& t = *call.tensors[i];
    data[i] = t.data();
    if (fits(t, variant)) continue;
    copies[i] = empty(t.shape(), {variant.dtype, t.device()});
    if (!variant.channels_first) copies[i] = copies[i].view(t.shape(), channels_last_strides(t.shape()), 0);
    if (i != call.output() || call.accumulate) backend.copy(t, copies[i]);
    data[i] = copies[i].data();
  }
  const float one32 = 1, beta32 = call.accumulate ? 1 : 0;
  const double one64 = 1, beta64 = call.accumulate ? 1 : 0;
  const bool wide = variant.dtype == DType::f64;
  const void* alpha = wide ? static_cast<const void*>(&one64) : &one32;
  const void* beta = wide ? static_cast<const void*>(&beta64) : &beta32;
  const bool done = plan.run(state.handle, backend, alpha, data[0], data[1], data[2], beta);
  if (done) ++backend.counters.launches;
  if (const Tensor& result = copies[call.output()]; done && result.defined()) {
    Tensor target = *call.tensors[call.output()];
    backend.copy(result, target);
  }
  backend.counters.casts = casts;  // copies are part of the convolution
  return done;
}

/// Channels-last as the tensors are, else channels-first (f64 and some groups); then 16-bit values in f32,
/// where TF32 holds them exactly: it has their exponents and 10 fraction bits.
void run(CudaBackend& backend, const Call& call, bool tf32) {
  const DType dtype = call.tensors[0]->dtype();
  for (const bool channels_first : {false, true})
    if (try_variant(backend, call, {channels_first, dtype, tf32})) return;
  if (is_low_precision(dtype))
    for (const bool channels_first : {false, true})
      if (try_variant(backend, call, {channels_first, DType::f32, true})) return;
  MT_THROW(CudaError, "conv2d: cuDNN has no deterministic algorithm for x ", *call.tensors[0], ", w ",
           *call.tensors[1]);
}

/// f(x's part, y's part, first) for runs of images in which neither has more than `most` elements.
template <class F> void for_each_part(const Tensor& x, const Tensor& y, std::int64_t most, const F& f) {
  const std::int64_t n = x.size(0), image = std::max(x.numel(), y.numel()) / n;
  const std::int64_t step = std::clamp<std::int64_t>(most / image, 1, n);
  for (std::int64_t first = 0; first < n; first += step) {
    const auto part = [&](const Tensor& t) {
      Shape shape = t.shape();
      shape[0] = std::min(step, n - first);
      return t.view(shape, t.strides(), t.offset() + first * (t.numel() / n));
    };
    f(part(x), part(y), first);
  }
}

bool use_tf32() { return float32_matmul() == Float32Matmul::tf32; }

}  // namespace

void CudaBackend::conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("conv2d");
  if (x.numel() == 0 || w.numel() == 0) return fill(0, y);
  for_each_part(x, y, kMostElements, [&](const Tensor& images, const Tensor& result, std::int64_t) {
    run(*this, {Direction::forward, {&images, &w, &result}, options, false}, use_tf32());
  });
}

void CudaBackend::conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  const detail::OpRange range("conv2d_grad_input");
  if (g.numel() == 0 || w.numel() == 0) return fill(0, gx);
  for_each_part(gx, g, kMostElements, [&](const Tensor& result, const Tensor& gradient, std::int64_t) {
    run(*this, {Direction::grad_input, {&result, &w, &gradient}, options, false}, use_tf32());
  });
}

void CudaBackend::conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate,
                                     Tensor& gw) {
  if (gw.numel() == 0) return;
  const detail::OpRange range("conv2d_grad_weight");
  if (g.numel() == 0 || x.numel() == 0) {
    if (!accumulate) fill(0, gw);
    return;
  }
  const bool one_call = std::max(x.numel(), g.numel()) <= kMostElements;
  if (gw.dtype() == x.dtype() && (one_call || !is_low_precision(x.dtype()))) {
    for_each_part(x, g, kMostElements, [&](const Tensor& images, const Tensor& gradient, std::int64_t first) {
      run(*this, {Direction::grad_weight, {&images, &gw, &gradient}, options, accumulate || first > 0}, use_tf32());
    });
    return;
  }
  // An f32 sum of 16-bit products. The library does not mix types, but TF32 holds the widened values exactly,
  // so its products are exact on the tensor cores. Parts bound the memory of the widened copies.
  constexpr std::int64_t kPart = std::int64_t{1} << 26;
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t before = counters.casts;
  Tensor sum = gw.dtype() == DType::f32 ? gw : empty_like(gw, DType::f32);
  if (sum.dtype() != gw.dtype() && accumulate) copy(gw, sum);
  for_each_part(x, g, kPart, [&](const Tensor& images, const Tensor& gradient, std::int64_t first) {
    Tensor wide_x = empty_like(images, DType::f32), wide_g = empty_like(gradient, DType::f32);
    copy(images, wide_x);
    copy(gradient, wide_g);
    run(*this, {Direction::grad_weight, {&wide_x, &sum, &wide_g}, options, accumulate || first > 0}, true);
  });
  if (sum.dtype() != gw.dtype()) copy(sum, gw);
  counters.casts = before;
}

}  // namespace mantissa
