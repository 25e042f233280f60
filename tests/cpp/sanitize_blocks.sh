#!/usr/bin/env bash
# Builds kvplane-blocks with AddressSanitizer and UndefinedBehaviorSanitizer, apart from the
# installed one, and runs a command that finds this build. Without one, it runs the tests of it.
#     tests/cpp/sanitize_blocks.sh [COMMAND...]
#
#   KVPLANE_PYTHON=.venv/bin/python   the interpreter that has what builds the module
#   KVPLANE_COVERAGE=FILE             a source that tells a fuzzer which code ran
#   BUILD=build/blocks-asan           the folder to build in; kept, so only changes are compiled
#   SOURCES=csrc/blocks               what to build
#   CXX=g++                           the compiler, GCC
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${KVPLANE_PYTHON:-.venv/bin/python}
BUILD=$(realpath -m "${BUILD:-build/blocks-asan}")
export CXX=${CXX:-g++}
if [ $# -eq 0 ]; then
  # The programs have sanitizers of their own, and compilers need not run under one.
  set -- "$PYTHON" -m pytest -q -p no:cacheprovider -m "not nightly" tests/unit/blocks \
    --ignore tests/unit/blocks/test_native_programs.py
fi

# One run at a time in a folder.
mkdir -p "$BUILD"
exec 9>"$BUILD/lock"
flock 9

PATH="$(dirname "$PYTHON"):$PATH" "$PYTHON" -m pip --disable-pip-version-check install --quiet \
  --root-user-action ignore --no-deps --no-build-isolation --upgrade --target "$BUILD/site" \
  --config-settings=build-dir="$BUILD/cmake" --config-settings=install.strip=false \
  --config-settings=cmake.build-type=RelWithDebInfo \
  --config-settings=cmake.define.KVPLANE_WERROR=ON \
  --config-settings=cmake.define.KVPLANE_SANITIZE=address,undefined \
  --config-settings=cmake.define.KVPLANE_COVERAGE="${KVPLANE_COVERAGE:-}" \
  "$(realpath "${SOURCES:-csrc/blocks}")"

# Python's own allocator hides from AddressSanitizer what lies beside a bytes object. Leaks are not
# looked for: the interpreter keeps much until it ends. libstdc++ must be there before the first
# exception is thrown.
export PYTHONPATH="$BUILD/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$("$CXX" -print-file-name=libasan.so):$("$CXX" -print-file-name=libstdc++.so)"
export LD_PRELOAD

"$PYTHON" -c 'import sys, kvplane_blocks
assert kvplane_blocks.__file__.startswith(sys.argv[1]), kvplane_blocks.__file__' "$BUILD/site"
"$@"
