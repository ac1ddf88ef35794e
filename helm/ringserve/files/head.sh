#!/bin/bash
# Ray's head beside `ringserve up`: router, leaders of all rings, and their supervision. Ends when either ends.
# On SIGTERM it lets turns continue for DRAIN_SECONDS at most.
# $KUBERAY_GEN_RAY_START_CMD is "ray start --head --block ..." as the operator made it from rayStartParams.
set -u
config=${1:?usage: head.sh CONFIG [DRAIN_SECONDS]}
drain_seconds=${2:-0}

bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!
ringserve up --config "$config" --no-gateway --drain-seconds "$drain_seconds" &
rings=$!

stop() {
    trap '' TERM INT
    kill -TERM "$rings" 2>/dev/null
    wait "$rings"
    kill -TERM "$ray" 2>/dev/null
    wait "$ray"
    exit "$1"
}
trap 'stop 0' TERM INT

wait -n "$ray" "$rings"
stop 1
