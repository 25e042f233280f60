#!/usr/bin/env bash
# Runs the protoc that requirements/protos.txt pins, in a virtual environment of its own: it needs
# an older protobuf than everything else here.
#     scripts/protos.sh            regenerates the stubs in kvplane/v1, kvplane/wire/v1,
#                                 integrations/etcd and integrations/push
#     scripts/protos.sh ARG ...    runs protoc with these arguments instead
#   PYTHON=python3.12   the interpreter to use (default: that of .venv, otherwise python3)
#   OUT=FOLDER          where to write the stubs (default: the root of the repository)
#
# kvplane.wire.v1 is the twin of kvplane.v1: the same messages, but a column is the bytes of its
# elements, which Python reads without an object for each. Services keep their names.
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

out=${OUT:-$root}
source=$root/protos/kvplane/v1
twin=$(mktemp -d)
trap 'rm -rf "$twin"' EXIT
mkdir -p "$twin/kvplane/wire/v1" "$twin/integrations/push" "$out"
enums=$(sed -nE 's/^enum (\w+) .*/\1/p' "$source"/*.proto | paste -sd '|')
for file in "$source"/*.proto; do
  sed -E -e 's/^package kvplane\.v1;/package kvplane.wire.v1;/' \
    -e 's#^import "kvplane/v1/#import "kvplane/wire/v1/#' \
    -e "s/repeated (sfixed32|sfixed64|bool|uint32|$enums) (\w+ =)/bytes \2/" \
    -e '/^extend /,/^}/d' -e '/option \((audience|callers)\)/d' \
    "$file" >"$twin/kvplane/wire/v1/${file##*/}"
done
# A push holds messages of the contract, and its methods have the contract's option.
sed -E -e 's#^import "kvplane/v1/(\w+)\.proto";#&\nimport "kvplane/wire/v1/\1.proto";#' \
  -e 's/ kvplane\.v1\.([A-Z])/ kvplane.wire.v1.\1/' \
  "$root/integrations/push/push.proto" >"$twin/integrations/push/push.proto"

generate=("${protoc[@]}" "-I$root/protos" "-I$twin" "-I$root" --python_out="$out" --pyi_out="$out")
"${generate[@]}" "$twin/integrations/push/push.proto" "$root/integrations/etcd/etcd.proto"
"${generate[@]}" --grpc_python_out="$out" "$source"/*.proto "$twin"/kvplane/wire/v1/*.proto
sed -i 's/kvplane\.wire\.v1\./kvplane.v1./' "$out"/kvplane/wire/v1/*_pb2_grpc.py
