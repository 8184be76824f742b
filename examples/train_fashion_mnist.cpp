// Trains a small CNN or an MLP on Fashion-MNIST (Xiao et al. 2017) in a chosen precision.
#include <chrono>
#include <memory>

#include "common.h"

using namespace examples;

namespace {

struct Options : CommonOptions {
  std::string model = "cnn", data = std::string(mt::train::kFashionMnistDirectory);
  int epochs = 2;
  std::int64_t batch = 128, limit = 0;
  double lr = 2e-3, weight_decay = 0.01;
};

/// One callable for both models.
struct Classifier {
  std::unique_ptr<mt::nn::SmallCNN> cnn;
  std::unique_ptr<mt::nn::MLP> mlp;
  mt::nn::Module& module() { return cnn ? static_cast<mt::nn::Module&>(*cnn) : *mlp; }
  mt::Tensor operator()(const mt::Tensor& x) const { return cnn ? (*cnn)(x) : (*mlp)(x); }
};

Classifier make_model(const std::string& name, mt::Device device) {
  if (name == "cnn") return {std::make_unique<mt::nn::SmallCNN>(device), nullptr};
  return {nullptr, std::make_unique<mt::nn::MLP>(std::vector<std::int64_t>{784, 256, 128, 10}, device)};
}

/// The share of images whose most likely class is right.
double accuracy(Classifier& model, mt::train::ImageLoader& loader, mt::Precision precision) {
  const mt::NoGrad no_grad;
  model.module().eval();
  double right = 0, seen = 0;
  for (auto [x, y] : loader) {
    const mt::Autocast scope(mt::autocast_dtype(precision));
    right += mt::sum((mt::argmax(model(x), 1) == y).to(mt::f32)).item();
    seen += static_cast<double>(y.numel());
  }
  model.module().train();
  return right / seen;
}

RunResult train(const Options& o, mt::Precision precision, mt::Device device, const mt::train::StopSignal& stop) {
  const auto start = std::chrono::steady_clock::now();
  mt::train::ImageDataset images = mt::train::load_fashion_mnist(mt::train::Split::train, o.data);
  if (o.limit > 0 && o.limit < images.size())
    images = {images.images.slice(0, 0, o.limit), images.labels.slice(0, 0, o.limit), images.classes};
  mt::train::ImageLoader loader(images, {.batch = o.batch, .seed = o.seed, .device = device});
  mt::train::ImageLoader test(mt::train::load_fashion_mnist(mt::train::Split::test, o.data),
                              {.batch = 500, .shuffle = false, .drop_last = false, .device = device});

  Classifier model = make_model(o.model, device);
  const std::int64_t total = o.epochs * loader.batches();
  mt::optim::AdamW optimizer(model.module().parameters(), {.lr = o.lr, .weight_decay = o.weight_decay});
  optimizer.set_schedule(mt::optim::cosine_decay(o.lr, total, total / 20, o.lr / 100));
  mt::optim::LossScaler scaler;

  std::unique_ptr<mt::train::JsonLog> log = o.log.empty() ? nullptr : std::make_unique<mt::train::JsonLog>(o.log);
  mt::train::Progress progress(total, {.label = to_string(precision),
                                       .unit = "images",
                                       .units_per_step = static_cast<double>(o.batch),
                                       .quiet = o.quiet});
  RunResult result{.precision = precision};
  mt::Tensor loss;
  std::int64_t step = 0;
  for (int epoch = 0; epoch < o.epochs && !stop.requested(); ++epoch) {
    for (auto [x, y] : loader) {
      {
        const mt::Autocast scope(mt::autocast_dtype(precision));
        loss = mt::cross_entropy(model(x), y);
      }
      scaler.backward(loss);
      scaler.step(optimizer);
      ++step;
      if (progress.due()) {  // reading the loss waits for the device, so it is done a few times a second only
        const double value = loss.item(), scale = scaler.scale();
        if (log) log->write({{"precision", to_string(precision)}, {"step", step}, {"loss", value}, {"scale", scale}});
        progress.update(step, "loss " + std::to_string(value));
      } else {
        progress.update(step);
      }
      if (stop.requested()) break;
    }
  }
  progress.finish();
  result.interrupted = stop.requested();
  result.loss = loss.item();
  result.memory = mt::memory_stats(device);
  const double score = accuracy(model, test, precision);
  result.score = std::to_string(100 * score).substr(0, 5) + " %";
  const mt::ScaleState scale = scaler.state();
  result.skipped = scale.skipped;
  result.scale = precision == mt::Precision::fp16_mixed ? static_cast<double>(scale.scale) : 0;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (log) log->write({{"precision", to_string(precision)}, {"accuracy", score}, {"seconds", result.seconds}});
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Trains on Fashion-MNIST in mixed precision.");
  add_common_options(app, o);
  app.add_option("--model", o.model, "cnn or mlp")->check(CLI::IsMember({"cnn", "mlp"}))->capture_default_str();
  app.add_option("--data", o.data, "directory of the IDX files")->capture_default_str();
  app.add_option("--epochs", o.epochs, "passes over the training images")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", o.batch, "images a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--limit", o.limit, "use only the first so many training images; 0: all")->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--weight-decay", o.weight_decay, "of AdamW")->check(CLI::NonNegativeNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return run_precisions(
      o, "Fashion-MNIST, " + o.model, "accuracy",
      [&](mt::Precision p, mt::Device d, const mt::train::StopSignal& stop) { return train(o, p, d, stop); });
}
