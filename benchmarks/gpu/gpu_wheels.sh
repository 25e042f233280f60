#!/usr/bin/env bash
# Makes .whl, to take to a machine with a GPU (benchmarks.gpu.first) that has no network and where
# compiling would cost minutes: wheels for Python 3.12 of the kernels, for
# sm_90 alone, and of the block store; the packages that such a machine lacks, as
# requirements/lock.txt pins them; and the emulator's objects, without what only a debugger reads.
#
# It takes three to six minutes on two cores, and needs Python 3.12 with venv and headers, nvcc 12.1
# or later, g++, libxxhash-dev, and the network, for pip. At most 64 MiB travel to such a machine,
# the tree among them: more fail here.
#
#   PYTHON312=/opt/bin/python3.12  the interpreter (default: python3.12, or one that pyenv has)
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/packages.sh

ARCH=90-real
MAX_MIB=64
TAKEN=.whl

say() { printf '%s\n' "gpu-wheels: $*" >&2; }
die() {
  say "$*"
  exit 1
}

# Prints the first Python 3.12 that runs, as a shim of pyenv may not, and can make a venv.
find_python() {
  local candidate of_pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
  for candidate in ${PYTHON312:-python3.12 "$of_pyenv"/3.12*/bin/python3.12}; do
    if "$candidate" -c 'import ensurepip, pathlib, sys, sysconfig, venv
headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(sys.version_info[:2] != (3, 12) or not headers.exists())' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

pinned() { grep -iE "^($1)==" requirements/lock.txt; } # $1: names of packages, a regex

python=$(find_python)
need 'Python 3.12 with venv and headers (PYTHON312)' test -n "$python"
need nvcc command -v nvcc
need g++ command -v "${CXX:-g++}"
need libxxhash-dev sh -c "echo '#include <xxhash.h>' | ${CXX:-g++} -E -x c++ -"
list=$(printf ', %s' "${missing[@]}")
[ ${#missing[@]} -eq 0 ] || die "not found: ${list#, }"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf "$TAKEN" # so that what is there was made of this tree, and whole
"$python" -m venv "$scratch/venv"
export PATH="$scratch/venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
export KVPLANE_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
mapfile -t tools < <(pinned 'cmake|ninja|packaging|pathspec|pybind11|scikit[-_]build[-_]core')
python -m pip install -q --no-deps "${tools[@]}"

wheel=(python -m pip wheel -q --no-deps --no-build-isolation -w "$scratch/made")
say "compiling the kernels for $ARCH"
"${wheel[@]}" -Cbuild-dir="$scratch/csrc" -Ccmake.define.CMAKE_CUDA_ARCHITECTURES=$ARCH ./csrc
say "compiling the block store ($SECONDS s)"
"${wheel[@]}" -Cbuild-dir="$scratch/blocks" ./csrc/blocks
names='protobuf|grpcio(-health-checking|-reflection|-status)?|googleapis-common-protos'
mapfile -t packages < <(pinned "$names")
python -m pip download -q --no-deps --only-binary=:all: -d "$scratch/made" "${packages[@]}"
say "compiling for the emulator ($SECONDS s)"
EMULATED="$scratch/made/emulated" PYTHONPATH=tests/kernels python -c '
import os, pathlib, emulated_build
emulated_build.KEPT = pathlib.Path(os.environ["EMULATED"])
emulated_build.emulated_module()'
find "$scratch/made/emulated" '(' -name 'linked-*' -o -name '*.lock' ')' -delete # linked anew there
strip --strip-debug "$scratch"/made/emulated/*.o
mv "$scratch/made" "$TAKEN"

num_bytes=$({ git ls-files -z; find "$TAKEN" .peers -type f -print0 2>/dev/null || true; } \
  | du -cb --files0-from=- | tail -n 1 | cut -f 1)
say "$TAKEN is ready ($SECONDS s): with the tree and .peers $((num_bytes >> 20)) of $MAX_MIB MiB"
[ "$num_bytes" -le $((MAX_MIB << 20)) ] || die "more than can travel"
