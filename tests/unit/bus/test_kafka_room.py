"""Tests of full broker disks as clients see them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.kafka.cluster import FULL_BYTES, LOW_BYTES, LogDir, Partition, too_few_of
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.errors import BusError, ResourceError
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S
from dora_pipe.launch import disk_watch as broker_watch
from dora_pipe.launch.disk_watch import FULL_BYTES as LOCAL_FULL_BYTES
from dora_pipe.launch.disk_watch import BrokerWatch, DiskWatch, broker_trouble
from dora_pipe.schemas.topics import Topics
from tests.support.cluster import make_config
from tests.support.worker import VirtualClock

ALL = frozenset({1, 2, 3})
WAIT_S = 30.0
Said = tuple[str, str]


def part(*, leader: int = 1, in_sync: frozenset[int] = ALL) -> Partition:
    return Partition(leader=leader, replicas=ALL, in_sync=in_sync, needed=2)


def directory(*, failed: bool = False, free: int | None = None) -> LogDir:
    return LogDir(broker=2, path="/data", failed=failed, free_bytes=free)


def test_log_directory_is_full_before_its_broker_ends() -> None:
    full = directory(free=FULL_BYTES - 1)
    assert full.stops == "the disk under log directory /data of broker 2 is full: 1,048,575 B free"
    assert full.low == ""
    low = directory(free=FULL_BYTES)
    assert low.stops == ""
    assert low.low == "the disk under log directory /data of broker 2 has only 1,048,576 B free"
    sound = directory(free=LOW_BYTES)
    assert (sound.stops, sound.low) == ("", "")
    unknown = directory()
    assert (unknown.stops, unknown.low) == ("", ""), "an older broker does not say"
    failed = directory(failed=True).stops
    assert failed == "log directory /data of broker 2 has failed: its disk is full, or broken"


def test_partitions_that_take_no_appends_are_told_with_the_brokers_that_are_away() -> None:
    assert too_few_of([part(), part(in_sync=frozenset({1, 2}))]) == ""
    result = too_few_of(
        [part(in_sync=frozenset({1})), part(leader=-1, in_sync=frozenset({3})), part()]
    )
    assert "1 partitions of the run have no leader" in result
    assert "1 partitions of the run have fewer replicas in sync than an append needs (2)" in result
    assert result.endswith("brokers 1, 2, 3 stopped or cannot write: check their disks")


def test_broker_that_is_full_elsewhere_is_told_waited_for_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dora_pipe.launch.disk_watch.free_bytes", lambda path: 10 * LOCAL_FULL_BYTES
    )
    replies: list[str] = []
    clock, text = VirtualClock(), [directory(free=5).stops]
    watch = DiskWatch((tmp_path,), replies.append, clock, brokers=lambda: (text[-1], ""))
    watch.turn()
    assert watch.full and replies[0].endswith("free space within 120 s")
    assert "/data of broker 2 is full: 5 B free; roles wait" in replies[0]
    text.append("")
    clock.sleep(2.0)
    watch.turn()
    assert not watch.full and "disk space is available again" in replies[1]
    text.append(directory(failed=True).stops)
    with pytest.raises(ResourceError, match=r"has failed.* 120 s") as ended:
        for _ in range(int(DELIVERY_TIMEOUT_S) + 5):
            clock.sleep(1.0)
            watch.turn()
    assert "free space" in (ended.value.hint or "")


def test_disk_that_will_soon_be_full_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    replies: list[str] = []
    clock, low = VirtualClock(), [directory(free=LOW_BYTES - 1).low]
    watch = DiskWatch((tmp_path,), replies.append, clock, brokers=lambda: ("", low[-1]))
    for _ in range(int(DELIVERY_TIMEOUT_S) + 5):
        clock.sleep(1.0)
        watch.turn()
    assert not watch.full
    assert len(replies) == 1 and replies[0].endswith("free space, or the run will wait")


def test_last_answer_of_a_cluster_explains_why_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Callable[[], Said]] = [lambda: ("", ""), lambda: ("", "5 B free"), _away]
    asked = threading.Event()

    def trouble(*_: Any) -> Said:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if len(answers) == 1:
            asked.set()
        return answer()

    monkeypatch.setattr(broker_watch, "broker_trouble", trouble)
    monkeypatch.setattr(broker_watch, "LOOK_S", 0.01)
    config = make_config(bus__url="kafka://127.0.0.1:1")
    with BrokerWatch(config, lambda config: MemoryBus(MemoryLog())) as watch:
        assert asked.wait(WAIT_S)
        limit = threading.Event()
        while not watch.trouble()[0].startswith("the log is not reachable"):
            assert not limit.wait(0.01)
    assert watch.trouble() == ("the log is not reachable; when last reached: 5 B free", "")


def test_other_logs_have_no_brokers_to_ask() -> None:
    config = make_config()
    assert broker_trouble(config, MemoryBus(MemoryLog()), Topics("r")) == ("", "")
    with BrokerWatch(config, _never) as watch:
        assert watch.trouble() == ("", "")


def _away() -> Said:
    raise BusError("nobody answers")


def _never(config: object) -> MemoryBus:
    raise AssertionError("a log in a file has no brokers")
