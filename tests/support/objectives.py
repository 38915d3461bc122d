"""Objectives with settings and random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from dora_pipe.config.model import Objective
from dora_pipe.config.objectives import BUILT_IN
from dora_pipe.consumers.learners.learner import Settings
from dora_pipe.consumers.learners.settings import step_settings
from dora_pipe.consumers.objectives.registry import terms_of
from dora_pipe.consumers.objectives.terms import Inputs

KINDS = tuple(BUILT_IN)

OF_TRAINER: Settings = {
    "trainer.learning_rate": 1e-3,
    "trainer.max_grad_norm": 1.0,
    "trainer.minibatches": 2,
    "trainer.micro_batch_tokens": 4096,
}


def objective_settings(kind: str, **keys: Any) -> dict[str, Any]:
    objective = msgspec.convert({"kind": kind, **keys}, Objective)
    if objective.loss == "constant" and objective.loss_tokens is None:
        objective = msgspec.structs.replace(objective, loss_tokens=64)
    plain = msgspec.to_builtins(objective)
    plain |= {f"options.{key}": value for key, value in plain.pop("options").items()}
    return {f"objective.{key}": value for key, value in plain.items() if value is not None}


def chosen(kind: str, **keys: Any) -> Objective:
    return step_settings({**OF_TRAINER, **objective_settings(kind, **keys)}).objective


def random_inputs(
    seed: int,
    lengths: Sequence[int],
    *,
    spread: float = 0.3,
    proximal: bool = False,
    on_policy: bool = False,
) -> Inputs:
    """Return float64 tokens with one advantage per trajectory. `spread` is the distance of the
    policies in nats; `on_policy` makes them equal."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    logprobs = -0.1 - torch.rand(size, generator=generator, dtype=torch.float64) * 3
    apart = 0.0 if on_policy else spread
    behaviour, near, reference = (logprobs + noise(apart) for _ in range(3))
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    teacher = logprobs + noise(0.5)
    return Inputs(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour=behaviour,
        proximal=near if proximal else None,
        reference=reference,
        teacher=teacher,
        advantages=advantages.repeat_interleave(torch.tensor(lengths)),
        lengths=tuple(lengths),
    )


def gradient(inputs: Inputs, settings: Objective) -> Tensor:
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    torch.autograd.backward(terms_of(replace(inputs, logprobs=logprobs), settings).loss.sum())
    assert logprobs.grad is not None
    return logprobs.grad


def rows(inputs: Inputs, values: Tensor) -> list[Tensor]:
    return list(torch.split(values, list(inputs.lengths)))


def worth_of(inputs: Inputs, settings: Objective) -> Tensor:
    if not settings.teacher_weight:
        return inputs.advantages
    assert inputs.teacher is not None
    gap = inputs.teacher - inputs.logprobs.detach()
    return inputs.advantages + settings.teacher_weight * gap


def weights_of(inputs: Inputs, settings: Objective) -> Tensor:
    results = []
    log_ratio = (inputs.logprobs - inputs.around).detach()
    for part, worth in zip(
        rows(inputs, log_ratio), rows(inputs, worth_of(inputs, settings)), strict=True
    ):
        if settings.kind in ("cispo", "distill"):
            assert settings.clip_low is not None
            assert settings.clip_high is not None
            results.append(part.exp().clip(1 - settings.clip_low, 1 + settings.clip_high))
            continue
        own = part.exp() if settings.level == "token" else part.sum().exp().expand(len(part))
        good, bad = settings.positive_weight, settings.negative_weight
        entry = torch.full_like(part, 1.0 if good is None else good)
        tapered = own.clip(0, 1) * (1.0 if bad is None else bad)
        results.append(torch.where(worth >= 0, entry, tapered))
    return torch.cat(results)
