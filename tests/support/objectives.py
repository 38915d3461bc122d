"""Objectives with their settings, and random inputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dora_pipe.config.model import Objective
from dora_pipe.config.objectives import KEYS
from dora_pipe.consumers.objectives.terms import Inputs
from dora_pipe.consumers.trainers.port import Settings
from dora_pipe.consumers.trainers.settings import StepSettings, step_settings

KINDS = tuple(KEYS)

OF_TRAINER: Settings = {
    "trainer.learning_rate": 1e-3,
    "trainer.grad_norm_max": 1.0,
    "trainer.minibatches": 2,
    "trainer.micro_batch_tokens": 4096,
}


def objective_settings(kind: str, **keys: Any) -> dict[str, Any]:
    """The logged keys of an objective, defaults filled in, as a batch decision carries them."""
    objective = msgspec.convert({"kind": kind, **keys}, Objective)
    if objective.loss == "constant" and objective.loss_tokens is None:
        objective = msgspec.structs.replace(objective, loss_tokens=64)
    return {
        f"objective.{key}": value
        for key, value in msgspec.to_builtins(objective).items()
        if value is not None
    }


def chosen(kind: str, **keys: Any) -> StepSettings:
    """What a trainer hands to `terms_of`."""
    return step_settings({**OF_TRAINER, **objective_settings(kind, **keys)})


def random_inputs(
    seed: int,
    lengths: Sequence[int],
    *,
    spread: float = 0.3,
    proximal: bool = False,
    on_policy: bool = False,
) -> Inputs:
    """Tokens of trajectories in float64, each trajectory with an advantage of its own.

    `spread` is how far the policies are apart, in nats; with `on_policy` they are all the same.
    """
    made = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=made, dtype=torch.float64)

    logprobs = -0.1 - torch.rand(size, generator=made, dtype=torch.float64) * 3
    apart = 0.0 if on_policy else spread
    behaviour, near, reference = (logprobs + noise(apart) for _ in range(3))
    advantages = torch.randn(len(lengths), generator=made, dtype=torch.float64)
    return Inputs(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour=behaviour,
        proximal=near if proximal else None,
        reference=reference,
        advantages=advantages.repeat_interleave(torch.tensor(lengths)),
        lengths=tuple(lengths),
    )
