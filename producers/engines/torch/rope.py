"""Rotary positions in config.json, independent of the sequence length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from dora_pipe.core.errors import PolicyError

GLM_TURNED: Final = 0.5
"""Default `partial_rotary_factor` of glm4_moe."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions, with linear or llama3 scaling, or yarn (arXiv 2309.00071) after `share`."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 0
    share: float = 1.0
    """Share of dimensions with rotary position, the first ones."""
    fast: float = 32.0
    """beta_fast: rotations above which a frequency is kept."""
    slow: float = 1.0
    """beta_slow: rotations below which it is divided by `factor`."""
    whole: bool = True
    """Round the bounds of the blend."""
    stretch: float = 1.0
    """attention_factor."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read a config. Raises PolicyError for a missing number."""
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
        scaled, original_tokens=positive(fields, "original_max_position_embeddings", int, positions)
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
    if fields.get("attention_factor") is not None:
        return positive(fields, "attention_factor", float)
    over, under = fields.get("mscale"), fields.get("mscale_all_dim")
    if over and under:
        return _magnified(factor, float(over)) / _magnified(factor, float(under))
    return _magnified(factor)


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a current or older config."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    fields.setdefault("rope_type", fields.get("type", "default"))
    fields.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    turned = GLM_TURNED if config.get("model_type") == "glm4_moe" else 1.0
    fields.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or turned)
    return fields


def _magnified(factor: float, share: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def positive(config: Mapping[str, Any], key: str, kind: type[N], default: N | None = None) -> N:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
        raise PolicyError(f"{key} is missing or not positive")
    return kind(value)
