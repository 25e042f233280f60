#!/bin/sh
# In an image's build stage: installs the requirements into /opt/kvplane, at the locked versions.
#     deploy/install.sh REQUIREMENT...
# KVPLANE_TORCH, CA_BUNDLE and KVPLANE_COMMIT are build arguments; .env describes them.
set -eu

if [ -n "${CA_BUNDLE:-}" ]; then
  printf '%s' "$CA_BUNDLE" | base64 -d >/tmp/ca.pem
  export PIP_CERT=/tmp/ca.pem
fi
# The packages' build requirements are locked too: older versions of pip read the first variable
# for that, newer ones the second.
export PIP_CONSTRAINT="$PWD/requirements/lock.txt" PIP_BUILD_CONSTRAINT="$PWD/requirements/lock.txt"
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

python -m venv /opt/kvplane
if [ "${KVPLANE_TORCH:-}" = cpu ]; then
  /opt/kvplane/bin/pip install --retries 1 --no-deps \
    --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(grep '^torch==' requirements/lock.txt)"
fi
/opt/kvplane/bin/pip install "$@"
