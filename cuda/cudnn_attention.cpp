// The fused attention of cuDNN. A plan is built on the first call for a problem (shapes, strides, dtype,
// mask, scale) and kept; what the library refuses is remembered too, and the composed path takes over.
#define CUDNN_FRONTEND_SKIP_JSON_LIB  // halves the time this file takes to compile
#include <cudnn_frontend.h>

#include <bit>
#include <mutex>
#include <unordered_map>

#include "cuda/attention.h"
#include "cuda/bytes_hash.h"
#include "cuda/cuda_check.h"
#include "cuda/cudnn_handle.h"

namespace mantissa {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorRef = std::shared_ptr<fe::graph::Tensor_attributes>;

/// Names of the tensors of a plan.
enum Uid : std::int64_t { kQ = 1, kK, kV, kY, kLse, kG, kGradQ, kGradK, kGradV };

struct Geometry {
  std::int64_t heads, length, strides[3];
};

/// Compared and hashed as bytes, so it has no padding.
struct Problem {
  std::int64_t device, batches, size;
  Geometry q, k, v, y, g, gq, gk, gv;  // the last four are zero in forward
  std::uint64_t scale;                 // the bits of the double
  std::int32_t dtype, causal;
};

struct Plan {
  std::shared_ptr<Graph> graph;  // null: the library refuses the problem
  std::size_t workspace = 0;
};

/// The stride of an axis of one element means nothing; a fixed value lets such problems share a plan.
Geometry geometry_of(const Tensor& x) {
  Geometry p{x.size(1), x.size(2), {}};
  for (int axis = 0; axis < 3; ++axis) p.strides[axis] = x.size(axis) == 1 ? x.size(3) : x.stride(axis);
  return p;
}

Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y, const AttentionOptions& o) {
  Problem p{};
  p.device = q.device().index;
  p.batches = q.size(0);
  p.size = q.size(3);
  p.q = geometry_of(q);
  p.k = geometry_of(k);
  p.v = geometry_of(v);
  p.y = geometry_of(y);
  p.scale = std::bit_cast<std::uint64_t>(o.scale);
  p.dtype = static_cast<std::int32_t>(q.dtype());
  p.causal = o.causal;
  return p;
}

// ---- building plans ----

std::shared_ptr<Graph> new_graph(const Problem& p) {
  auto graph = std::make_shared<Graph>();
  graph->set_io_data_type(static_cast<DType>(p.dtype) == DType::f16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16);
  graph->set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

fe::graph::Tensor_attributes describe(const Problem& p, const Geometry& x, Uid uid) {
  fe::graph::Tensor_attributes t;
  t.set_uid(uid)
      .set_dim({p.batches, x.heads, x.length, p.size})
      .set_stride({x.strides[0], x.strides[1], x.strides[2], 1});
  return t;
}
void describe_lse(fe::graph::Tensor_attributes& t, const Problem& p) {
  t.set_uid(kLse).set_dim({p.batches, p.q.heads, p.q.length, 1}).set_stride({p.q.heads * p.q.length, p.q.length, 1, 1});
  t.set_data_type(fe::DataType_t::FLOAT);
}
void describe_output(const TensorRef& t, const Problem& p, const Geometry& x, Uid uid) {
  t->set_output(true)
      .set_uid(uid)
      .set_dim({p.batches, x.heads, x.length, p.size})
      .set_stride({x.strides[0], x.strides[1], x.strides[2], 1});
}

template <class Attributes> void set_mask_and_scale(Attributes& attributes, const Problem& p) {
  attributes.set_attn_scale(static_cast<float>(std::bit_cast<double>(p.scale)));
  if (p.causal == 0) return;
  // The last query sees every key; with as many queries as keys both alignments mean the same.
  attributes.set_diagonal_alignment(p.q.length == p.k.length ? fe::DiagonalAlignment_t::TOP_LEFT
                                                             : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
  attributes.set_diagonal_band_right_bound(0);
}

std::shared_ptr<Graph> forward_graph(const Problem& p) {
  auto graph = new_graph(p);
  const TensorRef q = graph->tensor(describe(p, p.q, kQ)), k = graph->tensor(describe(p, p.k, kK)),
                  v = graph->tensor(describe(p, p.v, kV));
  fe::graph::SDPA_attributes attributes;
  attributes.set_name("attention").set_generate_stats(true);
  set_mask_and_scale(attributes, p);
  const auto [y, lse] = graph->sdpa(q, k, v, attributes);
  describe_output(y, p, p.y, kY);
  // The statistic is max + log(sum exp(score - max)) of the scaled scores, natural logarithm.
  describe_lse(*lse, p);
  lse->set_output(true);
  return graph;
}

std::shared_ptr<Graph> backward_graph(const Problem& p) {
  auto graph = new_graph(p);
  const TensorRef q = graph->tensor(describe(p, p.q, kQ)), k = graph->tensor(describe(p, p.k, kK)),
                  v = graph->tensor(describe(p, p.v, kV)), y = graph->tensor(describe(p, p.y, kY)),
                  g = graph->tensor(describe(p, p.g, kG));
  fe::graph::Tensor_attributes saved;
  describe_lse(saved, p);
  fe::graph::SDPA_backward_attributes attributes;
  attributes.set_name("attention_grad").set_deterministic_algorithm(true);
  set_mask_and_scale(attributes, p);
  const auto [gq, gk, gv] = graph->sdpa_backward(q, k, v, y, g, graph->tensor(saved), attributes);
  describe_output(gq, p, p.gq, kGradQ);
  describe_output(gk, p, p.gk, kGradK);
  describe_output(gv, p, p.gv, kGradV);
  return graph;
}

Plan build_plan(cudnnHandle_t handle, const Problem& p) {
  auto graph = p.g.length == 0 ? forward_graph(p) : backward_graph(p);
  std::int64_t bytes = 0;
  const bool supported =
      graph->build(handle, {fe::HeurMode_t::A}).is_good() && graph->get_workspace_size(bytes).is_good();
  if (!supported) cudaGetLastError();  // a refusal is no error
  return supported ? Plan{std::move(graph), static_cast<std::size_t>(bytes)} : Plan{};
}

/// Plans live as long as the process, for all devices.
const Plan& plan_for(cudnnHandle_t handle, const Problem& p) {
  static std::mutex mutex;
  static auto& plans = *new std::unordered_map<Problem, Plan, BytesHash, BytesEqual>;
  const std::lock_guard lock(mutex);
  auto it = plans.find(p);
  if (it == plans.end()) it = plans.emplace(p, build_plan(handle, p)).first;
  return it->second;
}

bool run_plan(CudaBackend& backend, const Problem& p, std::unordered_map<std::int64_t, void*> pointers) {
  const cudnnHandle_t handle = cudnn_handle(backend);
  const Plan& plan = plan_for(handle, p);
  if (plan.graph == nullptr) return false;
  const Tensor scratch = backend.workspace(plan.workspace);
  fe::error_t status = plan.graph->execute(handle, pointers, scratch.data());
  if (status.is_bad())
    detail::raise_library(status.get_message().c_str(), "cudnn_frontend::graph::Graph::execute", __FILE__, __LINE__);
  ++backend.counters.launches;
  return true;
}

}  // namespace

bool fused_attention(CudaBackend& backend, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o,
                     Tensor& y, Tensor& lse) {
  return run_plan(backend, problem_of(q, k, v, y, o),
                  {{kQ, q.data()}, {kK, k.data()}, {kV, v.data()}, {kY, y.data()}, {kLse, lse.data()}});
}

bool fused_attention_grad(CudaBackend& backend, const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& y, const Tensor& lse, const AttentionOptions& o, Tensor& gq, Tensor& gk,
                          Tensor& gv) {
  Problem p = problem_of(q, k, v, y, o);
  p.g = geometry_of(g);
  p.gq = geometry_of(gq);
  p.gk = geometry_of(gk);
  p.gv = geometry_of(gv);
  return run_plan(backend, p,
                  {{kQ, q.data()},
                   {kK, k.data()},
                   {kV, v.data()},
                   {kY, y.data()},
                   {kLse, lse.data()},
                   {kG, g.data()},
                   {kGradQ, gq.data()},
                   {kGradK, gk.data()},
                   {kGradV, gv.data()}});
}

}  // namespace mantissa
