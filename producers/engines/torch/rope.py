"""Rotary positions of a model, from its config.json alone, and how a number of one is read.

Only frequencies that do not depend on the length of the sequence: a token's bits would, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from dora_pipe.core.errors import PolicyError

GLM_TURNED: Final = 0.5
"""What a glm4_moe config without `partial_rotary_factor` means."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of the sequence."""
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions; the fields from `factor` to `original_tokens` belong to linear and llama3
    scaling, those behind `share` to yarn (arXiv 2309.00071)."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 0
    share: float = 1.0
    """Of each head's numbers, the first ones, that are turned."""
    fast: float = 32.0
    """Turns within `original_tokens` from which on a frequency stays as it is."""
    slow: float = 1.0
    """Turns up to which it is divided by `factor`."""
    whole: bool = True
    """Whether the pairs between are counted from a whole number to a whole number."""
    stretch: float = 1.0
    """What turned numbers are multiplied with."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Of a config. Raises PolicyError for one that lacks a number."""
    fields = rope_fields(config)
    kind, theta = str(fields["rope_type"]), positive(fields, "rope_theta", float)
    share = positive(fields, "partial_rotary_factor", float)
    plain = Rope(kind=kind, theta=theta, share=share)
    if kind == "default":
        return plain
    scaled = replace(plain, factor=positive(fields, "factor", float))
    if kind == "linear":
        return scaled
    positions = config.get("max_position_embeddings")
    scaled = replace(
        scaled,
        original_tokens=positive(fields, "original_max_position_embeddings", int, positions),
    )
    if kind == "yarn":
        return replace(
            scaled,
            fast=positive(fields, "beta_fast", float, 32.0),
            slow=positive(fields, "beta_slow", float, 1.0),
            whole=bool(fields.get("truncate", True)),
            stretch=_stretch(fields, scaled.factor),
        )
    return replace(
        scaled,
        low_freq_factor=positive(fields, "low_freq_factor", float),
        high_freq_factor=positive(fields, "high_freq_factor", float),
    )


def _stretch(fields: Mapping[str, Any], factor: float) -> float:
    """What yarn multiplies turned numbers with."""
    if fields.get("attention_factor") is not None:
        return positive(fields, "attention_factor", float)
    over, under = fields.get("mscale"), fields.get("mscale_all_dim")
    if over and under:
        return _magnified(factor, float(over)) / _magnified(factor, float(under))
    return _magnified(factor)


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, from the present form of a config or the one before it."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    fields.setdefault("rope_type", fields.get("type", "default"))
    fields.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    turned = GLM_TURNED if config.get("model_type") == "glm4_moe" else 1.0
    fields.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or turned)
    return fields


def sharpened(fields: Mapping[str, Any]) -> float:
    """What attention over latents multiplies products of queries and keys with, by its rotary
    settings."""
    every = float(fields.get("mscale_all_dim") or 0)
    if fields["rope_type"] == "default" or not every:
        return 1.0
    return _magnified(positive(fields, "factor", float), every) ** 2


def _magnified(factor: float, share: float = 1.0) -> float:
    """By how much yarn sharpens attention over `factor` times as many tokens."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def positive(config: Mapping[str, Any], key: str, kind: type[N], default: N | None = None) -> N:
    """A positive number of a config. Raises PolicyError where there is none."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
        raise PolicyError(f"{key} is missing or is no positive number")
    return kind(value)
