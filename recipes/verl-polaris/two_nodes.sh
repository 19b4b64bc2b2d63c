#!/usr/bin/env bash
# The same run on two machines of 8 GPUs. On the first:    bash recipes/verl-polaris/two_nodes.sh head 4b [overrides]
# On the second, before or after it:                       bash recipes/verl-polaris/two_nodes.sh join ADDRESS_OF_FIRST
# sparroll is installed on both; data, model and the folder of checkpoints are at the same place on both. Each machine
# waits WAIT_SECONDS (600) for the other one. Whatever ends the run, both stop Ray; `ray stop` ends all that runs there.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
port=6379
most="${WAIT_SECONDS:-600}" pause="${POLL_SECONDS:-5}"

# All of Ray's commands must agree on this. A token that the first machine has must be the second one's, too.
if [ -z "${RAY_AUTH_MODE:-}" ]; then
    RAY_AUTH_MODE=disabled
    if [ -f "$HOME/.ray/auth_token" ]; then RAY_AUTH_MODE=token; fi
    export RAY_AUTH_MODE
fi

end() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

# After Ray was started: whatever ends this script ends the run and Ray, and its status stays what it was.
leave_nothing() {
    trap 'ray stop || true' EXIT
    trap 'end_run; exit 130' INT
    trap 'end_run; exit 143' TERM
}
# $! is the run's from the moment that there is one, and nothing else is started in the background.
end_run() {
    if [ -n "${!-}" ]; then kill "$!" 2> /dev/null || true; fi
}

case "${1:?head or join}" in
    head)
        shift
        # Where this fails, a Ray that runs here is somebody else's.
        ray start --head --port "$port"
        leave_nothing
        # Named, because there may be others: the run goes into this Ray.
        export RAY_ADDRESS="127.0.0.1:$port"
        until [ "$(ray status --address "$RAY_ADDRESS" 2> /dev/null | grep -c ' 1 node_')" -ge 2 ]; do
            if [ "$SECONDS" -ge "$most" ]; then
                end "the second machine did not join within $most s" \
                    "run two_nodes.sh join there with this machine's address; port $port must be open, and Ray's token the same"
            fi
            echo "waiting for the second machine"
            sleep "$pause"
        done
        # In the background, so that a signal is heard at once.
        NODES=2 bash "$here/run.sh" "$@" &
        wait "$!"
        ;;
    join)
        address="${2:?the address of the first machine}:$port"
        until ray start --address "$address"; do
            if [ "$SECONDS" -ge "$most" ]; then
                end "no Ray answered at $address within $most s" \
                    "run two_nodes.sh head on the first machine; port $port must be open, and Ray's token the same"
            fi
            sleep "$pause"
        done
        leave_nothing
        echo "joined; this machine works until Ray ends on the first one"
        missed=0
        while [ "$missed" -lt 3 ]; do
            sleep "$pause"
            if ray status --address "$address" > /dev/null 2>&1; then missed=0; else missed=$((missed + 1)); fi
        done
        echo "Ray has ended on the first machine"
        ;;
    *) echo "error: head or join, got $1" >&2; exit 2 ;;
esac
