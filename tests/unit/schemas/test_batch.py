"""Tests of batch digests: every part counts, order does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.batch import batch_digest, deadline_of, staleness_of
from dora_pipe.schemas.control import TakenGroup
from tests.golden.values import GROUPS

CHANGES: list[tuple[str, Any]] = [
    ("trajectory", "g0000000042-005"),
    ("attempt", 3),
    ("incarnation", 8),
    ("partition", 1),
    ("offset", 91),
    ("sha256", "00" * 32),
]


def with_first(**changes: Any) -> list[TakenGroup]:
    first, *rest = GROUPS
    entry, *later = first.trajectories
    changed = (msgspec.structs.replace(entry, **changes), *later)
    return [msgspec.structs.replace(first, trajectories=changed), *rest]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_every_part_of_a_trajectory_counts(name: str, value: Any) -> None:
    assert batch_digest(with_first(**{name: value})) != batch_digest(GROUPS)


@pytest.mark.parametrize(("name", "value"), [("group", "g1"), ("version", 2), ("deadline", 7)])
def test_every_part_of_a_group_counts(name: str, value: Any) -> None:
    first = msgspec.structs.replace(GROUPS[0], **{name: value})
    assert batch_digest([first, *GROUPS[1:]]) != batch_digest(GROUPS)


def test_missing_trajectory_or_group_counts() -> None:
    first = msgspec.structs.replace(GROUPS[0], trajectories=GROUPS[0].trajectories[:1])
    digests = {batch_digest(entry) for entry in (GROUPS, GROUPS[:1], [first, *GROUPS[1:]], [])}
    assert len(digests) == 4


@given(st.permutations(GROUPS), st.booleans())
def test_order_does_not_count(groups: Sequence[TakenGroup], backwards: bool) -> None:
    if backwards:
        groups = [
            msgspec.structs.replace(group, trajectories=tuple(reversed(group.trajectories)))
            for group in groups
        ]
    assert batch_digest(groups) == batch_digest(GROUPS)


def test_trajectory_does_not_pass_for_one_of_another_group() -> None:
    first, second = GROUPS
    swapped = [
        msgspec.structs.replace(first, trajectories=first.trajectories + second.trajectories),
        msgspec.structs.replace(second, trajectories=()),
    ]
    assert batch_digest(swapped) != batch_digest(GROUPS)


def test_group_or_trajectory_that_is_there_twice_is_refused_and_named() -> None:
    with pytest.raises(SchemaError, match="g0000000042 is in the batch twice"):
        batch_digest([*GROUPS, GROUPS[0]])
    with pytest.raises(SchemaError, match="g0000000042-001 is in the batch twice"):
        batch_digest(with_first(trajectory="g0000000042-001"))


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_group_at_its_deadline_has_exactly_the_greatest_staleness(version: int, eta: int) -> None:
    assert staleness_of(deadline_of(version, eta), version) == eta
