"""What an episode was worth where its turns began, as a record has it; decides nothing.

A value belongs to a place of the record: the first token of a turn of the model behind the first
turn, so that what was answered to the turn before stands in front of it. It is the mean reward of
continuations from there, under the version of the trajectory. A place may lack its value; where the
prompt ends there is none, because siblings continue from there, and none behind the last turn,
where the reward itself stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dora_pipe.core.errors import SchemaError

if TYPE_CHECKING:
    from dora_pipe.schemas.trajectory import Segment


class TurnValue(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an episode was worth where a turn began.

    Example: ``TurnValue(token=40, mean=0.25, samples=4, sampled=131)``: of four continuations from
    the first 40 tokens, under the trajectory's own version, one earned 1.
    """

    token: int
    """Where the turn begins."""
    mean: float
    """Mean of the rewards of its continuations, as the task gave them."""
    samples: int
    """Continuations with a valid reward."""
    sampled: int
    """Tokens that all continuations from there cost."""


def turn_places(segments: Sequence[Segment]) -> dict[int, int]:
    """Where each turn of the model begins, in order; those without a token are left out."""
    found: dict[int, int] = {}
    for one in segments:
        if one.kind == "model" and one.end > one.start:
            found.setdefault(one.turn, one.start)
    return found


def check_turn_values(values: Sequence[TurnValue], segments: Sequence[Segment]) -> None:
    """Raise SchemaError unless values are finite, in order, and of places where turns begin."""
    if not values:
        return
    later = list(turn_places(segments).values())[1:]
    tokens = [one.token for one in values]
    if tokens != sorted({*tokens}) or not set(tokens) <= set(later):
        raise SchemaError("not where later turns begin", path="$.meta.turn_values")
    for one in values:
        if not math.isfinite(one.mean) or one.samples < 1 or one.sampled < 0:
            raise SchemaError("no value of samples", path="$.meta.turn_values")
