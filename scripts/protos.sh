#!/usr/bin/env bash
# Runs the protoc that requirements/protos.txt pins, in a virtual environment of its own: it needs
# an older protobuf than everything else here.
#     scripts/protos.sh            regenerates the stubs in kvplane/v1, integrations/etcd and
#                                 integrations/push
#     scripts/protos.sh ARG ...    runs protoc with these arguments instead
#   PYTHON=python3.12   the interpreter to use (default: that of .venv, otherwise python3)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
wanted=$({ "$python" --version && cat "$root/requirements/protos.txt"; } | sha256sum | cut -c1-16)
venv=$root/build/protos-$wanted

mkdir -p "$root/build"
exec 9>"$root/build/protos.lock"
flock 9 # so that concurrent callers create it once
if [ ! -x "$venv/bin/python" ]; then
  rm -rf "$venv.partial"
  "$python" -m venv "$venv.partial"
  "$venv.partial/bin/python" -m pip install --quiet --disable-pip-version-check \
    --only-binary :all: -r "$root/requirements/protos.txt"
  mv "$venv.partial" "$venv"
fi
exec 9>&-
protoc=("$venv/bin/python" -m grpc_tools.protoc)
[ $# -eq 0 ] || exec "${protoc[@]}" "$@"
generate=("${protoc[@]}" "-I$root/protos" --python_out="$root" --pyi_out="$root")
"${generate[@]}" "-I$root" "$root"/integrations/{etcd/etcd,push/push}.proto
exec "${generate[@]}" --grpc_python_out="$root" \
  "$root"/protos/kvplane/v1/{types,control,data}.proto
