"""DeepSpeed trainers for tests: DORA_PIPE_RANKS ranks on logged batches.

A process has one team of ranks, so a test run has one rank count.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.consumers.learners.learner import LoggedAt, Settings, StepResult, TrainBatch
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from dora_pipe.store.log_location import LogLocation
from tests.support.device import DEVICE, prepare

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.deepspeed.learner import DeepspeedLearner
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

RANKS = int(os.environ.get("DORA_PIPE_RANKS", "1"))
PARTITIONS = 2
RUN = "r"

ENGINES: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload": "optimizer"},
    {"zero_stage": 3, "offload": "all"},
]
"""Sharding configurations, all in float32."""


def need_deepspeed(*, ranks: int | None = None) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; make test-deepspeed runs this")
    if ranks not in (None, RANKS):
        pytest.skip(f"needs DORA_PIPE_RANKS={ranks}; make test-deepspeed runs this")


class BatchLog:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.place = LogLocation(run=RUN, url=f"sqlite:{path}")
        self._topic = Topics(RUN).trajectories
        from dora_pipe.bus.sqlite import SqliteBus

        SqliteBus(path).close()
        self.bus = self.place.open()
        self.bus.create([TopicSpec(name=self._topic, partitions=PARTITIONS)])
        self._writer = self.bus.writer()

    def logged(self, batch: TrainBatch) -> TrainBatch:
        """Log the batch; each group is in one partition."""
        groups = [
            replace(group, places=self._log(number % PARTITIONS, group.trajectories))
            for number, group in enumerate(batch.groups)
        ]
        return replace(batch, groups=groups)

    def _log(self, partition: int, trajectories: Sequence[Trajectory]) -> list[LoggedAt]:
        appends, sha256s = [], []
        for trajectory in trajectories:
            value, headers = encode_trajectory(trajectory)
            sha256s.append(headers.sha256)
            appends.append(
                Append(
                    topic=self._topic,
                    partition=partition,
                    key=headers.group.encode(),
                    value=value,
                    headers=header_pairs(headers),
                )
            )
        offsets = self._writer.append(appends)
        return [
            LoggedAt(partition=partition, offset=offset, sha256=sha256)
            for offset, sha256 in zip(offsets, sha256s, strict=True)
        ]


class LoggedTrainer:
    def __init__(self, trainer: DeepspeedLearner, log: BatchLog) -> None:
        self.trainer = trainer
        self._log = log
        self.name = trainer.name
        self.version = trainer.version

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        self.trainer.load(weights, digest=digest, optimizer=optimizer)

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        return self.trainer.train(self._log.logged(batch), settings)

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        self.trainer.train_part(self._log.logged(batch), settings)

    def leave_device(self) -> None:
        self.trainer.leave_device()

    def manifest(self) -> Manifest:
        return self.trainer.manifest()

    def save_weights(self, path: Path) -> Manifest:
        return self.trainer.save_weights(path)

    def save_optimizer(self, path: Path) -> None:
        self.trainer.save_optimizer(path)

    def numerics(self) -> dict[str, str]:
        return self.trainer.numerics()


def make_learner(
    assets: Path,
    reference: Path,
    log: BatchLog,
    *,
    zero_stage: int = 2,
    offload: str = "none",
    dtype: str = "float32",
    micro_batch_tokens: int = 256,
    lora: LoraOptions | None = None,
    weight_decay: float = 0.0,
    memory: Mapping[str, Any] | None = None,
    routes: bool = False,
    router_aux_loss: float = 0.0,
    expert_parallel_size: int = 1,
) -> LoggedTrainer:
    prepare()
    from dora_pipe.consumers.learners.deepspeed.engine import EngineOptions
    from dora_pipe.consumers.learners.deepspeed.learner import DeepspeedLearner, DeepspeedOptions
    from dora_pipe.consumers.learners.torch.memory import MemoryOptions

    options = DeepspeedOptions(
        engine=EngineOptions(
            zero_stage=zero_stage,
            offload=offload,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            lora=lora,
            weight_decay=weight_decay,
            memory=MemoryOptions(**(memory or {})),
            routes=routes,
            router_aux_loss=router_aux_loss,
            expert_parallel_size=expert_parallel_size,
        ),
        ranks=RANKS,
        micro_batch_tokens=micro_batch_tokens,
        device=DEVICE,
    )
    return LoggedTrainer(
        DeepspeedLearner(assets, reference=reference, log=log.place, options=options), log
    )
