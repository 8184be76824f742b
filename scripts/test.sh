#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test that this machine can run.
#   scripts/test.sh                          all stages
#   scripts/test.sh format cpu asan cuda     any of: formatting, CPU, ASan+UBSan, the CUDA build
set -euo pipefail
cd "$(dirname "$0")/.."
export MANTISSA_SETUP_LINT=1
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(format cpu asan cuda)
passed=0 failed=0 skipped=0
mkdir -p build

scripts/setup.sh
# Python's safetensors, to exchange files with; without it (no network) that test is skipped and says so.
if [ ! -e .deps/python/ready ]; then
  if python3 -m venv .deps/python && .deps/python/bin/pip install -q numpy safetensors; then touch .deps/python/ready; fi >/dev/null 2>&1 || true
fi
[ ! -e .deps/python/ready ] || export PATH=$PWD/.deps/python/bin:$PATH
have_nvcc() { command -v nvcc >/dev/null; }

# run_tests DIRECTORY: runs ctest, adds up the GoogleTest cases and prints the reasons of those that were skipped.
run_tests() {
  local log=$1/tests.log status=0
  ctest --test-dir "$1" --output-on-failure --no-tests=error -V >"$log" 2>&1 || status=$?
  local ok bad skip
  ok=$(grep -c '\[       OK \]' "$log" || true)
  bad=$(grep -c '\[  FAILED  \].*ms)' "$log" || true)
  skip=$(grep -c '\[  SKIPPED \].*ms)' "$log" || true)
  passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
  if [ "$skip" -gt 0 ]; then
    echo "  $skip skipped: $(grep -A1 'Skipped$' "$log" | grep -v 'Skipped$' | grep -v '^--' | sed 's/^[0-9]*: *//' | sort | uniq -c | sort -rn | head -3 | tr '\n' ';')"
  fi
  if [ "$status" -ne 0 ]; then
    echo "test: FAILED in $1" >&2
    grep -E '\[  FAILED  \]|tests failed|Failure|\*\*\*' "$log" | sort -u | head -60 >&2
    tail -n 60 "$log" >&2
    exit 1
  fi
  echo "  $ok passed"
}

build() {  # build DIRECTORY OPTIONS...
  local directory=$1
  shift
  cmake -S . -B "$directory" -G Ninja -DMANTISSA_WERROR=ON "$@" >"$directory.log" 2>&1 || { cat "$directory.log" >&2; exit 1; }
  cmake --build "$directory" >>"$directory.log" 2>&1 || { tail -n 80 "$directory.log" >&2; exit 1; }
}

for stage in "${stages[@]}"; do
  echo "== $stage"
  case $stage in
    format)
      git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror
      ;;
    cpu)
      build build/cpu -DMANTISSA_CUDA=OFF
      run_tests build/cpu
      ;;
    asan)
      build build/asan -DMANTISSA_CUDA=OFF -DMANTISSA_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo
      ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 run_tests build/asan
      ;;
    cuda)
      if have_nvcc; then
        scripts/setup.sh --cuda
        build build/cuda -DMANTISSA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${MANTISSA_CUDA_ARCHITECTURES:-90-real}" -DBUILD_SHARED_LIBS=ON
        run_tests build/cuda
      else
        echo "  no nvcc: the CUDA build is left out"
      fi
      ;;
    *)
      echo "test: unknown stage '$stage'; use format, cpu, asan or cuda" >&2
      exit 2
      ;;
  esac
done
echo "$passed passed, $failed failed, $skipped skipped"
