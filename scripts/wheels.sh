#!/usr/bin/env bash
# Makes dist/: the wheels of a release, for this interpreter. make wheels makes .venv first, and
# then serves a model from them in a bare Debian, without a compiler.
#
# CUDA's kernels are left out: pip install ./csrc builds them where nvcc is. The kernels for CPUs
# have every instruction set, and choose at run time.
set -euo pipefail
cd "$(dirname "$0")/.."

# On Debian 12 the newest symbols are of glibc 2.34 and gcc 11. auditwheel fails beyond.
PLATFORM=manylinux_2_34_$(uname -m)
export PATH="$PWD/.venv/bin:$PWD/build/wheel-tools/bin:$PATH" KVPLANE_CUDA=OFF
rm -rf build/lib build/wheels dist # setuptools would add modules that are gone from the tree
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels \
  ./csrc ./csrc/blocks .
for wheel in build/wheels/*-linux_*.whl; do
  PYTHONPATH=build/wheel-tools python -m auditwheel repair --plat "$PLATFORM" --only-plat \
    --wheel-dir dist "$wheel"
done
mv build/wheels/kvplane-*.whl dist
ls -l dist
