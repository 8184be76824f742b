#!/usr/bin/env bash
# What a machine with a GPU has to say about a build: the whole test suite, the sanitizers on the kernels, and the benchmarks
# beside PyTorch where it is installed. Builds first unless MANTISSA_BUILD_DIR holds a build made elsewhere.
#   scripts/gpu-check.sh [tests] [sanitize] [bench]     default: all three
set -uo pipefail
cd "$(dirname "$0")/.."
build=${MANTISSA_BUILD_DIR:-}
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(tests sanitize bench)
if [ -z "$build" ]; then
  build=build/gpu
  scripts/setup.sh --cuda
  cmake -S . -B "$build" -G Ninja -DMANTISSA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native -DBUILD_SHARED_LIBS=ON -DMANTISSA_BUILD_BENCHMARKS=ON &&
    cmake --build "$build" || exit 1
fi
# The libraries of NVIDIA's Python packages serve where no toolkit is on the library path.
for folder in $(python3 -c 'import glob, site, sys
for base in site.getsitepackages():
    print(" ".join(glob.glob(base + "/nvidia/*/lib")))' 2>/dev/null); do
  LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$folder
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$build
out=${OUT:-$build}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
status=0

for stage in "${stages[@]}"; do
  echo "== $stage"
  case $stage in
    tests)
      # Several programs share the GPU: most of their time is spent on the host.
      export out
      export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
      printf '%s\n' "$build"/tests/*_test | xargs -P "${MANTISSA_JOBS:-4}" -I{} bash -c '
        name=$(basename {})
        begin=$SECONDS
        if timeout 500 {} --gtest_brief=1 >"$out/$name.log" 2>&1; then
          echo "$name: $(grep -E "^\[  PASSED|^\[  SKIPPED|MANTISSA_TEST_SEED" "$out/$name.log" | tr "\n" " ")$((SECONDS - begin)) s"
        else
          echo "FAILED $name ($((SECONDS - begin)) s)"
          grep -vE "^\[ RUN|^\[       OK" "$out/$name.log" | head -n 60
          exit 1
        fi' || status=1
      ;;
    sanitize)
      # Small shapes: the sanitizers slow kernels down by ten to a hundred times. The tools share the GPU.
      sanitize() {
        local tool=$1 failed=0 case test filter log
        local cases=(op_rounding_test:'*EveryRow*cuda_f16*' op_rounding_test:'*EveryRow*cuda_f32*' optimizer_test:'*cuda*'
                     loss_scaler_test:'*cuda*')
        # A whole model: racecheck does not understand how cuDNN's attention synchronises, and initcheck does not see what
        # cuBLAS writes through the tensor memory accelerator.
        [ "$tool" = memcheck ] && cases+=(captured_step_test:'*cuda*')
        for case in "${cases[@]}"; do
          test=${case%%:*} filter=${case#*:} log=$out/$tool-${case%%:*}.log
          if MANTISSA_SMALL=1 OMP_NUM_THREADS=2 timeout 280 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$build/tests/$test" --gtest_filter="$filter" --gtest_brief=1 >"$log" 2>&1; then
            echo "$tool $test $filter: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1)"
          else
            failed=1
            echo "FAILED $tool $test $filter"
            grep -E '=========|Failure|FAILED' "$log" | head -n 40
          fi
        done
        return $failed
      }
      tools=()
      for tool in ${MANTISSA_SANITIZERS:-memcheck racecheck initcheck}; do
        sanitize "$tool" &
        tools+=($!)
      done
      for tool in "${tools[@]}"; do wait "$tool" || status=1; done
      ;;
    bench)
      MANTISSA_BUILD_DIR=$build scripts/bench-peers.sh || status=1
      "$build/bench/kernels" --device cuda || status=1
      ;;
  esac
done
exit $status
