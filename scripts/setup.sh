#!/usr/bin/env bash
# Sets up .venv: pinned packages, the native parts of both planes, this project.
# Each part runs only when its inputs have changed.
#
#   KVPLANE_TORCH=cpu   install torch's CPU build, a tenth of the download
#                       (default: the build that the package index provides)
#   KVPLANE_CUDA=OFF    do not build the CUDA kernels where nvcc is found; saves a minute or two
#   CUDAARCHS=90-real   what the CUDA kernels are built for (default: 80-real;90)
#                       These three hold for .venv until another value, or an empty one, is given.
#   PYTHON=python3.12   the interpreter to use
#                       (default: the first suitable one of python3.11 to python3.14 and python3)
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)

say() { printf '%s\n' "setup: $*" >&2; }
die() {
  say "$*"
  exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed (on Debian: apt install python3 python3-venv python3-dev)"
}

check_tools() { # $1: the interpreter
  case "${KVPLANE_TORCH:-}" in
    '' | cpu) ;;
    *) die "KVPLANE_TORCH is '$KVPLANE_TORCH'; it must be cpu, or not set" ;;
  esac
  command -v "${CXX:-g++}" >/dev/null \
    || die "a C++17 compiler is needed (on Debian: apt install g++)"
  "${CXX:-g++}" -E -x c++ -include xxhash.h /dev/null >/dev/null 2>&1 \
    || die "xxhash.h is needed (on Debian: apt install libxxhash-dev)"
  "$1" -c 'import ensurepip, venv' 2>/dev/null \
    || die "Python's venv module is needed (on Debian: apt install python3-venv)"
  "$1" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
    || die "Python's header files are needed (on Debian: apt install python3-dev)"
}

digest() { sha256sum | cut -c1-64; }

# Runs the command unless its stamp has this digest already.
unless_done() { # $1: name, $2: digest of what it depends on, rest: command
  local stamp="$VENV/.kvplane-$1"
  [ "$(cat "$stamp" 2>/dev/null)" = "$2" ] && return
  "${@:3}"
  printf '%s\n' "$2" >"$stamp"
}

# Of a variable that is not set, the value it had the last time: after "KVPLANE_TORCH=cpu make run"
# a plain "make test" builds nothing again.
keep_choices() {
  local file="$VENV/.kvplane-choices" name kept choices=()
  for name in KVPLANE_TORCH KVPLANE_CUDA CUDAARCHS; do
    if [ -z "${!name+set}" ] && kept=$(grep -s "^$name=" "$file"); then
      export "${kept?}"
    fi
    [ -z "${!name:-}" ] || choices+=("$name=${!name}")
  done
  printf '%s\n' "${choices[@]}" >"$file"
}

# Not compiled to bytecode: of what is installed little is imported, and that is compiled then.
install_packages() {
  say "installing the pinned packages, which takes minutes the first time"
  if [ "${KVPLANE_TORCH:-}" = cpu ]; then
    "${PIP[@]}" install --no-compile --retries 1 --no-deps --extra-index-url "$TORCH_CPU_INDEX" \
      "$(grep '^torch==' requirements/lock.txt)"
  fi
  "${PIP[@]}" install --no-compile -r requirements/lock.txt
}

install_native() { # $1: the folder
  PATH="$PWD/$VENV/bin:$PATH" "${PIP[@]}" install --quiet \
    --no-deps --no-build-isolation --force-reinstall "./$1"
}

install_kernels() {
  say "compiling the kernels in csrc/: about a minute, one or two more where nvcc is found"
  install_native csrc
}

install_blocks() {
  say "compiling the block store in csrc/blocks/"
  install_native csrc/blocks
}

install_project() {
  say "installing kvplane, editable"
  "${PIP[@]}" install --quiet --no-deps --no-build-isolation -e .
}

packages_digest() {
  { cat requirements/lock.txt && echo "${KVPLANE_TORCH:-}"; } | digest
}

# The names and contents of what find finds there, and the versions of what builds it.
sources_digest() { # $1: the folder, rest: what find leaves out
  find "$1" -type f -not -path "$1/build/*" -not -name '*.pyc' "${@:2}" -print0 \
    | LC_ALL=C sort -z | xargs -0 sha256sum
  cat requirements/lock.txt
}

kernels_digest() {
  {
    sources_digest csrc -not -path 'csrc/blocks/*'
    echo "${KVPLANE_CUDA:-}" "${CUDAARCHS:-}" "$(command -v nvcc || true)"
  } | digest
}

# The tests of csrc/blocks are no part of the module.
blocks_digest() { sources_digest csrc/blocks -not -path 'csrc/blocks/tests/*' | digest; }

main() {
  local started=$SECONDS
  if [ ! -x "$VENV/bin/python" ]; then
    local python
    python=$(find_python)
    check_tools "$python"
    say "creating $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  check_tools "$VENV/bin/python"
  keep_choices
  unless_done packages "$(packages_digest)" install_packages
  unless_done kernels "$(kernels_digest)" install_kernels
  unless_done blocks "$(blocks_digest)" install_blocks
  unless_done project "$(cat pyproject.toml setup.py | digest)" install_project
  [ $((SECONDS - started)) -lt 2 ] || say "ready after $((SECONDS - started)) s"
}

main
