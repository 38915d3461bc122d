"""Start of the orchestrator: fence the predecessor, fold the log, take an incarnation, run.

Garbage is collected only while the loop waits, since it can take as long as a turn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Never

from dora_pipe.bus.base import ends_of
from dora_pipe.bus.bus import Bus, Writer
from dora_pipe.config.model import Timing
from dora_pipe.core.errors import RunHalted, UsageError
from dora_pipe.core.loop.effect_runner import BackgroundWriter
from dora_pipe.core.loop.run_lifecycle import await_stable_offset
from dora_pipe.core.loop.runtime import Meter, Port, PortGroup, Runtime
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.machine import OrchestratorEffect, OrchestratorMachine, TrimMetrics
from dora_pipe.orchestrator.process.recovery import recover
from dora_pipe.orchestrator.process.snapshot_files import SnapshotPort
from dora_pipe.orchestrator.process.trim_port import Trimmed, TrimPort
from dora_pipe.orchestrator.snapshots import SNAPSHOT_EVERY, WriteSnapshot
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import Command, Control, RoleStarted, RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

HALTED_HINT: Final = (
    "fix the cause, then `run --resume`, or `dora-pipe control resume RUN` and start this role; "
    "rollout.max_failed_share sets the limit"
)


STATUS_TAIL: Final = 10_000
"""Old statuses to read per partition: ten seconds of 512 workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Role process."""

    name: str
    host: str
    pid: int
    package: str


def run_orchestrator(
    bus: Bus,
    topics: Topics,
    *,
    stop: Callable[[], bool],
    timing: Timing,
    clock: Clock,
    instance: Instance,
    run_started: RunStarted | None = None,
    snapshots: Path | None = None,
    resumed_by: str = "",
    trimmed: Trimmed | None = None,
    samplers: Samplers | None = None,
) -> State:
    """Run the orchestrator until the run is over or `stop` returns True; return the final state.

    `run_started` starts an empty log. `resumed_by` resumes a halted run.

    Raises RunHalted, Fenced by a successor, UsageError without a run, InvariantBroken and
    LogTruncated if the log was changed, BusError, ConfigError of `samplers`.
    """
    meter = Meter()
    writer = bus.writer(exclusive=f"{topics.run}.orchestrator")
    status = BackgroundWriter(bus.writer())
    try:
        machine = start_machine(
            bus=bus,
            writer=writer,
            topics=topics,
            timing=timing,
            clock=clock,
            instance=instance,
            meter=meter,
            run_started=run_started,
            snapshots=snapshots,
            resumed_by=resumed_by,
            metrics_keep_ns=0 if trimmed is None else trimmed.keep_ns,
            samplers=samplers,
        )
        runtime = Runtime(
            machine,
            bus=bus,
            writer=writer,
            port=_ports(topics.run, snapshots, trimmed, clock),
            clock=clock,
            meter=meter,
            exclusive=True,
            status=status,
            waiting=Tidying(),
            kept=[partition for topic in topics.all() for partition in ends_of(bus, topic)],
        )
        with closing(runtime):
            runtime.run(stop)
        return _unless_halted(machine.state, topics.run)
    finally:
        status.close()
        writer.close()


def _ports(
    run: str, snapshots: Path | None, trimmed: Trimmed | None, clock: Clock
) -> PortGroup[OrchestratorEffect, Never]:
    ports: dict[type, Port[Any, Never]] = {}
    if snapshots is not None:
        ports[WriteSnapshot] = SnapshotPort(snapshots, run)
    if trimmed is not None:
        ports[TrimMetrics] = TrimPort(trimmed.open_bus, sleep=clock.sleep)
    return PortGroup(ports)


def _unless_halted(state: State, run: str) -> State:
    if halted := state.failures.halted:
        raise RunHalted(f"{run}: {halted}", hint=HALTED_HINT)
    return state


def start_machine(
    *,
    bus: Bus,
    writer: Writer,
    topics: Topics,
    timing: Timing,
    clock: Clock,
    instance: Instance,
    meter: Meter,
    run_started: RunStarted | None = None,
    snapshots: Path | None = None,
    resumed_by: str = "",
    metrics_keep_ns: int = 0,
    samplers: Samplers | None = None,
) -> OrchestratorMachine:
    """Return a machine at the end of the log; announce its incarnation."""
    folded = (topics.control, topics.decisions)
    await_stable_offset(bus, [TopicPartition(topic, 0) for topic in folded], clock)
    recovered = recover(bus, topics, snapshots)
    if not recovered.run_started and run_started is None:
        raise UsageError(f"{topics.run} has not been started", hint="start it with `dora-pipe run`")
    incarnation = recovered.incarnation + 1
    records: list[Control] = []
    if not recovered.run_started and run_started is not None:
        records.append(run_started)
    records.append(
        RoleStarted(
            at_ns=clock.wall_ns(),
            role="orchestrator",
            incarnation=incarnation,
            instance=instance.name,
            host=instance.host,
            pid=instance.pid,
            package=instance.package,
            samplers={} if samplers is None else dict(samplers.sources),
        )
    )
    if resumed_by and recovered.state.failures.halted:
        records.append(Command(at_ns=clock.wall_ns(), user=resumed_by, verb="resume"))
    if not recovered.state.done:
        writer.append([Append(topic=topics.control, value=encode(record)) for record in records])
    partitions = range(bus.partitions(topics.metrics))
    metrics = [TopicPartition(topics.metrics, partition) for partition in partitions]
    return OrchestratorMachine(
        state=recovered.state,
        topics=topics,
        incarnation=incarnation,
        metrics={
            partition: max(bus.begin(partition), bus.end(partition) - STATUS_TAIL)
            for partition in metrics
        },
        timing=timing,
        cost=meter.cost,
        snapshot_every=0 if snapshots is None else SNAPSHOT_EVERY,
        metrics_keep_ns=metrics_keep_ns,
        samplers=samplers,
    )


GARBAGE_MAX: Final = 100_000
"""New objects that trigger a collection within a turn."""

FULL_EVERY: Final = 600
"""Waits between full collections, about a minute."""


def settle_memory() -> None:
    """Freeze startup objects: scanning them takes longer than a round."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_MAX, *gc.get_threshold()[1:])


class Tidying:
    """Garbage collection at each call."""

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self) -> None:
        """Collect garbage."""
        self._waits += 1
        gc.collect(1 if self._waits % FULL_EVERY else 2)
