#!/bin/bash
# Ray's head beside `ringserve up`: router, leaders of all rings, and their supervision. Ends when Ray ends. If `up`
# ends by itself, say over a configuration that it refuses, another is started: a new head would cost every pod its Ray.
# On SIGTERM it lets turns continue for DRAIN_SECONDS at most. Ranks are left to the next `up`, with their models.
# $KUBERAY_GEN_RAY_START_CMD is "ray start --head --block ..." as the operator made it from rayStartParams.
set -u
config=${1:?usage: head.sh CONFIG [DRAIN_SECONDS]}
drain_seconds=${2:-0}
pause=1
longest_pause=60

start_rings() {
    ringserve up --config "$config" --no-gateway --drain-seconds "$drain_seconds" --leave-ranks &
    rings=$!
    started=$SECONDS
}

# A child that is still this shell, before it becomes its program, would lose the signal. The trap may interrupt a
# `wait`, and bash forgets children that end just then: so no other `wait` here.
end() {
    while [[ /proc/$1/exe -ef /proc/$$/exe ]]; do sleep 0.05; done
    kill -TERM "$1" 2>/dev/null
    while kill -0 "$1" 2>/dev/null; do sleep 0.1; done
}

stop() {
    trap '' TERM INT
    end "$rings"
    end "$ray"
    exit "$1"
}

bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!
start_rings
trap 'stop 0' TERM INT

while wait -n "$ray" "$rings"; code=$?; kill -0 "$ray" 2>/dev/null; do
    ((SECONDS - started > longest_pause)) && pause=1
    echo "ringserve up has ended with status $code; another starts in $pause s" >&2
    sleep "$pause" &
    wait $!
    pause=$((pause * 2 < longest_pause ? pause * 2 : longest_pause))
    start_rings
done
stop 1
