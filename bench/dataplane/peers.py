"""What stands beside the log: raw Kafka with Arrow, Redis streams, TransferQueue; decides nothing.

Each is used as its documentation shows it. All carry the same columns; on arrival the digest of the
bytes is checked where there are bytes (not by TransferQueue, which carries tensors), and shapes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dora_pipe.bench.dataplane.bounds import CopyInbox, CopyOutbox, DiskInbox, DiskOutbox
from dora_pipe.bench.dataplane.carriers import Inbox, LogOutbox, Outbox
from dora_pipe.bench.dataplane.pipe import open_plane
from dora_pipe.bench.dataplane.process import PARTITIONS
from dora_pipe.bench.dataplane.rows import SAID, check_shapes, encode_row, open_row, said_by
from dora_pipe.bus.kafka.client import LINGER_MS
from dora_pipe.bus.port import Append, TopicPartition
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.identity import parse_trajectory_id, partition_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory

RAW: Final = "raw"
REDIS: Final = "redis"
QUEUE: Final = "transferqueue"
QUEUE_ONE: Final = "transferqueue-one"
DISK: Final = "disk"
COPY: Final = "copy"
PEERS: Final = (COPY, DISK, RAW, REDIS, QUEUE, QUEUE_ONE)
"""Kinds of their addresses; `transferqueue-one` puts each trajectory by itself. The first two are
no planes but what the machine can do (`bounds`)."""

SAID_BYTES: Final = 2048
"""What is no array, as a tensor of one size, so that trajectories can stand in one batch."""

NAMESPACE: Final = "dora-pipe-bench"
QUEUE_POLL_S: Final = 0.002
"""Between two questions whether there is something: TransferQueue does not wait for its callers."""


def open_outbox(address: str, run: str, *, paced: bool, claims: str = "") -> Outbox:
    """Of a plane; `paced`: one trajectory at a time, `claims`: as `open_plane` has it. Raises
    UsageError for none."""
    kind, _, rest = address.partition(":")
    topic = Topics(run).trajectories
    match kind:
        case "copy":
            return CopyOutbox(run)
        case "disk":
            return DiskOutbox(rest, run)
        case "raw":
            return RawOutbox(rest, topic, paced=paced)
        case "redis":
            return RedisOutbox(int(rest), topic)
        case "transferqueue" | "transferqueue-one":
            return QueueOutbox(rest, run, single=kind == QUEUE_ONE)
        case _:
            return LogOutbox(open_plane(address, reads=False, claims=claims), topic)


def open_inbox(address: str, run: str, *, routes: bool) -> Inbox:
    """Of a peer. Raises UsageError for another plane."""
    kind, _, rest = address.partition(":")
    topic = Topics(run).trajectories
    match kind:
        case "copy":
            return CopyInbox(run)
        case "disk":
            return DiskInbox(rest, run)
        case "raw":
            return RawInbox(rest, topic)
        case "redis":
            return RedisInbox(int(rest), topic)
        case "transferqueue" | "transferqueue-one":
            return QueueInbox(rest, run, routes=routes)
        case _:
            raise UsageError(f"`{address}` is no peer")


class RawOutbox(Outbox):
    """kafka-python by itself: acknowledged by all, and waited for at the end."""

    def __init__(self, servers: str, topic: str, *, paced: bool) -> None:
        from dora_pipe.bench.dataplane.raw import RawWriter

        self._topic = topic
        self._paced = paced
        self._writer = RawWriter(servers, linger_ms=0 if paced else LINGER_MS)

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        value = encode_row(trajectory)
        _, ordinal, _ = parse_trajectory_id(trajectory.trajectory)
        record = Append(
            topic=self._topic,
            partition=partition_of(ordinal, PARTITIONS),
            key=trajectory.trajectory.encode(),
            value=value,
            headers=(("sha256", hashlib.sha256(value).digest()),),
        )
        return record, len(value)

    def put(self, held: Sequence[Any]) -> None:
        self._writer.append(held)
        if self._paced:
            self._writer.finish()

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()


class RawInbox(Inbox):
    """kafka-python by itself."""

    def __init__(self, servers: str, topic: str) -> None:
        from dora_pipe.bench.dataplane.raw import RawReader

        self._reader = RawReader(
            servers, [TopicPartition(topic, number) for number in range(PARTITIONS)]
        )

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        return self._reader.poll(round(timeout_s * 1000))

    def open(self, one: Any) -> tuple[str, int]:
        return open_row(one.value, dict(one.headers)["sha256"]), len(one.value)

    def close(self) -> None:
        self._reader.close()


class RedisOutbox(Outbox):
    """An entry of a stream for each, several to a pipeline; the stream goes when it is closed."""

    def __init__(self, port: int, stream: str) -> None:
        import redis

        self._stream = stream
        self._client: Any = redis.Redis(port=port)
        self._client.ping()

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        value = encode_row(trajectory)
        return {b"v": value, b"s": hashlib.sha256(value).digest()}, len(value)

    def put(self, held: Sequence[Any]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for each in held:
                pipeline.xadd(self._stream, each)
            pipeline.execute()

    def finish(self) -> None:
        pass  # What the server has answered is in its file.

    def close(self) -> None:
        self._client.close()


class RedisInbox(Inbox):
    """Reads a stream from its beginning, and deletes it when it is closed."""

    def __init__(self, port: int, stream: str) -> None:
        import redis

        self._stream = stream
        self._client: Any = redis.Redis(port=port)
        self._last: Any = "0"

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        found = self._client.xread(
            {self._stream: self._last}, count=at_most, block=round(timeout_s * 1000)
        )
        entries = [each for _, some in found or () for each in some]
        if entries:
            self._last = entries[-1][0]
        return [fields for _, fields in entries]

    def open(self, one: Any) -> tuple[str, int]:
        return open_row(one[b"v"], one[b"s"]), len(one[b"v"])

    def close(self) -> None:
        self._client.delete(self._stream)
        self._client.close()


def _queue_client(address: str) -> Any:
    """TransferQueue's, of the cluster that the bench started."""
    import ray
    import transfer_queue

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    transfer_queue.init()
    return transfer_queue.get_client()


class QueueOutbox(Outbox):
    """One call for all that were gathered, or (`single`) for each."""

    def __init__(self, address: str, run: str, *, single: bool) -> None:
        self._client = _queue_client(address)
        self._run = run
        self._single = single

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        import torch

        said = np.full(SAID_BYTES, ord(" "), np.uint8)
        text = np.frombuffer(said_by(trajectory), np.uint8)
        said[: len(text)] = text
        routes = trajectory.routed_experts
        row: dict[str, np.ndarray[Any, Any]] = {
            "token_ids": np.asarray(trajectory.token_ids, np.int32),
            "logprobs": np.asarray(trajectory.logprobs, np.float32),
            "loss_mask": np.asarray(trajectory.loss_mask, np.uint8).copy(),
            "version": np.array([trajectory.version]),
            "reward": np.array([trajectory.reward]),
            "said": said,
        }
        if routes is not None:
            row["routes"] = routes.choices.copy()
        tensors = {name: torch.from_numpy(one) for name, one in row.items()}
        return tensors, sum(one.nbytes for one in row.values())

    def put(self, held: Sequence[Any]) -> None:
        import torch
        from tensordict import TensorDict

        for some in ([each] for each in held) if self._single else [held]:
            columns = {name: torch.stack([one[name] for one in some]) for name in some[0]}
            self._client.put(TensorDict(columns, len(some)), partition_id=self._run)

    def finish(self) -> None:
        pass  # A put returns when the memory of its server has it.

    def close(self) -> None:
        self._client.close()


class QueueInbox(Inbox):
    """Whole batches of as many as are asked for; clears its partition when it is closed."""

    def __init__(self, address: str, run: str, *, routes: bool) -> None:
        self._client = _queue_client(address)
        self._run = run
        self._fields = ["token_ids", "logprobs", "loss_mask", "version", "reward", "said"]
        self._fields += ["routes"] if routes else []

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        until_s = time.monotonic() + timeout_s
        while True:
            found = self._client.get_meta(
                self._fields, at_most, self._run, task_name="train", mode="fetch"
            )
            if found.size:
                columns = {
                    name: values.unbind() for name, values in self._client.get_data(found).items()
                }
                return [
                    {name: values[at] for name, values in columns.items()}
                    for at in range(found.size)
                ]
            if time.monotonic() > until_s:
                return []
            time.sleep(QUEUE_POLL_S)

    def open(self, one: Any) -> tuple[str, int]:
        arrays = {name: values.numpy() for name, values in one.items()}
        said = SAID.decode(arrays["said"].tobytes())
        lengths = [len(arrays[name]) for name in ("token_ids", "logprobs", "loss_mask")]
        routed = arrays["routes"].size if "routes" in arrays else None
        check_shapes(said, lengths, routed)
        who = f"{said.meta.group}-{said.meta.sibling:03d}"
        return who, sum(each.nbytes for each in arrays.values())

    def close(self) -> None:
        self._client.clear_partition(self._run)
