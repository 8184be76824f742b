// Memory-bound kernels against their floor: the bytes that each must move over the bandwidth of a plain copy measured
// in the same run. Tensors are larger than any cache. One line a kernel, or JSON lines with --json.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "core/step.h"
#include "mantissa/mantissa.h"

namespace mt = mantissa;

namespace {

struct Options {
  std::string device = "auto", dtype = "bf16";
  double scale = 1;  // of the sizes: a CPU wants less
  int repeats = 20;
  bool json = false;
};

class Table {
 public:
  Table(mt::Device device, const Options& o) : backend_(mt::backend(device)), options_(o) {}

  /// Median over three rounds of the mean time of a call, in seconds.
  double time(const std::function<void()>& f) {
    for (int i = 0; i < 3; ++i) f();
    std::vector<double> rounds;
    for (int round = 0; round < 3; ++round) {
      backend_.synchronize();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < options_.repeats; ++i) f();
      backend_.synchronize();
      rounds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
                       options_.repeats);
    }
    std::ranges::sort(rounds);
    return rounds[1];
  }
  void row(const std::string& name, double bytes, const std::function<void()>& f) {
    const double seconds = time(f), rate = bytes / seconds;
    if (copy_ == 0) copy_ = rate;  // the first row is the copy
    if (options_.json) {
      std::printf("{\"kernel\": \"%s\", \"mib\": %.1f, \"us\": %.1f, \"gb_per_second\": %.1f, \"of_copy\": %.3f}\n",
                  name.c_str(), bytes / (1 << 20), seconds * 1e6, rate * 1e-9, rate / copy_);
    } else {
      std::printf("%-44s %9.1f MiB %10.1f us %8.1f GB/s %6.1f %% of copy\n", name.c_str(), bytes / (1 << 20),
                  seconds * 1e6, rate * 1e-9, 100 * rate / copy_);
    }
    std::fflush(stdout);
  }

 private:
  mt::Backend& backend_;
  const Options& options_;
  double copy_ = 0;
};

/// The parameters of GPT-2 124M by size.
std::vector<std::int64_t> gpt2_sizes(double scale) {
  std::vector<std::int64_t> sizes{50304 * 768, 1024 * 768, 768, 768};
  for (int i = 0; i < 12; ++i)
    for (const std::int64_t n :
         {768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 768 * 3072, 768})
      sizes.push_back(n);
  for (auto& n : sizes) n = std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(n) * scale));
  return sizes;
}

void run(const Options& o) {
  const mt::Device device = mt::parse_device(o.device);
  const mt::DType dtype = o.dtype == "f32" ? mt::f32 : o.dtype == "f16" ? mt::f16 : mt::bf16;
  const auto bytes_of = [](std::initializer_list<mt::Tensor> tensors) {
    double bytes = 0;
    for (const mt::Tensor& x : tensors)
      bytes += static_cast<double>(x.numel()) * static_cast<double>(mt::size_of(x.dtype()));
    return bytes;
  };
  const auto scaled = [&](std::int64_t n) {
    return std::max<std::int64_t>(64, static_cast<std::int64_t>(static_cast<double>(n) * o.scale));
  };
  mt::Backend& b = mt::backend(device);
  const mt::NoGrad no_grad;
  Table table(device, o);
  {
    const std::int64_t n = scaled(std::int64_t{1} << 28);
    const mt::Tensor x = mt::zeros({n}, {dtype, device});
    mt::Tensor y = mt::empty_like(x), z = mt::empty_like(x);
    mt::Tensor g = mt::zeros({n}, {dtype, device});
    table.row("copy", bytes_of({x, y}), [&] { b.copy(x, y); });
    table.row("gelu", bytes_of({x, y}), [&] { b.unary(mt::Gelu{}, x, y); });
    table.row("gelu_tanh gradient", bytes_of({g, x, y}), [&] { b.unary_grad(mt::GeluTanh{}, g, x, y); });
    table.row("add", bytes_of({x, g, y}), [&] { b.binary(mt::Add{}, x, g, y); });
    table.row("swiglu", bytes_of({x, g, y}), [&] { b.binary(mt::SwiGlu{}, x, g, y); });
    table.row("swiglu gradient of one operand", bytes_of({x, g, y, z}),
              [&] { b.binary_grad(mt::SwiGlu{}, 0, z, x, g, y); });
    table.row("dropout", bytes_of({x, y}), [&] { b.dropout(x, 0.1, {1, 0}, y); });
    table.row("sum of all", bytes_of({x}), [&] {
      mt::Tensor total = mt::empty({1}, {mt::f32, device});
      b.reduce(mt::ReduceOp::sum, x, false, total);
    });
  }
  for (const std::int64_t columns : {768, 4096}) {
    const std::int64_t rows = scaled((std::int64_t{1} << 27) / columns);
    const std::string size = " [" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
    const mt::Tensor x = mt::randn({rows, columns}, {mt::f32, device}).to(dtype),
                     r = mt::randn({rows, columns}, {mt::f32, device}).to(dtype);
    const mt::Tensor w = mt::ones({columns}, {mt::f32, device}), bias = mt::zeros({columns}, {mt::f32, device});
    mt::Tensor sum = mt::empty_like(x), y = mt::empty_like(x), gx = mt::empty_like(x),
               mean = mt::empty({rows}, {mt::f32, device}), rstd = mt::empty_like(mean);
    mt::Tensor gw = mt::empty_like(w), gb = mt::empty_like(w), none,
               column = mt::empty({1, columns}, {mt::f32, device});
    table.row("layer norm with residual" + size, bytes_of({x, r, sum, y}),
              [&] { b.norm(mt::NormKind::layer, x, r, w, bias, 1e-5, sum, y, mean, rstd); });
    table.row("its gradient" + size, bytes_of({y, r, sum, gx}),
              [&] { b.norm_grad(mt::NormKind::layer, y, r, sum, w, mean, rstd, false, gx, gw, gb); });
    table.row("rms norm with residual" + size, bytes_of({x, r, sum, y}),
              [&] { b.norm(mt::NormKind::rms, x, r, w, none, 1e-5, sum, y, none, rstd); });
    table.row("its gradient" + size, bytes_of({y, r, sum, gx}),
              [&] { b.norm_grad(mt::NormKind::rms, y, r, sum, w, none, rstd, false, gx, gw, none); });
    table.row("column sums" + size, bytes_of({x}), [&] { b.reduce(mt::ReduceOp::sum, x, false, column); });
    table.row("softmax" + size, bytes_of({x, y}), [&] { b.softmax(x, false, y); });
  }
  {
    const std::int64_t rows = scaled(16384), classes = 50304;
    mt::Tensor x = mt::randn({rows, classes}, {mt::f32, device}).to(dtype);
    const mt::Tensor targets = mt::zeros({rows}, {mt::i64, device}), g = mt::ones({}, {mt::f32, device});
    mt::Tensor loss = mt::empty({}, {mt::f32, device}), count = mt::empty_like(loss),
               lse = mt::empty({rows}, {mt::f32, device});
    table.row("cross entropy [" + std::to_string(rows) + ", 50304]", bytes_of({x}),
              [&] { b.cross_entropy(x, targets, {}, loss, lse, count); });
    table.row("its gradient, in place", bytes_of({x, x}),
              [&] { b.cross_entropy_grad(g, x, targets, {}, lse, count, x); });
    const std::int64_t width = 768, tokens = scaled(1 << 18);
    const mt::Tensor weight = mt::zeros({classes, width}, {dtype, device});
    const mt::Tensor ids = mt::uniform({tokens}, 0, static_cast<double>(classes) - 1, {mt::f32, device}).to(mt::i64);
    mt::Tensor y = mt::empty({tokens, width}, {dtype, device}), gw = mt::empty({classes, width}, {mt::f32, device});
    table.row("embedding of " + std::to_string(tokens) + " tokens", bytes_of({y, y}),
              [&] { b.embedding(ids, weight, y); });
    table.row("its gradient", bytes_of({y, gw}), [&] { b.embedding_grad(y, ids, false, gw); });
  }
  {
    std::vector<mt::Tensor> parameters, gradients, first, second, working;
    double total = 0;
    for (const std::int64_t n : gpt2_sizes(o.scale)) {
      total += static_cast<double>(n);
      for (auto* list : {&parameters, &gradients, &first, &second}) list->push_back(mt::zeros({n}, {mt::f32, device}));
      working.push_back(mt::zeros({n}, {dtype, device}));
    }
    std::vector<mt::UpdateTensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      tensors.push_back({.parameter = parameters[i].data(),
                         .gradient = gradients[i].data(),
                         .state1 = first[i].data(),
                         .state2 = second[i].data(),
                         .working = dtype == mt::f32 ? nullptr : working[i].data(),
                         .numel = parameters[i].numel(),
                         .working_dtype = dtype,
                         .weight_decay = 0.1f});
    mt::StepState state;
    state.applied = 1;
    state.verdict = mt::Verdict::applied;
    state.learning_rate = 1e-3f;
    mt::Tensor on_device = mt::empty({static_cast<std::int64_t>(sizeof state)}, {mt::u8, device});
    b.copy_from_host(&state, on_device);
    b.synchronize();
    auto* s = static_cast<mt::StepState*>(on_device.data());
    const std::string of = " of " + std::to_string(static_cast<int>(total * 1e-6)) + " M in " +
                           std::to_string(tensors.size()) + " tensors";
    table.row("finite check and norm" + of, 4 * total, [&] { b.check_gradients(gradients, s); });
    table.row("AdamW with unscale, clip and working copy" + of, (dtype == mt::f32 ? 28 : 30) * total,
              [&] { b.adam_update(tensors, {}, s); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times memory-bound kernels against a plain copy.");
  app.add_option("--device", o.device)->capture_default_str();
  app.add_option("--dtype", o.dtype)->check(CLI::IsMember({"f32", "f16", "bf16"}))->capture_default_str();
  app.add_option("--scale", o.scale, "factor on the sizes")->check(CLI::Range(1e-6, 4.0))->capture_default_str();
  app.add_option("--repeats", o.repeats)->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_flag("--json", o.json);
  CLI11_PARSE(app, argc, argv);
  try {
    run(o);
  } catch (const mt::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
