"""A small log with one worker that samples what an analysis needs, then leaves.

The log starts with the `run started` of the analyzed run, so the worker prepares prompts, calls
environments, tools and agents, samples and checks data and weights as the workers of the run did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.port import Append, Bus, TopicPartition, TopicSpec, Writer
from dora_pipe.config.model import Config
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.local_roles import with_engine
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.engine_port import Policies
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.role import EngineFactory, OpenPool, run_worker
from dora_pipe.schemas.control import RunStarted, WorkerJoined, config_digest, decode_control
from dora_pipe.schemas.rounds import AnyDecision, Assign, Drain, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import encode

Joined = Callable[[WorkerSetup, Mapping[str, TaskFacts]], None]
"""Hears that the worker has joined; writes what it is to do."""

Work = Callable[[Joined], None]
"""Runs a worker on the log until it has left."""

Report = Callable[[str, float, float | None], None]
"""Receives the phase, the number of records so far and their total."""


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


def alone(config: Config, engine: str) -> Config:
    """Configure such a worker on this machine: no progress records, no elastic workers."""
    config = with_engine(config, engine)
    workers = msgspec.structs.replace(
        config.workers, elastic=0, checkpoint_tokens=config.workers.context_tokens
    )
    return msgspec.structs.replace(config, workers=workers)


def work_on(
    log: WorkerLog,
    name: str,
    parts: WorkerParts,
    *,
    phase: str,
    total: int,
    report: Report,
) -> Work:
    """What is the worker of this name on a log, and says how many records of `total` there are.

    Raises what `run_worker` does.
    """

    def work(joined: Joined) -> None:
        with closing(_HowFar(log, phase, total, report)) as how_far:
            run_worker(
                log.bus,
                log.topics,
                worker=name,
                store=parts.store,
                engine_factory=parts.engine,
                open_pool=parts.pool,
                stop=how_far,
                config=parts.config,
                joined=joined,
                source=parts.source,
            )

    return work


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What such a worker is made of."""

    store: Policies
    config: Config
    """Of this machine; see `alone`."""
    engine: EngineFactory
    pool: OpenPool | None = None
    """None: its own, which end with it."""
    source: str = ""
    """Of what it samples; empty: all tasks of the configuration are started."""


class _HowFar:
    """Says how many records there are; the worker asks it at every turn whether to stop, which it
    never wants."""

    def __init__(self, log: WorkerLog, phase: str, total: int, report: Report) -> None:
        self._phase, self._total, self._report = phase, total, report
        self._reader = log.bus.reader({TopicPartition(log.topics.trajectories, 0): 0})
        self._there = 0

    def __call__(self) -> bool:
        self._there += len(self._reader.poll(timeout_s=0.0))
        self._report(self._phase, self._there, self._total)
        return False

    def close(self) -> None:
        """Read no more."""
        self._reader.close()
