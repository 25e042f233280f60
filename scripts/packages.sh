# Packages of Debian 12, for setup.sh and .ci/run: installs missing ones, or prints the command.

missing=()
network_s=0 # seconds spent only on fetching packages

need() { # $1: the package, rest: a command that succeeds if it is installed
  "${@:2}" >/dev/null 2>&1 || missing+=("$1")
}

# To build and to run.
need_to_build() { # $1: the interpreter; empty if none is new enough
  need g++ command -v "${CXX:-g++}"
  need libxxhash-dev sh -c "echo '#include <xxhash.h>' | ${CXX:-g++} -E -x c++ -"
  need python3 test -n "$1"
  need python3-venv "${1:-false}" -c 'import ensurepip, venv'
  need python3-dev "${1:-false}" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
}

# For the tests of a push, and for make lint.
need_to_test() {
  need golang-go command -v go
  need golang-google-grpc-dev test -d /usr/share/gocode/src/google.golang.org/grpc
  need npm command -v npm
  need chromium command -v chromium
  need docker-compose command -v docker-compose
  need faketime command -v faketime
  need nginx-light command -v nginx
  need prometheus command -v promtool
  need prometheus-alertmanager command -v prometheus-alertmanager
  need etcd-server command -v etcd
  need etcd-client command -v etcdctl
}

# For the nightly tests, beside those.
need_at_night() {
  need docker.io command -v dockerd
  need debootstrap command -v debootstrap
  need cargo-web command -v cargo
}

# Installs missing packages if this is root and has apt-get, unless KVPLANE_APT is off; else prints
# the command, and fails.
install_missing() { # $1: name of the caller, for messages
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "${KVPLANE_APT:-}" = off ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "$1: packages are missing; on Debian: sudo apt-get install -y ${missing[*]}" >&2
    return 1
  fi
  echo "$1: installing ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  # Keeps packages from starting their daemons.
  local policy=/usr/sbin/policy-rc.d is_ours=
  if [ ! -e "$policy" ] && [ -w "${policy%/*}" ]; then
    is_ours=1
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  local code=0
  local install=(apt-get install -qq -y --no-install-recommends "${missing[@]}") began=$SECONDS
  { apt-get update -qq && "${install[@]}" --download-only; } >/dev/null || code=$?
  network_s=$((network_s + SECONDS - began))
  [ "$code" -ne 0 ] || "${install[@]}" >/dev/null || code=$?
  [ -z "$is_ours" ] || rm -f "$policy"
  [ "$code" -eq 0 ] || echo "$1: apt-get failed: install these by hand: ${missing[*]}" >&2
  missing=()
  return "$code"
}
