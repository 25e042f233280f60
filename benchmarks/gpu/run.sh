#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, in under ten minutes: builds the CUDA module, runs the
# conformance cases on it, compares the emulator's instructions with the hardware's, measures, and
# looks for faults with compute-sanitizer. Downloads nothing; lists what is missing first.
#
#   benchmarks/gpu/run.sh [--quick | --build-only]
#
#   --quick         fewer shapes, no compute-sanitizer
#   --build-only    builds and imports the module, which needs no GPU
#   PYTHON          the interpreter that has torch (default: python3)
#   KVPLANE_WHEELS  a folder of wheels to take missing packages from (protobuf, flashinfer, ...)
#   KVPLANE_ARCH    CMake's name of the architecture to build for (default: this GPU's)
#   BUILD           the build folder (default: build/gpu)
#   OUT             the folder for the JSON and the logs (default: benchmarks/results)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-$PWD/build/gpu}
SITE=$BUILD/site
OUT=${OUT:-benchmarks/results}
MODE=${1:-}
LIMIT_S=580        # for the whole run; the sanitizers use what is left
CONFORM_S=200      # for the conformance cases
MEASURE_S=280      # after which no measurement is started
SANITIZE_S=60      # for each sanitizer
ERRORS_FOUND=86    # a sanitizer's exit code, which nothing else uses

say() { printf 'gpu: %s (%d s)\n' "$*" "$SECONDS" >&2; }

check() {
  # shellcheck disable=SC2086
  "$PYTHON" benchmarks/gpu/preflight.py $MODE >&2
}

take_wheels() {
  [ -n "${KVPLANE_WHEELS:-}" ] || return 0
  say "installing wheels from $KVPLANE_WHEELS"
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$SITE" "$KVPLANE_WHEELS"/*.whl
}

build() {
  local arch=${KVPLANE_ARCH:-native} settings
  settings=(--config-settings=build-dir="$BUILD/cmake")
  if [ "$MODE" != --build-only ] || [ -n "${KVPLANE_ARCH:-}" ]; then
    settings+=(--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES="$arch")
  fi
  say "building the CUDA module"
  KVPLANE_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$PYTHON" -m pip install --quiet --no-index \
    --no-deps --no-build-isolation --upgrade --target "$SITE" "${settings[@]}" ./csrc
  "$PYTHON" -c 'import kvplane_kernels as k
assert k.has_cuda_build()
print(f"gpu: built {k.__path__[0]}; GPUs: {k.cuda_device_count()}")' >&2
}

build_emulator() {
  "$PYTHON" -c 'from emulated_build import emulated_module; emulated_module()'
}

# The project's pytest settings need plugins that may not be installed here.
conform() {
  local files=() file code=0
  for file in tests/kernels/test_cuda_*.py tests/kernels/on_gpu*.py; do
    [ "${file##*/}" = test_cuda_build.py ] || files+=("$file")
  done
  say "running the conformance cases: ${#files[@]} files"
  KVPLANE_DEVICE_BACKEND=cuda timeout -k 5 "$CONFORM_S" "$PYTHON" -m pytest -q --maxfail 20 \
    -c /dev/null --rootdir . -p no:cacheprovider -W ignore -m "not nightly" --tb short \
    "${files[@]}" >"$OUT/conformance.log" 2>&1 || code=$?
  tail -n 25 "$OUT/conformance.log" >&2
  return "$code"
}

measure() {
  local words=(--out "$OUT") seconds=$((LIMIT_S - SECONDS - 20))
  say "measuring"
  words+=(--seconds $((seconds < MEASURE_S ? seconds : MEASURE_S)))
  [ "$MODE" != --quick ] || words+=(--quick)
  "$PYTHON" -m benchmarks.gpu.measure "${words[@]}"
}

# $1: the tool. Fails only if it found an error in our kernels: it may not be able to run here, and
# errors in torch's kernels do not count.
sanitize() {
  local code=0 log=$OUT/$1.log words=(--tool "$1" --error-exitcode "$ERRORS_FOUND")
  words+=(--report-api-errors no)
  # initcheck knows what is initialised only if it watches all kernels.
  [ "$1" = initcheck ] || words+=(--kernel-name kns=kvplane)
  say "compute-sanitizer $1"
  # Without torch's memory cache each tensor is an allocation, so that an overrun is noticed.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$SANITIZE_S" compute-sanitizer "${words[@]}" \
    "$PYTHON" -m benchmarks.gpu.measure --tiny >"$log" 2>&1 || code=$?
  if grep -q "Device not supported" "$log"; then
    say "compute-sanitizer cannot use this GPU"
  elif [ "$code" = 124 ] || [ "$code" = 137 ]; then
    say "compute-sanitizer $1 did not finish in $SANITIZE_S s"
  elif [ "$code" = "$ERRORS_FOUND" ] && grep -q "^=========.*kvplane" "$log"; then
    grep "^=========" "$log" | head -n 40 >&2
    say "compute-sanitizer $1 found errors: $log"
    return 1
  elif [ "$code" != 0 ]; then
    tail -n 5 "$log" >&2
    say "compute-sanitizer $1 reported nothing about our kernels, but exited with $code: $log"
  else
    say "compute-sanitizer $1 found nothing"
  fi
}

sanitize_all() {
  command -v compute-sanitizer >/dev/null || { say "compute-sanitizer is not installed"; return 0; }
  local tool failed=0
  for tool in memcheck racecheck synccheck initcheck; do
    if [ $((SECONDS + SANITIZE_S)) -gt "$LIMIT_S" ]; then
      say "no time for compute-sanitizer $tool"
    else
      sanitize "$tool" || failed=1
    fi
  done
  return "$failed"
}

case $MODE in "" | --quick | --build-only) ;; *) sed -n '2,/^set/{/^#/p}' "$0"; exit 2 ;; esac
export PYTHONPATH="$SITE:$PWD:$PWD/tests/kernels:$PWD/tests/helpers${PYTHONPATH:+:$PYTHONPATH}"
rm -rf "$SITE" "$BUILD/cmake"
mkdir -p "$SITE"
take_wheels
check
if [ "$MODE" = --build-only ]; then
  build
  exit 0
fi
mkdir -p "$OUT"
build_emulator &
emulator=$!
build
wait "$emulator" || say "the emulator does not compile here"
# Each part runs even if an earlier one failed: time on a GPU may be hard to get again.
failed=()
conform || failed+=("conformance cases")
measure || failed+=("measurements")
[ "$MODE" = --quick ] || sanitize_all || failed+=("compute-sanitizer")
if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED:$(printf ' %s;' "${failed[@]}") see $OUT"
  exit 1
fi
say "all passed; the targets are in the table above"
