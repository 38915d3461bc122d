"""Judge of a kill round, from log, store and acknowledged records.

In addition to the audit it counts double training and lost acknowledged records from raw records.
It retrains every step from version 0 in one process and compares the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dora_pipe.analysis.replay import SourceRun, replay_steps
from dora_pipe.audit.auditor import audit
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.core.errors import DoraError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import (
    RequestFailed,
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    decode_control,
)
from dora_pipe.schemas.rounds import Fence, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.store import as_store
from tests.support.kill_rounds.inject import Ack

VIOLATIONS_MAX = 5
"""Maximum violations in a verdict."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    finished: bool
    steps: int
    steps_wanted: int
    violations: tuple[str, ...]
    """First violations of the audit, and errors of the replay."""
    acknowledged: int
    """Acknowledged records."""
    trajectories: int
    """Acknowledged trajectories."""
    lost: int
    """Acknowledged records missing from the log, or with other bytes."""
    trained_twice: int
    """Steps, groups and trajectories committed more than once."""
    equal: int
    """Consecutive steps from 0 with bitwise equal weights after retraining."""
    moved: bool
    """Whether every step changed the weights; otherwise equality proves nothing."""
    others: tuple[str, ...] = ()
    """Effects of a dead role on others."""

    @property
    def weights_equal(self) -> bool:
        return self.equal == self.steps == self.steps_wanted and self.moved

    @property
    def clean(self) -> bool:
        counted = self.lost == self.trained_twice == 0 < self.acknowledged
        full = self.finished and not self.violations and not self.others
        return full and counted and self.weights_equal


class Evidence(msgspec.Struct, kw_only=True):
    started: RunStarted | None = None
    commits: list[StepCommitted] = []


def judge(
    bus: Bus,
    topics: Topics,
    store: Path,
    acks: Iterable[Ack],
    trainer: Learner,
    *,
    clock: Clock,
    dead: str = "",
) -> Verdict:
    """Return the verdict. `trainer` is a new one; `dead` is a role that stayed dead. Raises
    BusError for an unreadable log."""
    report = audit(bus, topics, store)
    evidence = read_evidence(bus, topics)
    assert evidence.started is not None
    lines = [violation.line for violation in report.violations[:VIOLATIONS_MAX]]
    booked = list(acks)
    equal, why = _count_equal(bus, topics, store, trainer, report.steps, clock)
    return Verdict(
        finished=report.finished,
        steps=report.steps,
        steps_wanted=logged_config(evidence.started.config).run.steps,
        violations=(*lines, *why),
        acknowledged=len(booked),
        trajectories=sum(ack.topic == topics.trajectories for ack in booked),
        lost=count_lost(bus, topics, booked),
        trained_twice=count_twice(evidence.commits),
        equal=equal,
        moved=_moved(evidence),
        others=tuple(others_lost(bus, topics, dead)) if dead else (),
    )


def read_evidence(bus: Bus, topics: Topics) -> Evidence:
    evidence = Evidence()
    for record in records_of(bus, ends_of(bus, topics.control)):
        control = decode_control(record.value)
        if isinstance(control, RunStarted):
            evidence.started = evidence.started or control
        elif isinstance(control, StepCommitted):
            evidence.commits.append(control)
    return evidence


def count_twice(commits: Iterable[StepCommitted]) -> int:
    counter: Counter[str] = Counter()
    for commit in commits:
        counter[f"step {commit.step}"] += 1
        for group in commit.groups:
            counter[group.group] += 1
            counter.update(taken.trajectory for taken in group.trajectories)
    return sum(count > 1 for count in counter.values())


def count_lost(bus: Bus, topics: Topics, acks: Iterable[Ack]) -> int:
    held: dict[tuple[TopicPartition, int], str] = {}
    for topic in topics.all():
        for record in records_of(bus, ends_of(bus, topic)):
            held[record.at, record.offset] = sha256_hex(record.value)
    return sum(
        held.get((TopicPartition(ack.topic, ack.partition), ack.offset)) != ack.sha256
        for ack in acks
    )


def others_lost(bus: Bus, topics: Topics, dead: str) -> list[str]:
    results: list[str] = []
    begun: Counter[str] = Counter()
    for record in records_of(bus, ends_of(bus, topics.control)):
        match decode_control(record.value):
            case WorkerJoined(worker=name) | RoleStarted(role=name):
                begun[name] += 1
            case RequestFailed(worker=name, trajectory=trajectory) if name != dead:
                results.append(f"{trajectory} failed on {name}")
            case _:
                pass
    results += [
        f"{name} began again" for name, times in begun.items() if times > 1 and name != dead
    ]
    for record in records_of(bus, ends_of(bus, topics.decisions)):
        for decision in decode_round(record.value).decisions:
            if isinstance(decision, Fence) and decision.worker != dead:
                results.append(f"{decision.worker} was fenced")
    return results


def _count_equal(
    bus: Bus, topics: Topics, store: Path, trainer: Learner, steps: int, clock: Clock
) -> tuple[int, tuple[str, ...]]:
    equal = 0
    try:
        source = SourceRun(
            bus=bus, topics=topics, store=as_store(store), make=lambda started: trainer, clock=clock
        )
        for line in replay_steps(source, range(steps)):
            equal += line.replayed.equal
    except DoraError as error:
        return equal, (f"replay: {error.message}",)
    return equal, ()


def _moved(evidence: Evidence) -> bool:
    assert evidence.started is not None
    digests = [
        evidence.started.policy.digest,
        *(commit.digest_after for commit in evidence.commits),
    ]
    return len(set(digests)) == len(digests)
