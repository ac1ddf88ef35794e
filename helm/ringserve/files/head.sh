#!/bin/bash
# Ray's head, and beside it the router, the leaders of all rings, and what watches them. Ends when either ends.
# $KUBERAY_GEN_RAY_START_CMD is "ray start --head --block ..." as the operator made it from rayStartParams.
set -u
config=${1:?usage: head.sh CONFIG}

bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!
ringserve up --config "$config" --no-gateway &
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
