#!/usr/bin/env bash
# Two nodes on one machine. The second is lost, with all that it had; the job goes on from the very step.
# What makes a "node" here: a name, a directory, memory and a keeper of its own.
set -euo pipefail
root=${1:-$(mktemp -d)}
here=$(cd "$(dirname "$0")" && pwd)
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # torchrun ends its ranks

start() { # a job on both nodes: its name, the directory, arguments of the program
    local job=$1 dir=$2 node
    shift 2
    agents=()
    for node in one two; do
        everstep run --tiers 'Partner()' --node "$node" -- \
            torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id "$job" \
            --rdzv-endpoint "127.0.0.1:$port" "$here/train_nodes.py" --dir "$dir/$node" "$@" \
            </dev/null >>"$root/$job-$node.log" 2>&1 &
        agents+=($!)
    done
}

finish() {
    for agent in "${agents[@]}"; do wait "$agent"; done
}

keeper_and_run() { # of a node: the process, and the name under which its memory lies
    EVERSTEP_NODE=$1 everstep status "$root/run/$1" --json |
        python -c 'import json, sys; said = json.load(sys.stdin); print(said["keeper"], said["run"])'
}

end() { # a torchrun and its ranks, at once
    local ranks
    ranks=$(ps -o pid= --ppid "$1")
    kill -9 "$1" $ranks
    wait "$1" 2>/dev/null || true
}

echo "a job on nodes one and two, which stands still at step 20"
start first "$root/run" --stand-still-at 20
until grep -qs 'is protected' "$root/first-one.log" && grep -qs 'is protected' "$root/first-two.log"; do
    sleep 0.2
    kill -0 "${agents[@]}" || { cat "$root"/first-*.log && exit 1; }
done

echo "node two is lost: its ranks, its keeper, its memory, its disk"
read -r keeper run < <(keeper_and_run two)
end "${agents[1]}"
kill -9 "$keeper"
rm -rf "$root/run/two" "/dev/shm/everstep-$(id -u)-two/$run"
end "${agents[0]}" # what a scheduler does with the rest of the job

echo "the job is started again, with an empty node two"
start second "$root/run"
finish
echo "and, for comparison, one that was never disturbed"
start undisturbed "$root/undisturbed"
finish

grep -h 'rank' "$root"/second-*.log "$root"/undisturbed-*.log
