// The graph's mechanics: what accumulates where, what may be used again, what is caught, and that nothing is left
// behind.
#include <thread>

#include "step_support.h"

using namespace mantissa;
using namespace mantissa::testing;

namespace {

using Values = std::vector<double>;
Values values(const Tensor& x) { return x.to_vector<double>(); }

class Autograd : public OnDevice {
 protected:
  static Tensor given(const Values& v, DType dtype = DType::f32) { return leaf(v, on(dtype)); }
  static std::int64_t held() { return memory_stats(device()).total; }
};
MT_ON_DEVICES(Autograd);

// ---- accumulation
// ---------------------------------------------------------------------------------------------------------

TEST_P(Autograd, EveryUseOfALeafAddsUp) {
  const Tensor x = given({2, 3});
  sum(x * x + x * 3.0 + exp(x) * 0.0).backward();
  EXPECT_EQ(values(x.grad()), (Values{7, 9}));
  sum(x).backward();  // another backward adds
  EXPECT_EQ(values(x.grad()), (Values{8, 10}));
  x.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  sum(x).backward();  // and starts anew after zero_grad
  EXPECT_EQ(values(x.grad()), (Values{1, 1}));
}

TEST_P(Autograd, DiamondsAreSummedBeforeTheyGoOn) {
  const Tensor x = given({3});
  int calls = 0;
  const Tensor h = x * 2.0;
  h.register_hook([&](const Tensor&) { return ++calls, Tensor{}; });
  const Tensor a = h * 5.0, b = h * h, c = a * b;  // c = 5 h^3
  sum(c + a).backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(values(x.grad()), (Values{2 * (15 * 36 + 5)}));
}

TEST_P(Autograd, SixteenBitLeavesAccumulateInF32) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = given({1}, dtype);
    for (int i = 0; i < 3000; ++i) (x * 1.0).backward();  // f16 would stop at 2048, bf16 at 256
    EXPECT_EQ(x.grad().dtype(), DType::f32);
    EXPECT_EQ(x.grad().item(), 3000);
  }
}

TEST_P(Autograd, ALeafMayBeTheRoot) {
  const Tensor x = given({4});
  x.backward();
  x.backward();
  EXPECT_EQ(values(x.grad()), (Values{2}));
}

TEST_P(Autograd, OnlyWhatAsksGetsAGradient) {
  const Tensor x = given({2}), constant = from_vector(Values{3}, {1}, on());
  const Tensor y = x * constant;
  y.backward();
  EXPECT_EQ(values(x.grad()), (Values{3}));
  EXPECT_FALSE(constant.grad().defined());
  EXPECT_FALSE((constant * constant).requires_grad());
  Tensor frozen = given({5});
  frozen.set_requires_grad(false);
  sum(frozen * x).backward();
  EXPECT_FALSE(frozen.grad().defined());
}

TEST_P(Autograd, ASeedScalesAndANonScalarRootTakesOne) {
  const Tensor x = given({1, 2, 3});
  backward(square(x), {.seed = from_vector(Values{1, 10, 100}, {3}, on())});
  EXPECT_EQ(values(x.grad()), (Values{2, 40, 600}));
}

TEST_P(Autograd, OutputsThatNobodyUsesCountAsZero) {
  const Tensor x = leaf(from_vector(Values{1, 2, 4, 8}, {2, 2}, on())), r = leaf(zeros({2, 2}, on()));
  const Normed n = add_layer_norm(x, r);
  sum(n.sum * 2.0).backward();  // the norm itself is not used
  EXPECT_EQ(values(x.grad()), (Values{2, 2, 2, 2}));
  EXPECT_EQ(values(r.grad()), (Values{2, 2, 2, 2}));
  const std::vector<Tensor> parts = split(x, 1, 1);
  x.zero_grad();
  sum(parts[1]).backward();
  EXPECT_EQ(values(x.grad()), (Values{0, 1, 0, 1}));
}

TEST_P(Autograd, CastsCarryGradientsBothWays) {
  for (const DType dtype : {DType::f64, DType::f16, DType::bf16}) {
    const Tensor x = given({1, -2});
    const Tensor y = x.to(dtype);
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(values(cast(y, DType::f32)), (Values{1, -2}));
    sum(square(y.to(DType::f32))).backward();
    EXPECT_EQ(values(x.grad()), (Values{2, -4}));
  }
  const Tensor x = given({1.5});
  EXPECT_EQ(x.to(DType::f32).storage(), x.storage());  // nothing to do, nothing done
  EXPECT_FALSE(x.to(DType::i64).requires_grad());      // integers have no gradients
  const Tensor low = given({1.5}, DType::f16);
  (low.to(DType::f32) * 0x1p-30).backward();  // what f16 can not hold is rounded on the way, as in any f16 chain
  EXPECT_EQ(low.grad().item(), 0);
}

// ---- one use, or many
// ---------------------------------------------------------------------------------------------------

TEST_P(Autograd, AGraphIsUsedOnceUnlessItIsKept) {
  const Tensor x = given({3});
  const Tensor h = square(x), y = h * h;
  backward(y, {.retain_graph = true});
  backward(y, {.retain_graph = true});
  EXPECT_EQ(x.grad().item(), 2 * 4 * 27);
  y.backward();
  EXPECT_EQ(x.grad().item(), 3 * 4 * 27);
  expect_error<AutogradError>([&] { y.backward(); },
                              {"backward: the graph of", "was used already", "retain_graph = true"});
  expect_error<AutogradError>([&] { (h * 2.0).backward(); }, {"'square' was used already"});  // a part of it
  EXPECT_EQ(x.grad().item(), 3 * 4 * 27);
}

TEST_P(Autograd, KeptGraphsGiveTheSameBitsAgain) {  // no saved tensor is overwritten, though cross_entropy may when it
                                                    // is the last use
  manual_seed(seed());
  const Tensor x = leaf(randn({5, 7}, on(DType::f16))), targets = zeros({5}, on(DType::i64));
  const Tensor loss = cross_entropy(x * 2.0, targets);
  backward(loss, {.retain_graph = true});
  const Values first = values(x.grad());
  x.zero_grad();
  loss.backward();
  EXPECT_EQ(values(x.grad()), first);
}

// ---- changes in place
// ---------------------------------------------------------------------------------------------------

TEST_P(Autograd, AChangedSavedTensorIsCaught) {
  const auto refuse = [](auto change, const std::vector<std::string>& parts) {
    expect_error<AutogradError>(change, parts);
  };
  const Tensor x = given({1, 2}), w = given({3, 4});
  Tensor h = x * 2.0;
  Tensor loss = sum(h * w);
  {
    const NoGrad off;
    h.fill_(1);
  }
  refuse([&] { loss.backward(); }, {"mul: a tensor that backward needs, f32[2]@" + to_string(device()),
                                    "was changed in place: it is at version 1, saved at 0"});
  h = x * 2.0;
  loss = sum(square(h));
  {
    const NoGrad off;
    h.slice(0, 0, 1).fill_(7);  // through a view
  }
  refuse([&] { loss.backward(); }, {"square: a tensor that backward needs", "was changed in place"});
  loss = sum(square(w));
  {
    const NoGrad off;
    w.copy_(x.detach());  // a parameter
  }
  refuse([&] { loss.backward(); }, {"square: a tensor that backward needs"});
  // What backward does not read may change.
  h = x * 2.0;
  loss = sum(h + 1.0);
  {
    const NoGrad off;
    h.fill_(0);
  }
  x.zero_grad();
  loss.backward();
  EXPECT_EQ(values(x.grad()), (Values{2, 2}));
}

TEST_P(Autograd, AChangeOfAWorkingCopyIsCaught) {  // what an optimizer step between forward and backward does
  const Tensor w = leaf(ones({2, 2}, on())), x = leaf(ones({1, 2}, on()));
  Tensor loss;
  {
    const Autocast scope(DType::f16);
    loss = sum(linear(x, w));
  }
  {
    const NoGrad off;
    w.fill_(2);
    const Autocast scope(DType::f16);
    linear(x, w);  // brings the 16-bit copy up to date, under the graph that saved it
  }
  expect_error<AutogradError>(
      [&] { loss.backward(); },
      {"linear: a tensor that backward needs, f16[2,2]@" + to_string(device()), "was changed in place"});
}

// ---- hooks
// --------------------------------------------------------------------------------------------------------------

TEST_P(Autograd, HooksSeeAndReplaceGradients) {
  const Tensor x = given({1, 2});
  Values seen;
  const Tensor h = x * 3.0;
  h.register_hook([&](const Tensor& g) {
    seen = values(g);
    return g * 10.0;
  });
  x.register_hook([](const Tensor& g) { return g + 1.0; });
  x.register_hook([](const Tensor& g) { return g * 2.0; });  // in the order of registration
  sum(square(h) + x * 100.0).backward();
  EXPECT_EQ(seen, (Values{6, 12}));
  EXPECT_EQ(values(x.grad()),
            (Values{2 * (1 + 100 + 3 * 60), 2 * (1 + 100 + 3 * 120)}));  // a leaf's hook sees the whole sum
}

TEST_P(Autograd, FinishedHooksRunOncePerBackward) {
  const Tensor x = given({1, 2}), other = given({5, 5});
  std::vector<Values> finished;
  register_accumulated_hook(x, [&](const Tensor& g) { finished.push_back(values(g)); });
  sum(x * x + x).backward();
  sum(other).backward();  // not about x
  sum(x).backward();
  EXPECT_EQ(finished, (std::vector<Values>{{3, 5}, {4, 6}}));
}

// ---- off and on
// ---------------------------------------------------------------------------------------------------------

TEST_P(Autograd, NoGradRecordsNothing) {
  const Tensor x = given({2});
  EXPECT_TRUE(grad_enabled());
  {
    const NoGrad off;
    EXPECT_FALSE(grad_enabled());
    EXPECT_FALSE((x * 2.0).requires_grad());
    {
      const EnableGrad on_again;
      EXPECT_TRUE((x * 2.0).requires_grad());
    }
    EXPECT_FALSE(grad_enabled());
    std::thread([] { EXPECT_TRUE(grad_enabled()); }).join();  // of this thread only
  }
  EXPECT_TRUE((x * 2.0).requires_grad());
  EXPECT_FALSE(x.detach().requires_grad());
  (x * x.detach()).backward();
  EXPECT_EQ(x.grad().item(), 2);
}

TEST_P(Autograd, DetachedTensorsShareData) {
  const Tensor x = given({1, 2});
  const Tensor d = x.detach();
  EXPECT_EQ(d.storage(), x.storage());
  d.fill_(9);
  EXPECT_EQ(values(x), (Values{9, 9}));
}

// ---- depth, memory, errors
// ------------------------------------------------------------------------------------------------

TEST_P(Autograd, AMillionNodesNeitherRecurseNorLeak) {
  const std::int64_t before = held();
  const int length = device().is_cpu() ? 1000000 : 100000;
  {
    const Tensor x = given({1});
    Tensor y = x;
    for (int i = 0; i < length; ++i) y = y + 1.0;
    EXPECT_EQ(y.item(), 1.0 + length);
    y.backward();
    EXPECT_EQ(x.grad().item(), 1);
    y = x;
    for (int i = 0; i < length; ++i) y = y + 1.0;  // destroyed without a backward
  }
  EXPECT_EQ(held(), before);
}

TEST_P(Autograd, BackwardFreesWhatTheOpsSaved) {
  const Tensor x = leaf(ones({1 << 16}, on()));
  Tensor y = x;
  for (int i = 0; i < 8; ++i) y = y * y;  // each saves its operands
  const Tensor loss = sum(y);
  y = {};
  sum(x).backward();  // the gradient buffer exists now
  const std::int64_t full = held();
  loss.backward();
  EXPECT_LE(held(), full - 6 * (1 << 18));
}

TEST_P(Autograd, AnExceptionInBackwardLeavesNothingBehind) {
  const std::int64_t before = held();
  {
    const Tensor x = given({1, 2, 3});
    struct Refusal {};
    bool armed = true;
    const auto build = [&] {
      const Autocast scope(DType::bf16);
      const Tensor h = matmul(x.reshape({1, 3}), x.reshape({3, 1}));
      h.register_hook([&](const Tensor&) -> Tensor {
        if (armed) throw Refusal{};
        return {};
      });
      return sum(square(h.to(DType::f32)));
    };
    EXPECT_THROW(build().backward(), Refusal);
    EXPECT_TRUE(grad_enabled());
    EXPECT_FALSE(autocast_state().enabled);
    armed = false;
    x.zero_grad();
    build().backward();
    EXPECT_EQ(values(x.grad()), (Values{56, 112, 168}));  // (x x)^2, 2 * 14 * 2 x
  }
  EXPECT_EQ(held(), before);
}

// ---- checkpoint
// -----------------------------------------------------------------------------------------------------------

TEST_P(Autograd, ACheckpointEqualsThePlainCallBitForBit) {
  manual_seed(seed());
  const Tensor w1 = leaf(randn({16, 8}, on())), b1 = leaf(randn({16}, on())), w2 = leaf(randn({8, 16}, on())),
               x = leaf(randn({5, 8}, on())), unused = leaf(randn({3}, on()));
  const auto block = [&](std::span<const Tensor> in) {  // two parameters as inputs, two from outside
    const Tensor h = dropout(linear(in[0], in[1], b1, Activation::gelu_tanh), 0.3);
    return softmax(linear(h, w2)) + in[0];
  };
  for (const DType precision : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<Values> results[2];
    for (const bool saving : {false, true}) {
      manual_seed(5);
      const Autocast scope(precision);
      Tensor h = x * 1.0;
      for (int i = 0; i < 2; ++i)
        h = saving ? checkpoint(block, {h, w1, unused}) : block(std::vector<Tensor>{h, w1, unused});
      const Tensor after = dropout(h, 0.5);  // the stream goes on from the same place
      {
        const Autocast other(DType::f32);  // backward has the scope of forward, whatever is in force now
        sum(after * after).backward();
      }
      results[saving].push_back(values(after));
      for (const Tensor& p : {w1, b1, w2, x}) {
        results[saving].push_back(values(p.grad()));
        p.zero_grad();
      }
      results[saving].push_back({static_cast<double>(random_state().offset)});
      EXPECT_FALSE(unused.grad().defined());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i)
      EXPECT_EQ(results[0][i], results[1][i]) << precision << ", result " << i;
  }
}

TEST_P(Autograd, ACheckpointKeepsNoIntermediateResults) {
  const Tensor x = leaf(ones({1 << 16}, on()));
  const auto deep = [](std::span<const Tensor> in) {
    Tensor y = in[0];
    for (int i = 0; i < 8; ++i) y = y * y;
    return y;
  };
  const std::int64_t before = held();
  const Tensor y = checkpoint(deep, {x});
  EXPECT_LE(held(), before + (1 << 18));
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector()[0], 256);
}

TEST_P(Autograd, ACheckpointMayBeUsedAgainAndFail) {
  const Tensor x = given({3});
  struct Refusal {};
  bool armed = false;
  const auto fn = [&](std::span<const Tensor> in) {
    if (armed) throw Refusal{};
    return dropout(in[0] * in[0], 0.0) * 1.0;
  };
  const Tensor y = checkpoint(fn, {x});
  backward(y, {.retain_graph = true});
  backward(y, {.retain_graph = true});
  EXPECT_EQ(x.grad().item(), 12);
  armed = true;
  rand({8}, on());
  const PhiloxState state = random_state();
  EXPECT_THROW(y.backward(), Refusal);
  EXPECT_EQ(random_state().offset, state.offset) << "the stream is left where recomputation began";
  EXPECT_EQ(random_state().seed, state.seed);
  EXPECT_FALSE(checkpoint([](std::span<const Tensor> in) { return in[0] * 2.0; }, {from_vector(Values{1}, {1}, on())})
                   .to(DType::f32)
                   .shape()
                   .rank() == 0);
}

// ---- Autocast
// -------------------------------------------------------------------------------------------------------------

TEST_P(Autograd, AutocastNestsAndEndsWithItsScope) {
  const Tensor x = ones({2, 2}, on());
  EXPECT_EQ(matmul(x, x).dtype(), DType::f32);
  {
    const Autocast outer(DType::f16);
    EXPECT_EQ(matmul(x, x).dtype(), DType::f16);
    {
      const Autocast inner(DType::bf16);
      EXPECT_EQ(matmul(x, x).dtype(), DType::bf16);
      const Autocast off(DType::f32);
      EXPECT_EQ(matmul(x, x).dtype(), DType::f32);
    }
    EXPECT_EQ(matmul(x, x).dtype(), DType::f16);
    DType elsewhere{};
    std::thread([&] { elsewhere = matmul(ones({2, 2}, on()), ones({2, 2}, on())).dtype(); }).join();
    EXPECT_EQ(elsewhere, DType::f32);  // of this thread only
    EXPECT_EQ(softmax(matmul(x, x)).dtype(), DType::f32);
    const Tensor d = ones({2, 2}, on(DType::f64));
    EXPECT_EQ(matmul(d, d).dtype(), DType::f64);  // f64 is left alone
  }
  EXPECT_FALSE(autocast_state().enabled);
  EXPECT_EQ(matmul(x, x).dtype(), DType::f32);
}

TEST_P(Autograd, AWorkingCopyIsMadeOnceAndRefreshedWhenItsParameterChanges) {
  const Tensor w = leaf(full({4, 4}, 1.5, on())), x = ones({1, 4}, on(DType::f16));
  const auto product = [&] {
    const Autocast scope(DType::f16);
    return linear(x, w).to_vector()[0];
  };
  const auto casts = [&] { return backend(device()).counters.casts; };
  EXPECT_EQ(product(), 6);
  std::int64_t before = casts();
  const NoGrad off;
  product();
  const std::int64_t steady = casts() - before;  // of reading the result only
  w.fill_(2);
  before = casts();
  EXPECT_EQ(product(), 8);
  EXPECT_EQ(casts() - before, steady + 1);
  w.slice(0, 0, 1).fill_(3);  // through a view
  EXPECT_EQ(product(), 12);
  const Autocast scope(DType::bf16);  // another type
  EXPECT_EQ(linear(x.to(DType::bf16), w).to_vector()[0], 12);
  EXPECT_EQ(product(), 12);
}

TEST_P(Autograd, AViewOfAParameterIsNotTakenForIt) {
  const Tensor w = leaf(from_vector(Values{1, 2, 3, 4}, {2, 2}, on()));
  const Autocast scope(DType::f16);
  const Tensor x = ones({1, 2}, on());
  EXPECT_EQ(values(matmul(x, w.transpose(0, 1))), (Values{3, 7}));
  EXPECT_EQ(values(matmul(x, w)), (Values{4, 6}));
  EXPECT_EQ(values(matmul(x.slice(1, 0, 1), w.slice(0, 1, 2))), (Values{3, 4}));
}

TEST_P(Autograd, TwoThreadsDifferentiateTheirOwnGraphs) {
  std::vector<double> results(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < results.size(); ++t)
    threads.emplace_back([&results, t] {
      const Tensor x = leaf(Values{static_cast<double>(t) + 1}, on());
      const Autocast scope(t % 2 ? DType::f16 : DType::bf16);
      for (int i = 0; i < 50; ++i) sum(square(x)).backward();
      results[t] = x.grad().item();
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(results, (Values{100, 200, 300, 400}));
}

// ---- gradcheck itself
// -----------------------------------------------------------------------------------------------------

TEST_P(Autograd, GradcheckFindsAWrongGradient) {
  const auto op = [](double factor) {
    return [factor](std::span<const Tensor> in) {
      const Tensor x = in[0];
      return record({"op", Cast::keep}, (x * x).detach(), {x},
                    [x = save(x), factor](Grads g, GradOut& out) { out.set(0, g[0] * x.get() * factor); });
    };
  };
  const auto check = [&](double factor) { return gradcheck(op(factor), {given({0.5, -1.5, 2}, DType::f64)}); };
  EXPECT_TRUE(check(2));
  const auto report = check(2 * (1 + 1e-5));
  EXPECT_FALSE(report);
  EXPECT_GT(report.worst, 1);
  EXPECT_TRUE(contains(report.message, "gradcheck: input 0 f64[3]@")) << report.message;
  EXPECT_FALSE(check(kNaN));
  // And leaves the inputs as they were.
  const Tensor x = given({0.25, 3}, DType::f64);
  gradcheck(op(2), {x});
  EXPECT_EQ(values(x), (Values{0.25, 3}));
}

}  // namespace
