"""Where two runs part: sequences, and trajectories of equal weights with the cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.audit.run_diff import Cause, ComparedRun, comparable, diff, difference, parting
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.batches import make_trajectory


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_sequences_are_the_same_before_where_they_part(one: list[int], other: list[int]) -> None:
    found = parting(one, other)
    assert found.of == (len(one), len(other))
    if found.at is None:
        assert one == other
    else:
        assert one[: found.at] == other[: found.at]
        assert one[found.at : found.at + 1] != other[found.at : found.at + 1]


def versioned(*versions: str | None) -> ComparedRun:
    nothing: dict[str, object] = {}
    return ComparedRun(
        config=nothing,
        made_of=nothing,
        versions=versions,
        groups=(),
        batches=(),
        steps=(),
        evaluations={},
    )


def test_versions_are_compared_by_number_where_a_run_has_only_later_ones() -> None:
    whole, again = versioned(*"abcdef"), versioned("a", None, "c", "d", "x")
    assert diff(whole, again).versions.words("version") == "the same before version 4 of 6 and 5"
    found = diff(versioned("a", None, "c"), whole).versions
    assert found.words("version") == "the same as far as both go (3 and 6)"


RATE = "trainer.learning_rate"
RAISED = [(21, f"{RATE} 0.1 -> 0.2")]


@pytest.mark.parametrize(
    ("rates", "changes", "words"),
    [
        ((0.1, 0.1), ([], []), "the same"),
        ((0.1, 0.1), (RAISED, RAISED), "the same"),
        ((0.1, 0.5), ([], []), f"{RATE} 0.1 and 0.5"),
        ((0.1, 0.1), ([], RAISED), f"the other {RAISED[0][1]} at step 21"),
    ],
)
def test_settings_differ_from_the_start_on_or_because_they_changed_in_a_run(
    rates: tuple[float, float],
    changes: tuple[list[tuple[int, str]], list[tuple[int, str]]],
    words: str,
) -> None:
    one, other = (
        dataclasses.replace(versioned(), config={RATE: rate}, changes=own)
        for rate, own in zip(rates, changes, strict=True)
    )
    assert diff(one, other).settings == words


NAME = "g0000000003-001"


def with_token(one: Trajectory, place: int, token: int) -> Trajectory:
    ids = list(one.token_ids)
    ids[place] = token
    return replace(one, token_ids=ids)


def with_logprob(one: Trajectory, place: int, value: float) -> Trajectory:
    logprobs: Sequence[float | None] = [
        value if at == place else known for at, known in enumerate(one.logprobs)
    ]
    return replace(one, logprobs=logprobs)


def last(one: Trajectory) -> int:
    return len(one.token_ids) - 1


CHANGES: list[tuple[Callable[[Trajectory], Trajectory], bool, Cause, bool]] = [
    (lambda one: with_token(one, 0, 999), True, "prompt", True),
    (lambda one: replace(one, reward=0.125), True, "reward", False),
    (lambda one: with_token(one, last(one), 999), True, "numerics", True),
    (lambda one: with_token(one, last(one), 999), False, "sampling", True),
    (
        lambda one: with_logprob(with_token(one, last(one), 999), last(one) - 1, -7.5),
        False,
        "numerics",
        True,
    ),
]


@pytest.mark.parametrize(("change", "alike", "cause", "placed"), CHANGES)
def test_a_trajectory_that_differs_says_where_and_why(
    change: Callable[[Trajectory], Trajectory], alike: bool, cause: Cause, placed: bool
) -> None:
    one = make_trajectory(NAME)
    other = change(one)
    found = difference(one, other, alike=alike)
    assert found is not None
    assert (found.trajectory, found.cause) == (one.trajectory, cause)
    differing = [
        at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b
    ]
    assert found.place == (differing[0] if placed else None)


def test_the_same_trajectory_does_not_differ_whoever_sampled_it() -> None:
    one = make_trajectory(NAME)
    elsewhere = [msgspec.structs.replace(part, worker="w9") for part in one.segments]
    assert difference(one, replace(one, segments=elsewhere), alike=True) is None
    assert comparable(one, one)
    assert not comparable(one, replace(one, digest="1" * 64))
