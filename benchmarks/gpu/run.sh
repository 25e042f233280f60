#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, in under ten minutes: builds the CUDA module and, most important
# first, looks for what is wrong and what is slow. Downloads nothing; lists what is missing first.
#
#   benchmarks/gpu/run.sh [--quick | --build-only] [--only PART] [--no-build]
#
#   steps      single instructions against their definitions and the emulator; a step captured in
#              a graph; two sanitizers
#   profile    six shapes with each split; three kernels under ncu, if it is installed
#   conform    the conformance cases
#   measure    the full measurement, as JSON and a table of targets
#
#   --quick         fewer shapes; no profile and no compute-sanitizer
#   --build-only    builds and imports the module, which needs no GPU
#   --only PART     one of the four parts
#   --no-build      uses the module of the last run
#   PYTHON          the interpreter that has torch (default: python3)
#   KVPLANE_WHEELS  a folder of wheels to take missing packages from (protobuf, flashinfer, ...)
#   KVPLANE_ARCH    CMake's name of the architecture to build for (default: this GPU's)
#   BUILD           the build folder (default: build/gpu)
#   OUT             the folder for the JSON and the logs (default: benchmarks/results)
#
# Long output of a part is in OUT; here are errors, missed targets and summaries, in 60 lines at
# most.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-$PWD/build/gpu}
SITE=$BUILD/site
OUT=${OUT:-benchmarks/results}
SIZE='' ONLY='' BUILDS=yes
LIMIT_S=580        # for the whole run
STEPS_S=90         # each part is interrupted when its time is over
CAPTURE_S=30
SANITIZE_S=60      # for each sanitizer
PROFILE_S=60
CONFORM_S=200
MEASURE_S=280      # after which no measurement is started
ERRORS_FOUND=86    # a sanitizer's exit code, which nothing else uses

say() { printf 'gpu: %s (%d s)\n' "$*" "$SECONDS" >&2; }

usage() {
  sed -n '2,/^set/{/^#/p}' "$0"
  exit 2
}

# $1: seconds, unless less is left of the run. pytest and the measurements print their results
# when interrupted, which a shell without a terminal may have made them ignore.
within() {
  local left=$((LIMIT_S - SECONDS)) limit=$1
  shift
  timeout -s INT -k 15 "$((limit < left ? limit : left > 1 ? left : 1))" \
    env --default-signal=INT "$@"
}

# $1: how many lines at most.
briefly() { cut -c 1-200 | tail -n "$1" >&2; }

check() {
  # shellcheck disable=SC2086
  "$PYTHON" -m benchmarks.gpu.preflight $SIZE >&2
}

take_wheels() {
  [ -n "${KVPLANE_WHEELS:-}" ] || return 0
  say "installing wheels from $KVPLANE_WHEELS"
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$SITE" "$KVPLANE_WHEELS"/*.whl
}

build() {
  local arch=${KVPLANE_ARCH:-native} settings
  settings=(--config-settings=build-dir="$BUILD/cmake")
  if [ "$SIZE" != --build-only ] || [ -n "${KVPLANE_ARCH:-}" ]; then
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

# $1: seconds. $2: the log. The others: files of cases. The project's pytest settings need plugins
# that may not be installed here.
run_cases() {
  local limit=$1 log=$OUT/$2 code=0
  shift 2
  KVPLANE_DEVICE_BACKEND=cuda within "$limit" "$PYTHON" -m pytest -v --maxfail 60 -c /dev/null \
    --rootdir . -p no:cacheprovider -W ignore -m "not nightly" --tb short "$@" >"$log" 2>&1 ||
    code=$?
  grep -E '^(FAILED|ERROR|E  )' "$log" | head -n 4 >&2 || true
  tail -n 1 "$log" >&2
  return "$code"
}

# $1: the tool. Fails only if it found an error in our kernels: it may not be able to run here, and
# errors in torch's kernels do not count.
sanitize() {
  local code=0 log=$OUT/$1.log words=(--tool "$1" --error-exitcode "$ERRORS_FOUND")
  words+=(--report-api-errors no --kernel-name kns=kvplane)
  # Without torch's memory cache each tensor is an allocation, so that an overrun is noticed.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 within "$SANITIZE_S" compute-sanitizer "${words[@]}" \
    "$PYTHON" -m benchmarks.gpu.measure --tiny >"$log" 2>&1 || code=$?
  if grep -q "Device not supported" "$log"; then
    say "compute-sanitizer cannot use this GPU"
  elif [ "$code" = 124 ] || [ "$code" = 130 ] || [ "$code" = 137 ]; then
    say "compute-sanitizer $1 did not finish in $SANITIZE_S s"
  elif [ "$code" = "$ERRORS_FOUND" ] && grep -q "^=========.*kvplane" "$log"; then
    grep "^=========" "$log" | head -n 2 >&2
    say "compute-sanitizer $1 found errors: $log"
    return 1
  elif [ "$code" != 0 ]; then
    tail -n 1 "$log" >&2
    say "compute-sanitizer $1 reported nothing about our kernels, but exited with $code: $log"
  else
    say "compute-sanitizer $1 found nothing"
  fi
}

steps() {
  local failed=0 tool
  say "comparing single steps with their definitions and with the emulator"
  run_cases "$STEPS_S" steps.log tests/kernels/test_cuda_steps.py tests/kernels/on_gpu.py ||
    failed=1
  say "capturing a step of an executor, and the host's time for its layers"
  within "$CAPTURE_S" "$PYTHON" -m benchmarks.gpu.step >"$OUT/step.log" 2>&1 || failed=1
  briefly 5 <"$OUT/step.log"
  [ "$SIZE" != --quick ] || return "$failed"
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do sanitize "$tool" || failed=1; done
  else
    say "compute-sanitizer is not installed"
  fi
  return "$failed"
}

profile() {
  local failed=0 name kernel metrics
  [ "$SIZE" != --quick ] || return 0
  say "timing six shapes with each split"
  within "$PROFILE_S" "$PYTHON" -m benchmarks.gpu.measure --survey >"$OUT/survey.log" 2>&1 ||
    { failed=1 && tail -n 1 "$OUT/survey.log" | briefly 1; }
  grep -E '^(survey|WRONG|left out)' "$OUT/survey.log" | briefly 12 || true
  command -v ncu >/dev/null || { say "ncu is not installed"; return "$failed"; }
  metrics=$("$PYTHON" -m benchmarks.gpu.profile metrics)
  for name in decode speculative prefill; do
    # The second launch of the kernel that attends: the first warms up. A call launches others whose
    # names begin alike and that may have nothing to do. Not everybody may read ncu's counters.
    kernel=$("$PYTHON" -m benchmarks.gpu.profile kernel "$name")
    within "$PROFILE_S" ncu --clock-control none --csv --page raw --metrics "$metrics" \
      -k "$kernel" --launch-skip 1 \
      --launch-count 1 "$PYTHON" -m benchmarks.gpu.profile run "$name" \
      >"$OUT/ncu-$name.csv" 2>&1 || say "ncu could not profile $name: $OUT/ncu-$name.csv"
    "$PYTHON" -m benchmarks.gpu.profile say "$OUT/ncu-$name.csv" | briefly 1
  done
  return "$failed"
}

conform() {
  local files=() file
  for file in tests/kernels/on_gpu_*.py tests/kernels/test_cuda_*.py; do
    case ${file##*/} in
      # The first needs no GPU, the second only the emulator; the third is among the steps.
      test_cuda_build.py | test_cuda_small_devices.py | test_cuda_steps.py) ;;
      *) files+=("$file") ;;
    esac
  done
  say "running the conformance cases: ${#files[@]} files"
  run_cases "$CONFORM_S" conformance.log "${files[@]}"
}

measure() {
  local words=(--out "$OUT") seconds=$((LIMIT_S - SECONDS - 20)) code=0
  say "measuring; what it estimates before: $OUT/estimates.log"
  words+=(--seconds $((seconds < MEASURE_S ? seconds : MEASURE_S)))
  [ "$SIZE" != --quick ] || words+=(--quick)
  within "$LIMIT_S" "$PYTHON" -m benchmarks.gpu.measure "${words[@]}" >"$OUT/measure.log" 2>&1 ||
    code=$?
  # By the copy bandwidth of this GPU, as it was just measured.
  grep '^estimate: ' "$OUT/measure.log" >"$OUT/estimates.log" || true
  head -n 1 "$OUT/estimates.log" | briefly 1
  grep -E '^WRONG' "$OUT/measure.log" | briefly 3 || true
  grep -E '^MISSED' "$OUT/measure.log" | head -n 6 | briefly 6 || true
  grep -E '^benchmarks.gpu.measure' "$OUT/measure.log" | briefly 1 || true
  grep -E '^(met|missed|not measured)[:, ]|^(saved|wrong)' "$OUT/measure.log" | briefly 8 || true
  return "$code"
}

while [ $# -gt 0 ]; do
  case $1 in
    --quick | --build-only) SIZE=$1 ;;
    --no-build) BUILDS='' ;;
    --only)
      ONLY=${2:-}
      case $ONLY in steps | profile | conform | measure) shift ;; *) usage ;; esac
      ;;
    *) usage ;;
  esac
  shift
done
export PYTHONPATH="$SITE:$PWD:$PWD/tests/kernels${PYTHONPATH:+:$PYTHONPATH}"
[ -z "$BUILDS" ] || rm -rf "$SITE" "$BUILD/cmake"
mkdir -p "$SITE"
[ -z "$BUILDS" ] || take_wheels
check
if [ "$SIZE" = --build-only ]; then
  build
  exit 0
fi
mkdir -p "$OUT"
if [ -n "$BUILDS" ]; then
  build_emulator &
  emulator=$!
  build
  wait "$emulator" || say "the emulator does not compile here"
fi
# Each part runs even if an earlier one failed: time on a GPU may be hard to get again.
failed=()
for part in steps profile conform measure; do
  if [ -z "$ONLY" ] || [ "$ONLY" = "$part" ]; then "$part" || failed+=("$part"); fi
done
if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED:$(printf ' %s;' "${failed[@]}") see $OUT"
  exit 1
fi
say "all passed; the targets are above, more is in $OUT"
