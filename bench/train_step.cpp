// Times whole training steps (forward, backward, clip, update) on random data and prints one JSON line.
// bench/peers/train_step.py does the same with PyTorch.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "mantissa/mantissa.h"

namespace mt = mantissa;

namespace {

struct Options {
  std::string model = "gpt", precision = "bf16-mixed", device = "auto";
  std::int64_t batch = 16, context = 1024, width = 768, vocabulary = 50304;
  int layers = 12, heads = 12, steps = 20, warmup = 8, threads = 0;
  bool checkpoint = false, capture = false;
};

/// The model and how to get a loss from it.
struct Job {
  std::shared_ptr<mt::nn::Module> model;
  std::function<mt::Tensor(const mt::Tensor& x, const mt::Tensor& y)> loss;
  mt::Tensor x, y;
  double tokens = 0, flops = 0;  // a step
  double clip = 0;
};

mt::Tensor random_ids(const mt::Shape& shape, std::int64_t n, mt::Device device) {
  const mt::Tensor u = mt::uniform(shape, 0, static_cast<double>(n) - 0.5);
  return u.to(mt::i64).to(device);
}

Job make_job(const Options& o, mt::Device device) {
  Job job;
  if (o.model == "gpt") {
    auto gpt = std::make_shared<mt::nn::GPT>(mt::nn::GPTOptions{.vocabulary = o.vocabulary,
                                                                .context = o.context,
                                                                .width = o.width,
                                                                .layers = o.layers,
                                                                .heads = o.heads,
                                                                .checkpoint_blocks = o.checkpoint},
                                             device);
    const mt::Tensor x = random_ids({o.batch, o.context}, o.vocabulary, device),
                     y = random_ids({o.batch, o.context}, o.vocabulary, device);
    job = {gpt,
           [=](const mt::Tensor& in, const mt::Tensor& out) { return gpt->loss(in, out); },
           x,
           y,
           static_cast<double>(o.batch * o.context),
           0,
           1.0};
    job.flops = job.tokens * gpt->flops_per_token();
  } else if (o.model == "cnn") {
    auto cnn = std::make_shared<mt::nn::SmallCNN>(device);
    const mt::Tensor x = mt::randn({o.batch, 1, 28, 28}).to(device), y = random_ids({o.batch}, 10, device);
    job = {cnn, [=](const mt::Tensor& in, const mt::Tensor& out) { return mt::cross_entropy((*cnn)(in), out); }, x, y,
           static_cast<double>(o.batch)};
  } else {
    auto mlp = std::make_shared<mt::nn::MLP>(std::vector<std::int64_t>{784, 256, 256, 10}, device);
    const mt::Tensor x = mt::randn({o.batch, 784}).to(device), y = random_ids({o.batch}, 10, device);
    job = {mlp, [=](const mt::Tensor& in, const mt::Tensor& out) { return mt::cross_entropy((*mlp)(in), out); }, x, y,
           static_cast<double>(o.batch)};
  }
  return job;
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void run(const Options& o) {
  const mt::Device device = mt::parse_device(o.device);
  const mt::Precision precision = mt::parse_precision(o.precision);
  if (o.threads > 0) mt::set_num_threads(o.threads);
  mt::use_precision(precision);
  mt::manual_seed(1);
  const Job job = make_job(o, device);
  mt::optim::AdamW optimizer(job.model->parameters(), {.lr = 3e-4, .weight_decay = 0.1});
  mt::optim::LossScaler scaler;
  mt::Backend& backend = mt::backend(device);
  const auto eager = [&](const mt::Tensor& x, const mt::Tensor& y) {
    mt::Tensor loss;
    {
      const mt::Autocast scope(mt::autocast_dtype(precision));
      loss = job.loss(x, y);
    }
    scaler.backward(loss);
    if (job.clip > 0) optimizer.clip_grad_norm(job.clip);
    scaler.step(optimizer);
    return loss;
  };
  mt::train::CapturedStep captured(eager);
  const auto step = [&] { return o.capture ? captured(job.x, job.y) : eager(job.x, job.y); };
  mt::Tensor loss;
  for (int i = 0; i < o.warmup; ++i) loss = step();
  backend.synchronize();
  if (!o.capture) mt::reset_peak_memory(device);  // a recording holds the memory of a step without asking for it again
  const mt::BackendCounters before = backend.counters;
  const std::int64_t allocations = mt::memory_stats(device).source_allocations;
  // Without waiting in between: what a training loop sees.
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < o.steps; ++i) loss = step();
  const mt::BackendCounters after = backend.counters;
  const std::int64_t allocated = mt::memory_stats(device).source_allocations - allocations;
  backend.synchronize();
  const double pipelined =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() / o.steps;
  std::vector<double> times, queued;  // queued: until the host has handed the step to the device
  for (int i = 0; i < o.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    loss = step();
    queued.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    backend.synchronize();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  const mt::MemoryStats memory = mt::memory_stats(device);
  const double ms = median(times);
  std::printf(
      "{\"who\": \"mantissa\", \"model\": \"%s\", \"precision\": \"%s\", \"captured\": %s, \"batch\": %lld, \"ms\": "
      "%.4f, \"ms_pipelined\": %.4f, \"ms_host\": %.4f, "
      "\"per_second\": %.0f, \"tflops\": %.1f, \"peak_mib\": %.0f, \"loss\": %.5f, \"launches\": %lld, "
      "\"synchronizations\": %lld, \"casts\": %lld, "
      "\"driver_allocations\": %lld}\n",
      o.model.c_str(), o.precision.c_str(), o.capture ? "true" : "false", static_cast<long long>(o.batch), ms,
      pipelined, median(queued), job.tokens / ms * 1e3, job.flops / ms * 1e-9,
      static_cast<double>(memory.peak) / (1 << 20), loss.item(),
      static_cast<long long>((after.launches - before.launches) / o.steps),
      static_cast<long long>(after.synchronizations - before.synchronizations),
      static_cast<long long>((after.casts - before.casts) / o.steps), static_cast<long long>(allocated));
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Times training steps on random data.");
  app.add_option("--model", o.model)->check(CLI::IsMember({"gpt", "cnn", "mlp"}))->capture_default_str();
  app.add_option("--precision", o.precision)->capture_default_str();
  app.add_option("--device", o.device)->capture_default_str();
  app.add_option("--batch", o.batch)->capture_default_str();
  app.add_option("--context", o.context)->capture_default_str();
  app.add_option("--width", o.width)->capture_default_str();
  app.add_option("--layers", o.layers)->capture_default_str();
  app.add_option("--heads", o.heads)->capture_default_str();
  app.add_option("--vocabulary", o.vocabulary)->capture_default_str();
  app.add_option("--steps", o.steps)->capture_default_str();
  app.add_option("--warmup", o.warmup)->capture_default_str();
  app.add_option("--threads", o.threads)->capture_default_str();
  app.add_flag("--checkpoint", o.checkpoint, "recompute the blocks in backward");
  app.add_flag("--capture", o.capture, "replay the step as a CUDA graph");
  CLI11_PARSE(app, argc, argv);
  try {
    run(o);
  } catch (const mt::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
