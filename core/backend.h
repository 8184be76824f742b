#pragma once
// The whole contract between ops and devices: one class, one subclass a device (core/cpu/, cuda/). A device that misses
// a kernel does not compile. Rules for every kernel:
//   * Arguments are checked by the op (autograd/ops_*.cpp); kernels assume what is written here.
//   * Dtype is erased: a kernel visits the dtype of its tensors. Compute is f32 (f64 for f64); every sum accumulates in
//     f32 (f64) whatever the storage type and rounds once. The result of a kernel is deterministic.
//   * Any strides are legal unless said otherwise, zero sizes too (then nothing happens, or the empty sum is written).
//   * Outputs are the last arguments; they are allocated by the caller and are completely overwritten, unless an
//     `accumulate` flag asks to add to them.
//   * Scratch memory is taken under MemoryCategory::workspace from allocator().

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/elementwise.h"
#include "core/memory.h"
#include "core/random.h"
#include "core/tensor.h"

namespace mantissa {

// core/step.h: what decides a training step. Only the kernels of the step and the optimizers need more than the names.
struct StepState;
struct StepRules;
struct ScaleState;
struct UpdateTensor;
struct SgdRule;
struct AdamRule;

enum class CompareOp : std::uint8_t { equal, not_equal, less, less_equal, greater, greater_equal };
enum class ReduceOp : std::uint8_t { sum, mean, max, min };
enum class RandomKind : std::uint8_t { uniform, normal, bernoulli };
enum class Pooling : std::uint8_t { max, average };
enum class NormKind : std::uint8_t { layer, rms };

/// y = activation(alpha a b + bias) (+ y). With `pre_activation`, alpha a b + bias is stored there as well.
/// In backward, `grad_activation` and its saved input turn the product g into activation'(input) g.
struct MatmulOptions {
  double alpha = 1;
  bool accumulate = false;       // y += instead of y =
  const Tensor* bias = nullptr;  // [n], of y's dtype
  Activation activation = Activation::none;
  Tensor* pre_activation = nullptr;  // like y; read by backward (gelu_tanh)
  Activation grad_activation = Activation::none;
  const Tensor* grad_input = nullptr;  // gelu_tanh: the saved pre-activation; relu: the saved output
};

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
};

struct AttentionOptions {
  bool causal = false;
  double scale = 0;  // the factor on q k^T; the op resolves the default 1/sqrt(head size)
};

struct Conv2dOptions {
  std::int64_t stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  std::int64_t groups = 1;
};

struct Pool2dOptions {
  std::int64_t kernel[2] = {2, 2}, stride[2] = {2, 2}, padding[2] = {0, 0};
  bool count_include_pad = true;  // average pooling
};

/// What the backend did so far; tests prove with it that a steady step neither waits, nor allocates, nor casts weights.
struct BackendCounters {
  std::int64_t launches = 0;          // kernels (library calls count as one)
  std::int64_t synchronizations = 0;  // times the host waited for the device
  std::int64_t casts = 0;             // copies that change the dtype
  std::int64_t transfers = 0;         // copies between host and device
};

/// Work that was recorded instead of run, and can be run again and again as a whole at little cost on the host (a
/// CUDA graph). The memory that it uses stays reserved as long as it lives.
class Recording {
 public:
  virtual ~Recording() = default;
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  void replay() {
    for (const auto& f : before) f();
    launch();
  }

  std::vector<std::function<void()>> before;      // what the host does before each replay
  std::vector<std::shared_ptr<const void>> kept;  // memory that the work uses

 protected:
  virtual void launch() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device device() const = 0;
  virtual CachingAllocator& allocator() = 0;
  virtual void synchronize() = 0;
  BackendCounters counters;

  // Host memory from which copies to the device need not wait; plain memory on the CPU. It may be dropped as soon as
  // a copy is queued: a block is handed out again only when the work queued before it was dropped is done.
  virtual std::shared_ptr<Storage> pinned_storage(std::size_t bytes) = 0;
  /// Contiguous bytes between host memory and a contiguous tensor of this device. to_host waits; from_host does not
  /// when the source is pinned (the caller then keeps it unchanged until the work is done).
  virtual void copy_from_host(const void* source, Tensor& y) = 0;
  virtual void copy_to_host(const Tensor& x, void* target) = 0;
  /// The same without waiting, into pinned memory.
  virtual void mirror_to_host(const Tensor& x, void* pinned) = 0;

  // ---- recording: between begin and end nothing runs, and what would wait for the device is an error. One thread uses
  // the device meanwhile. train/captured_step.h is the use of it. ----
  virtual bool can_record() const = 0;
  virtual void begin_recording() = 0;
  virtual std::unique_ptr<Recording> end_recording() = 0;
  virtual void abandon_recording() noexcept = 0;
  bool recording() const { return recording_ != nullptr; }
  /// While recording: f runs before each replay.
  void before_replay(std::function<void()> f) {
    if (recording_) recording_->before.push_back(std::move(f));
  }
  /// While recording: memory that was not allocated since it began lives as long as the recording.
  void keep(std::shared_ptr<const void> owner) {
    if (recording_) recording_->kept.push_back(std::move(owner));
  }

  // ---- elementwise ----
  virtual void fill(double value, Tensor& y) = 0;           // any dtype
  virtual void copy(const Tensor& x, Tensor& y) = 0;        // any dtypes and strides; x broadcasts to y
  virtual void accumulate(const Tensor& x, Tensor& y) = 0;  // y += x; same shape, float dtypes may differ
  virtual void unary(const UnaryOp& op, const Tensor& x, Tensor& y) = 0;
  /// gx = op.grad(g, saved); saved is x, y or undefined, as op.needs says. gx may be g.
  virtual void unary_grad(const UnaryOp& op, const Tensor& g, const Tensor& saved, Tensor& gx) = 0;
  virtual void binary(const BinaryOp& op, const Tensor& a, const Tensor& b, Tensor& y) = 0;  // a, b broadcast to y
  /// The gradient of operand 0 (a) or 1 (b) in the broadcast shape; a, b undefined when the op does not read them.
  virtual void binary_grad(const BinaryOp& op, int operand, const Tensor& g, const Tensor& a, const Tensor& b,
                           Tensor& gx) = 0;
  virtual void compare(CompareOp op, const Tensor& a, const Tensor& b, Tensor& y) = 0;  // any equal dtypes; y bool
  virtual void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) = 0;  // all broadcast to y
  /// y = keep ? x / (1 - p) : 0, keep drawn from the stream; the gradient is the same call on g. x, y contiguous; p < 1
  /// or 1.
  virtual void dropout(const Tensor& x, double p, PhiloxState state, Tensor& y) = 0;
  /// uniform [a, b), normal(mean a, deviation b), or bernoulli(a) as 0 and 1; y contiguous.
  virtual void random(RandomKind kind, double a, double b, PhiloxState state, Tensor& y) = 0;

  // ---- reductions ----
  /// y has x's rank, with size 1 on the reduced axes; f32 and 16-bit types may mix.
  virtual void reduce(ReduceOp op, const Tensor& x, bool accumulate, Tensor& y) = 0;
  /// Index of the first largest element along an axis (NaN counts as largest); y i64 with size 1 on that axis.
  virtual void argmax(const Tensor& x, int axis, Tensor& y) = 0;

  // ---- matrix products ----
  /// a[..., m, k] b[..., k, n] -> y[..., m, n]. Transposes are strides; batch axes broadcast by stride 0. y may be f32
  /// for 16-bit a and b (weight gradients). Inner strides: one of the last two axes of a, b and y has stride 1.
  virtual void matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y) = 0;

  // ---- rows: the last axis, contiguous inputs and outputs ----
  virtual void softmax(const Tensor& x, bool log, Tensor& y) = 0;  // y's dtype may be f32 for 16-bit x
  virtual void softmax_grad(const Tensor& g, const Tensor& y, bool log, Tensor& gx) = 0;
  /// x[n, classes], targets[n] i32/i64 in [0, classes) or ignore_index (checked by the op where it can; a bad target on
  /// the device sets `status`). loss[1] = mean over counted rows (0 when none); lse[n] = log sum exp; count[1]: rows
  /// counted.
  virtual void cross_entropy(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options, Tensor& loss,
                             Tensor& lse, Tensor& count) = 0;
  /// gx = g[1] / count (softmax(x) - target distribution); gx may be x itself.
  virtual void cross_entropy_grad(const Tensor& g, const Tensor& x, const Tensor& targets,
                                  const CrossEntropyOptions& options, const Tensor& lse, const Tensor& count,
                                  Tensor& gx) = 0;
  /// y = (x + residual - mean) rstd w + b over the last axis. residual, w, b may be undefined; sum (written when
  /// residual is defined) = x + residual, rounded to x's dtype before it is normalised. mean and rstd: [rows] of the
  /// compute dtype; mean is undefined for rms. w, b: [columns] of the compute dtype.
  virtual void norm(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b,
                    double eps, Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd) = 0;
  /// gx from g (gradient of y) plus g_sum when defined; gw, gb (when defined) of the compute dtype, overwritten or
  /// added to.
  virtual void norm_grad(NormKind kind, const Tensor& g, const Tensor& g_sum, const Tensor& x, const Tensor& w,
                         const Tensor& mean, const Tensor& rstd, bool accumulate, Tensor& gx, Tensor& gw,
                         Tensor& gb) = 0;

  // ---- indexing ----
  virtual void embedding(const Tensor& ids, const Tensor& w, Tensor& y) = 0;  // y[..., d] = w[ids[...], d]
  /// gw[rows, d] (f32 or f64) = or += sum of the rows of g with each id, in a fixed order.
  virtual void embedding_grad(const Tensor& g, const Tensor& ids, bool accumulate, Tensor& gw) = 0;
  /// y[i...] = x[i... with axis replaced by index[i...]]; index has x's rank, y index's shape.
  virtual void gather(const Tensor& x, int axis, const Tensor& index, Tensor& y) = 0;
  /// y[i... with axis replaced by index[i...]] += x[i...], in a fixed order; y of the compute dtype.
  virtual void scatter_add(const Tensor& x, int axis, const Tensor& index, Tensor& y) = 0;
  /// False when any index lies outside [low, high), except `ignored`. Waits for the device: used on CPU tensors always,
  /// on the GPU only in checking mode.
  virtual bool indices_in_range(const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored) = 0;

  // ---- attention: logical [B, H, T, D] of any strides with stride 1 on D; kv heads divide q heads ----
  virtual void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, Tensor& y,
                         Tensor& lse) = 0;  // lse: [B, H, T] of the compute dtype
  virtual void attention_grad(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                              const Tensor& lse, const AttentionOptions& options, Tensor& gq, Tensor& gk,
                              Tensor& gv) = 0;

  // ---- images: logical [N, C, H, W], stored channels-last; w[O, C/groups, KH, KW] likewise ----
  virtual void conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) = 0;
  virtual void conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) = 0;
  virtual void conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate,
                                  Tensor& gw) = 0;  // gw may be f32 for 16-bit g and x
  virtual void pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) = 0;
  virtual void pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y,
                           const Pool2dOptions& options,
                           Tensor& gx) = 0;  // max: to the first largest element of each window
  /// Training: batch statistics, running = (1 - momentum) running + momentum batch (unbiased variance);
  /// mean and rstd [C] are saved for backward. Parameters and statistics are of the compute dtype.
  virtual void batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum, bool training,
                          Tensor& running_mean, Tensor& running_var, Tensor& y, Tensor& mean, Tensor& rstd) = 0;
  virtual void batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean,
                               const Tensor& rstd, bool training, Tensor& gx, Tensor& gw, Tensor& gb) = 0;

  // ---- the training step: one launch for all tensors, decisions taken on the device (core/step.h) ----
  /// One read of all gradients: sum of squares and number of non-finite elements, into state->check.
  virtual void check_gradients(std::span<const Tensor> gradients, StepState* state) = 0;
  /// The verdict, clip factor, learning rate, step count and scale of one optimizer step (`decide_step` on the device).
  /// The states are written to the mirrors too: pinned memory, for a host that does not wait; null: none.
  virtual void decide(const StepRules* rules, StepState* optimizer, ScaleState* scale, bool update_scale,
                      StepState* mirror, ScaleState* scale_mirror) = 0;
  virtual void sgd_update(std::span<const UpdateTensor> tensors, const SgdRule& rule, const StepState* state) = 0;
  virtual void adam_update(std::span<const UpdateTensor> tensors, const AdamRule& rule, const StepState* state) = 0;
  /// target = source when the last verdict was "skip" (restores buffers that a skipped step must not change).
  virtual void restore_if_skipped(const Tensor& source, const StepState* state, Tensor& target) = 0;

 protected:
  std::unique_ptr<Recording> recording_;
};

/// The backend of a device; DeviceError with what is missing when there is none.
Backend& backend(Device device);
inline Backend& backend(const Tensor& x) { return backend(x.device()); }

Backend& cpu_backend();            // core/cpu/
Backend& cuda_backend(int index);  // cuda/, or core/no_cuda.cpp in a build without CUDA

/// Matrix products of f32 tensors on the GPU: full f32, or TF32 (10-bit fractions, faster). Process-wide; default f32.
enum class Float32Matmul : std::uint8_t { full, tf32 };
void set_float32_matmul(Float32Matmul mode);
Float32Matmul float32_matmul();

/// Threads of the CPU backend (default: the number of cores, or OMP_NUM_THREADS).
void set_num_threads(int n);
int num_threads();

}  // namespace mantissa
