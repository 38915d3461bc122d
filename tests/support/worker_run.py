"""Log and store for tests of the worker as a role, driven by a script of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus.bus import Bus
from dora_pipe.config import model
from dora_pipe.config.workers import Workers
from dora_pipe.consumers.learners.simulated import initial_weights
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.arithmetic import WORDS, Arithmetic
from dora_pipe.producers.tasks.registry import rows_digest
from dora_pipe.producers.worker.role import run_worker
from dora_pipe.schemas.control import WorkerJoined, decode_control
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import Assign, ScheduledRequest
from dora_pipe.store.model_dir import asset_files
from dora_pipe.store.store import PolicyStore
from tests.support.orchestrator_records import run_started
from tests.support.worker import TOPICS, ScriptedLog, spec_of

TURNS_MAX = 4_000
"""Turns after which a script counts as hung."""

OPTIONS: dict[str, Any] = {"count": 16, "eval_count": 4}


def task_of_the_run() -> Arithmetic:
    return Arithmetic(**OPTIONS)


class Run(ScriptedLog):
    """Log and store of a run; a script decides while the worker runs."""

    def __init__(self, bus: Bus, path: Path) -> None:
        super().__init__(bus)
        model_dir = path / "model"
        write_word_tokenizer(model_dir, WORDS)
        (model_dir / "config.json").write_text("{}")
        self.store = PolicyStore(path / "policies")
        self.assets_digest = self.store.publish_assets(asset_files(model_dir))
        self.policy = self.store.publish_weights(initial_weights)
        self.config = _config()
        self.turns = 0
        self.engines: list[SimulatedEngine] = []

    def begin(self, **changes: Any) -> None:
        train, rows = rows_digest(task_of_the_run().rows("train"), "train")
        evaluation, eval_rows = rows_digest(task_of_the_run().rows("eval"), "eval")
        record = msgspec.structs.replace(
            run_started(self.config, rows=rows, eval_rows=eval_rows),
            dataset_digest=train,
            eval_digest=evaluation,
            policy=self.policy,
            assets_digest=self.assets_digest,
        )
        self.append(TOPICS.control, msgspec.structs.replace(record, **changes))

    def joins(self) -> list[tuple[int, WorkerJoined]]:
        records = self.records(TOPICS.control)
        events = [(record.offset, decode_control(record.value)) for record in records]
        return [(offset, event) for offset, event in events if isinstance(event, WorkerJoined)]

    def assign(self, incarnation: int) -> Assign:
        return Assign(
            reason="t", worker="w0", incarnation=incarnation, version=0, digest=self.policy.digest
        )

    def place(self, incarnation: int, ordinal: int = 0) -> ScheduledRequest:
        spec = msgspec.structs.replace(
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
