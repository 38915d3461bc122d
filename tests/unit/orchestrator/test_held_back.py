"""Tests of the machine while the log holds records back."""

from __future__ import annotations

from dora_pipe.core.pure.machine import HeldBack
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.metrics import Blocker, OrchestratorStatus, Wait, decode_metrics
from dora_pipe.schemas.rounds import LeaseExpired
from tests.unit.orchestrator.test_machine import TOPICS, Bench

METRICS = TopicPartition(TOPICS.metrics, 0)
LEASE_S = 5


def waits_of(bench: Bench) -> list[Wait]:
    status = decode_metrics(bench.topic(TOPICS.metrics)[-1].value)
    assert isinstance(status, OrchestratorStatus)
    return [wait for wait in status.waits if wait.name == "held-back"]


def test_nobody_is_fenced_while_a_topic_is_held_back_and_everybody_is_judged_afterwards() -> None:
    bench = Bench(timing__lease_s=LEASE_S)
    incarnation = bench.serving()
    bench.wait(LEASE_S - 2)
    result = bench.turn(HeldBack((METRICS,)))
    result += bench.wait(10 * LEASE_S)
    result += bench.turn(HeldBack(()))
    result += bench.wait(1.5)
    assert not any(isinstance(expired, LeaseExpired) for expired in result)
    assert LeaseExpired(worker="w0", incarnation=incarnation) in bench.wait(1)


def test_a_held_back_topic_is_a_wait_with_a_beginning_a_limit_and_a_name() -> None:
    bench = Bench()
    bench.serving()
    bench.turn(HeldBack((METRICS,)))
    bench.wait(3)
    (first,) = waits_of(bench)
    assert first.description.startswith("records of tiny.metrics, not readable yet: a dead role")
    assert first.blockers == (Blocker("topic", "tiny.metrics"),)
    assert (first.limit_ms, first.overdue, first.blocking) == (30_000, False, False)
    bench.wait(30)
    (later,) = waits_of(bench)
    assert later.since_ns == first.since_ns
    assert later.overdue
    bench.turn(HeldBack(()))
    bench.wait(1)
    assert waits_of(bench) == []


def test_statuses_may_be_lost_and_rounds_may_not() -> None:
    bench = Bench()
    bench.now_s += 5  # beyond the longest delay of an unchanged status
    outputs = bench.react(bench.fact(b"{}"))
    lossy = {entry.record.topic: entry.lossy for entry in outputs.publish}
    assert lossy[TOPICS.metrics]
    assert not any(is_lossy for topic, is_lossy in lossy.items() if topic != TOPICS.metrics)
    assert TOPICS.decisions in lossy
