"""Temporary log with one worker that samples for an analysis, set up as in the analyzed run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus import open_bus
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus, TopicSpec, Writer
from dora_pipe.config.model import Config
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.launch.local_roles import with_engine
from dora_pipe.launch.run_dir import LOG
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.engine_port import Policies
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.role import EngineFactory, OpenPool, run_worker
from dora_pipe.schemas.control import (
    RequestFailed,
    Resume,
    RunStarted,
    config_digest,
    decode_control,
)
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import Assign, Drain, GroupSpec, Round, Schedule, ScheduledSample
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Progress, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_any_progress
from dora_pipe.schemas.wire import encode

Report = Callable[[str, float, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    spec: GroupSpec
    sample: int
    prefix: Progress | None = None

    @property
    def name(self) -> str:
        return trajectory_id(self.spec.group, self.sample)


Sampled = dict[str, Trajectory | RequestFailed]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    store: Policies
    config: Config
    """See `alone`."""
    engine: EngineFactory
    pool: OpenPool | None = None
    """None: a new pool."""
    source: str = ""
    """Only task to start; empty: all."""
    left: Callable[[], object] = lambda: None
    """Called after a worker has left."""


def alone(config: Config, engine: str) -> Config:
    """Return the worker's configuration: no progress records, not colocated."""
    config = with_engine(config, engine)
    workers = msgspec.structs.replace(
        config.workers, colocated=0, checkpoint_tokens=config.workers.max_model_len
    )
    return msgspec.structs.replace(config, workers=workers)


def started_of(started: RunStarted, name: str) -> RunStarted:
    """Return the run's first record with one fixed version and without routed experts."""
    plain: dict[str, Any] = dict(started.config)
    plain["staleness"] = {**plain.get("staleness", {}), "partial_rollout": False}
    plain["sampling"] = {**plain.get("sampling", {}), "return_routed_experts": False}
    return msgspec.structs.replace(
        started, run=name, config=plain, config_digest=config_digest(plain)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryWorker:
    """Sampler under one version, with one worker at a time."""

    started: RunStarted
    """From `started_of`."""
    parts: WorkerParts
    version: int
    digest: str
    reason: str
    report: Report
    check: Callable[[Mapping[str, TaskFacts]], None] = lambda facts: None
    """Receives task facts before sampling."""

    def sample(self, requests: Sequence[SampleRequest]) -> Sampled:
        """Sample until each request has a record or has failed. Raises what `run_worker` and
        `check` raise, InvariantBroken for a worker that leaves early."""
        with (
            tempfile.TemporaryDirectory(prefix="dora-pipe-sample-") as folder,
            closing(open_bus(f"sqlite:{Path(folder) / LOG}")) as bus,
        ):
            bus.create([TopicSpec(name=name) for name in self._topics.all()])
            with closing(bus.writer()) as writer:
                writer.append([Append(topic=self._topics.control, value=encode(self.started))])
            sampled: Sampled = {}
            while missing := [request for request in requests if request.name not in sampled]:
                before = len(sampled)
                self._work(bus, missing, len(requests))
                sampled = self._read(bus)
                if len(sampled) == before:
                    raise InvariantBroken("a worker left its log without a sample")
        return sampled

    @property
    def _topics(self) -> Topics:
        return Topics(self.started.run)

    def _work(self, bus: Bus, missing: Sequence[SampleRequest], total: int) -> None:
        partition = TopicPartition(self._topics.trajectories, 0)

        def never_stop() -> bool:
            self.report("sampling", bus.end(partition), total)
            return False

        try:
            run_worker(
                bus,
                self._topics,
                worker="analysis",
                store=self.parts.store,
                engine_factory=self.parts.engine,
                open_pool=self.parts.pool,
                stop=never_stop,
                config=self.parts.config,
                joined=partial(self._schedule, bus, missing),
                source=self.parts.source,
            )
        finally:
            self.parts.left()

    def _read(self, bus: Bus) -> Sampled:
        control = records_of(bus, ends_of(bus, self._topics.control))
        facts = [decode_control(record.value) for record in control]
        sampled: Sampled = {
            fact.trajectory: fact for fact in facts if isinstance(fact, RequestFailed)
        }
        for record in records_of(bus, ends_of(bus, self._topics.trajectories)):
            trajectory = decode_trajectory(record.value)
            sampled[trajectory.trajectory] = trajectory
        return sampled

    def _schedule(
        self,
        bus: Bus,
        missing: Sequence[SampleRequest],
        setup: WorkerSetup,
        facts: Mapping[str, TaskFacts],
    ) -> None:
        self.check(facts)
        worker, incarnation, reason = setup.worker, setup.incarnation, self.reason
        groups: dict[str, list[SampleRequest]] = {}
        for request in missing[: setup.requests_max]:
            groups.setdefault(request.spec.group, []).append(request)
        with closing(bus.writer()) as writer:
            places = [
                Schedule(
                    reason=reason,
                    spec=members[0].spec,
                    worker=worker,
                    incarnation=incarnation,
                    samples=tuple(self._placed(writer, request) for request in members),
                )
                for members in groups.values()
            ]
            assign = Assign(
                reason=reason,
                worker=worker,
                incarnation=incarnation,
                version=self.version,
                digest=self.digest,
            )
            round_ = Round(
                ordinal=incarnation,
                incarnation=incarnation,
                now_ns=self.started.at_ns,
                control_next=0,
                decisions=(
                    assign,
                    *places,
                    Drain(reason=reason, worker=worker, incarnation=incarnation),
                ),
            )
            writer.append([Append(topic=self._topics.decisions, value=encode(round_))])

    def _placed(self, writer: Writer, request: SampleRequest) -> ScheduledSample:
        prefix, resume = request.prefix, None
        if prefix is not None:
            value, key = encode_any_progress(prefix), request.name.encode()
            (offset,) = writer.append([Append(topic=self._topics.progress, key=key, value=value)])
            resume = Resume(tokens=sum(prefix.loss_mask), partition=0, offset=offset)
        return ScheduledSample(sample=request.sample, attempt=1, resume=resume)
