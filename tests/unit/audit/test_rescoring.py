"""What other rewards of a run's texts would have changed: fates, advantages, curves, examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.audit.rescoring import ScoredGroup, compare, fate_of
from dora_pipe.config.model import Groups

RULES = Groups(size=2, per_step=2, min_valid_siblings=2, filter_zero_advantage=True)
GROUP_RULE: Mapping[str, Any] = {"objective.advantage": "group", "objective.advantage_std": False}
SETTINGS = dict.fromkeys(range(8), GROUP_RULE)

Rewards = tuple[float | None, ...]


def group(ordinal: int, old: Rewards, new: Rewards, *, step: int = 0) -> ScoredGroup:
    name = f"g{ordinal:010d}"
    return ScoredGroup(
        group=name,
        version=step,
        size=len(old),
        fate=fate_of(old, len(old), RULES),
        step=step,
        evaluation="",
        trajectories=tuple(f"{name}-{place:03d}" for place in range(len(old))),
        old=old,
        new=new,
    )


def test_the_same_rewards_change_nothing() -> None:
    groups = [group(0, (1.0, 0.0), (1.0, 0.0)), group(1, (1.0, 1.0), (1.0, 1.0), step=1)]
    found = compare(groups, RULES, SETTINGS, examples=20)
    assert (found.differ, found.fates, found.signs, found.first) == (0, (), 0, None)
    assert (found.trajectories, found.advantages, found.examples) == (4, 2, ())
    assert (found.old, found.new) == (0.75, 0.75)


def test_a_group_whose_rewards_become_equal_would_have_been_filtered_and_the_other_way_round() -> (
    None
):
    groups = [
        group(0, (1.0, 0.0), (1.0, 0.0), step=1),
        group(1, (1.0, 0.0), (1.0, 1.0), step=3),
        group(2, (0.0, 0.0), (0.5, 0.0), step=2),
        group(3, (1.0, 0.0), (None, 1.0), step=4),
    ]
    found = compare(groups, RULES, SETTINGS, examples=20)
    assert [(one.group[-1], one.step, one.old, one.new) for one in found.fates] == [
        ("2", 2, "filtered", "trained"),
        ("1", 3, "trained", "filtered"),
        ("3", 4, "trained", "failed"),
    ]
    assert found.first == 2
    assert found.moves["trained", "failed"] == 1


def test_advantages_that_change_sign_are_counted_by_step() -> None:
    groups = [group(0, (1.0, 0.0), (0.0, 1.0), step=2), group(1, (1.0, 0.0), (4.0, 0.0), step=5)]
    found = compare(groups, RULES, SETTINGS, examples=20)
    assert [(one.at, one.signs, one.old, one.new) for one in found.steps] == [
        (2, 2, 0.5, 0.5),
        (5, 0, 0.5, 2.0),
    ]
    assert (found.signs, found.advantages, found.first) == (2, 4, 2)
    larger = compare(groups[1:], RULES, SETTINGS, examples=20)
    assert larger.first == 5, "twice the advantage is another one"


def test_examples_are_those_farthest_apart_and_a_missing_reward_is_farthest() -> None:
    groups = [group(0, (1.0, 0.0), (0.9, 0.0)), group(1, (1.0, 0.0), (None, 3.0))]
    found = compare(groups, RULES, SETTINGS, examples=2)
    assert [(one.trajectory[-5:], one.new) for one in found.examples] == [
        ("1-000", None),
        ("1-001", 3.0),
    ]
    assert found.differ == 3


def test_evaluations_have_curves_of_their_own_and_no_fate() -> None:
    one = group(0, (1.0, 0.0), (1.0, 1.0), step=3)
    evaluated = ScoredGroup(
        **{
            **{name: getattr(one, name) for name in one.__slots__},
            "fate": "evaluated",
            "evaluation": "held-out",
        }
    )
    found = compare([evaluated], RULES, SETTINGS, examples=0)
    ((curve),) = found.evaluations
    assert (curve.name, curve.at, curve.old, curve.new) == ("held-out", 3, 0.5, 1.0)
    assert (found.steps, found.fates, found.first, found.old) == ((), (), None, None)


rewards = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4
).map(tuple)


@given(st.lists(rewards, max_size=6))
def test_whatever_the_rewards_are_scoring_them_alike_changes_nothing(all_: list[Rewards]) -> None:
    groups = [group(at, one, one, step=at % 3) for at, one in enumerate(all_)]
    found = compare(groups, RULES, SETTINGS, examples=20)
    assert (found.differ, found.fates, found.signs, found.first) == (0, (), 0, None)


@pytest.mark.parametrize(("filtering", "fate"), [(True, "filtered"), (False, "trained")])
def test_equal_rewards_are_filtered_where_the_run_filters(filtering: bool, fate: str) -> None:
    rules = Groups(size=2, per_step=2, min_valid_siblings=2, filter_zero_advantage=filtering)
    assert fate_of([1.0, 1.0], 2, rules) == fate
