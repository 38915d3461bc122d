"""The process that holds TransferQueue's actors: `python -m dora_pipe.bench.dataplane.queue_host`.

It says the namespace and the address of its Ray cluster on one line, and ends with its stdin.
"""

from __future__ import annotations

import sys
from typing import Final

from dora_pipe.bench.dataplane.peers import NAMESPACE

STORE_BYTES: Final = 128 * 1024 * 1024
"""Of Ray's own store, which TransferQueue does not use."""


def main() -> None:
    """Start it, say where, and wait."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    context = ray.init(
        namespace=NAMESPACE,
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
    )
    wanted = {
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
    }
    transfer_queue.init(OmegaConf.create(wanted))
    sys.stdout.write(f"{NAMESPACE} {context.address_info['address']}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
