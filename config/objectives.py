"""The objectives that come with the package, a row each, and which keys of [objective] one uses.

A row says where the function is, and the keys it uses with their defaults: nothing is imported to
read a configuration, not even for `module:attribute` of a user's. `model.Objective`
refuses the other keys and fills the defaults in. See docs/objectives.md for when to use which, and
docs/extending.md for how one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from dora_pipe.core.own_code import nearest

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


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A row: an objective that comes with the package."""

    function: str
    """`module:attribute` below `consumers/objectives`."""
    keys: Mapping[str, Plain]
    """Every key that it uses, with its default there."""


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
            "grpo:decoupled_ppo", {**_COMMON, **_KL, **_WEIGHT, "weight_max": 5.0}
        ),
        "tis": BuiltIn("grpo:tis", {**_COMMON, **_KL, **_WEIGHT, "weight_max": 2.0}),
        # No lower bound, as published; 5 = 1 + 4 is ScaleRL's (arXiv 2510.13786).
        "cispo": BuiltIn(
            "reinforce:cispo", {**_COMMON, **_KL, **_CLIP, "clip_low": 1.0, "clip_high": 4.0}
        ),
        "topr": BuiltIn("reinforce:topr", {**_COMMON, **_KL, "level": "sequence"}),
        "weighted-topr": BuiltIn(
            "reinforce:weighted_topr",
            {
                **_COMMON,
                **_KL,
                "level": "sequence",
                "positive_weight": 1.0,
                "negative_weight": 1.0,
            },
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
"""Kinds whose ratio is always that of a whole trajectory; `level` and `mask` say it of others."""

OWN_KEYS: Final[Mapping[str, Plain]] = {**_COMMON, **_KL, "proximal": "behaviour"}
"""Keys of an objective of a user's own, beside those in `options`."""

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

MAY_LACK: Final = frozenset({"teacher_weight"})
"""Keys that any kind takes, and does without."""

FOR_GOOD: Final = frozenset({"options", "reference_every"})
"""Keys that do not change in a run, whatever its kind becomes: versions that were references are
kept, and others are not."""


def rewarded(kind: str) -> bool:
    """Whether rewards become advantages; the teacher's log-probs alone do, where they do not."""
    return kind not in BUILT_IN or "advantage" in BUILT_IN[kind].keys


def is_own(kind: str) -> bool:
    """Whether it is `module:attribute` of a user's."""
    return ":" in kind


def check_kind(kind: str) -> None:
    """Raise ValueError for a kind that is neither known nor a user's own."""
    if kind not in BUILT_IN and not is_own(kind):
        near = nearest(kind, BUILT_IN)
        own = f"there are {', '.join(BUILT_IN)}, and module:attribute of your own"
        raise ValueError(f"kind: no objective `{kind}`; {near or own}")


def refused_kind(before: str, after: Any) -> str:
    """Why a run whose objective is `before` cannot go on with `after`; empty if it can.

    The source of a user's own is in the fingerprint of a run from its beginning on, so it neither
    comes nor goes while the run lasts.
    """
    if after == before or not isinstance(after, str):
        return ""
    if after in BUILT_IN and not is_own(before):
        return ""
    return f"Invalid enum value {after!r} - at `$.objective.kind`"


def defaults_of(given: Mapping[str, Any]) -> dict[str, Plain]:
    """Every key that this objective uses and that has a default of its own, with it.

    `given` are keys of [objective], None where they are not. An unknown kind uses nothing.

    Example: ``defaults_of({"kind": "gspo"})["loss"] == "sequence-mean"``
    """
    kind = str(given.get("kind") or "grpo")
    known = dict(OWN_KEYS if is_own(kind) else BUILT_IN[kind].keys if kind in BUILT_IN else {})
    mask = given.get("mask") or known.get("mask")
    if str(mask) in CONDITIONAL["mask_low"][1]:
        known |= _MASK_BOUNDS
    return known


def uses(given: Mapping[str, Any]) -> frozenset[str]:
    """Names of the keys that this objective uses, beside `kind` and `options`."""
    known = defaults_of(given)
    loss = given.get("loss") or known.get("loss")
    return frozenset({*known, *(["loss_tokens"] if loss == "constant" else [])})


def unused(given: Mapping[str, Any]) -> list[str]:
    """Keys that are given and that this objective does not use, sorted."""
    used = uses(given) | MAY_LACK | {"kind", "reference_every"}
    if is_own(str(given.get("kind"))) or not given.get("options"):
        used |= {"options"}
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
    kinds = [kind for kind, row in BUILT_IN.items() if key in row.keys]
    used = ", ".join(kinds) or "objectives of your own"
    return f"it is used by {used}; this kind uses {', '.join(sorted(uses(given)))}"


def settled(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [objective] after `changes`: another kind starts from its own defaults.

    Keys that belong to a value that is changed away go with it; what was changed stays even if
    it is not used, so that it is refused and not forgotten.

    Example: ``settled({"kind": "grpo", "kl": 0.1}, {"kind": "topr"}) == {"kind": "topr"}``
    """
    if changes.get("kind", given.get("kind")) != given.get("kind"):
        stays = {key: given[key] for key in ("reference_every",) if given.get(key) is not None}
        return {**stays, **changes}
    merged = {**given, **changes}
    gone = {key for key in unused(merged) if key in CONDITIONAL and key not in changes}
    return {key: value for key, value in merged.items() if key not in gone}
