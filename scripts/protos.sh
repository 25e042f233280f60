#!/usr/bin/env bash
# Runs the protoc that requirements/protos.txt pins, in a virtual environment of its own: it needs
# an older protobuf than everything else here.
#     scripts/protos.sh            regenerates the stubs in kvplane/v1, kvplane/plane/v1,
#                                 kvplane/wire and integrations/push
#     scripts/protos.sh ARG ...    runs protoc with these arguments instead
#   PYTHON=python3.12   the interpreter to use (default: that of .venv, otherwise python3)
#   OUT=FOLDER          where to write the stubs (default: the root of the repository)
#
# kvplane.wire.v1 is the twin of kvplane.v1, and kvplane.wire.plane.v1 that of kvplane.plane.v1: the
# same messages, but a column is the bytes of its elements, which Python reads without an object for
# each. Services keep their names.
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
twin=$(mktemp -d)
trap 'rm -rf "$twin"' EXIT
mkdir -p "$twin/integrations/push" "$out"
cd "$root/protos"
files=$(find kvplane -name '*.proto' | sort)
enums=$(sed -nE 's/^enum (\w+) .*/\1/p' $files | paste -sd '|')
twins=()
for file in $files; do
  twins+=("$twin/kvplane/wire/${file#kvplane/}")
  mkdir -p "$(dirname "${twins[-1]}")"
  sed -E -e 's/^package kvplane\./package kvplane.wire./' -e 's#^import "kvplane/#&wire/#' \
    -e "s/repeated (kvplane\.v1\.)?(sfixed32|sfixed64|bool|uint32|$enums) (\w+ =)/bytes \3/" \
    -e '/^extend /,/^}/d' -e '/option \(.*(audience|callers)\)/d' \
    -e 's/([ (])kvplane\.v1\.([A-Z])/\1kvplane.wire.v1.\2/' "$file" >"${twins[-1]}"
done
# A push holds messages of the contract, and its methods have the contract's option.
sed -E -e 's#^import "kvplane/(v1/\w+\.proto)";#&\nimport "kvplane/wire/\1";#' \
  -e 's/ kvplane\.v1\.([A-Z])/ kvplane.wire.v1.\1/' \
  "$root/integrations/push/push.proto" >"$twin/integrations/push/push.proto"

generate=("${protoc[@]}" "-I$root/protos" "-I$twin" "-I$root" --python_out="$out" --pyi_out="$out")
"${generate[@]}" --grpc_python_out="$out" "$twin/integrations/push/push.proto"
"${generate[@]}" --grpc_python_out="$out" $files "${twins[@]}"
# The package of the pushes has two names: one in the tree, and one where it is installed.
sed -i "s/^from integrations.push import/from . import/" "$out/integrations/push/push_pb2_grpc.py"
sed -i -E "s/'(\/?)kvplane\.wire\./'\1kvplane./" "$out"/kvplane/wire/{,plane/}v1/*_pb2_grpc.py
