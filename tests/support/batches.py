"""Trajectories and batches generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dora_pipe.consumers.learners.learner import Settings, TrainBatch, TrainGroup
from dora_pipe.schemas.identity import group_id, parse_trajectory_id, trajectory_id
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import Meta, Progress, Segment, Times, Trajectory

SETTINGS: Settings = {
    "trainer.learning_rate": 1e-3,
    "trainer.max_grad_norm": 1.0,
    "trainer.minibatches": 2,
    "objective.kind": "grpo",
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.28,
    "objective.proximal": "behaviour",
    "objective.loss": "token-mean",
    "objective.advantage": "group",
    "objective.advantage_std": True,
    "objective.kl_coef": 0.0,
    "objective.kl_estimate": "k3",
    "objective.mask": "none",
}


def make_trajectory(
    trajectory: str,
    *,
    run: str = "r",
    version: int = 0,
    digest: str = "0" * 64,
    deadline: int = 2,
    attempt: int = 0,
    worker: str = "w0",
    incarnation: int = 7,
    group_size: int = 8,
    prompt: Sequence[int] = (4, 5, 6),
    sampled: Sequence[int] = (7, 8, 2),
    logprobs: Sequence[float] | None = None,
    reward: float | None = 1.0,
) -> Trajectory:
    purpose, ordinal, sample = parse_trajectory_id(trajectory)
    start, end = len(prompt), len(prompt) + len(sampled)
    sampled_logprobs = [-4.5] * len(sampled) if logprobs is None else logprobs
    column: list[float | None] = [*[None] * start, *sampled_logprobs]
    return Trajectory(
        trajectory=trajectory,
        version=version,
        digest=digest,
        token_ids=[*prompt, *sampled],
        logprobs=column,
        sampler_logprobs=column,
        loss_mask=[0] * start + [1] * len(sampled),
        reward=reward,
        segments=_segments(start, end, worker=worker, incarnation=incarnation, version=version),
        meta=Meta(
            run=run,
            schema_version=1,
            group=group_id(purpose, ordinal),
            group_size=group_size,
            sample=sample,
            attempt=attempt,
            purpose=purpose,
            deadline=deadline,
            dataset_digest="d" * 64,
            index=0,
            data_epoch=0,
            seed=1,
            prompt_tokens=start,
            worker=worker,
            incarnation=incarnation,
            finish="stop",
            times=Times(scheduled=1),
            reward_error=None if reward is not None else "the checker crashed",
        ),
    )


def _segments(start: int, end: int, **of: Any) -> list[Segment]:
    return [
        Segment(kind="prompt", start=0, end=start, turn=0, start_ns=1, end_ns=1),
        Segment(kind="model", start=start, end=end, turn=0, start_ns=1, end_ns=2, **of),
    ]


def progress_chunk(
    start: int, sampled: Sequence[int], prompt: Sequence[int] = (), **changes: Any
) -> Progress:
    """Return a progress record of one stay, of worker w0 unless `changes` say otherwise."""
    made_by: dict[str, Any] = {"worker": "w0", "incarnation": 4, "version": 2}
    made_by |= {name: changes.pop(name) for name in list(changes) if name in made_by}
    given, end = len(prompt), len(prompt) + len(sampled)
    times: dict[str, Any] = {"turn": 0, "start_ns": 11, "end_ns": 11}
    segments = [Segment(kind="model", start=given, end=end, **times, **made_by)]
    if prompt:
        segments.insert(0, Segment(kind="prompt", start=0, end=given, **times))
    chunk = Progress(
        trajectory="g0000000000-000",
        attempt=1,
        digest="0" * 64,
        start=start,
        token_ids=[*prompt, *sampled],
        logprobs=[*[None] * given, *[-0.5] * len(sampled)],
        sampler_logprobs=[*[None] * given, *[-0.25] * len(sampled)],
        loss_mask=[*[0] * given, *[1] * len(sampled)],
        segments=segments,
        prefills=(3,),
        previous=7 if start else -1,
        started_ns=11,
        finish="",
        **made_by,
    )
    return replace(chunk, **changes)


def make_batch(
    *,
    seed: int,
    step: int = 0,
    groups: int = 4,
    samples: int = 4,
    tokens: tuple[int, int] = (3, 40),
    vocabulary: int = 90,
    valid: float = 1.0,
) -> TrainBatch:
    chance = random.Random(seed)
    created = []
    for ordinal in range(groups):
        group = group_id("train", ordinal)
        rows = []
        for sample in range(samples):
            size = chance.randint(*tokens)
            rows.append(
                make_trajectory(
                    trajectory_id(group, sample),
                    group_size=samples,
                    prompt=[chance.randrange(4, vocabulary) for _ in range(5)],
                    sampled=[chance.randrange(4, vocabulary) for _ in range(size)],
                    logprobs=[-4.3 - chance.random() * 0.5 for _ in range(size)],
                    reward=chance.random() if chance.random() < valid else None,
                )
            )
        created.append(TrainGroup(group=group, version=0, trajectories=rows))
    return TrainBatch(step=step, groups=created)


def with_teacher(batch: TrainBatch, seed: int = 1) -> TrainBatch:
    chance = random.Random(seed)
    return replace(
        batch,
        teacher={
            trajectory.trajectory: [
                float(np.float32(-4.3 - chance.random())) for _ in range(sum(trajectory.loss_mask))
            ]
            for group in batch.groups
            for trajectory in group.trajectories
        },
    )


def poisoned(batch: TrainBatch, logprob: float = -1e30) -> TrainBatch:
    for trajectory in batch.groups[0].trajectories:
        for index, mask in enumerate(trajectory.loss_mask):
            if mask:
                trajectory.logprobs[index] = logprob  # type: ignore[index]
    return batch


def states_with_a_part_ahead(
    trainer_of: Callable[[], Any], path: Path
) -> list[tuple[Manifest, bytes]]:
    """Return weights and optimizer state after two steps, without and with part of step 2 ahead;
    one trainer each."""
    batch = make_batch(seed=3, step=1, groups=4, samples=3)
    states = []
    for ahead in (False, True):
        trainer = trainer_of()
        trainer.train(make_batch(seed=2, step=0, groups=2, samples=3), SETTINGS)
        if ahead:
            trainer.train_part(replace(batch, groups=batch.groups[:2]), SETTINGS)
        trainer.train(batch, SETTINGS)
        trainer.save_optimizer(path)
        states.append((trainer.manifest(), path.read_bytes()))
    return states


def routed(batch: TrainBatch, *, layers: int, experts: int = 8, per_token: int = 2) -> TrainBatch:
    chance, groups = np.random.default_rng(5), []
    for group in batch.groups:
        created = []
        for trajectory in group.trajectories:
            drawn = chance.random((trajectory.length, layers, experts)).argsort(-1)[
                :, :, :per_token
            ]
            created.append(
                replace(trajectory, routed_experts=Routes.of(drawn.astype("u1"), experts))
            )
        groups.append(replace(group, trajectories=created))
    return replace(batch, groups=groups)
