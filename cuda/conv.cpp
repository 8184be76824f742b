// Convolution on cuDNN, channels-last. Only deterministic algorithms; the first that the library proposes for a problem is
// kept for the process, so results do not depend on timing.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "cuda/cuda_check.h"
#include "cuda/cudnn_handle.h"

namespace mantissa {

cudnnHandle_t cudnn_handle(const CudaBackend& backend) {
  const cudaStream_t stream = backend.stream();
  static std::mutex mutex;
  static auto& handles = *new std::unordered_map<int, cudnnHandle_t>;
  const std::lock_guard lock(mutex);
  cudnnHandle_t& handle = handles[backend.device().index];
  if (handle == nullptr) {
    cudnnHandle_t created = nullptr;
    MT_CUDNN_CHECK(cudnnCreate(&created));
    MT_CUDNN_CHECK(cudnnSetStream(created, stream));
    handle = created;
  }
  return handle;
}

namespace {

enum class Direction : std::int32_t { forward, grad_input, grad_weight };

/// Compared and hashed as bytes, so it has no padding.
struct Problem {
  Direction direction;
  std::int32_t device, dtype, channels_first, tf32;
  std::int32_t n, c, h, w, o, kh, kw, oh, ow;
  std::int32_t stride[2], padding[2], dilation[2], groups;
  bool operator==(const Problem& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<Problem>);

struct ProblemHash {
  std::size_t operator()(const Problem& p) const {
    std::uint32_t words[sizeof(Problem) / 4];
    std::uint64_t h = 0x9E3779B97F4A7C15ull;
    std::memcpy(words, &p, sizeof words);
    for (const std::uint32_t w : words) h = (h ^ w) * 0xBF58476D1CE4E5B9ull, h ^= h >> 29;
    return static_cast<std::size_t>(h);
  }
};

/// Descriptors and the algorithm of a problem; they live as long as the process.
struct Plan {
  cudnnTensorDescriptor_t x = nullptr, y = nullptr;
  cudnnFilterDescriptor_t w = nullptr;
  cudnnConvolutionDescriptor_t convolution = nullptr;
  int algorithm = -1;  // none: the library refuses the problem
  std::size_t workspace = 0;
};

constexpr std::size_t kWorkspaceLimit = std::size_t{512} << 20;

cudnnDataType_t cudnn_type(std::int32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::f64: return CUDNN_DATA_DOUBLE;
    case DType::f32: return CUDNN_DATA_FLOAT;
    case DType::f16: return CUDNN_DATA_HALF;
    default: return CUDNN_DATA_BFLOAT16;
  }
}

template <class Perf>
void choose(const Perf* found, int count, Plan& plan) {
  for (int i = 0; i < count; ++i) {
    if (found[i].status != CUDNN_STATUS_SUCCESS || found[i].determinism != CUDNN_DETERMINISTIC || found[i].memory > kWorkspaceLimit) continue;
    plan.algorithm = static_cast<int>(found[i].algo);
    plan.workspace = found[i].memory;
    return;
  }
}

Plan make_plan(cudnnHandle_t handle, const Problem& p) {
  Plan plan;
  const cudnnDataType_t type = cudnn_type(p.dtype);
  const auto layout = p.channels_first ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC;
  MT_CUDNN_CHECK(cudnnCreateTensorDescriptor(&plan.x));
  MT_CUDNN_CHECK(cudnnCreateTensorDescriptor(&plan.y));
  MT_CUDNN_CHECK(cudnnCreateFilterDescriptor(&plan.w));
  MT_CUDNN_CHECK(cudnnCreateConvolutionDescriptor(&plan.convolution));
  MT_CUDNN_CHECK(cudnnSetTensor4dDescriptor(plan.x, layout, type, p.n, p.c, p.h, p.w));
  MT_CUDNN_CHECK(cudnnSetTensor4dDescriptor(plan.y, layout, type, p.n, p.o, p.oh, p.ow));
  MT_CUDNN_CHECK(cudnnSetFilter4dDescriptor(plan.w, type, layout, p.o, p.c / p.groups, p.kh, p.kw));
  MT_CUDNN_CHECK(cudnnSetConvolution2dDescriptor(plan.convolution, p.padding[0], p.padding[1], p.stride[0], p.stride[1], p.dilation[0], p.dilation[1],
                                                 CUDNN_CROSS_CORRELATION, type == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT));
  MT_CUDNN_CHECK(cudnnSetConvolutionGroupCount(plan.convolution, p.groups));
  // FMA_MATH keeps f32 products in f32; the default may use TF32. No type is ever narrowed to f16.
  const auto math = type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? CUDNN_TENSOR_OP_MATH : p.tf32 ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH;
  MT_CUDNN_CHECK(cudnnSetConvolutionMathType(plan.convolution, math));
  constexpr int kMost = 16;
  int count = 0;
  switch (p.direction) {
    case Direction::forward: {
      cudnnConvolutionFwdAlgoPerf_t found[kMost];
      if (cudnnGetConvolutionForwardAlgorithm_v7(handle, plan.x, plan.w, plan.convolution, plan.y, kMost, &count, found) == CUDNN_STATUS_SUCCESS)
        choose(found, count, plan);
      break;
    }
    case Direction::grad_input: {
      cudnnConvolutionBwdDataAlgoPerf_t found[kMost];
      if (cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, plan.w, plan.y, plan.convolution, plan.x, kMost, &count, found) == CUDNN_STATUS_SUCCESS)
        choose(found, count, plan);
      break;
    }
    case Direction::grad_weight: {
      cudnnConvolutionBwdFilterAlgoPerf_t found[kMost];
      if (cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, plan.x, plan.y, plan.convolution, plan.w, kMost, &count, found) == CUDNN_STATUS_SUCCESS)
        choose(found, count, plan);
      break;
    }
  }
  return plan;
}

std::int32_t small(std::int64_t n) {
  MT_CHECK(ShapeError, n >= 0 && n < (std::int64_t{1} << 31), "conv2d: a size of ", n, " is more than the GPU library takes");
  return static_cast<std::int32_t>(n);
}

/// One convolution of `direction`; x, w, y in one dtype and layout. False when the library refuses it.
bool convolve(CudaBackend& backend, Direction direction, bool channels_first, bool tf32, const Tensor& x, const Tensor& w, const Tensor& y,
              const Conv2dOptions& o, bool accumulate) {
  for (const Tensor* t : {&x, &w, &y}) small(t->numel());
  Problem p{};
  p.direction = direction;
  p.device = backend.device().index;
  p.dtype = static_cast<std::int32_t>(x.dtype());
  p.channels_first = channels_first;
  p.tf32 = tf32;
  p.n = small(x.size(0)), p.c = small(x.size(1)), p.h = small(x.size(2)), p.w = small(x.size(3));
  p.o = small(w.size(0)), p.kh = small(w.size(2)), p.kw = small(w.size(3)), p.oh = small(y.size(2)), p.ow = small(y.size(3));
  for (int i = 0; i < 2; ++i) p.stride[i] = small(o.stride[i]), p.padding[i] = small(o.padding[i]), p.dilation[i] = small(o.dilation[i]);
  p.groups = small(o.groups);
  const cudnnHandle_t handle = cudnn_handle(backend);
  static auto& plans = *new std::unordered_map<Problem, Plan, ProblemHash>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto it = plans.find(p);
  if (it == plans.end()) it = plans.emplace(p, make_plan(handle, p)).first;
  const Plan& plan = it->second;
  if (plan.algorithm < 0) return false;
  const Tensor scratch = backend.workspace(plan.workspace);
  const float one32 = 1, beta32 = accumulate ? 1.0f : 0.0f;
  const double one64 = 1, beta64 = accumulate ? 1 : 0;
  const bool wide = x.dtype() == DType::f64;
  const void *alpha = wide ? static_cast<const void*>(&one64) : &one32, *beta = wide ? static_cast<const void*>(&beta64) : &beta32;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  switch (direction) {
    case Direction::forward:
      status = cudnnConvolutionForward(handle, alpha, plan.x, x.data(), plan.w, w.data(), plan.convolution, static_cast<cudnnConvolutionFwdAlgo_t>(plan.algorithm),
                                       scratch.data(), plan.workspace, beta, plan.y, y.data());
      break;
    case Direction::grad_input:
      status = cudnnConvolutionBackwardData(handle, alpha, plan.w, w.data(), plan.y, y.data(), plan.convolution,
                                            static_cast<cudnnConvolutionBwdDataAlgo_t>(plan.algorithm), scratch.data(), plan.workspace, beta, plan.x, x.data());
      break;
    case Direction::grad_weight:
      status = cudnnConvolutionBackwardFilter(handle, alpha, plan.x, x.data(), plan.y, y.data(), plan.convolution,
                                              static_cast<cudnnConvolutionBwdFilterAlgo_t>(plan.algorithm), scratch.data(), plan.workspace, beta, plan.w, w.data());
      break;
  }
  if (status == CUDNN_STATUS_NOT_SUPPORTED) {
    it->second.algorithm = -1;
    return false;
  }
  MT_CUDNN_CHECK(status);
  ++backend.counters.launches;
  return true;
}

/// Runs `convolve` on the tensors as they are, or on channels-first copies where the library has nothing for channels-last.
void run(CudaBackend& backend, Direction direction, bool tf32, const Tensor& x, const Tensor& w, const Tensor& y, const Conv2dOptions& o, bool accumulate) {
  if (convolve(backend, direction, false, tf32, x, w, y, o, accumulate)) return;
  const MemoryScope scope(MemoryCategory::workspace);
  Tensor copies[3];
  const Tensor* originals[] = {&x, &w, &y};
  const int output = direction == Direction::forward ? 2 : direction == Direction::grad_input ? 0 : 1;
  for (int i = 0; i < 3; ++i) {
    copies[i] = empty(originals[i]->shape(), {x.dtype(), x.device()});
    if (i != output || accumulate) backend.copy(*originals[i], copies[i]);
  }
  MT_CHECK(CudaError, convolve(backend, direction, true, tf32, copies[0], copies[1], copies[2], o, accumulate), "conv2d: cuDNN has no algorithm for x ", x, ", w ", w);
  Tensor target = *originals[output];
  backend.copy(copies[output], target);
}

bool use_tf32() { return float32_matmul() == Float32Matmul::tf32; }

}  // namespace

void CudaBackend::conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  const detail::OpRange range("conv2d");
  if (w.numel() == 0) return fill(0, y);
  run(*this, Direction::forward, use_tf32(), x, w, y, options, false);
}

void CudaBackend::conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) {
  if (gx.numel() == 0) return;
  const detail::OpRange range("conv2d_grad_input");
  if (g.numel() == 0 || w.numel() == 0) return fill(0, gx);
  run(*this, Direction::grad_input, use_tf32(), gx, w, g, options, false);
}

void CudaBackend::conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate, Tensor& gw) {
  if (gw.numel() == 0) return;
  const detail::OpRange range("conv2d_grad_weight");
  if (g.numel() == 0 || x.numel() == 0) {
    if (!accumulate) fill(0, gw);
    return;
  }
  if (gw.dtype() == x.dtype()) return run(*this, Direction::grad_weight, use_tf32(), x, gw, g, options, accumulate);
  // The library does not mix types. Widened f16 and bf16 values are exact in TF32 (10 fraction bits), so TF32 products of
  // them are exact and the sums are in f32: the tensor cores give what an f32 result asks for.
  const MemoryScope scope(MemoryCategory::workspace);
  const std::int64_t casts = counters.casts;
  Tensor wide_x = empty_like(x, gw.dtype()), wide_g = empty_like(g, gw.dtype());
  copy(x, wide_x);
  copy(g, wide_g);
  counters.casts = casts;  // part of the product
  run(*this, Direction::grad_weight, true, wide_x, gw, wide_g, options, accumulate);
}

}  // namespace mantissa
