#!/usr/bin/env bash
# From a fresh clone to two trained models: installs what is missing, builds, and trains a CNN on Fashion-MNIST and a small
# GPT on English text in fp32, bf16-mixed and fp16-mixed. On the GPU if there is one, else on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

scripts/setup.sh
if command -v nvcc >/dev/null; then scripts/setup.sh --cuda || echo "quickstart: going on without CUDA"; fi

build=${MANTISSA_BUILD_DIR:-build}
echo "quickstart: building in $build/"
architectures=()
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  architectures=(-DCMAKE_CUDA_ARCHITECTURES=native)
  cuda=AUTO
else
  cuda=OFF  # nothing here could run it
fi
cmake -S . -B "$build" -G Ninja -DMANTISSA_BUILD_TESTS=OFF -DMANTISSA_CUDA=$cuda "${architectures[@]}" >/dev/null
cmake --build "$build" --target train_fashion_mnist train_gpt
echo "quickstart: built after $((SECONDS - started)) s"

mkdir -p runs
text=runs/kjv.txt
[ -s "$text" ] || bible -f -l72 'gen1:1-rev22:21' >"$text"

"$build/examples/train_fashion_mnist" --precision all --epochs "${MANTISSA_EPOCHS:-1}" --log runs/fashion_mnist.jsonl
echo
"$build/examples/train_gpt" --precision all --data "$text" --steps "${MANTISSA_STEPS:-200}" --log runs/gpt.jsonl
echo "quickstart: done after $((SECONDS - started)) s; logs are in runs/"
