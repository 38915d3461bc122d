"""Several processes on one log: nothing acknowledged is lost, nothing is torn, fencing holds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.bus import Bus
from dora_pipe.core.pure.records import TopicPartition
from tests.support.bus_harness import KafkaHarness, SqliteHarness
from tests.support.bus_steps import catch_up, topic_on
from tests.support.kafka_broker import ROOT

END_LIMIT_S = 60.0
BATCH = 7
SMOKE_ROUNDS = 4
ROUNDS = 30


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "sqlite":
        harness: Any = SqliteHarness(tmp_path)
    else:
        harness = KafkaHarness(request.getfixturevalue("kafka_broker").bootstrap)
    yield harness
    harness.close()


class WriterProcess:
    def __init__(self, url: str, topic: str, who: str, count: int, *exclusive: str) -> None:
        arguments = [url, topic, "0", who, str(BATCH), str(count), *exclusive]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bus_writer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[str]:
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(END_LIMIT_S, self.process.kill)
        late.start()
        with self.process.stdin, self.process.stdout:
            text = self.process.stdout.read()
        self.process.wait(END_LIMIT_S)
        late.cancel()
        return text.split()


def read_appended(bus: Bus, topic: str) -> dict[str, list[tuple[int, int]]]:
    partition = TopicPartition(topic, 0)
    reader = bus.reader({partition: 0})
    appended: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in catch_up(bus, reader, partition):
        who, call, index = record.value.decode().split()
        assert record.key == who.encode()
        appended[who].append((int(call), int(index)))
    return appended


def sequence(records: int) -> list[tuple[int, int]]:
    return [divmod(i, BATCH) for i in range(records)]


def test_processes_that_append_at_once_lose_nothing_and_keep_their_order(harness: Any) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    writers = [WriterProcess(harness.url, topic, f"w{i}", 20, harness.topic("x")) for i in range(3)]
    for writer in writers:
        writer.go()
    for writer in writers:
        assert writer.end() == [str(call) for call in range(20)]
    assert read_appended(bus, topic) == {f"w{i}": sequence(20 * BATCH) for i in range(3)}


def test_a_sqlite_log_keeps_the_records_of_an_append_side_by_side(tmp_path: Path) -> None:
    with closing(SqliteHarness(tmp_path)) as harness:
        bus = harness.open()
        topic = topic_on(harness, bus)
        writers = [WriterProcess(harness.url, topic, f"w{i}", 20) for i in range(3)]
        for writer in writers:
            writer.go()
        for writer in writers:
            writer.end()
        partition = TopicPartition(topic, 0)
        result = catch_up(bus, bus.reader({partition: 0}), partition)
    assert len(result) == 3 * 20 * BATCH
    for start in range(0, len(result), BATCH):
        calls = {record.value.rsplit(b" ", 1)[0] for record in result[start : start + BATCH]}
        assert len(calls) == 1, "another writer's records lie inside an append"


def test_a_process_is_fenced_by_another(harness: Any) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("x")
    zombie = WriterProcess(harness.url, topic, "zombie", 1_000_000, name)
    zombie.go()
    while (line := zombie.line()) and int(line) < 3:
        pass
    writer = bus.writer(exclusive=name)
    rest = zombie.end()
    calls = int([line, *rest[:-1]][-1]) + 1
    # A broker may answer the commit that a fence overtakes with an unknown error.
    outcomes = {"fenced": {calls}, "unknown": {calls, calls + 1}}
    appended = read_appended(bus, topic)["zombie"]
    assert appended in [sequence(count * BATCH) for count in outcomes[rest[-1]]]
    writer.close()


def kill_rounds(harness: Any, rounds: int) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("x")
    acknowledged = {}
    for i in range(rounds):
        exclusive = [name] if i % 2 else []
        writer = WriterProcess(harness.url, topic, f"r{i}", 1_000_000, *exclusive)
        writer.go()
        last = ""
        while (line := writer.line()) and int(line) < 1 + i % 5:
            last = line
        time.sleep(0.0007 * (i % 9))  # append by append takes about as long
        writer.process.kill()
        acknowledged[f"r{i}"] = int(([last, line, *writer.end()])[-1])
    bus.writer(exclusive=name).close()  # ends what the last killed one left open
    appended = read_appended(bus, topic)
    for i in range(rounds):
        who = f"r{i}"
        calls = acknowledged[who] + 1
        assert calls * BATCH <= len(appended[who]) <= (calls + 1) * BATCH
        assert appended[who] == sequence(len(appended[who])), "in order, without holes"
        full = harness.url.startswith("sqlite") or i % 2
        assert not full or len(appended[who]) % BATCH == 0, "an append was torn"


def test_killed_writers_lose_nothing_that_was_acknowledged(harness: Any) -> None:
    kill_rounds(harness, SMOKE_ROUNDS)
    assert harness.open().topics()


@pytest.mark.slow
def test_many_killed_writers_lose_nothing_that_was_acknowledged(harness: Any) -> None:
    kill_rounds(harness, ROUNDS)
    assert harness.open().topics()
