"""Which keys of [objective] each kind of objective uses, and what they are when not given.

`model.Objective` refuses the other keys and fills in the defaults; what the kinds compute is in
`dora_pipe.consumers.objectives`. See docs/objectives.md for when to use which.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

Kind = Literal[
    "grpo",
    "dapo",
    "dr-grpo",
    "decoupled-ppo",
    "tis",
    "cispo",
    "topr",
    "weighted-topr",
    "gspo",
]
Averaging = Literal["token-mean", "sequence-mean", "constant"]
Advantage = Literal["group", "leave-one-out", "version-baseline"]
Proximal = Literal["behaviour", "recomputed"]
KlEstimate = Literal["k1", "k2", "k3"]
Mask = Literal["none", "token", "sequence", "geometric"]
Level = Literal["token", "sequence"]
Plain = float | int | str | bool

_COMMON: Final[Mapping[str, Plain]] = {
    "loss": "token-mean",
    "advantage": "group",
    "advantage_std": True,
    "mask": "none",
}
_KL: Final[Mapping[str, Plain]] = {"kl": 0.0, "kl_estimate": "k3"}
_CLIP: Final[Mapping[str, Plain]] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "proximal": "behaviour",
}
_WEIGHT: Final[Mapping[str, Plain]] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "proximal": "recomputed",
    "level": "token",
}

KEYS: Final[Mapping[str, Mapping[str, Plain]]] = MappingProxyType(
    {
        "grpo": {**_COMMON, **_KL, **_CLIP},
        "dapo": {**_COMMON, **_CLIP},
        "dr-grpo": {
            **_COMMON,
            **_KL,
            **_CLIP,
            "clip_high": 0.2,
            "loss": "constant",
            "advantage_std": False,
        },
        "decoupled-ppo": {**_COMMON, **_KL, **_WEIGHT, "weight_max": 5.0},
        "tis": {**_COMMON, **_KL, **_WEIGHT, "weight_max": 2.0},
        "cispo": {**_COMMON, **_KL, **_CLIP, "clip_low": 1.0, "clip_high": 4.0},
        "topr": {**_COMMON, **_KL, "level": "sequence"},
        "weighted-topr": {
            **_COMMON,
            **_KL,
            "level": "sequence",
            "positive_weight": 1.0,
            "negative_weight": 1.0,
        },
        "gspo": {
            **_COMMON,
            **_KL,
            **_CLIP,
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss": "sequence-mean",
        },
    }
)
"""Every key that a kind uses, with its default there.

DAPO has no KL term (arXiv 2503.14476, section 2.3). CISPO has no lower bound as published, and
5 = 1 + 4 as the upper one is ScaleRL's (arXiv 2510.13786). GSPO's bounds are of its paper (arXiv
2507.18071, section 5.1), 5.0 and 2.0 for the weight those of AReaL's and FlashRL's code.
"""

_MASK_BOUNDS: Final[Mapping[str, Plain]] = {"mask_low": 0.5, "mask_high": 5.0}
"""IcePop's (Ring-1T, arXiv 2510.18855)."""

CONDITIONAL: Final[Mapping[str, tuple[str, frozenset[str]]]] = MappingProxyType(
    {
        "mask_low": ("mask", frozenset({"token", "sequence", "geometric"})),
        "mask_high": ("mask", frozenset({"token", "sequence", "geometric"})),
        "loss_tokens": ("loss", frozenset({"constant"})),
    }
)
"""Keys that belong to certain values of another one; `loss_tokens` is then sampling.max_tokens
where it is not given."""


def defaults_of(given: Mapping[str, Any]) -> dict[str, Plain]:
    """Every key that this objective uses and that has a default of its own, with it.

    `given` are keys of [objective], None where they are not. An unknown kind uses nothing.

    Example: ``defaults_of({"kind": "gspo"})["loss"] == "sequence-mean"``
    """
    known = dict(KEYS.get(str(given.get("kind") or "grpo"), {}))
    mask = given.get("mask") or known.get("mask")
    if str(mask) in CONDITIONAL["mask_low"][1]:
        known |= _MASK_BOUNDS
    return known


def uses(given: Mapping[str, Any]) -> frozenset[str]:
    """Names of the keys that this objective uses, beside `kind`."""
    known = defaults_of(given)
    loss = given.get("loss") or known.get("loss")
    return frozenset({*known, *(["loss_tokens"] if loss == "constant" else [])})


def unused(given: Mapping[str, Any]) -> list[str]:
    """Keys that are given and that this objective does not use, sorted."""
    used = uses(given) | {"kind"}
    return sorted(key for key, value in given.items() if value is not None and key not in used)


def why_unused(given: Mapping[str, Any], key: str) -> str:
    """Why `key` is not used, in one line."""
    kind = given.get("kind") or "grpo"
    if key in CONDITIONAL:
        other, values = CONDITIONAL[key]
        wanted = " or ".join(f'"{value}"' for value in sorted(values))
        return f"objective.{key}: it belongs to objective.{other} = {wanted}"
    return f"objective.{key}: kind `{kind}` does not use it"


def hint_for(given: Mapping[str, Any], key: str) -> str:
    """Which kinds use `key`, or what this one has instead."""
    if key in CONDITIONAL:
        other, _ = CONDITIONAL[key]
        return f"leave it out, or set objective.{other}"
    kinds = [kind for kind, keys in KEYS.items() if key in keys]
    return f"it is used by {', '.join(kinds)}; this kind uses {', '.join(sorted(uses(given)))}"


def settled(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [objective] after `changes`: another kind starts from its own defaults.

    Keys that belong to a value that is changed away go with it; what was changed stays even if
    it is not used, so that it is refused and not forgotten.

    Example: ``settled({"kind": "grpo", "kl": 0.1}, {"kind": "topr"}) == {"kind": "topr"}``
    """
    if changes.get("kind", given.get("kind")) != given.get("kind"):
        return dict(changes)
    merged = {**given, **changes}
    gone = {key for key in unused(merged) if key in CONDITIONAL and key not in changes}
    return {key: value for key, value in merged.items() if key not in gone}
