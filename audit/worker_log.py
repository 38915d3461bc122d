"""A log of its own with one worker: what it is to sample stands in a single round, then it leaves.

The log is a run's like any other: `run started` of the run that is asked about, a worker that
joins, a round, its records. So whatever a worker does, it does here as it did there
(`producers.worker`): prompts, environments, agents, chats, sampling, checks of data and weights.
What is there is known from the log, and not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.port import Append, Bus, TopicPartition, TopicSpec, Writer
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.control import RunStarted, WorkerJoined, config_digest, decode_control
from dora_pipe.schemas.rounds import AnyDecision, Assign, Drain, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import encode

Joined = Callable[[WorkerSetup, Mapping[str, TaskFacts]], None]
"""Hears that the worker has joined; writes what it is to do."""

Work = Callable[[Joined], None]
"""Is a worker on the log until it has left."""


def started_of(started: RunStarted, name: str) -> RunStarted:
    """`run started` of such a log: the run's, under one version that does not change. Nobody asks
    through which experts of a mixture tokens go."""
    plain: dict[str, Any] = dict(started.config)
    plain["staleness"] = {**plain.get("staleness", {}), "interruptible": False}
    plain["sampling"] = {**plain.get("sampling", {}), "routes": False}
    return msgspec.structs.replace(
        started, run=name, config=plain, config_digest=config_digest(plain)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLog:
    """Example: ``WorkerLog(bus=bus, topics=Topics("g0000000042-003-v7"))``"""

    bus: Bus
    topics: Topics
    reason: str
    """Of all that is decided, in words."""

    def begin(self, started: RunStarted, *, hint: str) -> None:
        """Write the first record, or find it there. Raises UsageError where another one is."""
        topics = self.topics
        self.bus.create([TopicSpec(name=name) for name in topics.all()])
        there = next(self.control(), None)
        if there is None:
            append = Append(topic=topics.control, value=encode(started))
            with closing(self.bus.writer()) as writer:
                writer.append([append])
        elif there[1] != started:
            raise UsageError(
                f"{topics.run} was begun for another run of that name, or otherwise", hint=hint
            )

    def control(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Its facts from an offset on, each with its own."""
        control = TopicPartition(self.topics.control, 0)
        ends = {control: self.bus.end(control)}
        for record in records_of(self.bus, ends, start=start) if ends[control] else ():
            yield record.offset, decode_control(record.value)

    @property
    def end(self) -> int:
        """Behind the last fact."""
        return self.bus.end(TopicPartition(self.topics.control, 0))

    def joins(self) -> list[WorkerJoined]:
        """The workers that have joined, the last one last."""
        return [one for _, one in self.control() if isinstance(one, WorkerJoined)]

    def trajectories(self) -> Iterator[Trajectory]:
        """Every record, in order."""
        for record in records_of(self.bus, ends_of(self.bus, self.topics.trajectories)):
            yield decode_trajectory(record.value)

    def decide(
        self,
        writer: Writer,
        setup: WorkerSetup,
        decisions: Sequence[AnyDecision],
        *,
        version: int,
        digest: str,
        now_ns: int,
    ) -> None:
        """Have the worker that has joined do this under a version, after which it leaves."""
        worker, epoch = setup.worker, setup.epoch
        assign = Assign(
            reason=self.reason, worker=worker, epoch=epoch, version=version, digest=digest
        )
        drain = Drain(reason=self.reason, worker=worker, epoch=epoch)
        round_ = Round(
            ordinal=epoch,
            role_epoch=epoch,
            now_ns=now_ns,
            control_next=0,
            decisions=(assign, *decisions, drain),
        )
        writer.append([Append(topic=self.topics.decisions, value=encode(round_))])
