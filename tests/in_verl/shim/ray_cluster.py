"""A Ray cluster that stands until this process is killed, for a run that does not start one.

python ray_cluster.py CPUS GPUS BYTES    # prints its address; BYTES are those of the object store
"""

from __future__ import annotations

import signal
import sys

import ray


def main(cpus: int, gpus: int, object_store_bytes: int) -> None:
    context = ray.init(
        "local", num_cpus=cpus, num_gpus=gpus, object_store_memory=object_store_bytes, include_dashboard=False
    )
    print(f"address {context.address_info['gcs_address']}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
