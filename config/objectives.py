"""Built-in objectives, one row each, with the keys of [objective] that they use. Nothing is
imported to read a configuration. `model.Objective` refuses other keys and fills in defaults. See
docs/training.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from dora_pipe.core.system.own_code import nearest

Averaging = Literal["token-mean", "sequence-mean", "constant"]
Advantage = Literal["group", "leave-one-out", "version-baseline"]
Proximal = Literal["behaviour", "recomputed"]
KlEstimate = Literal["k1", "k2", "k3"]
Mask = Literal["none", "token", "sequence", "geometric"]
Level = Literal["token", "sequence"]
Plain = float | int | str | bool

_COMMON_OF_ALL: Final[Mapping[str, Plain]] = {"loss": "token-mean", "mask": "none"}
_COMMON: Final[Mapping[str, Plain]] = {
    **_COMMON_OF_ALL,
    "advantage": "group",
    "advantage_std": True,
}
_KL: Final[Mapping[str, Plain]] = {"kl_coef": 0.0, "kl_estimate": "k3"}
_CLIP: Final[Mapping[str, Plain]] = {"clip_low": 0.2, "clip_high": 0.28, "proximal": "behaviour"}
_WEIGHT: Final[Mapping[str, Plain]] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "proximal": "recomputed",
    "level": "token",
}


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in objective."""

    function: str
    keys: Mapping[str, Plain]
    """Keys with their defaults."""


BUILT_IN: Final[Mapping[str, BuiltIn]] = MappingProxyType(
    {
        "grpo": BuiltIn("grpo:grpo", {**_COMMON, **_KL, **_CLIP}),
        # No KL term (arXiv 2503.14476, section 2.3).
        "dapo": BuiltIn("grpo:grpo", {**_COMMON, **_CLIP}),
        "dr-grpo": BuiltIn(
            "grpo:grpo",
            {
                **_COMMON,
                **_KL,
                **_CLIP,
                "clip_high": 0.2,
                "loss": "constant",
                "advantage_std": False,
            },
        ),
        # The bounds of the weight are those of AReaL's and FlashRL's code.
        "decoupled-ppo": BuiltIn(
            "grpo:decoupled_ppo", {**_COMMON, **_KL, **_WEIGHT, "max_weight": 5.0}
        ),
        "tis": BuiltIn("grpo:tis", {**_COMMON, **_KL, **_WEIGHT, "max_weight": 2.0}),
        # No lower bound, as published; 5 = 1 + 4 is ScaleRL's (arXiv 2510.13786).
        "cispo": BuiltIn(
            "reinforce:cispo", {**_COMMON, **_KL, **_CLIP, "clip_low": 1.0, "clip_high": 4.0}
        ),
        "topr": BuiltIn("reinforce:topr", {**_COMMON, **_KL, "level": "sequence"}),
        "weighted-topr": BuiltIn(
            "reinforce:weighted_topr",
            {**_COMMON, **_KL, "level": "sequence", "positive_weight": 1.0, "negative_weight": 1.0},
        ),
        # The bounds of its paper (arXiv 2507.18071, section 5.1).
        "gspo": BuiltIn(
            "grpo:gspo",
            {
                **_COMMON,
                **_KL,
                **_CLIP,
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "loss": "sequence-mean",
            },
        ),
        # CISPO on what the teacher says alone: rewards make no advantage.
        "distill": BuiltIn(
            "reinforce:cispo",
            {
                **_COMMON_OF_ALL,
                **_KL,
                **_CLIP,
                "clip_low": 1.0,
                "clip_high": 4.0,
                "teacher_weight": 1.0,
            },
        ),
    }
)

WHOLE: Final = frozenset({"gspo"})
"""Kinds whose ratio always covers a whole trajectory; for others `level` and `mask` decide."""

OWN_KEYS: Final[Mapping[str, Plain]] = {**_COMMON, **_KL, "proximal": "behaviour"}
"""Keys of a user's objective, in addition to `options`."""

_MASK_BOUNDS: Final[Mapping[str, Plain]] = {"mask_low": 0.5, "mask_high": 5.0}
"""IcePop's (Ring-1T, arXiv 2510.18855)."""

CONDITIONAL: Final[Mapping[str, tuple[str, frozenset[str]]]] = MappingProxyType(
    {
        "mask_low": ("mask", frozenset({"token", "sequence", "geometric"})),
        "mask_high": ("mask", frozenset({"token", "sequence", "geometric"})),
        "loss_tokens": ("loss", frozenset({"constant"})),
    }
)
"""Keys that belong to certain values of another key; `loss_tokens` defaults to
sampling.max_tokens."""

MAY_LACK: Final = frozenset({"teacher_weight"})
"""Optional keys of any kind."""

FOR_GOOD: Final = frozenset({"options", "reference_every"})
"""Keys that never change in a run: the store keeps only the versions that were references."""


def rewarded(kind: str) -> bool:
    """Return whether rewards become advantages; otherwise only the teacher's log-probs do."""
    return kind not in BUILT_IN or "advantage" in BUILT_IN[kind].keys


def is_own(kind: str) -> bool:
    """Return whether it is `module:attribute`."""
    return ":" in kind


def check_kind(kind: str) -> None:
    """Raise ValueError for an unknown kind."""
    if kind not in BUILT_IN and not is_own(kind):
        near = nearest(kind, BUILT_IN)
        own = f"there are {', '.join(BUILT_IN)}, and module:attribute of your own"
        raise ValueError(f"kind: no objective `{kind}`; {near or own}")


def refused_kind(before: str, after: Any) -> str:
    """Return why objective `after` cannot replace `before` in a run, or an empty string. The source
    of a user's objective is part of the fingerprint from the start."""
    if after == before or not isinstance(after, str):
        return ""
    if after in BUILT_IN and not is_own(before):
        return ""
    return f"Invalid enum value {after!r} - at `$.objective.kind`"


def defaults_of(given: Mapping[str, Any]) -> dict[str, Plain]:
    """Return the keys that this objective uses, with their defaults; none for an unknown kind.
    `given` holds the keys of [objective]. Example: ``defaults_of({"kind": "gspo"})["loss"] ==
    "sequence-mean"``"""
    kind = str(given.get("kind") or "grpo")
    defaults = dict(OWN_KEYS if is_own(kind) else BUILT_IN[kind].keys if kind in BUILT_IN else {})
    mask = given.get("mask") or defaults.get("mask")
    if str(mask) in CONDITIONAL["mask_low"][1]:
        defaults |= _MASK_BOUNDS
    return defaults


def uses(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that this objective uses, except `kind` and `options`."""
    defaults = defaults_of(given)
    loss = given.get("loss") or defaults.get("loss")
    return frozenset({*defaults, *(["loss_tokens"] if loss == "constant" else [])})


def unused(given: Mapping[str, Any]) -> list[str]:
    """Return given keys that this objective does not use, sorted."""
    used = uses(given) | MAY_LACK | {"kind", "reference_every"}
    if is_own(str(given.get("kind"))) or not given.get("options"):
        used |= {"options"}
    return sorted(key for key, value in given.items() if value is not None and key not in used)


def why_unused(given: Mapping[str, Any], key: str) -> str:
    """Return why `key` is not used, on one line."""
    kind = given.get("kind") or "grpo"
    if key in CONDITIONAL:
        other, values = CONDITIONAL[key]
        expected = " or ".join(f'"{value}"' for value in sorted(values))
        return f"objective.{key}: requires objective.{other} = {expected}"
    return f"objective.{key}: kind `{kind}` does not use it"


def hint_for(given: Mapping[str, Any], key: str) -> str:
    """Return the kinds that use `key`, or the keys of this kind."""
    if key in CONDITIONAL:
        other, _ = CONDITIONAL[key]
        return f"leave it out, or set objective.{other}"
    kinds = [kind for kind, row in BUILT_IN.items() if key in row.keys]
    used = ", ".join(kinds) or "objectives of your own"
    return f"used by {used}; this kind uses {', '.join(sorted(uses(given)))}"


def settled(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of [objective] after `changes`. A new kind starts from its own defaults, and
    keys of a replaced value are removed; changed keys stay, so that unused ones are refused.
    Example: ``settled({"kind": "grpo", "kl_coef": 0.1}, {"kind": "topr"}) == {"kind": "topr"}``"""
    if changes.get("kind", given.get("kind")) != given.get("kind"):
        stays = {key: given[key] for key in ("reference_every",) if given.get(key) is not None}
        return {**stays, **changes}
    merged = {**given, **changes}
    dropped = {key for key in unused(merged) if key in CONDITIONAL and key not in changes}
    return {key: value for key, value in merged.items() if key not in dropped}
