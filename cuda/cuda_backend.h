#pragma once
// The CUDA backend of one device. All work of a device runs in order on one stream of ours.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <memory>

#include "core/backend.h"

namespace mantissa {

class PinnedPool;     // cuda/cuda_backend.cpp: host memory for copies that do not wait
struct MatmulCache;   // cuda/matmul.cpp: the algorithm chosen for each shape
struct UpdateCache;   // cuda/optimizer.cu: pointer tables of multi-tensor launches
class CudaRecording;  // cuda/recording.cpp: a CUDA graph

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int index);
  ~CudaBackend() override;

  /// The one stream; also makes this device current for the calling thread.
  cudaStream_t stream() const;
  const cudaDeviceProp& properties() const { return properties_; }
  /// Scratch memory (u8). It may be dropped as soon as the kernels that use it are launched: reuse is in
  /// stream order.
  Tensor workspace(std::size_t bytes);
  /// A copy of host memory that kernels read; while recording it is made at once, not at each replay.
  Tensor constant(const void* source, std::size_t bytes);
  /// Where a draw starts: `state`, or while recording a place relative to *base, which each replay sets anew.
  struct RandomStart {
    PhiloxState state;
    const PhiloxState* base = nullptr;
  };
  RandomStart random_start(PhiloxState state);

  Device device() const override;
  CachingAllocator& allocator() override;
  void synchronize() override;
  std::shared_ptr<Storage> pinned_storage(std::size_t bytes) override;
  void copy_from_host(const void* source, Tensor& y) override;
  void copy_to_host(const Tensor& x, void* target) override;
  void mirror_to_host(const Tensor& x, void* pinned) override;
  bool can_record() const override;
  void begin_recording() override;
  std::unique_ptr<Recording> end_recording() override;
  void abandon_recording() noexcept override;
  void fill(double value, Tensor& y) override;
  void copy(const Tensor& x, Tensor& y) override;
  void accumulate(const Tensor& x, Tensor& y) override;
  void unary(const UnaryOp& op, const Tensor& x, Tensor& y) override;
  void unary_grad(const UnaryOp& op, const Tensor& g, const Tensor& saved, Tensor& gx) override;
  void binary(const BinaryOp& op, const Tensor& a, const Tensor& b, Tensor& y) override;
  void binary_grad(const BinaryOp& op, int operand, const Tensor& g, const Tensor& a, const Tensor& b,
                   Tensor& gx) override;
  void compare(CompareOp op, const Tensor& a, const Tensor& b, Tensor& y) override;
  void where(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) override;
  void dropout(const Tensor& x, double p, PhiloxState state, Tensor& y) override;
  void random(RandomKind kind, double a, double b, PhiloxState state, Tensor& y) override;
  void reduce(ReduceOp op, const Tensor& x, bool accumulate, Tensor& y) override;
  void argmax(const Tensor& x, int axis, Tensor& y) override;
  void matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y) override;
  void softmax(const Tensor& x, bool log, Tensor& y) override;
  void softmax_grad(const Tensor& g, const Tensor& y, bool log, Tensor& gx) override;
  void cross_entropy(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options, Tensor& loss,
                     Tensor& lse, Tensor& count) override;
  void cross_entropy_grad(const Tensor& g, const Tensor& x, const Tensor& targets, const CrossEntropyOptions& options,
                          const Tensor& lse, const Tensor& count, Tensor& gx) override;
  void norm(NormKind kind, const Tensor& x, const Tensor& residual, const Tensor& w, const Tensor& b, double eps,
            Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd) override;
  void norm_grad(NormKind kind, const Tensor& g, const Tensor& g_sum, const Tensor& x, const Tensor& w,
                 const Tensor& mean, const Tensor& rstd, bool accumulate, Tensor& gx, Tensor& gw, Tensor& gb) override;
  void embedding(const Tensor& ids, const Tensor& w, Tensor& y) override;
  void embedding_grad(const Tensor& g, const Tensor& ids, bool accumulate, Tensor& gw) override;
  void gather(const Tensor& x, int axis, const Tensor& index, Tensor& y) override;
  void scatter_add(const Tensor& x, int axis, const Tensor& index, Tensor& y) override;
  bool indices_in_range(const Tensor& index, std::int64_t low, std::int64_t high, std::int64_t ignored) override;
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, Tensor& y,
                 Tensor& lse) override;
  void attention_grad(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                      const Tensor& lse, const AttentionOptions& options, Tensor& gq, Tensor& gk, Tensor& gv) override;
  void conv2d(const Tensor& x, const Tensor& w, const Conv2dOptions& options, Tensor& y) override;
  void conv2d_grad_input(const Tensor& g, const Tensor& w, const Conv2dOptions& options, Tensor& gx) override;
  void conv2d_grad_weight(const Tensor& g, const Tensor& x, const Conv2dOptions& options, bool accumulate,
                          Tensor& gw) override;
  void pool2d(Pooling kind, const Tensor& x, const Pool2dOptions& options, Tensor& y) override;
  void pool2d_grad(Pooling kind, const Tensor& g, const Tensor& x, const Tensor& y, const Pool2dOptions& options,
                   Tensor& gx) override;
  void batch_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, double momentum, bool training,
                  Tensor& running_mean, Tensor& running_var, Tensor& y, Tensor& mean, Tensor& rstd) override;
  void batch_norm_grad(const Tensor& g, const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd,
                       bool training, Tensor& gx, Tensor& gw, Tensor& gb) override;
  void check_gradients(std::span<const Tensor> gradients, StepState* state) override;
  void decide(const StepRules* rules, StepState* optimizer, ScaleState* scale, bool update_scale, StepState* mirror,
              ScaleState* scale_mirror) override;
  void sgd_update(std::span<const UpdateTensor> tensors, const SgdRule& rule, const StepState* state) override;
  void adam_update(std::span<const UpdateTensor> tensors, const AdamRule& rule, const StepState* state) override;
  void restore_if_skipped(const Tensor& source, const StepState* state, Tensor& target) override;

 private:
  void matmul_in_steps(const Tensor& a, const Tensor& b, const MatmulOptions& options, Tensor& y);
  UpdateCache& update_cache();
  CudaRecording* cuda_recording() const;

  int index_;
  cudaStream_t stream_ = nullptr;
  cudaDeviceProp properties_{};
  CachingAllocator allocator_;
  cublasLtHandle_t cublas_ = nullptr;
  // Shared pointers: their types are complete only in the files that use them.
  std::shared_ptr<MatmulCache> matmul_cache_;
  std::shared_ptr<UpdateCache> updates_;
  std::shared_ptr<PinnedPool> pinned_;
};

}  // namespace mantissa
