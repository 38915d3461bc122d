"""The moments inside an append are met: what a struck process leaves in the log is what it must."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.learners.simulated import initial_weights
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.store import PolicyStore
from tests.support.kill_rounds.inject import FaultBus, FaultStore, Files, Injector
from tests.support.kill_rounds.order import AppendMoment, FileMoment, Order, Point
from tests.support.stores import Walk

TOPICS = Topics("r")
NTH = 3
APPENDS = 6
BATCH = 2
"""Records per append."""


def _in_child(do: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            do()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _order(files: Files, moment: AppendMoment | FileMoment, what: str, *, nth: int = NTH) -> None:
    point = Point(moment=moment, what=what, nth=nth)
    order = Order(number=0, seed=1, role="w0", at=point)
    files.order.write_bytes(msgspec.json.encode(order))


def _log(directory: Path) -> Path:
    path = directory / "log.sqlite"
    bus = SqliteBus(path)
    bus.create([TopicSpec(name=name) for name in TOPICS.all()])
    bus.close()
    return path


def _write(path: Path, files: Files, *, first: int = 0) -> None:
    bus = FaultBus(SqliteBus(path), Injector(files, "w0", TOPICS))
    writer = bus.writer()
    for number in range(first, first + APPENDS):
        value = f"{number}".encode()
        writer.append([Append(topic=TOPICS.metrics, value=value)])
        writer.append([Append(topic=TOPICS.trajectories, value=value)] * BATCH)
    bus.close()


def _values(path: Path) -> list[bytes]:
    bus = SqliteBus(path)
    reader = bus.reader({TopicPartition(TOPICS.trajectories, 0): 0})
    values = [record.value for record in reader.poll(timeout_s=0.0)]
    bus.close()
    return values


@pytest.mark.parametrize(
    ("moment", "appends_left"), [("before", NTH - 1), ("middle", NTH - 1), ("after", NTH)]
)
def test_a_struck_append_is_whole_or_not_there(
    tmp_path: Path, moment: AppendMoment, appends_left: int
) -> None:
    path, files = _log(tmp_path), Files(tmp_path)
    _order(files, moment, "trajectory")
    assert _in_child(lambda: _write(path, files)) == -signal.SIGKILL
    full = [f"{number}".encode() for number in range(appends_left) for _ in range(BATCH)]
    assert _values(path) == full
    acks = [ack for ack in files.acks("w0") if ack.topic == TOPICS.trajectories]
    assert [ack.sha256 for ack in acks] == [sha256_hex(value) for value in full]
    hit = files.read_hit()
    assert hit is not None
    assert (hit.role, hit.phase) == ("w0", files_phase(moment))
    assert hit.at_ns <= time.monotonic_ns()


def files_phase(moment: AppendMoment) -> str:
    return Point(moment=moment, what="trajectory", nth=NTH).phase


def test_an_append_struck_in_its_commit_is_whole_or_not_there(tmp_path: Path) -> None:
    path, files = _log(tmp_path), Files(tmp_path)
    _order(files, "commit", "trajectory")
    assert _in_child(lambda: _write(path, files)) == -signal.SIGKILL
    values = _values(path)
    assert len(values) >= BATCH * (NTH - 1)
    assert all(values.count(value) == BATCH for value in values)
    assert [value for value in dict.fromkeys(values)] == [
        f"{number}".encode() for number in range(len(values) // BATCH)
    ]
    acks = [ack for ack in files.acks("w0") if ack.topic == TOPICS.trajectories]
    assert len(acks) <= len(values)


@pytest.mark.parametrize("moment", ["written", "named"])
def test_policy_file_is_met_before_and_after_it_has_its_name(
    tmp_path: Path, moment: FileMoment
) -> None:
    files = Files(tmp_path)
    _order(files, moment, "weights", nth=1)

    def publish() -> None:
        injector = Injector(files, "w0", TOPICS)
        FaultStore(tmp_path / "policies", injector).publish_weights(initial_weights)

    assert _in_child(publish) == -signal.SIGKILL
    names = [path.name for path in (tmp_path / "policies" / "weights").iterdir()]
    assert len(names) == 1
    assert names[0].startswith(".tmp-") == (moment == "written")
    store = PolicyStore(tmp_path / "policies")
    manifest = store.publish_weights(initial_weights)
    assert store.verify(manifest.digest) == manifest


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("moment", "what"), [("named", "delta"), ("named", "weights")])
def test_a_version_whose_delta_has_its_name_and_whose_commit_never_came_is_published_again(
    tmp_path: Path, moment: FileMoment, what: str, full: bool
) -> None:
    files, store = Files(tmp_path), PolicyStore(tmp_path / "policies")
    first = store.publish_weights(Walk(0)).digest
    _order(files, moment, what, nth=1)

    def publish() -> None:
        injector = Injector(files, "w0", TOPICS)
        struck = FaultStore(tmp_path / "policies", injector)
        struck.publish_version(Walk(1), before=first, whole=full)

    assert _in_child(publish) == -signal.SIGKILL
    assert len(list((tmp_path / "policies" / "deltas").iterdir())) == 1
    again = store.publish_version(Walk(1), before=first, whole=full)
    assert again.whole == full and again.delta is not None
    assert store.verify(again.manifest.digest) == again.manifest
    other = store.publish_version(Walk(2), before=first, whole=False)  # another attempt
    assert store.verify(other.manifest.digest) == other.manifest
