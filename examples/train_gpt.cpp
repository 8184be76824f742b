// Trains a small GPT on the bytes of a text, or on a token file, in a chosen precision, and prints a sample.
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>

#include "common.h"

using namespace examples;

namespace {

struct Options : CommonOptions {
  std::string data, prompt = "In the beginning ";
  std::int64_t batch = 16, context = 128, width = 128, steps = 300, vocabulary = 256;
  int layers = 4, heads = 4, sample = 200, top_k = 40;
  double lr = 2e-3, weight_decay = 0.1, clip = 1.0, dropout = 0, temperature = 0.8;
  bool tokens = false, checkpoint = false;
};

double validation_loss(mt::nn::GPT& model, mt::train::TokenLoader& loader, mt::Precision precision) {
  const mt::NoGrad no_grad;
  model.eval();
  double total = 0;
  for (std::int64_t i = 0; i < loader.batches(); ++i) {
    const auto [x, y] = loader.next();
    const mt::Autocast scope(mt::autocast_dtype(precision));
    total += model.loss(x, y).item();
  }
  model.train();
  return total / static_cast<double>(loader.batches());
}

std::string sample(mt::nn::GPT& model, const Options& o, mt::Precision precision) {
  const mt::Autocast scope(mt::autocast_dtype(precision));
  std::vector<std::int64_t> prompt;
  for (const char c : o.prompt) prompt.push_back(static_cast<unsigned char>(c));
  std::string text;
  for (const std::int64_t token : model.generate(prompt, o.sample, o.temperature, o.top_k))
    text += static_cast<char>(token);
  return text;
}

RunResult train(const Options& o, mt::Precision precision, mt::Device device, const mt::train::StopSignal& stop) {
  const auto start = std::chrono::steady_clock::now();
  const auto data =
      o.tokens ? mt::train::TokenDataset::open(o.data, o.vocabulary) : mt::train::TokenDataset::open_text(o.data);
  const auto [training, held_out] = data.split(0.95);
  mt::train::TokenLoader loader(training, {.batch = o.batch, .context = o.context, .seed = o.seed, .device = device});
  mt::train::TokenLoader validation(held_out, {.batch = o.batch,
                                               .context = o.context,
                                               .order = mt::train::TokenOrder::sequential,
                                               .steps = 8,
                                               .device = device});

  mt::nn::GPT model({.vocabulary = data.vocab(),
                     .context = o.context,
                     .width = o.width,
                     .layers = o.layers,
                     .heads = o.heads,
                     .dropout = o.dropout,
                     .checkpoint_blocks = o.checkpoint},
                    device);
  mt::optim::AdamW optimizer(model.parameters(), {.lr = o.lr, .beta2 = 0.95, .weight_decay = o.weight_decay});
  optimizer.set_schedule(mt::optim::cosine_decay(o.lr, o.steps, o.steps / 20, o.lr / 10));
  mt::optim::LossScaler scaler;

  std::unique_ptr<mt::train::JsonLog> log = o.log.empty() ? nullptr : std::make_unique<mt::train::JsonLog>(o.log);
  mt::train::Progress progress(o.steps, {.label = to_string(precision),
                                         .unit = "tokens",
                                         .units_per_step = static_cast<double>(o.batch * o.context),
                                         .quiet = o.quiet});
  mt::Tensor loss;
  std::int64_t step = 0;
  while (step < o.steps && !stop.requested()) {
    const auto [x, y] = loader.next();
    {
      const mt::Autocast scope(mt::autocast_dtype(precision));
      loss = model.loss(x, y);
    }
    scaler.backward(loss);
    if (o.clip > 0) optimizer.clip_grad_norm(o.clip);
    const auto outcome = scaler.step(optimizer);
    ++step;
    if (progress.due()) {  // reading back waits for the device, so it is done a few times a second only
      const double value = loss.item();
      if (log)
        log->write({{"precision", to_string(precision)},
                    {"step", step},
                    {"loss", value},
                    {"grad_norm", outcome.grad_norm()},
                    {"scale", scaler.scale()},
                    {"verdict", to_string(outcome.verdict())}});
      progress.update(step, "loss " + std::to_string(value));
    } else {
      progress.update(step);
    }
  }
  progress.finish();
  RunResult result{.precision = precision};
  result.interrupted = step < o.steps;
  result.memory = mt::memory_stats(device);
  result.loss = validation_loss(model, validation, precision);
  result.score = std::to_string(result.loss / std::log(2.0)).substr(0, 6);
  const mt::ScaleState scale = scaler.state();
  result.skipped = scale.skipped;
  result.scale = precision == mt::Precision::fp16_mixed ? static_cast<double>(scale.scale) : 0;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (log)
    log->write({{"precision", to_string(precision)}, {"validation_loss", result.loss}, {"seconds", result.seconds}});
  if (o.sample > 0 && !o.tokens)
    std::cout << "--- sample, " << to_string(precision) << " ---\n" << sample(model, o, precision) << "\n---\n";
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app(
      "Trains a small GPT in mixed precision. The default text is what `bible` prints (apt-get install bible-kjv).");
  add_common_options(app, o);
  app.add_option("--data", o.data, "a text file, read as bytes; or a token file with --tokens")->required();
  app.add_flag("--tokens", o.tokens, "the data is a file of token ids (256 int32 of header, then uint16 or uint32)");
  app.add_option("--vocabulary", o.vocabulary, "number of tokens, with --tokens")->capture_default_str();
  app.add_option("--steps", o.steps, "optimizer steps")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", o.batch, "sequences a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--context", o.context, "tokens a sequence")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--layers", o.layers, "blocks")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", o.heads, "attention heads")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--width", o.width, "size of a token's vector")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dropout", o.dropout, "probability")->check(CLI::Range(0.0, 1.0))->capture_default_str();
  app.add_flag("--checkpoint", o.checkpoint, "recompute each block in backward: less memory, more time");
  app.add_option("--lr", o.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--weight-decay", o.weight_decay, "of AdamW")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--clip", o.clip, "limit of the gradients' global norm; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--sample", o.sample, "bytes of generated text at the end; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--prompt", o.prompt, "what the sample begins with")->capture_default_str();
  app.add_option("--temperature", o.temperature, "of the sample; 0: always the likeliest")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--top-k", o.top_k, "sample among so many; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return run_precisions(
      o, "GPT, " + std::to_string(o.layers) + " layers of " + std::to_string(o.width), "bits/token",
      [&](mt::Precision p, mt::Device d, const mt::train::StopSignal& stop) { return train(o, p, d, stop); });
}
