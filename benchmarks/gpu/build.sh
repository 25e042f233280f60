#!/usr/bin/env bash
# Builds the CUDA module for benchmarks.gpu.first, where no prebuilt one imports. Downloads nothing.
# Needs nvcc, g++, and the Python packages cmake, ninja, pybind11 and scikit-build-core; no GPU if
# KVPLANE_ARCH is given.
#
#   PYTHON          the interpreter that has torch (default: python3)
#   KVPLANE_WHEELS  a folder of wheels to take missing packages from
#   KVPLANE_ARCH    CMake's name of the architecture to build for (default: this GPU's)
#   BUILD           the build folder (default: build/gpu)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-$PWD/build/gpu}
SITE=$BUILD/site

say() { printf 'gpu: %s (%d s)\n' "$*" "$SECONDS" >&2; }

export PYTHONPATH="$SITE:$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$SITE"
if [ -n "${KVPLANE_WHEELS:-}" ]; then
  say "installing wheels from $KVPLANE_WHEELS"
  "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$SITE" \
    "$KVPLANE_WHEELS"/*.whl
fi
for program in nvcc g++; do
  command -v "$program" >/dev/null || { say "missing: $program"; exit 2; }
done
say "building the CUDA module"
rm -rf "$BUILD/cmake"
KVPLANE_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$PYTHON" -m pip install --quiet --no-index \
  --no-deps --no-build-isolation --upgrade --target "$SITE" \
  --config-settings=build-dir="$BUILD/cmake" \
  --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES="${KVPLANE_ARCH:-native}" ./csrc
"$PYTHON" -c 'import kvplane_kernels as k
assert k.has_cuda_build()
print(f"gpu: built {k.__path__[0]}; GPUs: {k.cuda_device_count()}")' >&2
