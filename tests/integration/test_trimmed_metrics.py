"""Tests of a run with trimmed statuses: audit and views other than past states are unaffected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis import replay
from dora_pipe.bus.base import records_of
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.pure.status_schedule import WHOLE_EVERY
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.launch import run_dir as rundir
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.ledger.statuses import read_statuses
from dora_pipe.observe.alarms import Alarms
from dora_pipe.observe.waits import summarise
from dora_pipe.orchestrator.process.recovery import recover
from dora_pipe.schemas.metrics import WorkerStatus, merged
from tests.support.bus_harness import log_in_memory
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in

PROOFS: list[tuple[object, ...]] = [
    ("log", "read", "RUN", "control", "--json"),
    ("show", "RUN", "3", "--json"),
    ("audit", "RUN", "--json"),
]
"""What says the same without any status; audit last, as it looks at tables that others keep."""

PICTURES: list[tuple[object, ...]] = [
    ("show", "RUN"),
    ("why", "RUN"),
    ("why", "RUN", "--step", "0"),
    ("why", "RUN", "--summary"),
    ("top", "RUN", "--once"),
    ("log", "topics", "RUN"),
    ("log", "read", "RUN", "metrics"),
    ("export", "traces", "RUN", "OUT/traces.jsonl"),
    ("export", "tensorboard", "RUN", "OUT/board"),
    ("prune", "RUN"),
]

Shortened = Callable[[MemoryLog, TopicPartition, int], None]


def all_gone(log: MemoryLog, partition: TopicPartition, end: int) -> None:
    log.delete_before(partition, end)


def half_gone(log: MemoryLog, partition: TopicPartition, end: int) -> None:
    log.delete_before(partition, end // 2)


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> RecordedRun:
    return recorded_in(tmp_path_factory.getbasetemp()).copy(tmp_path / "run")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setattr(replay, "make_learner", lambda **_: SimulatedLearner())
    return caller(monkeypatch, capsys)


@pytest.fixture(params=[all_gone, half_gone])
def trim(
    request: pytest.FixtureRequest, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], MemoryBus]:
    def shorten() -> MemoryBus:
        with closing(recorded.open()) as bus:
            log = log_in_memory(bus)
            partition = TopicPartition(recorded.topics.metrics, 0)
            request.param(log, partition, bus.end(partition))
        monkeypatch.setattr(rundir.RunDir, "open_bus", lambda directory, config: MemoryBus(log))
        return MemoryBus(log)

    return shorten


def filled(command: tuple[object, ...], run: Path, out: Path) -> list[str]:
    return [
        str(run) if entry == "RUN" else str(entry).replace("OUT", str(out)) for entry in command
    ]


def test_a_run_is_proved_without_its_statuses_as_with_them(
    call: Call, recorded: RecordedRun, trim: Callable[[], MemoryBus], tmp_path: Path
) -> None:
    def answers() -> list[tuple[int, str]]:
        return [call(*filled(entry, recorded.directory, tmp_path))[:2] for entry in PROOFS]

    full_answers = answers()
    assert [code for code, _ in full_answers] == [0] * len(PROOFS)
    with closing(recorded.open()) as bus:
        state = recover(bus, recorded.topics, None).state.digest()
    shortened = trim()
    assert answers() == full_answers
    assert recover(shortened, recorded.topics, None).state.digest() == state
    assert call("replay", recorded.directory, "--from", 0, "--to", STEPS)[0] == 0


@pytest.mark.parametrize("trim", [all_gone], indirect=True)
@pytest.mark.parametrize("command", PICTURES, ids=lambda command: "-".join(map(str, command)))
def test_every_picture_is_drawn_of_what_is_left(
    call: Call,
    recorded: RecordedRun,
    trim: Callable[[], MemoryBus],
    tmp_path: Path,
    command: tuple[object, ...],
) -> None:
    trim()
    code, _, err = call(*filled(command, recorded.directory, tmp_path))
    assert (code, "error:" in err) == (0, False), err


def test_topics_say_where_the_statuses_begin(
    call: Call, recorded: RecordedRun, trim: Callable[[], MemoryBus]
) -> None:
    bus = trim()
    partition = TopicPartition(recorded.topics.metrics, 0)
    code, out, _ = call("log", "topics", recorded.directory, "--json")
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    row = next(row for row in rows if row["topic"] == partition.topic)
    remaining = len(list(records_of(bus, {partition: bus.end(partition)})))
    assert (code, row["begin"], row["end"], row["records"]) == (
        0,
        bus.begin(partition),
        bus.end(partition),
        remaining,
    )
    _, out, _ = call("log", "topics", recorded.directory)
    assert re.search(
        rf"{re.escape(partition.topic)}\s+0\s+{bus.begin(partition)}\s+{bus.end(partition)}", out
    )


def test_those_who_follow_statuses_begin_at_what_is_left(
    recorded: RecordedRun, trim: Callable[[], MemoryBus]
) -> None:
    bus = trim()
    partition = TopicPartition(recorded.topics.metrics, 0)
    records = list(records_of(bus, {partition: bus.end(partition)}))
    assert len(read_statuses(bus, recorded.topics)) == len(records)
    assert bool(read_statuses(bus, recorded.topics, tail=10)) == bool(records)
    assert read_statuses(bus, recorded.topics, tail=10, until_ns=0) == []
    alarms = Alarms(bus, recorded.topics, lease_s=10.0, clock=SystemClock())
    assert alarms.lines() == []


def test_a_reader_in_the_middle_has_every_workers_whole_progress_soon(
    recorded: RecordedRun,
) -> None:
    topics = recorded.topics
    with closing(recorded.open()) as bus:
        statuses = [
            status for status in read_statuses(bus, topics) if isinstance(status, WorkerStatus)
        ]
    wholes = 0
    for start in range(0, len(statuses), 37):
        late: dict[tuple[str, int], WorkerStatus] = {}
        full: dict[tuple[str, int], WorkerStatus] = {}
        observed: dict[tuple[str, int], int] = {}
        for i, status in enumerate(statuses):
            who = status.worker, status.incarnation
            full[who] = merged(full.get(who), status)
            if i < start:
                continue
            late[who] = merged(late.get(who), status)
            observed[who] = observed.get(who, 0) + 1
            assert late[who].progress.items() <= full[who].progress.items()
            if observed[who] >= WHOLE_EVERY:
                assert late[who].progress == full[who].progress
                wholes += bool(late[who].progress)
    assert wholes and any(status.since for status in statuses)


def test_a_summary_says_from_when_on_there_are_statuses(
    call: Call, recorded: RecordedRun, trim: Callable[[], MemoryBus]
) -> None:
    code, before, _ = call("why", recorded.directory, "--summary")
    assert (code, "are deleted" in before) == (0, False)
    bus = trim()
    with closing(read_catalogue(bus, recorded.topics)) as catalogue:
        summary = summarise(bus, recorded.topics, catalogue)
    assert 0 < summary.untold_s <= summary.run_s
    trainer = summary.roles[0]
    assert trainer.waited_s <= trainer.there_s, "no more than the time that statuses tell of"
    _, out, _ = call("why", recorded.directory, "--summary")
    assert "waits of the first" in out and "are deleted" in out
