"""Tests of the machine: inputs, rounds, leases, gaps, limits, unreadable records."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.core.pure.machine import CaughtUp, Now, Outputs
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.orchestrator import planner
from dora_pipe.orchestrator.machine import OrchestratorEffect, OrchestratorMachine
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.metrics import Cost, OrchestratorStatus, WorkerStatus, decode_metrics
from dora_pipe.schemas.rounds import (
    Assign,
    Fence,
    LeaseExpired,
    PlanPeriod,
    Round,
    decode_round,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.singly import as_record
from tests.support.singly import placed as placed_by

TOPICS = Topics("tiny")
COST = Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)
WALL_NS = 10**18


class Bench:
    def __init__(self, *, state: State | None = None, started: bool = True, **changes: Any) -> None:
        self.config = records.make_config(**changes)
        self.machine = OrchestratorMachine(
            state=State() if state is None else state,
            topics=TOPICS,
            incarnation=0,
            metrics={TopicPartition(TOPICS.metrics, 0): 5},
            timing=self.config.timing,
            cost=lambda: COST,
        )
        self.now_s = 100.0
        self.offset = self.machine.state.control_next
        self.control: list[tuple[int, bytes]] = []
        self.rounds: list[Round] = []
        self.published: list[Append] = []
        if started:
            self.react(
                self.fact(records.run_started(self.config)),
                self.fact(records.role_started("trainer", 0)),
                CaughtUp(),
            )

    def fact(self, record: Any) -> Record:
        value = record if isinstance(record, bytes) else encode(as_record(record))
        self.offset += 3
        self.control.append((self.offset, value))
        return Record(topic=TOPICS.control, partition=0, offset=self.offset, key=b"k", value=value)

    def status(self, worker: str, incarnation: int, **progress: Resume) -> Record:
        status = WorkerStatus(
            at_ns=0,
            cost=COST,
            worker=worker,
            incarnation=incarnation,
            version=0,
            active=0,
            waiting=0,
            kv_used_tokens=0,
            tokens_total=0,
            progress={key.replace("_", "-"): entry for key, entry in progress.items()},
        )
        return Record(topic=TOPICS.metrics, partition=0, offset=9, key=b"", value=encode(status))

    def react(self, *inputs: Any) -> Outputs[OrchestratorEffect]:
        now_ns = int(self.now_s * 1e9)
        outputs = self.machine.react(inputs, Now(mono_ns=now_ns, wall_ns=WALL_NS + now_ns))
        for entry in outputs.publish:
            self.published.append(entry.record)
            if entry.record.topic == TOPICS.decisions:
                self.rounds.append(decode_round(entry.record.value))
        return outputs

    def turn(self, *inputs: Any) -> list[Any]:
        count = len(self.rounds)
        self.react(*inputs)
        new = self.rounds[count:]
        return [entry for round_ in new for entry in (*round_.observations, *round_.decisions)]

    def wait(self, seconds: float, *inputs: Any, every_s: float = 0.5) -> list[Any]:
        results: list[Any] = []
        for _ in range(int(seconds / every_s)):
            self.now_s += every_s
            results += self.turn(*inputs)
        return results

    def serving(self, name: str = "w0", slots: int = 4) -> int:
        self.turn(self.fact(records.joined(name, slots=slots)))
        incarnation = self.offset
        self.turn(self.fact(records.ready(name, incarnation, 0)))
        return incarnation

    def topic(self, name: str) -> list[Append]:
        return [version for version in self.published if version.topic == name]


def test_a_round_is_written_when_control_advances_and_none_when_nothing_happens() -> None:
    bench = Bench()
    assert len(bench.rounds) == 1
    assert bench.rounds[0].control_next == bench.offset + 1
    bench.react()
    bench.react(bench.status("w0", 3))
    assert len(bench.rounds) == 1, "metrics alone make no round"
    bench.react(bench.fact(records.joined("w0")))
    assert [type(decision) for decision in bench.rounds[-1].decisions] == [Assign]


def test_nothing_is_decided_before_the_log_is_read_but_rounds_are_written() -> None:
    bench = Bench(started=False)
    bench.react(bench.fact(records.run_started(bench.config)), bench.fact(records.joined("w0")))
    assert bench.rounds[0].decisions == ()
    assert bench.rounds[0].control_next == bench.offset + 1
    bench.react(CaughtUp())
    assert [type(decision) for decision in bench.rounds[1].decisions] == [Assign]


def test_plan_that_was_cut_short_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "DECISIONS_MAX", 6)
    bench = Bench(rollout__prompts_per_step=8)
    bench.serving(slots=16)
    placed = len(placed_by(bench.rounds[-1].decisions))
    assert placed == 4
    assert bench.machine.wake_at() == 0
    while bench.machine.wake_at() == 0:
        bench.react()
    assert len(bench.machine.state.workers["w0"].requests) == 16


@pytest.mark.parametrize("name", ["wörker", "x" * 600, "trainer"])
def test_worker_with_a_name_that_is_none_is_fenced_as_it_joins_and_hears_why(name: str) -> None:
    bench = Bench()
    result = bench.turn(bench.fact(records.joined(name)))
    incarnation = bench.offset
    fence = result[0]
    assert isinstance(fence, Fence) and (fence.worker, fence.incarnation) == (name, incarnation)
    assert fence.reason.startswith("not a worker's name: ") and len(fence.reason) < 200
    assert name not in bench.machine.state.workers
    assert not any(isinstance(decision, Assign) for decision in result)


def test_an_outage_of_the_orchestrator_itself_fences_nobody() -> None:
    bench = Bench()
    bench.serving()
    bench.wait(3)
    bench.now_s += 500
    assert bench.turn() == [PlanPeriod()]
    assert bench.wait(1.5) == []
    assert [type(event) for event in bench.wait(1)][:2] == [LeaseExpired, Fence]


def test_status_goes_out_without_news_and_says_what_the_run_waits_for() -> None:
    bench = Bench()
    bench.published.clear()
    bench.wait(5)
    assert len(bench.topic(TOPICS.metrics)) == 3, "at the first heartbeat behind 1.25 s"
    status = decode_metrics(bench.topic(TOPICS.metrics)[-1].value)
    assert isinstance(status, OrchestratorStatus)
    assert (status.waits_for, status.version, status.open_groups) == ("a worker", 0, 0)


def test_unreadable_control_goes_to_the_dead_letters_and_the_rest_goes_on() -> None:
    bench = Bench()
    bad = bench.fact(b'{"kind":"worker-ready","worker":7}')
    bench.react(bad, bench.fact(records.joined("w0")))
    (append,) = bench.topic(TOPICS.dead_letters)
    letter = decode_dead_letter(append.value, append.headers)
    assert (letter.topic, letter.offset, letter.path) == (TOPICS.control, bad.offset, "$.worker")
    assert letter.value == bad.value
    assert "w0" in bench.machine.state.workers
