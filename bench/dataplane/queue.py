"""TransferQueue beside the log: the same columns as tensors, used as its documentation shows.

Run as a program it hosts the actors: it prints the address of its Ray cluster as a line of JSON and
ends with its stdin. TransferQueue is in `.venv-peers`, which `make peers` makes.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import dora_pipe
from dora_pipe.bench.dataplane.process import QUEUE, SILENT_S, WARM, Assemble, Done, Inside
from dora_pipe.bench.dataplane.source import number_of
from dora_pipe.bench.support import Child, reply
from dora_pipe.core.errors import BusError, InvariantBroken
from dora_pipe.schemas.trajectory import Meta, Segment, Trajectory

NAMESPACE: Final = "dora-pipe-bench"
COLUMNS: Final = ("token_ids", "logprobs", "loss_mask", "version", "reward", "other")
OTHER_BYTES: Final = 2048
"""Everything but arrays, as JSON in a tensor of one size, so that trajectories fit in a batch."""
STORE_BYTES: Final = 128 * 1024 * 1024
"""Size of Ray's own store, which TransferQueue does not use."""
TAKE_S: Final = 0.05
POLL_S: Final = 0.002
QUIET: Final = {
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""One thread as everywhere here, no usage report, and a token that closes the cluster to others."""


class Other(msgspec.Struct, frozen=True):
    """What of a trajectory is no array."""

    meta: Meta
    segments: list[Segment]


def queue_python() -> str:
    """The interpreter that has TransferQueue; empty where none has."""
    if importlib.util.find_spec("transfer_queue"):
        return sys.executable
    python = Path(next(iter(dora_pipe.__path__))) / ".venv-peers" / "bin" / "python"
    return str(python) if python.exists() else ""


@contextmanager
def serving() -> Iterator[str]:
    """The address of a cluster with TransferQueue's actors while the block lasts."""
    module = "dora_pipe.bench.dataplane.queue"
    with Child(module, "host", python=queue_python(), environment=QUIET) as host:
        yield f"{QUEUE}:{host.answer(str)}"


def _client(address: str) -> Any:
    import ray
    import transfer_queue

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    transfer_queue.init()
    return transfer_queue.get_client()


class QueueOutbox:
    """One call for everything that was gathered."""

    def __init__(self, address: str, run: str) -> None:
        self._client = _client(address)
        self._run = run

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        """See Outbox."""
        import torch

        other = np.full(OTHER_BYTES, ord(" "), np.uint8)
        text = msgspec.json.encode(Other(trajectory.meta, list(trajectory.segments)))
        other[: len(text)] = np.frombuffer(text, np.uint8)
        row: dict[str, Any] = {
            "token_ids": np.asarray(trajectory.token_ids, np.int32),
            "logprobs": np.asarray(trajectory.logprobs, np.float32),
            "loss_mask": np.asarray(trajectory.loss_mask, np.uint8).copy(),
            "version": np.array([trajectory.version]),
            "reward": np.array([trajectory.reward]),
            "other": other,
        }
        tensors = {name: torch.from_numpy(one) for name, one in row.items()}
        return tensors, sum(one.nbytes for one in row.values())

    def put(self, held: Sequence[Any]) -> None:
        """See Outbox."""
        import torch
        from tensordict import TensorDict

        columns = {name: torch.stack([one[name] for one in held]) for name in COLUMNS}
        self._client.put(TensorDict(columns, len(held)), partition_id=self._run)

    def close(self) -> None:
        """See Outbox."""
        self._client.close()


class QueueInbox:
    """Trajectories out of the queue, opened and checked; `batch` 0: as many as have come."""

    def __init__(self, address: str, run: str, batch: int) -> None:
        self._client, self._run, self._batch = _client(address), run, batch
        self._heard_s = time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Begin to count again."""
        self.bytes = 0
        self.batched_ns: dict[int, int] = {}

    def read(self, left: int | None) -> None:
        """Take a batch, smaller only at the end. Raises BusError when nothing comes."""
        size = self._batch or 1
        found = self._take(size if left is None else min(size, left))
        if found:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > SILENT_S:
            raise BusError(f"no trajectory came for {SILENT_S:.0f} s")
        opened = [_open(one) for one in found]
        now_ns = time.monotonic_ns()
        for trajectory, size_bytes in opened:
            self.batched_ns[number_of(trajectory)] = now_ns
            self.bytes += size_bytes

    def close(self) -> None:
        """Clear the partition."""
        self._client.clear_partition(self._run)

    def _take(self, count: int) -> list[dict[str, Any]]:
        until_s = time.monotonic() + TAKE_S
        while True:
            found = self._client.get_meta(
                list(COLUMNS), count, self._run, task_name="train", mode="fetch"
            )
            if found.size:
                data = self._client.get_data(found).items()
                columns = {name: values.unbind() for name, values in data}
                return [{name: columns[name][at] for name in COLUMNS} for at in range(found.size)]
            if time.monotonic() > until_s:
                return []
            time.sleep(POLL_S)


def _open(row: dict[str, Any]) -> tuple[str, int]:
    """The id of a trajectory whose shapes were checked, and its bytes. Raises InvariantBroken."""
    arrays = {name: values.numpy() for name, values in row.items()}
    other = msgspec.json.decode(arrays["other"].tobytes(), type=Other)
    lengths = {len(arrays[name]) for name in ("token_ids", "logprobs", "loss_mask")}
    if lengths != {other.segments[-1].end}:
        raise InvariantBroken(f"columns of {lengths} tokens")
    size = sum(one.nbytes for one in arrays.values())
    return f"{other.meta.group}-{other.meta.sibling:03d}", size


def consume(task: Assemble, inside: Inside) -> Done:
    """Take until the total that comes later, after the warm ones."""
    inbox = QueueInbox(task.address.partition(":")[2], task.run, task.batch)
    while (seen := len(inbox.batched_ns)) < WARM:
        inbox.read(WARM - seen)
    inbox.forget()
    start_ns, start_s = inside.ready(listens=True), time.process_time()
    while inside.total is None or len(inbox.batched_ns) < inside.total:
        seen = len(inbox.batched_ns)
        inbox.read(None if inside.total is None else inside.total - seen)
    done = Done(
        records=len(inbox.batched_ns),
        bytes=inbox.bytes,
        start_ns=start_ns,
        end_ns=max(inbox.batched_ns.values(), default=start_ns),
        cpu_s=time.process_time() - start_s,
        moments=[moment for _, moment in sorted(inbox.batched_ns.items())],
    )
    inbox.close()
    return done


def host() -> None:
    """Start the cluster, print its address, and wait."""
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
    reply(context.address_info["address"])
    sys.stdin.buffer.read()
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    host()
