"""The configuration keys a training step depends on, with their types; it decides nothing."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from dora_pipe.consumers.trainers.port import Settings
from dora_pipe.errors import ConfigError

MICRO_BATCH_TOKENS: Final = "trainer.micro_batch_tokens"
"""The one key here that is not logged: a commit repeats it among its numerics."""

LEARNING_RATE_MAX: Final = 1e3
"""Gradients are clipped, so below this an update cannot overflow float32."""

_KEYS: Final = {
    "learning_rate": "trainer.learning_rate",
    "grad_norm_max": "trainer.grad_norm_max",
    "minibatches": "trainer.minibatches",
    "micro_batch_tokens": MICRO_BATCH_TOKENS,
    "clip_low": "objective.clip_low",
    "clip_high": "objective.clip_high",
    "loss": "objective.loss",
    "advantage_std": "objective.advantage_std",
    "kl": "objective.kl",
}


class StepSettings(msgspec.Struct, frozen=True, kw_only=True, rename=_KEYS):
    """What is in force for one step; `dora_pipe.config.model` says what each key means.

    Example: ``step_settings({"trainer.learning_rate": 3e-4, ...}).learning_rate == 3e-4``
    """

    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=LEARNING_RATE_MAX)]
    grad_norm_max: float
    minibatches: Annotated[int, msgspec.Meta(ge=1)]
    micro_batch_tokens: Annotated[int, msgspec.Meta(ge=1)]
    clip_low: float
    clip_high: float
    loss: Literal["token-mean", "sequence-mean"]
    advantage_std: bool
    kl: float


def step_settings(settings: Settings) -> StepSettings:
    """From logged keys; others are ignored. Raises ConfigError for one missing or mistyped."""
    try:
        return msgspec.convert(dict(settings), StepSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of this step cannot be used: {error}") from None
