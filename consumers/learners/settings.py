"""Configuration keys that a training step depends on."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

import msgspec

from dora_pipe.config.model import LEARNING_RATE_MAX, Objective
from dora_pipe.config.objectives import MAY_LACK, Advantage, defaults_of, rewarded, settled, uses
from dora_pipe.consumers.learners.learner import Settings
from dora_pipe.core.errors import ConfigError

MICRO_BATCH_TOKENS: Final = "trainer.micro_batch_tokens"
"""Not logged as a key, but in the commit's numerics."""

PACKING: Final = "trainer.packing"
"""Also in the numerics, with the kind of attention."""

MASKED: Final = "on"
"""One mask per packed line."""

VARLEN: Final = "varlen"
"""Attention per sequence, if the device supports it."""

Packing = bool | Literal["on", "varlen"]
"""True selects the best supported kind."""

ROUTER_AUX_LOSS: Final = "trainer.router_aux_loss"
_OF: Final = "objective."
_OPTION: Final = "options."


class StepSettings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename=lambda name: None if name == "objective" else f"trainer.{name}",
):
    """Settings of one step; see `dora_pipe.config.model`."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0, le=LEARNING_RATE_MAX)]
    """Rate of this step; 0 after the schedule's end."""
    max_grad_norm: float
    minibatches: Annotated[int, msgspec.Meta(ge=1)]
    micro_batch_tokens: Annotated[int, msgspec.Meta(ge=1)]
    packing: Packing = False
    router_aux_loss: float = 0.0
    reference: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """KL reference version, if it moves."""
    objective: Objective
    """Keys that its kind does not use are None."""


def step_settings(settings: Settings) -> StepSettings:
    """Convert logged keys, ignoring others. Raises ConfigError."""
    given = _of_objective(settings)
    used = uses(given) | {"kind"}
    taken = used | MAY_LACK | {"options"}
    own = {key: value for key, value in given.items() if key in taken}
    missing = sorted(key for key in used if own.get(key) is None)
    try:
        if missing:
            lacks = f"Object missing required field `objective.{missing[0]}`"
            raise msgspec.ValidationError(f"{lacks} of kind {own.get('kind')}")
        return msgspec.convert({**settings, "objective": own}, StepSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of this step cannot be used: {error}") from None


def changed_settings(settings: Settings, changes: Settings, *, max_tokens: int) -> Settings:
    """Return settings changed as by `set`; `max_tokens` is sampling.max_tokens.

    Another objective kind starts from its defaults. Raises ConfigError.
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
    options = {_OPTION + key: value for key, value in objective.options.items()}
    for key, value in (msgspec.to_builtins(objective) | options).items():
        if value is not None and key != "options":
            merged[_OF + key] = value
    return merged


def _of_objective(settings: Settings) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section == "objective" and name.startswith(_OPTION):
            options[name.removeprefix(_OPTION)] = value
        elif section == "objective":
            keys[name] = value
    return {**keys, "options": options} if options else keys


def advantage_rule(settings: Settings) -> tuple[Advantage | None, bool]:
    """Return the advantage rule, and whether it divides by std."""
    given = _of_objective(settings)
    complete = {**defaults_of(given), **given}
    advantage = complete.get("advantage") if rewarded(str(complete.get("kind", "grpo"))) else None
    return cast("Advantage | None", advantage), bool(complete.get("advantage_std"))
