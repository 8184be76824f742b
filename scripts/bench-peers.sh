#!/usr/bin/env bash
# Training steps beside PyTorch, one after the other in one run, as JSON lines and a table. Needs a GPU and a Python with torch.
#   scripts/bench-peers.sh [gpt2] [sizes] [mlp]     default: all three
# MANTISSA_BUILD_DIR: the build to measure (default build/gpu).
set -uo pipefail
cd "$(dirname "$0")/.."
build=${MANTISSA_BUILD_DIR:-build/gpu}
out=${OUT:-$build}/bench.jsonl
rows=("$@")
[ ${#rows[@]} -gt 0 ] || rows=(gpt2 sizes mlp)
: >"$out"

ours() { "$build/bench/train_step" --device cuda "$@" | tee -a "$out"; }
peer() { timeout 150 python3 bench/peers/train_step.py "$@" 2>/dev/null | tee -a "$out"; }
for row in "${rows[@]}"; do
  case $row in
    gpt2)
      for precision in bf16-mixed fp16-mixed tf32 fp32; do
        ours --precision $precision
        ours --precision $precision --capture
        peer --precision $precision
        [ $precision = fp32 ] || peer --precision $precision --compile
      done
      ;;
    sizes)
      for size in "--layers 24 --width 1024 --heads 16" "--layers 36 --width 1280 --heads 20 --batch 8"; do
        for precision in bf16-mixed fp16-mixed; do
          ours --precision $precision $size
          ours --precision $precision $size --capture
          peer --precision $precision $size --compile
        done
      done
      ;;
    mlp)
      for precision in fp16-mixed fp32; do
        small="--model mlp --batch 128 --precision $precision --steps 2000 --warmup 500"
        ours $small
        ours $small --capture
        peer $small
      done
      ;;
    *)
      echo "bench-peers: unknown row '$row'; use gpt2, sizes or mlp" >&2
      exit 2
      ;;
  esac
done

python3 - "$out" <<'PY'
import json, sys
print(f"{'model':8} {'batch':>5} {'precision':12} {'who':32} {'ms':>10} {'ms, no waits':>12} {'peak MiB':>9}")
for line in open(sys.argv[1]):
    r = json.loads(line)
    how = r["who"] + (", captured" if r.get("captured") else "")
    print(f"{r['model']:8} {r['batch']:5} {r['precision']:12} {how:32} {r['ms']:10.4f} {r['ms_pipelined']:12.4f} {r['peak_mib']:9.0f}")
PY
