#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, in under ten minutes: builds the CUDA module, runs the conformance
# cases on it and compares the emulator's instructions with the hardware's, measures, and looks for
# faults with compute-sanitizer. Nothing comes from outside; what is missing is named at the start.
#
#   benchmarks/gpu/run.sh [--quick | --build-only]
#
#   --quick         fewer shapes, no compute-sanitizer
#   --build-only    builds and imports the module, which needs no GPU
#   PYTHON          the interpreter that has torch (default: python3)
#   KVPLANE_WHEELS  a folder of wheels to take missing packages from (protobuf, flashinfer, ...)
#   KVPLANE_ARCH    CMake's name of the architecture to build for (default: this GPU's)
#   BUILD           the folder that is built in (default: build/gpu)
#   OUT             the folder for the JSON and the logs (default: benchmarks/results)
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-$PWD/build/gpu}
SITE=$BUILD/site
OUT=${OUT:-benchmarks/results}
MODE=${1:-}
LIMIT_S=580        # of the whole run; the sanitizers take what is left, a while each
CONFORM_S=200      # of the conformance cases
MEASURE_S=280      # when the measurements begin nothing more
SANITIZE_S=45      # of each sanitizer
ERRORS_FOUND=86    # a sanitizer's exit code, which nothing else uses

say() { printf 'gpu: %s (%d s)\n' "$*" "$SECONDS" >&2; }

check() {
  # shellcheck disable=SC2086
  "$PYTHON" benchmarks/gpu/preflight.py $MODE >&2
}

take_wheels() {
  [ -n "${KVPLANE_WHEELS:-}" ] || return 0
  say "taking wheels from $KVPLANE_WHEELS"
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

# The project's own settings of pytest name plugins that need not be here.
conform() {
  local files=()
  for file in tests/kernels/test_cuda_*.py tests/kernels/on_gpu*.py; do
    [ "${file##*/}" = test_cuda_build.py ] || files+=("$file")
  done
  say "running the conformance cases: ${#files[@]} files"
  KVPLANE_DEVICE_BACKEND=cuda timeout "$CONFORM_S" "$PYTHON" -m pytest -q -x -c /dev/null \
    --rootdir . -p no:cacheprovider -W ignore -m "not nightly" "${files[@]}"
}

measure() {
  say "measuring"
  local words=(--out "$OUT" --seconds "$MEASURE_S")
  [ "$MODE" != --quick ] || words+=(--quick)
  "$PYTHON" -m benchmarks.gpu.measure "${words[@]}"
}

# $1: the tool. Fails when it found an error, and only then: it need not be able to run here.
sanitize() {
  local code=0 log=$OUT/$1.log
  say "compute-sanitizer $1"
  timeout -k 5 "$SANITIZE_S" compute-sanitizer --tool "$1" --kernel-regex kns=kvplane \
    --report-api-errors no --error-exitcode "$ERRORS_FOUND" \
    "$PYTHON" -m benchmarks.gpu.measure --tiny >"$log" 2>&1 || code=$?
  if grep -q "Device not supported" "$log"; then
    say "compute-sanitizer can not use this GPU"
  elif [ "$code" = "$ERRORS_FOUND" ]; then
    tail -n 40 "$log" >&2
    say "compute-sanitizer $1 found errors: $log"
    return 1
  elif [ "$code" = 124 ] || [ "$code" = 137 ]; then
    say "compute-sanitizer $1 was not done in $SANITIZE_S s"
  elif [ "$code" != 0 ]; then
    tail -n 5 "$log" >&2
    say "compute-sanitizer $1 did not run (exit code $code): $log"
  else
    say "compute-sanitizer $1 found nothing"
  fi
}

sanitize_all() {
  command -v compute-sanitizer >/dev/null || { say "no compute-sanitizer here"; return 0; }
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
export PYTHONPATH="$SITE:$PWD:$PWD/tests/kernels${PYTHONPATH:+:$PYTHONPATH}"
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
wait "$emulator" || { say "the emulator does not compile"; exit 1; }
conform
measured=0
measure || measured=$?
sanitized=0
[ "$MODE" = --quick ] || sanitize_all || sanitized=$?
say "done: measurements $([ "$measured" = 0 ] && echo right || echo failed)," \
  "sanitizers $([ "$sanitized" = 0 ] && echo quiet || echo not quiet)"
exit $((measured | sanitized))
