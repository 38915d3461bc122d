"""Log and store for tests of the worker as a role, driven by a script of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.config import model
from dora_pipe.config.workers import Workers
from dora_pipe.consumers.learners.simulated import initial_weights
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.arithmetic import WORDS, Arithmetic
from dora_pipe.producers.tasks.registry import rows_digest
from dora_pipe.producers.worker.role import run_worker
from dora_pipe.schemas.control import (
    AnyControl,
    RunStarted,
    TrajectoryLogged,
    WorkerJoined,
    config_digest,
    decode_control,
)
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import AnyDecision, Assign, GroupSpec, Round, ScheduledRequest
from dora_pipe.schemas.wire import Unknown, encode
from dora_pipe.store.model_dir import asset_files
from dora_pipe.store.store import PolicyStore
from tests.support.singly import as_decision, singly
from tests.support.worker import PARTITIONS, TOPICS, spec_of

TURNS_MAX = 4_000
"""Turns after which a script counts as hung."""

OPTIONS: dict[str, Any] = {"count": 16, "eval_count": 4}


def task_of_the_run() -> Arithmetic:
    return Arithmetic(**OPTIONS)


@dataclass
class Run:
    """Log and store of a run; a script decides while the worker runs."""

    bus: Bus
    store: PolicyStore
    assets_digest: str
    policy: Manifest
    """Version 0, stored."""
    config: model.Config
    rounds: int = 0
    turns: int = 0
    engines: list[SimulatedEngine] = field(default_factory=list)

    def begin(self, **changes: Any) -> None:
        train, rows = rows_digest(task_of_the_run().rows("train"), "train")
        evaluation, eval_rows = rows_digest(task_of_the_run().rows("eval"), "eval")
        config = msgspec.to_builtins(self.config)
        record = RunStarted(
            at_ns=0,
            run="r",
            schema_version=1,
            config=config,
            config_digest=config_digest(config),
            dataset_digest=train,
            dataset_rows=rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            seed=1,
            policy=self.policy,
            assets_digest=self.assets_digest,
            planner="p",
            package="0",
        )
        self.append(TOPICS.control, msgspec.structs.replace(record, **changes))

    def append(self, topic: str, record: msgspec.Struct) -> int:
        return self.bus.writer().append([Append(topic=topic, value=encode(record))])[0]

    def decide(self, *decisions: AnyDecision | ScheduledRequest) -> None:
        record = Round(
            ordinal=self.rounds,
            incarnation=1,
            now_ns=0,
            control_next=0,
            decisions=tuple(map(as_decision, decisions)),
        )
        self.rounds += 1
        self.append(TOPICS.decisions, record)

    def control(self) -> list[tuple[int, AnyControl | Unknown]]:
        tp = TopicPartition(TOPICS.control, 0)
        reader = self.bus.reader({tp: 0})
        records = []
        while reader.position(tp) < self.bus.end(tp):
            records += reader.poll(timeout_s=0.0)
        reader.close()
        return [(record.offset, decode_control(record.value)) for record in records]

    def joins(self) -> list[tuple[int, WorkerJoined]]:
        return [
            (index, event) for index, event in self.control() if isinstance(event, WorkerJoined)
        ]

    def count(self, kind: type) -> int:
        return sum(
            isinstance(entry, kind) for entry in singly(entry for _, entry in self.control())
        )

    def logged(self) -> list[TrajectoryLogged]:
        facts = singly(entry for _, entry in self.control())
        return [fact for fact in facts if isinstance(fact, TrajectoryLogged)]

    def assign(self, incarnation: int) -> Assign:
        return Assign(
            reason="t", worker="w0", incarnation=incarnation, version=0, digest=self.policy.digest
        )

    def place(self, incarnation: int, ordinal: int = 0) -> ScheduledRequest:
        spec: GroupSpec = msgspec.structs.replace(
            spec_of(ordinal),
            dataset_digest=rows_digest(task_of_the_run().rows("train"), "train")[0],
            digest=self.policy.digest,
        )
        return ScheduledRequest(
            reason="t",
            spec=spec,
            trajectory=trajectory_id(spec.group, 0),
            sample=0,
            attempt=1,
            worker="w0",
            incarnation=incarnation,
        )

    def work(self, script: Iterator[bool], *, worker: str = "w0", **more: Any) -> None:
        """Run the worker; the script advances each turn and ends the run by yielding True."""

        def stop() -> bool:
            self.turns += 1
            assert self.turns < TURNS_MAX, "the script hangs"
            return next(script, True)

        run_worker(
            self.bus,
            TOPICS,
            worker=worker,
            store=self.store,
            engine_factory=self.engine,
            stop=stop,
            **more,
        )

    def engine(self, *, assets: Path, config: model.Config, decode: Decode) -> Engine:
        engine = SimulatedEngine(
            slots=config.workers.max_num_seqs,
            context_tokens=config.workers.max_model_len,
            decode=decode,
        )
        self.engines.append(engine)
        return engine


def _config(**workers: Any) -> model.Config:
    return model.Config(
        run=model.Run(name="r", steps=1),
        model=model.Model(path="nowhere"),
        task=model.Task(kind="arithmetic", options=dict(OPTIONS)),
        workers=Workers(max_num_seqs=4, max_model_len=256, **workers),
        timing=model.Timing(heartbeat_s=0.05),
    )


def _topics(bus: Bus) -> None:
    partitions = {TOPICS.trajectories: PARTITIONS, TOPICS.progress: PARTITIONS}
    bus.create([TopicSpec(name=name, partitions=partitions.get(name, 1)) for name in TOPICS.all()])


def make_run(bus: Bus, path: Path) -> Run:
    _topics(bus)
    model_dir = path / "model"
    write_word_tokenizer(model_dir, WORDS)
    (model_dir / "config.json").write_text("{}")
    store = PolicyStore(path / "policies")
    return Run(
        bus=bus,
        store=store,
        assets_digest=store.publish_assets(asset_files(model_dir)),
        policy=store.publish_weights(initial_weights),
        config=_config(),
    )
