#!/usr/bin/env bash
# What each protection costs in memory and on disk: four nodes on one machine, a model of a million parameters, AdamW.
# Prints the table of docs/choosing-tiers.md; arguments: tiers to be measured instead.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
nodes=(n1 n2 n3 n4)
trap 'for agent in $(jobs -p); do kill -9 "$agent" $(ps -o pid= --ppid "$agent") 2>/dev/null || true; done' EXIT

megabytes() { du -sb --apparent-size "$@" 2>/dev/null | awk '{ total += $1 } END { printf "%.1f MB", total / 1e6 }'; }

of() { # what `everstep status` says of a node
    EVERSTEP_NODE=$1 everstep status "$root/$1" --json | python -c "import json, sys; print(json.load(sys.stdin)['$2'])"
}

measure() { # the tiers
    local node agents=() keepers=() run
    root=$(mktemp -d)
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    for node in "${nodes[@]}"; do
        everstep run --tiers "$1, Shared('$root/shared', every=10)" --node "$node" -- \
            torchrun --nnodes ${#nodes[@]} --nproc-per-node 1 --rdzv-backend c10d --rdzv-id "$port" \
            --rdzv-endpoint "127.0.0.1:$port" "$here/examples/train_nodes.py" --dir "$root/$node" --width 1024 \
            --stand-still-at 20 </dev/null >"$root/$node.log" 2>&1 &
        agents+=($!)
    done
    for node in "${nodes[@]}"; do
        until grep -qs 'is protected' "$root/$node.log"; do
            sleep 0.2
            kill -0 "${agents[@]}" || { cat "$root"/*.log && exit 1; }
        done
    done
    until ls "$root/shared/step-"*.json >/dev/null 2>&1; do sleep 0.2; done
    run=$(of n1 run)
    local memory=/dev/shm/everstep-$(id -u)-n1/$run
    echo "| \`$1\` | $(megabytes "$memory"/rank-*) | $(megabytes "$memory/guests") |" \
        "$(megabytes "$root/n1/step-"*) | $(megabytes "$root/shared/step-"*) |"
    for node in "${nodes[@]}"; do keepers+=("$(of "$node" keeper)"); done
    for agent in "${agents[@]}"; do  # before the keepers: a rank that lives starts another
        kill -9 "$agent" $(ps -o pid= --ppid "$agent")
        wait "$agent" 2>/dev/null || true
    done
    kill -9 "${keepers[@]}"
    rm -rf "$root" /dev/shm/everstep-"$(id -u)"-n[1-4]/"$run"
}

echo "$(getconf _NPROCESSORS_ONLN) cores, $(date +%F); per node, but for the shared file system"
echo
echo "| tiers | its own memory (6 slots) | held for others | on its disk | on the shared file system |"
echo "|---|---:|---:|---:|---:|"
[ $# -gt 0 ] || set -- "Partner()" "Partner(copies=2)" "Parity('xor', group=4)" "Parity('rs', group=4, losses=2)"
for tiers in "$@"; do measure "$tiers"; done
