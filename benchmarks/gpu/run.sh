#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds the CUDA module, runs the conformance cases on it, then
# measures. Needs what a CUDA machine for PyTorch has (nvcc, python3 with torch, pip, cmake, ninja,
# scikit-build-core, pybind11, pytest) and nothing from outside.
#
#   benchmarks/gpu/run.sh [--quick]
#
#   PYTHON          the interpreter that has torch (default: python3)
#   KVPLANE_WHEELS  a folder of wheels to take missing packages from (protobuf, pytest, ...)
#   OUT             the folder for the JSON (default: benchmarks/results)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
SITE=$PWD/build/gpu/site
OUT=${OUT:-benchmarks/results}
say() { printf '%s\n' "gpu: $*" >&2; }

build() {
  say "building the CUDA module"
  rm -rf build/gpu
  mkdir -p "$SITE"
  if [ -n "${KVPLANE_WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$SITE" "$KVPLANE_WHEELS"/*.whl
  fi
  KVPLANE_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$PYTHON" -m pip install --quiet --no-index \
    --no-deps --no-build-isolation --target "$SITE" \
    --config-settings=build-dir=build/gpu/cmake ./csrc
}

# $1: words to run pytest under, rest: for pytest. The project's own settings of pytest name plugins
# that need not be here.
on_gpu() {
  local under=$1
  shift
  # shellcheck disable=SC2086
  KVPLANE_DEVICE_BACKEND=cuda $under "$PYTHON" -m pytest -q -x -c /dev/null --rootdir . \
    -p no:cacheprovider -W ignore -m "not nightly" "$@"
}

conform() {
  say "running the conformance cases"
  on_gpu "" tests/kernels/test_cuda_attention.py tests/kernels/test_cuda_bad_input.py \
    tests/kernels/test_cuda_cache_and_blocks.py tests/kernels/on_gpu.py
}

sanitize() {
  command -v compute-sanitizer >/dev/null || { say "no compute-sanitizer here"; return; }
  for tool in memcheck racecheck synccheck; do
    say "compute-sanitizer $tool"
    on_gpu "compute-sanitizer --tool $tool --error-exitcode 1" \
      tests/kernels/test_cuda_attention.py -k "any_order_of_warps or append_over"
  done
}

export PYTHONPATH="$SITE:$PWD:$PWD/tests/kernels${PYTHONPATH:+:$PYTHONPATH}"
build
conform
[ "${1:-}" = --quick ] || sanitize
say "measuring"
"$PYTHON" -m benchmarks.gpu.measure --out "$OUT" "$@"
