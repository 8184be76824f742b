// The training step on the device: one read of all gradients, one decision, one update of everything.
//
// All tensors are cut into chunks, one a block. A table of the chunks lives on the device; it is made again
// only when a pointer or a setting changes, which in a steady step none does.
#include <algorithm>
#include <bit>
#include <cmath>
#include <list>
#include <vector>

#include "core/step.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/kernel.cuh"
#include "cuda/map.cuh"

namespace mantissa {
namespace {

/// Elements of a chunk: 64 KiB of f32, 16 vectors for each of 256 threads; fewer where that would leave the device
/// idle.
std::int64_t chunk_size(std::int64_t elements, int multiprocessors) {
  const auto even = static_cast<std::uint64_t>(std::max<std::int64_t>(elements / (4 * multiprocessors), 1));
  return static_cast<std::int64_t>(std::clamp<std::uint64_t>(std::bit_floor(even), 1024, 16384));
}

struct GradientChunk {
  const void* gradient;
  std::int32_t count;
  bool wide;  // f64
};

enum class Working : std::int32_t { none, f16, bf16 };

struct UpdateChunk {
  void *parameter, *state1, *state2, *working;
  const void* gradient;
  std::int32_t count;
  float lr_scale, weight_decay;
  Working working_type;
  bool wide, vectors;  // f64; all addresses allow vectors of four elements
};

// ---- the check ----

struct Found {
  double squares;
  std::int64_t infs, nans;
};
__device__ Found operator+(const Found& a, const Found& b) {
  return {a.squares + b.squares, a.infs + b.infs, a.nans + b.nans};
}

/// Over the block, in a fixed order.
__device__ Found block_sum(const Found& f) {
  return {block_reduce<kThreads>(f.squares, SumOp{}), block_reduce<kThreads>(f.infs, SumOp{}),
          block_reduce<kThreads>(f.nans, SumOp{})};
}

/// The sum of f(x) over a chunk, of type A.
template <class A, class T, class F> __device__ A sum_of(const T* x, int count, const F& f) {
  A sum = 0;
  walk_row<kVector<T>>(x, count, static_cast<int>(threadIdx.x), kThreads, [&](std::int64_t, const auto& unit) {
    constexpr int kElements = static_cast<int>(sizeof(unit.v) / sizeof(T));
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += f(unit.v[j]);
  });
  return sum;
}

template <class T> __device__ Found examine(const T* x, int count) {
  const auto square = [](T e) { return static_cast<double>(e) * static_cast<double>(e); };
  Found f{block_reduce<kThreads>(sum_of<double>(x, count, square), SumOp{}), 0, 0};
  if (isfinite(f.squares)) return f;  // else count what made it so; the square of a finite f64 may be infinite
  f.infs = sum_of<int>(x, count, [](T e) { return isinf(e) ? 1 : 0; });
  f.nans = sum_of<int>(x, count, [](T e) { return isnan(e) ? 1 : 0; });
  f.infs = block_reduce<kThreads>(f.infs, SumOp{});
  f.nans = block_reduce<kThreads>(f.nans, SumOp{});
  return f;
}

// Bytes: every gradient once; 124 M f32: 0.5 GB, floor 0.12 ms at 4.2 TB/s. Squares in f64: no f32 is too
// large.
// The last block to finish adds up, in the order of the blocks.
__global__ void __launch_bounds__(kThreads)
    check_kernel(const GradientChunk* chunks, Found* partials, StepState* state) {
  __shared__ bool last;
  Found f{0, 0, 0};
  if (chunks != nullptr) {
    const GradientChunk c = chunks[blockIdx.x];
    f = c.wide ? examine(static_cast<const double*>(c.gradient), c.count)
               : examine(static_cast<const float*>(c.gradient), c.count);
  }
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = f;
    __threadfence();
    auto* done = reinterpret_cast<unsigned long long*>(&state->blocks_done);
    last = atomicAdd(done, 1ull) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  f = {0, 0, 0};
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) {
    const double* p = reinterpret_cast<const double*>(partials + i);
    f = f + Found{__ldcg(p), __double_as_longlong(__ldcg(p + 1)), __double_as_longlong(__ldcg(p + 2))};
  }
  f = block_sum(f);
  if (threadIdx.x != 0) return;
  state->sum_of_squares = f.squares;
  state->infs = f.infs;
  state->nans = f.nans;
  state->blocks_done = 0;
}

__global__ void decide_kernel(const StepRules* rules, StepState* optimizer, ScaleState* scale, bool update,
                              StepState* mirror, ScaleState* scale_mirror) {
  decide_step(*rules, *optimizer, scale, update);
  if (mirror != nullptr) *mirror = *optimizer;
  if (scale != nullptr && scale_mirror != nullptr) *scale_mirror = *scale;
}

// ---- updates ----

/// The gradient as the rule sees it: unscaled, then clipped; NaN stays.
template <class A> struct Gradient {
  A factor, limit;
  __device__ explicit Gradient(const StepState& s)
      : factor(static_cast<A>(s.factor)),
        limit(s.max_value > 0 ? static_cast<A>(s.max_value) : static_cast<A>(INFINITY)) {}
  __device__ A operator()(A g) const {
    const A value = g * factor;
    return value < -limit ? -limit : value > limit ? limit : value;
  }
};

// A rule on the elements of a chunk: kStates is the number of buffers that it keeps besides the parameter.

template <class A> struct AdamMath {
  static constexpr int kStates = 2;
  AdamElement<A> element;
  __device__ AdamMath(const AdamRule& r, const UpdateChunk& c, const StepState& s, const double* corrections)
      : element{static_cast<A>(s.learning_rate * c.lr_scale),
                static_cast<A>(c.weight_decay),
                static_cast<A>(r.beta1),
                static_cast<A>(r.beta2),
                static_cast<A>(1 - r.beta1),
                static_cast<A>(1 - r.beta2),
                static_cast<A>(r.eps),
                static_cast<A>(corrections[0]),
                static_cast<A>(corrections[1]),
                r.decoupled} {}
  __device__ void operator()(A g, A& w, A& m, A& v) const { element(g, w, m, v); }
};

template <class A, int kBuffers> struct SgdMath {
  static constexpr int kStates = kBuffers;
  SgdElement<A> element;
  __device__ SgdMath(const SgdRule& r, const UpdateChunk& c, const StepState& s, const double*)
      : element{static_cast<A>(s.learning_rate * c.lr_scale),
                static_cast<A>(c.weight_decay),
                static_cast<A>(r.momentum),
                static_cast<A>(r.dampening),
                r.nesterov,
                s.applied == 1} {}
  __device__ void operator()(A g, A& w, A& m, A&) const { element(g, w, m); }
};
template <class A> using PlainSgd = SgdMath<A, 0>;
template <class A> using MomentumSgd = SgdMath<A, 1>;

template <class T, int V, class A> __device__ void narrow(void* working, int at, const Vec<A, V>& w) {
  Vec<T, V> rounded;
#pragma unroll
  for (int j = 0; j < V; ++j) rounded.v[j] = convert<T>(w.v[j]);
  store(static_cast<T*>(working) + at, rounded);
}

/// Elements [begin, begin + units V) of a chunk; all loads of a thread's U units precede its first store.
template <int V, int U, class A, class Math>
__device__ void update_units(const UpdateChunk& c, const Math& math, const Gradient<A>& gradient, int begin,
                             int units) {
  constexpr int kStates = Math::kStates;
  const A* g = static_cast<const A*>(c.gradient);
  A *w = static_cast<A*>(c.parameter), *m = static_cast<A*>(c.state1), *v = static_cast<A*>(c.state2);
  for (int first = static_cast<int>(threadIdx.x); first < units; first += U * kThreads) {
    Vec<A, V> vg[U], vw[U], vm[U] = {}, vv[U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * kThreads >= units) continue;
      const int at = begin + (first + u * kThreads) * V;
      vg[u] = load<V>(g + at);
      vw[u] = load<V>(w + at);
      if constexpr (kStates > 0) vm[u] = load<V>(m + at);
      if constexpr (kStates > 1) vv[u] = load<V>(v + at);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * kThreads >= units) continue;
      const int at = begin + (first + u * kThreads) * V;
#pragma unroll
      for (int j = 0; j < V; ++j) math(gradient(vg[u].v[j]), vw[u].v[j], vm[u].v[j], vv[u].v[j]);
      store(w + at, vw[u]);
      if constexpr (kStates > 0) store(m + at, vm[u]);
      if constexpr (kStates > 1) store(v + at, vv[u]);
      if constexpr (std::is_same_v<A, float>) {
        if (c.working_type == Working::f16) narrow<__half>(c.working, at, vw[u]);
        if (c.working_type == Working::bf16) narrow<__nv_bfloat16>(c.working, at, vw[u]);
      }
    }
  }
}

// Bytes an element (Adam): 16 read (w, g, m, v), 12 written, 2 for the working copy; 124 M: 3.7 GB, floor
// 0.89 ms at 4.2 TB/s.
template <template <class> class Math, class Rule>
__global__ void __launch_bounds__(kThreads, 4)
    update_kernel(const UpdateChunk* chunks, Rule rule, const StepState* state) {
  if (state->verdict != Verdict::applied) return;
  __shared__ double corrections[2];
  if constexpr (std::is_same_v<Rule, AdamRule>) {  // in f64, once a block
    if (threadIdx.x < 2)
      corrections[threadIdx.x] =
          1 - ::pow(threadIdx.x == 0 ? rule.beta1 : rule.beta2, static_cast<double>(state->applied));
    __syncthreads();
  }
  const UpdateChunk c = chunks[blockIdx.x];
  if (c.wide) {
    const Math<double> math(rule, c, *state, corrections);
    return update_units<1, 1>(c, math, Gradient<double>(*state), 0, c.count);
  }
  const Math<float> math(rule, c, *state, corrections);
  const Gradient<float> gradient(*state);
  const int vectors = c.vectors ? c.count / 4 : 0;
  update_units<4, 2>(c, math, gradient, 0, vectors);
  update_units<1, 1>(c, math, gradient, 4 * vectors, c.count - 4 * vectors);
}

/// Takes the source where the last step was skipped.
template <class T> struct Restore {
  const StepState* state;
  __device__ T operator()(T source, T target) const {
    const Verdict v = state->verdict;
    return v == Verdict::applied || v == Verdict::nothing_to_do ? target : source;
  }
};

// ---- tables of chunks ----

void* at(const void* p, std::int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<std::byte*>(const_cast<void*>(p)) + bytes;
}

/// f(first element, count) for the chunks of n elements.
template <class F> void for_each_chunk(std::int64_t n, std::int64_t chunk, const F& f) {
  for (std::int64_t first = 0; first < n; first += chunk)
    f(first, static_cast<std::int32_t>(std::min<std::int64_t>(chunk, n - first)));
}

std::int64_t elements_of(const Tensor& g) { return g.numel(); }
std::int64_t elements_of(const UpdateTensor& t) { return t.numel; }

void add_chunks(const Tensor& g, std::int64_t chunk, std::vector<GradientChunk>& chunks) {
  const bool wide = g.dtype() == DType::f64;
  for_each_chunk(g.numel(), chunk, [&](std::int64_t first, std::int32_t count) {
    chunks.push_back({at(g.data(), first * (wide ? 8 : 4)), count, wide});
  });
}

void add_chunks(const UpdateTensor& t, std::int64_t chunk, std::vector<UpdateChunk>& chunks) {
  const bool wide = t.dtype == DType::f64;
  const std::int64_t size = wide ? 8 : 4;
  std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(t.working) * 2;  // 8 bytes for every 16 of the others
  for (const void* p : {t.gradient, static_cast<const void*>(t.parameter), static_cast<const void*>(t.state1),
                        static_cast<const void*>(t.state2)})
    bits |= reinterpret_cast<std::uintptr_t>(p);
  const Working type = t.working == nullptr            ? Working::none
                       : t.working_dtype == DType::f16 ? Working::f16
                                                       : Working::bf16;
  for_each_chunk(t.numel, chunk, [&](std::int64_t first, std::int32_t count) {
    chunks.push_back({at(t.parameter, first * size), at(t.state1, first * size), at(t.state2, first * size),
                      at(t.working, first * 2), at(t.gradient, first * size), count, t.lr_scale, t.weight_decay, type,
                      wide, bits % 16 == 0});
  });
}

using Key = std::vector<std::uint64_t>;  // all that a table depends on

std::uint64_t word(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
void append(const Tensor& g, Key& key) {
  key.insert(key.end(), {word(g.data()), static_cast<std::uint64_t>(g.numel()), static_cast<std::uint64_t>(g.dtype())});
}
void append(const UpdateTensor& t, Key& key) {
  const auto settings =
      std::uint64_t{std::bit_cast<std::uint32_t>(t.lr_scale)} << 32 | std::bit_cast<std::uint32_t>(t.weight_decay);
  const auto types = static_cast<std::uint64_t>(t.dtype) << 8 | static_cast<std::uint64_t>(t.working_dtype);
  key.insert(key.end(), {word(t.parameter), word(t.gradient), word(t.state1), word(t.state2), word(t.working),
                         static_cast<std::uint64_t>(t.numel), settings, types});
}

}  // namespace

/// The tables made last; a program needs a few (two for each optimizer), so the list is short.
struct UpdateCache {
  struct Table {
    Key key;
    std::int64_t chunks = 0;
    Tensor data;  // on the device
  };
  std::list<Table> tables;  // most recently used first
  Key key;                  // of the call in progress

  template <class Chunk, class Item> const Table& find(CudaBackend& backend, std::span<const Item> items) {
    key.assign(1, sizeof(Chunk));
    for (const Item& item : items) append(item, key);
    const auto known = std::ranges::find(tables, key, &Table::key);
    if (known != tables.end()) {
      tables.splice(tables.begin(), tables, known);
      backend.keep(known->data.storage());
      return tables.front();
    }
    std::vector<Chunk> chunks;
    std::int64_t total = 0;
    for (const Item& item : items) total += elements_of(item);
    const std::int64_t chunk = chunk_size(total, backend.properties().multiProcessorCount);
    for (const Item& item : items) add_chunks(item, chunk, chunks);
    Table table{key, static_cast<std::int64_t>(chunks.size()), {}};
    if (const std::size_t bytes = chunks.size() * sizeof(Chunk); bytes > 0) {
      table.data = backend.constant(chunks.data(), bytes);
    }
    constexpr std::size_t kTables = 16;
    if (tables.size() == kTables) tables.pop_back();
    tables.push_front(std::move(table));
    return tables.front();
  }
};

UpdateCache& CudaBackend::update_cache() {
  if (updates_ == nullptr) updates_ = std::make_shared<UpdateCache>();
  return *updates_;
}

void CudaBackend::check_gradients(std::span<const Tensor> gradients, StepState* state) {
  const detail::OpRange range("check_gradients");
  const UpdateCache::Table& table = update_cache().find<GradientChunk>(*this, gradients);
  const auto blocks = static_cast<unsigned>(std::max<std::int64_t>(table.chunks, 1));
  const Tensor scratch = workspace(blocks * sizeof(Found));
  const void* chunks = table.chunks > 0 ? table.data.data() : nullptr;
  check_kernel<<<blocks, kThreads, 0, stream()>>>(static_cast<const GradientChunk*>(chunks),
                                                  static_cast<Found*>(scratch.data()), state);
  MT_LAUNCHED();
}

void CudaBackend::decide(const StepRules* rules, StepState* optimizer, ScaleState* scale, bool update_scale,
                         StepState* mirror, ScaleState* scale_mirror) {
  decide_kernel<<<1, 1, 0, stream()>>>(rules, optimizer, scale, update_scale, mirror, scale_mirror);
  MT_LAUNCHED();
}

void CudaBackend::sgd_update(std::span<const UpdateTensor> tensors, const SgdRule& rule, const StepState* state) {
  const detail::OpRange range("sgd_update");
  const UpdateCache::Table& table = update_cache().find<UpdateChunk>(*this, tensors);
  if (table.chunks == 0) return;
  const auto* chunks = static_cast<const UpdateChunk*>(table.data.data());
  const auto blocks = static_cast<unsigned>(table.chunks);
  if (rule.momentum != 0) {
    update_kernel<MomentumSgd><<<blocks, kThreads, 0, stream()>>>(chunks, rule, state);
  } else {
    update_kernel<PlainSgd><<<blocks, kThreads, 0, stream()>>>(chunks, rule, state);
  }
  MT_LAUNCHED();
}

void CudaBackend::adam_update(std::span<const UpdateTensor> tensors, const AdamRule& rule, const StepState* state) {
  const detail::OpRange range("adam_update");
  const UpdateCache::Table& table = update_cache().find<UpdateChunk>(*this, tensors);
  if (table.chunks == 0) return;
  update_kernel<AdamMath><<<static_cast<unsigned>(table.chunks), kThreads, 0, stream()>>>(
      static_cast<const UpdateChunk*>(table.data.data()), rule, state);
  MT_LAUNCHED();
}

void CudaBackend::restore_if_skipped(const Tensor& source, const StepState* state, Tensor& target) {
  if (target.numel() == 0) return;
  const detail::OpRange range("restore_if_skipped");
  visit_bits(target.dtype(),
             [&]<class T>() { map<MapPaths::kElements, T, T, T>(*this, Restore<T>{state}, target, source, target); });
}

}  // namespace mantissa
