#!/usr/bin/env bash
# Sets up .venv: pinned packages, the native parts of both planes, this project.
# Each part runs only when its inputs have changed.
#
# As root it installs the packages of Debian that are missing; else it prints the line that does.
#
#   KVPLANE_TORCH=cuda  install the build of torch that the package index provides, 2.7 GB, also
#                       where there is no GPU; cpu: the CPU build, a tenth, also where there is one
#   KVPLANE_CUDA=AUTO   build the CUDA kernels where nvcc is found, also where there is no GPU; OFF:
#                       do not build them
#   CUDAARCHS=90-real   what the CUDA kernels are built for (default: 80-real;90)
#                       These three hold for .venv until another value, or an empty one, is given.
#   PYTHON=python3.12   the interpreter to use
#                       (default: the first suitable one of python3.11 to python3.14 and python3)
#   KVPLANE_APT=off     install no packages of Debian, also as root
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)

say() { printf '%s\n' "setup: $*" >&2; }
die() {
  say "$*"
  exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the first suitable interpreter; nothing where there is none.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

check_choices() {
  case "${KVPLANE_TORCH:-}" in
    '' | cpu | cuda) ;;
    *) die "KVPLANE_TORCH is '$KVPLANE_TORCH'; it must be cpu or cuda, or not set" ;;
  esac
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# Chooses what was not set: CUDA only where there is a GPU.
choose_defaults() {
  if ! has_gpu; then
    : "${KVPLANE_TORCH:=cpu}" "${KVPLANE_CUDA:=OFF}"
  fi
  export KVPLANE_TORCH KVPLANE_CUDA=${KVPLANE_CUDA:-AUTO}
}

digest() { sha256sum | cut -c1-64; }

# Runs the command unless its stamp has this digest already.
unless_done() { # $1: name, $2: digest of what it depends on, rest: command
  local stamp="$VENV/.kvplane-$1"
  [ "$(cat "$stamp" 2>/dev/null)" = "$2" ] && return
  local began=$SECONDS
  "${@:3}"
  printf '%s\n' "$2" >"$stamp"
  say "$1: $((SECONDS - began)) s"
}

# Gives each unset variable its last value: after "KVPLANE_TORCH=cpu make run" a plain "make test"
# builds nothing again.
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

# Not compiled to bytecode: few of the modules are imported, and these are compiled then.
install_packages() {
  if [ "${KVPLANE_TORCH:-}" = cpu ]; then
    "${PIP[@]}" install -qq --no-compile --retries 1 --no-deps \
      --extra-index-url "$TORCH_CPU_INDEX" "$(grep '^torch==' requirements/lock.txt)"
  fi
  "${PIP[@]}" install -qq --no-compile -r requirements/lock.txt
}

# Installs what compiling needs first, so that it runs while the rest is fetched.
install_build_tools() {
  local names='cmake|ninja|packaging|pathspec|pybind11|scikit[-_]build[-_]core|setuptools|wheel'
  "${PIP[@]}" install -qq --no-compile --no-deps \
    $(grep -iE "^($names)==" requirements/lock.txt)
}

install_native() { # $1: the folder
  PATH="$PWD/$VENV/bin:$PATH" "${PIP[@]}" install --quiet \
    --no-deps --no-build-isolation --force-reinstall "./$1"
}

install_project() {
  "${PIP[@]}" install --quiet --no-deps --no-build-isolation -e .
}

# Hashes names and contents of the files that find prints, and the versions of the build tools.
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

packages_digest() { { cat requirements/lock.txt && echo "${KVPLANE_TORCH:-}"; } | digest; }
blocks_digest() { sources_digest csrc/blocks | digest; }

main() {
  local started=$SECONDS fetching= alone python="$VENV/bin/python"
  check_choices
  [ -x "$python" ] || python=$(find_python)
  need_to_build "$python"
  install_missing setup || exit 1
  if [ ! -x "$VENV/bin/python" ]; then
    [ -n "$python" ] || python=$(find_python) # it may be installed by now
    [ -n "$python" ] || die "no Python 3.11 or newer was found"
    say "creating $VENV with $("$python" --version); the first time takes some minutes"
    "$python" -m venv "$VENV"
  fi
  keep_choices
  choose_defaults
  alone=$SECONDS
  unless_done build-tools "$(digest <requirements/lock.txt)" install_build_tools
  network_s=$((network_s + SECONDS - alone))
  unless_done packages "$(packages_digest)" install_packages &
  fetching=$!
  unless_done kernels "$(kernels_digest)" install_native csrc
  unless_done blocks "$(blocks_digest)" install_native csrc/blocks
  alone=$SECONDS
  wait "$fetching"
  network_s=$((network_s + SECONDS - alone))
  unless_done project "$(cat pyproject.toml setup.py | digest)" install_project
  echo "$network_s" >"$VENV/.kvplane-network" # the last line of make run says it
  [ $((SECONDS - started)) -lt 2 ] \
    || say "ready after $((SECONDS - started)) s, of which $network_s s waited for the network"
}

main
