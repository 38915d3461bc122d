"""Learner with a teacher, which scores batches whose settings give it a weight.

Replay reads the scores from contributions unless the teacher is bitwise repeatable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from dora_pipe.consumers.contributions import TEACHER
from dora_pipe.consumers.learners.learner import (
    Learner,
    Settings,
    StepResult,
    TrainBatch,
    TrainsParts,
)
from dora_pipe.consumers.teachers.teacher import Teacher
from dora_pipe.core.errors import ConfigError
from dora_pipe.schemas.context_tokens import counted_places, rows_of

WEIGHT: Final = "objective.teacher_weight"

Column = Mapping[str, Sequence[float]]


def with_teacher(learner: Learner, teacher: Teacher | None) -> Learner:
    """Return the learner, with its teacher if any."""
    return learner if teacher is None else cast("Learner", LearnerWithTeacher(learner, teacher))


def add_teacher_logprobs(
    learner: Learner,
    batch: TrainBatch,
    settings: Settings,
    kept: Callable[[], Column] | None = None,
) -> Generator[None, None, TrainBatch]:
    """Return the batch with teacher log-probs, if required; `kept` returns logged ones.

    Yields while waiting. Raises ConfigError without a teacher, and as `Teacher.logprobs`.
    """
    if not settings.get(WEIGHT) or batch.teacher is not None:
        return batch
    if not isinstance(learner, LearnerWithTeacher):
        raise ConfigError(f"{WEIGHT}: this run has no teacher")
    if kept is not None and not learner.teacher.repeatable:
        return replace(batch, teacher=kept())
    return (yield from learner.asked(batch))


def waits_for(learner: Learner | None) -> str:
    """Return the teacher's pending wait, in words."""
    return learner.teacher.waits_for if isinstance(learner, LearnerWithTeacher) else ""


class LearnerWithTeacher:
    """Learner plus teacher; delegates other attributes to the learner."""

    def __init__(self, learner: Learner, teacher: Teacher) -> None:
        self._learner = learner
        self.teacher = teacher
        self._said: dict[str, Sequence[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def asked(self, batch: TrainBatch) -> Generator[None, None, TrainBatch]:
        """Return the batch with teacher log-probs, new or from its first parts."""
        everything = [trajectory for group in batch.groups for trajectory in group.trajectories]
        trajectories = [
            trajectory for trajectory in everything if trajectory.trajectory not in self._said
        ]
        rows = [(ids, mask) for trajectory in trajectories for ids, mask, _ in rows_of(trajectory)]
        following = iter((yield from self.teacher.logprobs(rows)))
        column = {
            trajectory.trajectory: self._said[trajectory.trajectory]
            for trajectory in everything
            if trajectory.trajectory in self._said
        }
        for trajectory in trajectories:
            first, *contexts = islice(following, 1 + len(trajectory.meta.contexts))
            column[trajectory.trajectory] = list(chain(first, *contexts)) if contexts else first
        return replace(batch, teacher=column)

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        """See `Learner`; adds the teacher's column to the contributions."""
        batch = _result_of(add_teacher_logprobs(cast("Learner", self), batch, settings))
        result = self._learner.train(batch, settings)
        self._said = {}
        column = batch.teacher
        if column is None:
            return result
        return replace(
            result,
            metrics={**result.metrics, **_teacher_kl(batch, column)},
            contributions=[
                {**row, TEACHER: column[row["trajectory"]]} for row in result.contributions
            ],
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """See `TrainsParts`; keeps the teacher's log-probs."""
        batch = _result_of(add_teacher_logprobs(cast("Learner", self), batch, settings))
        self._said |= batch.teacher or {}
        if isinstance(self._learner, TrainsParts):
            self._learner.train_part(batch, settings)

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        self._said = {}
        self._learner.load(weights, digest=digest, optimizer=optimizer)

    def numerics(self) -> dict[str, str]:
        """See `Learner`; adds the teacher."""
        return {**self._learner.numerics(), "teacher": self.teacher.name()}


def _result_of(asking: Generator[None, None, TrainBatch]) -> TrainBatch:
    while True:
        try:
            next(asking)
        except StopIteration as ended:
            return cast("TrainBatch", ended.value)


def _teacher_kl(batch: TrainBatch, column: Column) -> dict[str, float]:
    """Estimated KL of sampling policy to teacher: mean behavior minus teacher log-prob, nats per
    token."""
    gaps = [
        behaviour - logprobs
        for group in batch.groups
        for trajectory in group.trajectories
        for behaviour, logprobs in zip(
            np.asarray(trajectory.logprobs, np.float32)[counted_places(trajectory)].tolist(),
            column[trajectory.trajectory],
            strict=True,
        )
    ]
    return {"teacher_kl": math.fsum(gaps) / len(gaps)} if gaps else {}
