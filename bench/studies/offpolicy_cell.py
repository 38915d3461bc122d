"""Training of one off-policy cell, with production components but without a log.

Cells of a seed share prompts and random streams.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.bench.studies.offpolicy import OBJECTIVES, Cell, Measured, StaleQueue, mean
from dora_pipe.config.logged import settings_in_force
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.learner import Settings, TrainBatch, TrainGroup
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.learners.settings import changed_settings
from dora_pipe.core.errors import NonFinite
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import (
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.task import Reward, Row
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.producers.worker.sequence import TokenSequence
from dora_pipe.schemas.identity import (
    Purpose,
    group_id,
    group_seed,
    prompt_index,
    trajectory_id,
    trajectory_seed,
)
from dora_pipe.schemas.trajectory import Meta, Times, Trajectory
from dora_pipe.schemas.wire import SCHEMA_VERSION
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore

WORKER: Final = "w0"
NO_DIGEST: Final = "0" * 64
"""Rows come from the task."""

WEIGHTS: Final = "weights.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    purpose: Purpose
    ordinal: int
    sample: int
    size: int
    row: Row
    index: int
    data_epoch: int
    seed: int

    @property
    def name(self) -> str:
        return trajectory_id(group_id(self.purpose, self.ordinal), self.sample)


class Bench:
    """Engine, trainer and task of a seed's cells.

    Example: ``Bench(config, Path("warm"), scratch).run(cell, setting="0f..")``
    """

    def __init__(self, config: Config, start: Path, folder: Path) -> None:
        """`folder` is temporary. Raises PolicyError, ConfigError, TaskError."""
        from dora_pipe.producers.engines.torch.engine import TorchEngine

        store = PolicyStore(folder / "policies")
        manifest, assets = import_model(store, start)
        self._config = config
        self._first = (store.weights_path(manifest.digest), manifest.digest)
        self._weights = folder / WEIGHTS
        directory = store.assets_path(assets)
        self.trainer = make_learner(assets=directory, reference=self._first[0], config=config)
        self._engine = TorchEngine.open(
            directory,
            slots=config.workers.max_num_seqs,
            context_tokens=config.workers.max_model_len,
            threads=1,
        )
        self._tokenizer = Tokenizer(directory, special_tokens=config.task.special_tokens)
        stop_ids = self._tokenizer.stop_ids
        self._params: Mapping[Purpose, SamplingParams] = {
            "train": sampling_params(config.sampling, stop_ids),
            "eval": sampling_params(config.eval_sampling(), stop_ids),
        }
        self._task = open_task(config.task)
        self._rows = self._task.rows("train")
        self._eval_rows = self._task.rows("eval")

    def settings(self, objective: str, step: int) -> Settings:
        return changed_settings(
            settings_in_force(self._config, step),
            OBJECTIVES[objective],
            max_tokens=self._config.sampling.max_tokens,
        )

    def run(self, cell: Cell, *, setting: str) -> Measured:
        """Train and evaluate a cell."""
        assert cell.seed == self._config.run.seed
        began_s, steps = time.process_time(), self._config.run.steps
        evaluated = evaluated_versions(steps, self._config.evaluation.every)
        queue: StaleQueue[TrainBatch] = StaleQueue(eta=cell.eta, steps=steps)
        rewards: list[tuple[int, float]] = []
        figures: list[Mapping[str, float]] = []
        diverged_at = None
        path, digest = self._first
        self.trainer.load(path, digest=digest, optimizer=None)
        for version in range(steps + 1):
            self._engine.load(path, version=version, digest=digest)
            if version in evaluated:
                rewards.append((version, self._evaluate(version, digest)))
            if version == steps:
                break
            queue.fill(version, lambda step: self._batch(step, version, digest))  # noqa: B023
            try:
                settings = self.settings(cell.objective, version)
                figures.append(self.trainer.train(queue.take(version), settings).metrics)
            except NonFinite:
                diverged_at = version
                rewards += [(later, 0.0) for later in evaluated if later > version]
                break
            path, digest = self._weights, self.trainer.save_weights(self._weights).digest
        return Measured(
            setting=setting,
            objective=cell.objective,
            eta=cell.eta,
            seed=cell.seed,
            steps=len(figures),
            samples=int(sum(figure["trajectories"] for figure in figures)),
            tokens=int(sum(figure["tokens"] for figure in figures)),
            rewards=rewards,
            clipped=mean(
                [figure["clipped_share"] for figure in figures if "clipped_share" in figure]
            ),
            masked=_mean_known(figures, "masked_share"),
            ratio_max=_median_known(figures, "ratio_max"),
            cpu_s=time.process_time() - began_s,
            diverged_at=diverged_at,
        )

    def _evaluate(self, version: int, digest: str) -> float:
        evaluation = self._config.evaluation
        asked = [
            self._ask("eval", row, sample, evaluation.group_size, (0, row), self._eval_rows[row])
            for row in range(min(evaluation.prompts, len(self._eval_rows)))
            for sample in range(evaluation.group_size)
        ]
        done = self._sample(asked, version, digest)
        return math.fsum(trajectory.reward or 0.0 for trajectory in done) / len(done)

    def _batch(self, step: int, version: int, digest: str) -> TrainBatch:
        groups, size = self._config.rollout.prompts_per_step, self._config.rollout.group_size
        asked = []
        for ordinal in range(step * groups, (step + 1) * groups):
            position = prompt_index(self._config.run.seed, ordinal, len(self._rows))
            row = self._rows[position[1]]
            asked += [
                self._ask("train", ordinal, sample, size, position, row) for sample in range(size)
            ]
        done = self._sample(asked, version, digest)
        return TrainBatch(
            step=step,
            groups=[
                TrainGroup(
                    group=done[first].meta.group,
                    version=version,
                    trajectories=done[first : first + size],
                )
                for first in range(0, len(done), size)
            ],
        )

    def _ask(
        self,
        purpose: Purpose,
        ordinal: int,
        sample: int,
        size: int,
        position: tuple[int, int],
        row: Row,
    ) -> _Asked:
        seed = group_seed(self._config.run.seed, purpose, ordinal)
        return _Asked(
            purpose=purpose,
            ordinal=ordinal,
            sample=sample,
            size=size,
            row=row,
            index=position[1],
            data_epoch=position[0],
            seed=trajectory_seed(seed, sample),
        )

    def _sample(self, asked: Sequence[_Asked], version: int, digest: str) -> list[Trajectory]:
        sequences = {
            sample.name: TokenSequence(
                self._tokenizer.prompt_ids(str(self._task.prompt(sample.row))), at_ns=0
            )
            for sample in asked
        }
        waiting = [
            EngineRequest(
                request=sample.name,
                token_ids=sequences[sample.name].token_ids[:],
                sampled=0,
                seed=sample.seed,
                params=self._params[sample.purpose],
            )
            for sample in reversed(asked)
        ]
        ends: dict[str, RequestFinished] = {}
        while waiting or self._engine.active:
            while waiting and self._engine.active < self._engine.slots:
                sequences[waiting[-1].request].start_stay(0)
                self._engine.add(waiting.pop())
            for event in self._engine.step():
                if isinstance(event, TokensSampled):
                    sequences[event.request].sampled(
                        event.token_ids, event.logprobs, event.sampler_logprobs
                    )
                elif isinstance(event, RequestFinished):
                    ends[event.request] = event
        return [
            self._trajectory(sample, sequences[sample.name], ends[sample.name], version, digest)
            for sample in asked
        ]

    def _trajectory(
        self,
        sample: _Asked,
        sequence: TokenSequence,
        end: RequestFinished,
        version: int,
        digest: str,
    ) -> Trajectory:
        sequence.end_stay(0, worker=WORKER, incarnation=0, version=version)
        reward = None if end.error else self._reward(sample.row, sequence)
        return Trajectory(
            trajectory=sample.name,
            version=version,
            digest=digest,
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            sampler_logprobs=sequence.sampler_logprobs,
            loss_mask=sequence.loss_mask,
            reward=reward,
            segments=sequence.segments,
            meta=Meta(
                run=self._config.run.name,
                schema_version=SCHEMA_VERSION,
                group=group_id(sample.purpose, sample.ordinal),
                group_size=sample.size,
                sample=sample.sample,
                attempt=0,
                purpose=sample.purpose,
                deadline=-1,
                dataset_digest=NO_DIGEST,
                index=sample.index,
                data_epoch=sample.data_epoch,
                seed=sample.seed,
                prompt_tokens=sequence.prompt_tokens,
                worker=WORKER,
                incarnation=0,
                finish=end.reason,
                times=Times(scheduled=0),
                reward_error=end.error,
            ),
        )

    def _reward(self, row: Row, sequence: TokenSequence) -> float:
        text = self._tokenizer.text(sequence.answer())
        reward = self._task.reward(row, text, [text])
        assert isinstance(reward, float | Reward)
        return reward.value if isinstance(reward, Reward) else reward


def evaluated_versions(steps: int, every: int) -> list[int]:
    """Return the first, the last, and every `every`-th version."""
    return [
        version
        for version in range(steps + 1)
        if version in (0, steps) or (every and version % every == 0)
    ]


def _mean_known(figures: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [figure[name] for figure in figures if name in figure]
    return mean(values) if values else None


def _median_known(figures: Sequence[Mapping[str, float]], name: str) -> float:
    values = [figure[name] for figure in figures if name in figure]
    return statistics.median(values) if values else 1.0
