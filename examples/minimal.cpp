// The whole of it: f32 masters, f16 compute, a dynamic loss scale. Delete the Autocast line and it trains in f32.
#include <mantissa/mantissa.h>
#include <cstdio>

namespace mt = mantissa;

int main() {
  const mt::Device device = mt::parse_device("auto");
  mt::manual_seed(1);
  mt::nn::MLP teacher({16, 32, 4}, device), model({16, 128, 128, 4}, device);
  mt::optim::AdamW optimizer(model.parameters(), {.lr = 3e-3, .weight_decay = 0.01});
  mt::optim::LossScaler scaler;  // dynamic; does nothing where no tensor is f16

  for (int step = 0; step <= 300; ++step) {
    const mt::Tensor x = mt::randn({256, 16}, {mt::f32, device});
    const mt::Tensor target = mt::argmax(teacher(x), 1);
    mt::Tensor loss;
    {
      mt::Autocast scope(mt::f16);  // products in f16; the loss in f32
      loss = mt::cross_entropy(model(x), target);
    }
    scaler.backward(loss);
    optimizer.clip_grad_norm(1.0);
    const auto result = scaler.step(optimizer);  // unscale, check, update or skip, adapt the scale
    if (step % 50 == 0)
      std::printf("step %3d  loss %.4f  scale %.0f  %s\n", step, loss.item(), scaler.scale(),
                  to_string(result.verdict()).c_str());
  }
}
