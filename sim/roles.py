"""Puts production's machines into production's loop, on a world's bus and clocks; decides nothing.

What stands here mirrors `orchestrator.role`, `consumers.trainer.role` and `producers.role`, without
processes and files: an incarnation that cannot reach the bus while it starts dies and is started
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dora_pipe.bus.port import Append, TopicPartition, Writer
from dora_pipe.consumers.trainer.machine import KEY, TrainerMachine, TrainerSetup
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.retry import retry_bus
from dora_pipe.core.run_lifecycle import await_stable_offset
from dora_pipe.core.runtime import Machine, Runtime
from dora_pipe.core.status_schedule import quiet_ns
from dora_pipe.orchestrator.role import Instance, start_machine
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.control import RoleStarted, WorkerJoined
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.parts import Site, WorkerParts, WorkerPlan
from dora_pipe.sim.ports import SimPort
from dora_pipe.sim.role import Role

if TYPE_CHECKING:
    from dora_pipe.sim.world import World

HOST: Final = "sim"


def build_orchestrator(world: World, role: Role) -> None:
    """Fence the predecessor, fold the log, take a role epoch. Raises BusError."""
    writer = role.bus.writer(exclusive=f"{world.topics.run}.orchestrator")
    machine = start_machine(
        bus=role.bus,
        writer=writer,
        topics=world.topics,
        timing=world.config.timing,
        clock=role.clock,
        instance=Instance(name=f"o{role.number}", host=HOST, pid=1, package="0"),
        meter=role.meter,
        run_started=world.run_started,
    )
    _loop(world, role, machine, writer, ())


def build_trainer(world: World, role: Role) -> None:
    """Fence the predecessor, read control, take a role epoch. Raises BusError."""
    writer = role.bus.writer(exclusive=f"{world.topics.run}.trainer")
    await_stable_offset(role.bus, [TopicPartition(world.topics.control, 0)], role.clock)
    history = read_history(role.bus, world.topics, role.clock)
    started = RoleStarted(
        at_ns=role.clock.wall_ns(),
        role="trainer",
        role_epoch=history.role_epoch + 1,
        instance=f"t{role.number}",
        host=HOST,
        pid=1,
        package="0",
    )
    writer.append([Append(topic=world.topics.control, key=KEY, value=encode(started))])
    parts = world.parts.trainer(_site(world, role), history)
    setup = TrainerSetup(
        topics=world.topics,
        role_epoch=started.role_epoch,
        checkpoint_every=world.config.trainer.checkpoint_every,
        heartbeat_ns=int(world.config.timing.heartbeat_s * 1e9),
        quiet_ns=quiet_ns(world.config.timing),
        keep_every=world.config.store.keep_every,
    )
    machine = TrainerMachine(setup, history, cost=role.meter.cost, cached=parts.cached)
    _loop(world, role, machine, writer, parts.ports)


def build_worker(world: World, role: Role, plan: WorkerPlan) -> None:
    """Open the parts, join. Raises BusError."""
    parts = world.parts.worker(_site(world, role), plan)
    role.on_close.append(parts.close)
    writer = role.bus.writer()
    decisions = TopicPartition(world.topics.decisions, 0)
    decisions_from = retry_bus("joining", lambda: role.bus.end(decisions), role.clock)
    joined = _joined(world, role, plan, parts)
    append = Append(topic=world.topics.control, key=plan.name.encode(), value=encode(joined))
    role.epoch = writer.append([append])[0]
    setup = _worker_setup(world, role.epoch, plan, parts, decisions_from)
    machine = WorkerMachine(setup, cost=role.meter.cost, kv_used=parts.kv_used)
    _loop(world, role, machine, writer, parts.ports)


def _loop(
    world: World, role: Role, machine: Machine, writer: Writer, ports: Sequence[SimPort]
) -> None:
    role.machine = machine
    role.ports = ports
    driven = machine if world.watch is None else world.watch.overhear(role, machine)
    role.runtime = Runtime(
        driven,
        bus=role.bus,
        writer=writer,
        ports=ports,
        clock=role.clock,
        meter=role.meter,
        exclusive=role.exclusive,
        status=role.bus.writer() if role.exclusive else None,
    )
    role.reads = frozenset(tp.topic for tp in machine.positions())


def _site(world: World, role: Role) -> Site:
    return Site(
        topics=world.topics,
        config=world.config,
        clock=role.clock,
        meter=role.meter,
        chance=role.chance,
        store=world.store,
        open_bus=lambda: world.open_bus(role),
        run_started=world.run_started,
    )


def _joined(world: World, role: Role, plan: WorkerPlan, parts: WorkerParts) -> WorkerJoined:
    return WorkerJoined(
        at_ns=role.clock.wall_ns(),
        worker=plan.name,
        instance=f"{plan.name}-{role.number}",
        host=HOST,
        pid=1,
        slots=plan.slots,
        prefetch=plan.prefetch,
        kv_tokens=parts.kv_tokens,
        engine=parts.engine,
        engine_version="1",
        dtype="none",
        device="none",
        declares=tuple(sorted(parts.declares)),
        assets_digest=world.run_started.assets_digest,
        reward_digest="",
        package="0",
        versions_resident=plan.versions,
    )


def _worker_setup(
    world: World, epoch: int, plan: WorkerPlan, parts: WorkerParts, decisions_from: int
) -> WorkerSetup:
    config, run = world.config, world.run_started
    return WorkerSetup(
        topics=world.topics,
        worker=plan.name,
        epoch=epoch,
        slots=plan.slots,
        prefetch=plan.prefetch,
        context_tokens=plan.context_tokens,
        checkpoint_tokens=config.workers.checkpoint_tokens,
        turns_max=config.task.turns_max,
        interruptible=config.staleness.interruptible,
        heartbeat_ns=int(config.timing.heartbeat_s * 1e9),
        quiet_ns=quiet_ns(config.timing),
        stop_timeout_ns=int(config.timing.stop_timeout_s * 1e9),
        decisions_from=decisions_from,
        digests={"train": run.dataset_digest, "eval": run.eval_digest},
        params={
            "train": sampling_params(config.sampling, parts.stop_ids),
            "eval": sampling_params(config.evaluation.sampling, parts.stop_ids),
        },
        versions_resident=plan.versions,
    )
