"""The first record where two runs part, and the cause of a trajectory's difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.diff import Cause, ComparedRun, Kind, Records, compare, difference
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.batches import make_trajectory

NAME = "g0000000003-001"
RATE = "trainer.learning_rate"
GROUPS: Records = {0: (10, "row 0 under version 0"), 1: (40, "row 1 under version 1")}
VERSIONS: Records = {0: (0, "a"), 1: (30, "b"), 2: (60, "c")}
TRAJECTORIES: Records = {NAME: (20, (("a", 3), "tokens", 1.0))}


def run(**changes: Any) -> ComparedRun:
    records: dict[Kind, Records] = {
        "group": GROUPS,
        "version": VERSIONS,
        "trajectory": TRAJECTORIES,
    }
    records |= changes.pop("records", {})
    given: Mapping[str, Any] = {"config": {RATE: 0.1}, "made_of": {"seed": 7}, **changes}
    return ComparedRun(records=records, **{"changes": [], **given})


def test_the_first_record_is_the_earliest_of_those_that_differ() -> None:
    assert not compare(run(), run()).partings
    other = run(
        records={
            "group": {**GROUPS, 1: (41, "row 5 under version 1")},
            "version": {**VERSIONS, 1: (31, "x"), 2: (61, "y")},
        }
    )
    found = compare(run(), other)
    assert [(one.kind, one.name) for one in found.partings] == [("version", "1"), ("group", "1")]
    assert found.partings[0].values == ("b", "x")


def test_a_shorter_run_does_not_differ_and_other_weights_are_not_compared() -> None:
    shorter: dict[Kind, Records] = {
        "version": {0: (0, "a")},
        "trajectory": {NAME: (20, (("b", 3), "other tokens", 0.0))},
    }
    found = compare(run(), run(records=shorter))
    assert not found.partings
    assert found.compared == {"group": 2, "version": 1, "trajectory": 0}


def test_a_setting_that_changed_in_mid_run_is_the_first_reason() -> None:
    raised = [(21, f"{RATE} 0.1 -> 0.2")]
    found = compare(run(), run(changes=raised, config={RATE: 0.1, "run.name": "b"}))
    assert found.reasons(("a", "b")) == [f"b changed {RATE} 0.1 -> 0.2 at step 21"]
    both = compare(run(changes=raised), run(changes=raised, made_of={"seed": 8}))
    assert both.reasons(("a", "b")) == ["seed: 7 and 8"]


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


CHANGES: list[tuple[Callable[[Trajectory], Trajectory], bool, Cause]] = [
    (lambda one: with_token(one, 0, 999), True, "prompt"),
    (lambda one: replace(one, reward=0.125), True, "reward"),
    (lambda one: with_token(one, last(one), 999), True, "numerics"),
    (lambda one: with_token(one, last(one), 999), False, "sampling"),
    (
        lambda one: with_logprob(with_token(one, last(one), 999), last(one) - 1, -7.5),
        False,
        "numerics",
    ),
]


@pytest.mark.parametrize(("change", "alike", "cause"), CHANGES)
def test_the_cause_of_a_trajectorys_difference_is_named_with_its_token(
    change: Callable[[Trajectory], Trajectory], alike: bool, cause: Cause
) -> None:
    one = make_trajectory(NAME)
    other = change(one)
    found = difference(one, other, alike=alike)
    assert found is not None
    assert found.cause == cause
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    assert found.token == next((at for at, (a, b) in pairs if a != b), None)


def test_a_trajectory_does_not_differ_by_its_worker() -> None:
    one = make_trajectory(NAME)
    elsewhere = [msgspec.structs.replace(part, worker="w9") for part in one.segments]
    assert difference(one, replace(one, segments=elsewhere), alike=True) is None
