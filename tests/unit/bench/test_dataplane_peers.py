"""What stands beside the log in `bench dataplane`: equal columns, checked on arrival."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from dora_pipe.bench.dataplane import servers
from dora_pipe.bench.dataplane.bounds import MEMORY, SLOTS
from dora_pipe.bench.dataplane.carriers import Inbox
from dora_pipe.bench.dataplane.consume import Consumer
from dora_pipe.bench.dataplane.figures import KEEPS
from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane
from dora_pipe.bench.dataplane.peers import (
    COPY,
    DISK,
    PEERS,
    QUEUE,
    QUEUE_ONE,
    RAW,
    REDIS,
    open_inbox,
    open_outbox,
)
from dora_pipe.bench.dataplane.rows import SAID, SCHEMA, encode_row, open_row
from dora_pipe.bench.dataplane.source import EXPERTS, PER_TOKEN, Source, encoded, sample_routes
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.routes import check_routes


@pytest.mark.parametrize("routes", [False, True])
def test_a_row_has_every_column_of_the_record(routes: bool) -> None:
    trajectory = Source("r", 40, routes=routes)(9)
    value = encode_row(trajectory)
    assert open_row(value, hashlib.sha256(value).digest()) == trajectory.trajectory
    (row,) = pa.ipc.read_record_batch(pa.py_buffer(value), SCHEMA).to_pylist()
    assert row["token_ids"] == list(trajectory.token_ids)
    assert row["loss_mask"] == list(trajectory.loss_mask)
    said = SAID.decode(row["said"])
    assert (said.meta, said.segments) == (trajectory.meta, trajectory.segments)
    routed = trajectory.routed_experts
    assert row["routes"] == (None if routed is None else routed.data)


def test_a_row_that_was_changed_or_is_short_is_refused() -> None:
    value = encode_row(Source("r", 40)(0))
    with pytest.raises(InvariantBroken, match="other bytes"):
        open_row(value + b"x", hashlib.sha256(value).digest())
    longer = Source("r", 41)(0)
    wrong = encode_row(
        type(longer)(**{**_fields(longer), "loss_mask": bytearray(longer.loss_mask)[:-1]})
    )
    with pytest.raises(InvariantBroken, match="columns of"):
        open_row(wrong, hashlib.sha256(wrong).digest())


def _fields(trajectory: Any) -> dict[str, Any]:
    return {name: getattr(trajectory, name) for name in trajectory.__dataclass_fields__}


def test_routes_of_the_bench_are_those_of_a_mixture() -> None:
    routes = sample_routes(5)
    check_routes(routes, 5)
    assert (routes.experts, routes.per_token, routes.tokens) == (EXPERTS, PER_TOKEN, 5)


class _Listed(Inbox):
    """Gives so many at a time, each its own number."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.left = list(ids)
        self.asked: list[int] = []

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        self.asked.append(at_most)
        found, self.left[:at_most] = self.left[:at_most], []
        return found

    def open(self, one: Any) -> tuple[str, int]:
        return one, 10

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("batch", "asked"), [(4, [4, 4, 2]), (0, [1] * 10)])
def test_batches_are_full_but_the_last_and_nobody_asks_for_more_than_will_come(
    batch: int, asked: list[int]
) -> None:
    source = Source("r", 4)
    inbox = _Listed([source(number).trajectory for number in range(10)])
    consumer = Consumer(inbox, batch)
    while consumer.records < 10:
        consumer.read(10 - consumer.records)
    assert inbox.asked == asked
    assert sorted(consumer.batched_ns) == sorted(consumer.polled_ns) == list(range(10))
    assert consumer.bytes == 100


def test_a_peer_that_cannot_be_here_is_named_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "python_of", lambda kind: "python" if kind == REDIS else "")
    monkeypatch.setattr("dora_pipe.bench.dataplane.servers.shutil.which", lambda name: None)
    here, absent = servers.wanted("kafka://localhost:9092")
    assert here == [COPY, DISK, RAW]
    assert "redis-server" in absent[REDIS]
    assert "make peers" in absent[QUEUE]
    assert absent[QUEUE] == absent[QUEUE_ONE]
    assert servers.wanted("")[1][RAW] == "no broker (--bus)"


def test_of_every_plane_it_is_said_what_it_keeps() -> None:
    assert {*PEERS, "kafka", "sqlite", "pipe"} == {*KEEPS}


@pytest.mark.parametrize("kind", [COPY, DISK])
def test_what_the_machine_can_do_is_measured_with_the_very_bytes_of_a_record(
    kind: str, tmp_path: Path
) -> None:
    if why := servers.missing(kind, ""):
        pytest.skip(why)
    run, source = f"r-{uuid4().hex}", Source("r", 40)
    outbox = open_outbox(f"{kind}:{tmp_path}", run, paced=False)
    inbox = open_inbox(f"{kind}:{tmp_path}", run, routes=False)
    assert inbox.take(timeout_s=0, at_most=5) == []
    held = [outbox.encode(source(at))[0] for at in range(SLOTS + 1)]
    writer = threading.Thread(target=outbox.put, args=[held])
    writer.start()  # There is no room in memory for the last.
    found: list[Any] = []
    while len(found) < len(held):
        found += inbox.take(timeout_s=10, at_most=3)
    writer.join()
    value = encoded(source(0), "t").value
    ids = [source(at).trajectory for at in range(len(held))]
    assert [inbox.open(one) for one in found] == [(who, len(value)) for who in ids]
    assert {one[1] for one in found} == {value}
    inbox.close()
    outbox.close()
    assert list(tmp_path.iterdir()) == [] and not (MEMORY / run).exists()


@pytest.mark.slow
def test_redis_has_a_row_beside_the_log_where_it_is_installed(tmp_path: Path) -> None:
    if why := servers.missing(REDIS, ""):
        pytest.skip(why)
    setup = Setup(kafka="", tokens=[64], seconds=0.1, repeats=1, folder=tmp_path, peers=[REDIS])
    measured = bench_dataplane(setup, lambda line: None)
    redis, sqlite, pipe = measured.planes
    assert (redis.plane, sqlite.plane, pipe.plane) == ("redis", "sqlite", "pipe")
    assert redis.trajectories_per_s > 0 and redis.keeps == "fsync every s"
    assert redis.cpu_s_per_gb is not None and redis.cpu_s_per_gb > 0
