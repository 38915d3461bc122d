"""Starts the orchestrator on a bus: fence the predecessor, fold the log, take a role epoch, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.bus.port import Append, Bus, TopicPartition, Writer
from dora_pipe.clock import Clock
from dora_pipe.config.model import Timing
from dora_pipe.errors import UsageError
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.recovery import recover
from dora_pipe.orchestrator.snapshot_port import SnapshotPort
from dora_pipe.orchestrator.snapshots import SNAPSHOT_EVERY
from dora_pipe.orchestrator.state import State
from dora_pipe.runtime import Meter, Runtime
from dora_pipe.schemas.control import Control, RoleStarted, RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Who runs the role. Example: ``Instance(name="m1-17", host="m1", pid=17, package="0.1.0")``"""

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
) -> State:
    """Be the orchestrator of a run until it is over or `stop` says so; the state at the end.

    The topics exist. `run_started` starts a log that has none yet, and is ignored by another.
    `timing` is this process's own (leases, heartbeats). In the folder `snapshots` the state is
    kept now and then, so that the next start folds only what came after. The order of starting
    matters: only what is read after the predecessor was fenced is the whole log.

    Raises Fenced when a successor took over, UsageError when there is no run to orchestrate,
    InvariantBroken and LogTruncated when the log was changed, BusError.
    """
    meter = Meter()
    ports = [] if snapshots is None else [SnapshotPort(snapshots, topics.run)]
    writer = bus.writer(exclusive=f"{topics.run}.orchestrator")
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
        )
        runtime = Runtime(
            machine,
            bus=bus,
            writer=writer,
            ports=ports,
            clock=clock,
            meter=meter,
            exclusive=True,
        )
        try:
            runtime.run(stop)
        finally:
            runtime.close()
        return machine.state
    finally:
        for port in ports:
            port.close()
        writer.close()


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
) -> OrchestratorMachine:
    """A machine at the end of the log; its role epoch is announced unless the run is over."""
    found = recover(bus, topics, snapshots)
    if not found.run_started and run_started is None:
        raise UsageError(f"{topics.run} has not been started", hint="start it with `dora-pipe run`")
    role_epoch = found.role_epoch + 1
    records = [_role_started(clock, instance, role_epoch)]
    if not found.run_started and run_started is not None:
        records.insert(0, run_started)
    if not found.state.done:
        writer.append([Append(topic=topics.control, value=encode(record)) for record in records])
    partitions = range(bus.partitions(topics.metrics))
    metrics = [TopicPartition(topics.metrics, partition) for partition in partitions]
    return OrchestratorMachine(
        state=found.state,
        topics=topics,
        role_epoch=role_epoch,
        metrics={at: bus.end(at) for at in metrics},
        timing=timing,
        cost=meter.cost,
        snapshot_every=0 if snapshots is None else SNAPSHOT_EVERY,
    )


def _role_started(clock: Clock, instance: Instance, role_epoch: int) -> Control:
    return RoleStarted(
        at_ns=clock.wall_ns(),
        role="orchestrator",
        role_epoch=role_epoch,
        instance=instance.name,
        host=instance.host,
        pid=instance.pid,
        package=instance.package,
    )
