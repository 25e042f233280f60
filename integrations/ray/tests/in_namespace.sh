#!/usr/bin/env bash
# Runs a command in a network of its own, which has only loopback: its processes cannot be reached
# from elsewhere, nor reach anything.
#     integrations/ray/tests/in_namespace.sh COMMAND [ARGUMENT...]
# Needs root, or a kernel that gives users namespaces of their own.
set -euo pipefail

flags=(--net)
[ "$(id -u)" -eq 0 ] || flags+=(--map-root-user)
exec unshare "${flags[@]}" sh -c 'ip link set lo up && exec "$@"' in_namespace "$@"
