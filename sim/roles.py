"""Start of production's machines without processes.

Mirrors `orchestrator.process.role`, `consumers.trainer.role` and `producers.worker.role`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bus.bus import Bus, TopicSpec, Writer
from dora_pipe.config.model import Config
from dora_pipe.config.retention import with_keep_every
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.trainer.machine import KEY, TrainerMachine
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.consumers.trainer.role import trainer_setup
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import await_stable_offset
from dora_pipe.core.loop.runtime import Runtime
from dora_pipe.core.pure.machine import Machine
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.orchestrator.curriculum import Samplers, has_curriculum
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.orchestrator.process.role import Instance, start_machine
from dora_pipe.producers.engines.registry import capabilities
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.role import params_by_source, turns_by_source, worker_setup
from dora_pipe.schemas.control import DataSet, RoleStarted, RunStarted, WorkerJoined, config_digest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode, sha256_hex
from dora_pipe.sim.parts import Parts, Site, WorkerParts, WorkerPlan
from dora_pipe.sim.role import ORCHESTRATOR, TRAINER
from dora_pipe.store.store import PolicyStore

HOST: Final = "sim"
DATASET: Final = sha256_hex(b"train rows")
EVAL_DATASET: Final = sha256_hex(b"eval rows")
ROWS: Final = 40
FEW_ROWS: Final = 2
"""Rows of a run with a curriculum; few, so that every row repeats."""
EVAL_ROWS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    machine: Machine[Any, Any]
    writer: Writer
    exclusive: bool = True
    port: Any = None
    """Port of its effects; in a simulated world, a `PortGroup` of `SimPort`s."""
    incarnation: int = -1

    def loop(
        self, site: Site, machine: Machine[Any, Any] | None = None, **more: Any
    ) -> Runtime[Any, Any]:
        """Return production's loop around its machine, or around a wrapper."""
        return Runtime(
            machine or self.machine,
            bus=site.bus,
            writer=self.writer,
            port=self.port,
            clock=site.clock,
            meter=site.meter,
            exclusive=self.exclusive,
            status=site.bus.writer() if self.exclusive else None,
            **more,
        )


def create_topics(bus: Bus, topics: Topics, config: Config) -> None:
    many = (topics.trajectories, topics.progress)
    bus.create(
        [
            TopicSpec(
                name=name,
                partitions=config.bus.partitions if name in many else 1,
                max_record_bytes=config.bus.max_record_bytes,
            )
            for name in topics.all()
        ]
    )


def run_started(
    config: Config, parts: Parts, store: PolicyStore, folder: Path, clock: Clock
) -> RunStarted:
    """Return a run's first record; store version 0 and assets."""
    policy, assets_digest = parts.policy(store, folder)
    plain = msgspec.to_builtins(with_keep_every(config, policy))
    data = parts.data(config) or data_of(config)
    train, evaluated = (
        data.get(purpose) or plain_data(config, purpose) for purpose in ("train", "eval")
    )
    return RunStarted(
        at_ns=clock.wall_ns(),
        run=config.run.name,
        schema_version=SCHEMA_VERSION,
        config=plain,
        config_digest=config_digest(plain),
        dataset_digest=train.digest,
        dataset_rows=train.rows,
        eval_digest=evaluated.digest,
        eval_rows=evaluated.rows,
        datasets={name: dataset for name, dataset in data.items() if "/" in name},
        scored_together=tuple(
            source
            for spec in pool_specs(config)
            if any(use.group for use in spec.task.rewards)
            for source in spec.sources
        ),
        seed=config.run.seed,
        policy=policy,
        assets_digest=assets_digest,
        planner=PLANNER,
        package="0",
    )


def plain_data(config: Config, purpose: str) -> DataSet:
    """Return the rows of an unnamed source."""
    if purpose == "eval":
        return DataSet(digest=EVAL_DATASET, rows=EVAL_ROWS)
    few = any(has_curriculum(task) for task in config.tasks)
    return DataSet(digest=DATASET, rows=FEW_ROWS if few else ROWS)


def data_of(config: Config) -> dict[str, DataSet]:
    """Return rows by source; named ones differ."""
    sets: dict[str, DataSet] = {}
    for source in turns_by_source(config):
        purpose, _, name = source.partition("/")
        dataset = plain_data(config, purpose)
        if name:
            dataset = DataSet(digest=sha256_hex(source.encode()), rows=dataset.rows + len(sets) + 1)
        sets[source] = dataset
    return sets


def start_role(site: Site, parts: Parts, plan: WorkerPlan | None = None) -> Started:
    """Start a role. Raises BusError."""
    if site.name == ORCHESTRATOR:
        return _orchestrator(site)
    if site.name == TRAINER:
        return _trainer(site, parts)
    assert plan is not None
    return _worker(site, parts, plan)


def _orchestrator(site: Site) -> Started:
    writer = site.bus.writer(exclusive=f"{site.topics.run}.orchestrator")
    machine = start_machine(
        bus=site.bus,
        writer=writer,
        topics=site.topics,
        timing=site.config.timing,
        clock=site.clock,
        instance=Instance(name=f"o{site.number}", host=HOST, pid=1, package="0"),
        meter=site.meter,
        run_started=site.run_started,
        samplers=Samplers.load(site.config),
    )
    return Started(machine=machine, writer=writer)


def _trainer(site: Site, parts: Parts) -> Started:
    control = site.topics.control
    writer = site.bus.writer(exclusive=f"{site.topics.run}.trainer")
    await_stable_offset(site.bus, [TopicPartition(control, 0)], site.clock)
    history = read_history(site.bus, site.topics, site.clock)
    started = RoleStarted(
        at_ns=site.clock.wall_ns(),
        role="trainer",
        incarnation=history.incarnation + 1,
        instance=f"t{site.number}",
        host=HOST,
        pid=1,
        package="0",
    )
    writer.append([Append(topic=control, key=KEY, value=encode(started))])
    trainer_parts = parts.trainer(site, history)
    setup = trainer_setup(
        site.config, site.run_started, topics=site.topics, incarnation=started.incarnation
    )
    machine = TrainerMachine(setup, history, cost=site.meter.cost, cached=trainer_parts.cached)
    return Started(machine=machine, writer=writer, port=trainer_parts.port)


def _worker(site: Site, parts: Parts, plan: WorkerPlan) -> Started:
    worker_parts = parts.worker(site, plan)
    writer = site.bus.writer()
    decisions = TopicPartition(site.topics.decisions, 0)
    decisions_from = retry_bus("joining", lambda: site.bus.end(decisions), site.clock)
    joined = encode(_joined(site, plan, worker_parts))
    append = Append(topic=site.topics.control, key=plan.name.encode(), value=joined)
    incarnation = writer.append([append])[0]
    data = parts.data(site.config) or data_of(site.config)
    machine = WorkerMachine(
        worker_setup(
            site.config,
            topics=site.topics,
            worker=plan.name,
            incarnation=incarnation,
            slots=plan.slots,
            prefetch=plan.prefetch,
            context_tokens=plan.context_tokens,
            decisions_from=decisions_from,
            digests={source: dataset.digest for source, dataset in data.items()},
            params=params_by_source(site.config, worker_parts.stop_ids, {}),
            max_resident_versions=worker_parts.engine.max_resident_versions,
        ),
        cost=site.meter.cost,
        kv_used=lambda: worker_parts.engine.kv_used_tokens,
        prompt_tokens=lambda: worker_parts.engine.prompt_tokens,
        failing=worker_parts.failing,
        codec=site.meter.spend("codec"),
    )
    return Started(
        machine=machine,
        writer=writer,
        exclusive=False,
        port=worker_parts.port,
        incarnation=incarnation,
    )


def _joined(site: Site, plan: WorkerPlan, parts: WorkerParts) -> WorkerJoined:
    engine = parts.engine
    return WorkerJoined(
        at_ns=site.clock.wall_ns(),
        worker=plan.name,
        instance=f"{plan.name}-{site.number}",
        host=HOST,
        pid=1,
        slots=plan.slots,
        prefetch=plan.prefetch,
        kv_tokens=plan.slots * plan.context_tokens,
        engine=engine.name,
        engine_version=engine.version,
        dtype=engine.dtype,
        device=engine.device,
        declares=capabilities(engine, moves=parts.single_turn),
        assets_digest=site.run_started.assets_digest,
        reward_digest="",
        package="0",
        max_resident_versions=engine.max_resident_versions,
        colocated=plan.colocated,
    )
