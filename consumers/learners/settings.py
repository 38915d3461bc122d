"""The configuration keys a training step depends on, with their types; it decides nothing."""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from dora_pipe.config.model import Objective
from dora_pipe.config.objectives import (
    Advantage,
    Averaging,
    Kind,
    KlEstimate,
    Level,
    Mask,
    Proximal,
    settled,
    uses,
)
from dora_pipe.config.training_sections import LEARNING_RATE_MAX
from dora_pipe.consumers.learners.port import Settings
from dora_pipe.core.errors import ConfigError

MICRO_BATCH_TOKENS: Final = "trainer.micro_batch_tokens"
"""The one key here that is not logged: a commit repeats it among its numerics."""

_OF: Final = "objective."

_KEYS: Final = {
    **{
        name: f"trainer.{name}"
        for name in ("learning_rate", "grad_norm_max", "minibatches", "micro_batch_tokens")
    },
    **{name: f"{_OF}{name}" for name in Objective.__struct_fields__},
}


class StepSettings(msgspec.Struct, frozen=True, kw_only=True, rename=_KEYS):
    """What is in force for one step; `dora_pipe.config.model` says what each key means.

    Keys that the kind of objective does not use are None. Those with a default here are younger
    than the first logs, which therefore lack them.

    Example: ``step_settings({"trainer.learning_rate": 3e-4, ...}).learning_rate == 3e-4``
    """

    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=LEARNING_RATE_MAX)]
    grad_norm_max: float
    minibatches: Annotated[int, msgspec.Meta(ge=1)]
    micro_batch_tokens: Annotated[int, msgspec.Meta(ge=1)]
    loss: Averaging
    advantage_std: bool
    kind: Kind = "grpo"
    proximal: Proximal = "behaviour"
    advantage: Advantage = "group"
    kl: float | None = None
    kl_estimate: KlEstimate = "k3"
    mask: Mask = "none"
    clip_low: float | None = None
    clip_high: float | None = None
    weight_max: float | None = None
    level: Level | None = None
    positive_weight: float | None = None
    negative_weight: float | None = None
    loss_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    mask_low: float | None = None
    mask_high: float | None = None


def step_settings(settings: Settings) -> StepSettings:
    """From logged keys; others are ignored. Raises ConfigError for one missing or mistyped."""
    try:
        step = msgspec.convert(dict(settings), StepSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of this step cannot be used: {error}") from None
    given = {name: getattr(step, name) for name in Objective.__struct_fields__}
    missing = sorted(key for key in uses(given) if given[key] is None)
    if missing:
        raise ConfigError(
            "the settings of this step cannot be used: Object missing required field"
            f" `objective.{missing[0]}` of kind {step.kind}"
        )
    return step


def changed_settings(settings: Settings, changes: Settings, *, max_tokens: int) -> Settings:
    """A step's settings with other values, as `set` would have changed them.

    Another kind of objective starts from its own defaults; `max_tokens` is sampling.max_tokens.
    Raises ConfigError for a value or a key that cannot be.
    """
    named = settled(_of_objective(settings), _of_objective(changes))
    merged = {**settings, **changes}
    for key in [key for key in merged if key.startswith(_OF)]:
        del merged[key]
    try:
        objective = msgspec.convert(named, Objective)
    except msgspec.ValidationError as error:
        raise ConfigError(f"these settings cannot be used: {error}") from None
    if objective.loss == "constant" and objective.loss_tokens is None:
        objective = msgspec.structs.replace(objective, loss_tokens=max_tokens)
    for key, value in msgspec.to_builtins(objective).items():
        if value is not None:
            merged[_OF + key] = value
    return merged


def _of_objective(settings: Settings) -> dict[str, Any]:
    return {key.removeprefix(_OF): v for key, v in settings.items() if key.startswith(_OF)}


def advantage_rule(settings: Settings) -> tuple[Advantage, bool]:
    """Which advantages a commit's settings ask for, and whether divided; older ones say less."""
    advantage = cast("Advantage", settings.get("objective.advantage", "group"))
    return advantage, bool(settings.get("objective.advantage_std", True))
