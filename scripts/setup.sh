#!/usr/bin/env bash
# Installs what is missing to build Mantissa on Debian 12 or Ubuntu 24.04, and says what it does. Safe to run again.
#   scripts/setup.sh            compiler, libraries, data sets
#   scripts/setup.sh --cuda     also the cudnn-frontend headers (PyPI) for a build with CUDA; the toolkit and cuDNN come from
#                               NVIDIA's packages (docs/dependencies.md)
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build git ca-certificates pkg-config ccache libeigen3-dev libopenblas-openmp-dev libcli11-dev
          nlohmann-json3-dev libfmt-dev zlib1g-dev libgtest-dev libgmock-dev dataset-fashion-mnist bible-kjv bible-kjv-text)
[ "${MANTISSA_SETUP_LINT:-0}" = 1 ] && packages+=(clang-format python3-venv)
[ "${MANTISSA_SETUP_BENCH:-0}" = 1 ] && packages+=(libbenchmark-dev)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: installing with apt-get: ${missing[*]}"
  sudo=""
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "setup: run this as root, or install sudo" >&2; exit 1; }
    sudo=sudo
  fi
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "setup: every package is there"
fi

if [ "${1:-}" = --cuda ] && [ ! -e .deps/cudnn_frontend/include/cudnn_frontend.h ]; then
  version=1.18.0  # pairs with cuDNN 9.18 and 9.19
  echo "setup: fetching the cudnn-frontend $version headers from PyPI into .deps/"
  python3 - "$version" <<'PY'
import glob, os, subprocess, sys, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder,
                    "nvidia-cudnn-frontend==" + sys.argv[1]], check=True)
    with zipfile.ZipFile(glob.glob(os.path.join(folder, "*.whl"))[0]) as wheel:
        for name in wheel.namelist():
            if name.startswith("include/") or name.endswith("LICENSE.txt"):
                wheel.extract(name, ".deps/cudnn_frontend")
PY
fi
