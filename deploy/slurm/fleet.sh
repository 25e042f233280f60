#!/usr/bin/env bash
# Both planes on the machines of a Slurm job, by Ray:
#     sbatch --nodes 4 --gpus-per-node 8 deploy/slurm/fleet.sh MODEL
#
# `ray symmetric-run` (Ray 2.49 and later) starts Ray on every machine of the job, runs the command
# after `--` on the first, and ends Ray everywhere when that ends. The fleet is up while this script
# runs: engines are started at its end, in place of the wait, or in other steps of the job (srun
# --overlap) with the control planes' addresses, which are in the file control_plane.
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail

model=${1:?usage: fleet.sh MODEL}
# Flags of both programs: TLS and an access list (docs/security.md), or --insecure if nobody else
# reaches the job's network.
serving=${KVPLANE_SERVING:?set it to --insecure, or to the flags of TLS}
shards=${KVPLANE_SHARDS:-2} # data planes a pool, a GPU each
pools=${KVPLANE_POOLS:-$((SLURM_JOB_NUM_NODES * ${SLURM_GPUS_ON_NODE:-8} / shards))}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_address=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }'):6379

# Callers that reach a port of Ray can run code as this user, so every call needs a token.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN_PATH=$(mktemp --tmpdir="$PWD" .ray-token.XXXXXX)
export RAY_AUTH_TOKEN_PATH
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH"

run="python -m kvplane.integrations.ray up --pools $pools --shards $shards --gpus 1"
run+=" --control='$serving'"
run+=" --data='--model $model $serving' | tee control_plane"
srun ray symmetric-run --address "$head_address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  bash -euc "$run; sleep infinity"
