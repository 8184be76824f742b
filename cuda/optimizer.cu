// The training step on the device: one read of all gradients, one decision, one update of everything.
//
// All tensors are cut into chunks of a fixed size; a table of the chunks lives on the device and is uploaded again only
// when a pointer changes, which in a steady step it does not. One block works on one chunk.
#include <cstring>
#include <list>
#include <vector>

#include "core/step.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"

namespace mantissa {
namespace {

constexpr int kChunk = 16384;  // elements: 64 KiB of f32, enough for 256 threads with 16 vectors each

struct GradientChunk {
  const void* gradient;
  std::int32_t count;
  std::int32_t wide;  // f64
};

struct UpdateChunk {
  void *parameter, *state1, *state2, *working;
  const void* gradient;
  std::int32_t count;
  float lr_scale, weight_decay;
  std::int32_t kind;  // bit 0: f64; bit 1: a working copy; bit 2: it is bf16
};

struct Found {
  double squares;
  std::int64_t infs, nans;
};

__device__ Found operator+(Found a, Found b) { return {a.squares + b.squares, a.infs + b.infs, a.nans + b.nans}; }

/// Sum over the block in a fixed order; valid in thread 0.
__device__ Found block_sum(Found mine) {
  __shared__ Found partial[kThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    mine = mine + Found{__shfl_down_sync(~0u, mine.squares, offset), __shfl_down_sync(~0u, mine.infs, offset), __shfl_down_sync(~0u, mine.nans, offset)};
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Found total{0, 0, 0};
  if (threadIdx.x == 0)
    for (const Found& p : partial) total = total + p;
  return total;
}

template <class T>
__device__ void examine(T x, Found& f) {
  f.squares += static_cast<double>(x) * static_cast<double>(x);
  f.infs += isinf(x) ? 1 : 0;
  f.nans += isnan(x) ? 1 : 0;
}

// Bytes: every gradient once; 124 M f32: 0.5 GB. Squares are summed in f64: no gradient is too large.
__global__ void __launch_bounds__(kThreads) check_kernel(const GradientChunk* chunks, Found* partials) {
  const GradientChunk chunk = chunks[blockIdx.x];
  Found f{0, 0, 0};
  if (chunk.wide) {
    const double* x = static_cast<const double*>(chunk.gradient);
    for (int i = threadIdx.x; i < chunk.count; i += kThreads) examine(x[i], f);
  } else {
    const float* x = static_cast<const float*>(chunk.gradient);
    const int vectors = reinterpret_cast<std::uintptr_t>(x) % 16 == 0 ? chunk.count / 4 : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      const float4 v = reinterpret_cast<const float4*>(x)[i];
      examine(v.x, f);
      examine(v.y, f);
      examine(v.z, f);
      examine(v.w, f);
    }
    for (int i = 4 * vectors + threadIdx.x; i < chunk.count; i += kThreads) examine(x[i], f);
  }
  f = block_sum(f);
  if (threadIdx.x == 0) partials[blockIdx.x] = f;
}

__global__ void __launch_bounds__(kThreads) check_total_kernel(const Found* partials, std::int64_t n, StepState* state) {
  Found f{0, 0, 0};
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) f = f + partials[i];
  f = block_sum(f);
  if (threadIdx.x != 0) return;
  state->sum_of_squares = f.squares;
  state->infs = f.infs;
  state->nans = f.nans;
}

__global__ void decide_kernel(StepRules rules, StepState* optimizer, ScaleState* scale, bool update) { decide_step(rules, *optimizer, scale, update); }

template <class A>
__device__ A clipped(A g, A factor, A limit) {
  g *= factor;
  if (limit > A(0)) g = g < -limit ? -limit : g > limit ? limit : g;
  return g;
}

__device__ void store_working(void* working, std::int32_t kind, std::int64_t i, float w) {
  if (kind & 4) {
    static_cast<__nv_bfloat16*>(working)[i] = __float2bfloat16_rn(w);
  } else {
    static_cast<__half*>(working)[i] = __float2half_rn(w);
  }
}

__device__ uint2 pack_working(std::int32_t kind, float4 w) {
  uint2 out;
  if (kind & 4) {
    const __nv_bfloat162 a = __floats2bfloat162_rn(w.x, w.y), b = __floats2bfloat162_rn(w.z, w.w);
    out = {*reinterpret_cast<const unsigned*>(&a), *reinterpret_cast<const unsigned*>(&b)};
  } else {
    const __half2 a = __floats2half2_rn(w.x, w.y), b = __floats2half2_rn(w.z, w.w);
    out = {*reinterpret_cast<const unsigned*>(&a), *reinterpret_cast<const unsigned*>(&b)};
  }
  return out;
}

/// How a rule is applied to elements: Rule<A> has (g, w, m, v).
template <class A>
struct AdamMath {
  AdamElement<A> element;
  __device__ AdamMath(const AdamRule& r, const UpdateChunk& c, const StepState& s, const double* corrections)
      : element{static_cast<A>(s.learning_rate * c.lr_scale), static_cast<A>(c.weight_decay), static_cast<A>(r.beta1), static_cast<A>(r.beta2),
                static_cast<A>(1 - r.beta1), static_cast<A>(1 - r.beta2), static_cast<A>(r.eps), static_cast<A>(corrections[0]), static_cast<A>(corrections[1]), r.decoupled} {}
  __device__ void operator()(A g, A& w, A& m, A& v) const { element(g, w, m, v); }
};

template <class A>
struct SgdMath {
  SgdElement<A> element;
  __device__ SgdMath(const SgdRule& r, const UpdateChunk& c, const StepState& s, const double*)
      : element{static_cast<A>(s.learning_rate * c.lr_scale), static_cast<A>(c.weight_decay), static_cast<A>(r.momentum), static_cast<A>(r.dampening),
                r.nesterov, s.applied == 1} {}
  __device__ void operator()(A g, A& w, A& m, A&) const { element(g, w, m); }
};

// Bytes an element (Adam): 16 read (w, g, m, v), 12 written, 2 for the working copy; 124 M: 3.7 GB, floor 0.88 ms at 4.2 TB/s.
template <template <class> class Math, class Rule, bool kFirst, bool kSecond>
__global__ void __launch_bounds__(kThreads) update_kernel(const UpdateChunk* chunks, Rule rule, const StepState* state) {
  if (state->verdict != Verdict::applied) return;
  __shared__ double corrections[2];
  if constexpr (kSecond) {  // Adam's bias corrections, in f64 once a block
    if (threadIdx.x < 2) corrections[threadIdx.x] = 1 - pow(threadIdx.x == 0 ? rule.beta1 : rule.beta2, static_cast<double>(state->applied));
    __syncthreads();
  }
  const UpdateChunk c = chunks[blockIdx.x];
  if (c.kind & 1) {
    const Math<double> math(rule, c, *state, corrections);
    double *w = static_cast<double*>(c.parameter), *m = static_cast<double*>(c.state1), *v = static_cast<double*>(c.state2), unused = 0;
    for (int i = threadIdx.x; i < c.count; i += kThreads)
      math(clipped<double>(static_cast<const double*>(c.gradient)[i], state->factor, state->max_value), w[i], kFirst ? m[i] : unused, kSecond ? v[i] : unused);
    return;
  }
  const Math<float> math(rule, c, *state, corrections);
  const float factor = state->factor, limit = state->max_value;
  const float* g = static_cast<const float*>(c.gradient);
  float *w = static_cast<float*>(c.parameter), *m = static_cast<float*>(c.state1), *v = static_cast<float*>(c.state2);
  const auto bits = reinterpret_cast<std::uintptr_t>(g) | reinterpret_cast<std::uintptr_t>(w) | reinterpret_cast<std::uintptr_t>(m) | reinterpret_cast<std::uintptr_t>(v);
  const int vectors = bits % 16 == 0 ? c.count / 4 : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    float4 vg = reinterpret_cast<const float4*>(g)[i], vw = reinterpret_cast<float4*>(w)[i], vm{}, vv{};
    if constexpr (kFirst) vm = reinterpret_cast<float4*>(m)[i];
    if constexpr (kSecond) vv = reinterpret_cast<float4*>(v)[i];
    math(clipped(vg.x, factor, limit), vw.x, vm.x, vv.x);
    math(clipped(vg.y, factor, limit), vw.y, vm.y, vv.y);
    math(clipped(vg.z, factor, limit), vw.z, vm.z, vv.z);
    math(clipped(vg.w, factor, limit), vw.w, vm.w, vv.w);
    reinterpret_cast<float4*>(w)[i] = vw;
    if constexpr (kFirst) reinterpret_cast<float4*>(m)[i] = vm;
    if constexpr (kSecond) reinterpret_cast<float4*>(v)[i] = vv;
    if (c.kind & 2) static_cast<uint2*>(c.working)[i] = pack_working(c.kind, vw);
  }
  for (int i = 4 * vectors + threadIdx.x; i < c.count; i += kThreads) {
    float unused = 0;
    math(clipped(g[i], factor, limit), w[i], kFirst ? m[i] : unused, kSecond ? v[i] : unused);
    if (c.kind & 2) store_working(c.working, c.kind, i, w[i]);
  }
}

__global__ void restore_kernel(const unsigned char* source, const StepState* state, std::int64_t bytes, unsigned char* target) {
  if (state->verdict == Verdict::applied || state->verdict == Verdict::nothing_to_do) return;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x)
    target[i] = source[i];
}

void* at(void* p, std::int64_t bytes) { return p == nullptr ? nullptr : static_cast<std::byte*>(p) + bytes; }

}  // namespace

/// Tables on the device, by content; a program has a few (one a launch and optimizer), so the list is short.
struct UpdateCache {
  struct Table {
    std::vector<std::byte> content;
    Tensor device;
  };
  std::list<Table> tables;  // most recently used first

  template <class Chunk>
  const Chunk* find(CudaBackend& backend, const std::vector<Chunk>& chunks) {
    const auto* bytes = reinterpret_cast<const std::byte*>(chunks.data());
    const std::size_t size = chunks.size() * sizeof(Chunk);
    for (auto it = tables.begin(); it != tables.end(); ++it) {
      if (it->content.size() != size || std::memcmp(it->content.data(), bytes, size) != 0) continue;
      tables.splice(tables.begin(), tables, it);
      return static_cast<const Chunk*>(tables.front().device.data());
    }
    constexpr std::size_t kTables = 16;
    if (tables.size() == kTables) tables.pop_back();
    const std::shared_ptr<Storage> staging = backend.pinned_storage(size);
    std::memcpy(staging->data, bytes, size);
    Tensor device = backend.workspace(size);
    backend.copy_from_host(staging->data, device);
    tables.push_front({{bytes, bytes + size}, device});
    return static_cast<const Chunk*>(tables.front().device.data());
  }
};

void CudaBackend::check_gradients(std::span<const Tensor> gradients, StepState* state) {
  const detail::OpRange range("check gradients");
  std::vector<GradientChunk> chunks;
  for (const Tensor& g : gradients) {
    const bool wide = g.dtype() == DType::f64;
    for (std::int64_t first = 0; first < g.numel(); first += kChunk)
      chunks.push_back({at(g.data(), first * (wide ? 8 : 4)), static_cast<std::int32_t>(std::min<std::int64_t>(kChunk, g.numel() - first)), wide});
  }
  const cudaStream_t on = stream();
  if (updates_ == nullptr) updates_ = std::make_shared<UpdateCache>();
  const auto n = static_cast<std::int64_t>(chunks.size());
  Found* partials = nullptr;
  Tensor scratch;
  if (n > 0) {
    const GradientChunk* table = updates_->find(*this, chunks);
    scratch = workspace(chunks.size() * sizeof(Found));
    partials = static_cast<Found*>(scratch.data());
    check_kernel<<<static_cast<unsigned>(n), kThreads, 0, on>>>(table, partials);
    MT_LAUNCHED();
  }
  check_total_kernel<<<1, kThreads, 0, on>>>(partials, n, state);
  MT_LAUNCHED();
}

void CudaBackend::decide(const StepRules& rules, StepState* optimizer, ScaleState* scale, bool update_scale) {
  decide_kernel<<<1, 1, 0, stream()>>>(rules, optimizer, scale, update_scale);
  MT_LAUNCHED();
}

namespace {

std::vector<UpdateChunk> update_chunks(std::span<const UpdateTensor> tensors) {
  std::vector<UpdateChunk> chunks;
  for (const UpdateTensor& t : tensors) {
    const bool wide = t.dtype == DType::f64;
    const std::int64_t size = wide ? 8 : 4;
    const std::int32_t kind = (wide ? 1 : 0) | (t.working != nullptr ? 2 : 0) | (t.working_dtype == DType::bf16 ? 4 : 0);
    for (std::int64_t first = 0; first < t.numel; first += kChunk)
      chunks.push_back({at(t.parameter, first * size), at(t.state1, first * size), at(t.state2, first * size), at(t.working, first * 2),
                        at(const_cast<void*>(t.gradient), first * size), static_cast<std::int32_t>(std::min<std::int64_t>(kChunk, t.numel - first)),
                        t.lr_scale, t.weight_decay, kind});
  }
  return chunks;
}

}  // namespace

void CudaBackend::sgd_update(std::span<const UpdateTensor> tensors, const SgdRule& rule, const StepState* state) {
  const detail::OpRange range("sgd");
  const std::vector<UpdateChunk> chunks = update_chunks(tensors);
  if (chunks.empty()) return;
  const cudaStream_t on = stream();
  if (updates_ == nullptr) updates_ = std::make_shared<UpdateCache>();
  const UpdateChunk* table = updates_->find(*this, chunks);
  const auto blocks = static_cast<unsigned>(chunks.size());
  if (rule.momentum != 0) {
    update_kernel<SgdMath, SgdRule, true, false><<<blocks, kThreads, 0, on>>>(table, rule, state);
  } else {
    update_kernel<SgdMath, SgdRule, false, false><<<blocks, kThreads, 0, on>>>(table, rule, state);
  }
  MT_LAUNCHED();
}

void CudaBackend::adam_update(std::span<const UpdateTensor> tensors, const AdamRule& rule, const StepState* state) {
  const detail::OpRange range("adam");
  const std::vector<UpdateChunk> chunks = update_chunks(tensors);
  if (chunks.empty()) return;
  const cudaStream_t on = stream();
  if (updates_ == nullptr) updates_ = std::make_shared<UpdateCache>();
  const UpdateChunk* table = updates_->find(*this, chunks);
  update_kernel<AdamMath, AdamRule, true, true><<<static_cast<unsigned>(chunks.size()), kThreads, 0, on>>>(table, rule, state);
  MT_LAUNCHED();
}

void CudaBackend::restore_if_skipped(const Tensor& source, const StepState* state, Tensor& target) {
  const std::int64_t bytes = target.numel() * static_cast<std::int64_t>(size_of(target.dtype()));
  if (bytes == 0) return;
  restore_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(1024, (bytes + 255) / 256)), 256, 0, stream()>>>(
      static_cast<const unsigned char*>(source.data()), state, bytes, static_cast<unsigned char*>(target.data()));
  MT_LAUNCHED();
}

}  // namespace mantissa
