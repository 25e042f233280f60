#!/usr/bin/env bash
# Regenerates requirements/lock.txt with the newest versions that pyproject.toml and
# requirements/constraints.txt allow.
#     scripts/lock.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${1:-python3}" -m venv "$scratch/venv"
python="$scratch/venv/bin/python"

# Every dependency of every extra but Ray's, except for what is built from this tree.
"$python" - >"$scratch/wanted.txt" <<'PYTHON'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
locked = [of for name, of in extras.items() if name != "ray"]
wanted = set(project["dependencies"]).union(*locked)
print("\n".join(sorted(w for w in wanted if not w.startswith("kvplane"))))
PYTHON
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip install --quiet -r "$scratch/wanted.txt" -c requirements/constraints.txt

{
  echo "# Everything that make run and make test install. Written by scripts/lock.sh; do not edit."
  echo "# What only a CUDA build of torch needs comes with torch, pinned by it."
  # A local version label such as +cpu is specific to one machine's build, so it is removed.
  "$python" -m pip freeze --all --exclude pip \
    | sed -E 's/\+[a-z0-9.]+$//' | grep -viE '^(nvidia-|cuda-|triton==)' | LC_ALL=C sort -f
} >"$scratch/lock.txt"
mv "$scratch/lock.txt" requirements/lock.txt
echo "requirements/lock.txt: $(grep -c == requirements/lock.txt) packages"
