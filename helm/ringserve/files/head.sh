#!/bin/bash
# Ray's head, and beside it the router, the leaders of all rings, and what watches them. Ends when either ends.
# Told to end, it lets turns go on for DRAIN_SECONDS at most.
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
