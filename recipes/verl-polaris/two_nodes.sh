#!/usr/bin/env bash
# The same run on two machines of 8 GPUs. On the first:    bash recipes/verl-polaris/two_nodes.sh head 4b [overrides]
# On the second, before or after it:                       bash recipes/verl-polaris/two_nodes.sh join ADDRESS_OF_FIRST
# sparroll is installed on both; data, model and the folder of checkpoints are at the same place on both.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
port=6379
case "${1:?head or join}" in
    head)
        shift
        ray start --head --port "$port"
        until [ "$(ray status 2> /dev/null | grep -c ' 1 node_')" -ge 2 ]; do
            echo "waiting for the second machine"
            sleep 5
        done
        NODES=2 bash "$here/run.sh" "$@"
        ray stop
        ;;
    join)
        until ray start --address "${2:?the address of the first machine}:$port" --block; do sleep 5; done
        ;;
    *) echo "error: head or join, got $1" >&2; exit 2 ;;
esac
