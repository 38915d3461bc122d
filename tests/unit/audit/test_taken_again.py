"""Batches that are taken again: which groups of a source make them, in which order, and when none
is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.audit.taken_again import (
    BatchTaken,
    BesideSource,
    EndedGroup,
    EndedGroups,
    SourceStep,
    beside_source,
    rules_of,
    taken_again,
)
from dora_pipe.config.model import Groups
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.schemas.control import TakenGroup, TakenTrajectory

FILTER = Groups(size=2, per_step=2, filter_zero_advantage=True)


def rules(**changes: Any) -> Groups:
    return Groups(**{"size": 2, "per_step": 2, "filter_zero_advantage": True, **changes})


def group(
    ordinal: int,
    ended: int,
    *,
    version: int = 0,
    eta: int = 9,
    rewards: Sequence[float | None] = (0.0, 1.0),
    newest: int | None = None,
    step: int | None = None,
) -> EndedGroup:
    name = f"g{ordinal:010}"
    names = [f"{name}-{place:03}" for place in range(len(rewards))]
    siblings = [
        TakenTrajectory(trajectory=one, attempt=1, epoch=0, partition=0, offset=0, sha256="")
        for one in names
    ]
    taken = TakenGroup(
        group=name, version=version, deadline=version + eta, trajectories=tuple(siblings)
    )
    return EndedGroup(
        taken=taken,
        ordinal=ordinal,
        size=2,
        rewards=dict(zip(names, rewards, strict=True)),
        ended=ended,
        newest=version if newest is None else newest,
        step=step,
    )


def source(
    *groups: EndedGroup, rounds: Sequence[int] = (10, 20, 30), first: int = 0
) -> EndedGroups:
    steps = [SourceStep(step=first + at, round=one) for at, one in enumerate(rounds)]
    return EndedGroups(groups=groups, steps=steps, rounds=99)


def names(batches: Sequence[BatchTaken]) -> list[list[int]]:
    return [[int(one.group[1:]) for one in batch.groups] for batch in batches]


def again(there: EndedGroups, how: Groups = FILTER, change: BatchChange = UNCHANGED) -> list[Any]:
    return names(list(taken_again(there, how, change)))


def test_of_those_that_have_ended_the_earliest_deadlines_go_first() -> None:
    late, early = group(0, 3, eta=5), group(1, 4, eta=2)
    there = source(group(2, 2, eta=5), late, early, group(3, 11, eta=1), group(4, 12))
    assert again(there) == [[1, 0], [3, 2]]


def test_a_batch_waits_for_what_ends_next_and_the_next_one_is_no_earlier() -> None:
    there = source(group(0, 3), group(1, 25), group(2, 26), group(3, 24, version=1))
    assert again(there) == [[0, 1], [2, 3]]
    assert again(source(group(0, 3), group(1, 25), group(2, 26))) == [[0, 1]]


def test_no_group_is_trained_beyond_its_deadline_or_before_its_version_is_there() -> None:
    gone = group(0, 3, eta=0)
    there = source(gone, group(1, 4), group(2, 5), group(3, 6), group(4, 6, version=1))
    assert again(there) == [[0, 1], [2, 3]]
    assert again(source(*there.groups, first=1)) == [[1, 2], [3, 4]]
    later = source(group(0, 3, version=2), group(1, 4), group(2, 5), rounds=(10,))
    assert again(later) == [[1, 2]]


def test_tokens_of_a_later_version_wait_for_its_step() -> None:
    mixed = group(0, 3, newest=1)
    assert again(source(mixed, group(1, 4), group(2, 5), group(3, 6))) == [[1, 2], [0, 3]]


def test_what_was_filtered_is_taken_where_its_rewards_differ_now_and_the_other_way_round() -> None:
    there = source(group(0, 3, rewards=(1.0, 1.0)), group(1, 4, step=0), group(2, 5, step=0))
    assert again(there) == [[1, 2]]
    change = BatchChange(rewards={"g0000000000-000": 0.5, "g0000000001-000": 1.0})
    assert again(there, change=change) == [[0, 2]]
    assert again(there, rules(filter_zero_advantage=False, per_step=3)) == [[0, 1, 2]]


def test_what_failed_is_taken_where_enough_siblings_have_a_reward_now() -> None:
    there = source(group(0, 3, rewards=(1.0, None)), group(1, 4))
    assert again(there) == []
    assert again(there, change=BatchChange(rewards={"g0000000000-001": 0.0})) == [[0, 1]]
    assert again(there, rules(min_valid_siblings=1, filter_zero_advantage=False)) == [[0, 1]]


def test_rows_that_do_not_count_make_no_batch() -> None:
    there = source(group(0, 3), group(1, 4), group(2, 5))
    assert again(there, change=BatchChange(without=frozenset({"g0000000000"}))) == [[1, 2]]
    assert again(there, change=BatchChange(without=frozenset({"g0000000001-000"}))) == [[0, 2]]


def test_what_the_source_has_trained_before_the_first_step_is_taken() -> None:
    there = source(group(0, 3, step=4), group(1, 4, step=5), group(2, 5), first=5)
    assert again(there) == [[1, 2]]


def test_another_number_of_groups_leaves_some_over_or_ends_early() -> None:
    groups = [group(at, 5 * at, version=at // 2, eta=1, step=at // 2) for at in range(6)]
    there = source(*groups, rounds=(10, 20, 30))
    assert again(there) == [[0, 1], [2, 3], [4, 5]]
    assert again(there, rules(per_step=1)) == [[0], [1], [2]]
    assert again(there, rules(per_step=3)) == []
    assert again(there, rules(per_step=7)) == []


def test_parts_are_taken_where_the_source_took_some() -> None:
    steps = [SourceStep(step=0, round=10, parts=(4, 6)), SourceStep(step=1, round=20, parts=(8,))]
    groups = [group(at, at, eta=9 - at) for at in range(1, 9)]
    there = EndedGroups(groups=groups, steps=steps, rounds=99)
    batches = list(taken_again(there, rules(per_step=4), UNCHANGED, parts=2))
    assert [one.parts for one in batches] == [(2,), ()]
    assert names(batches) == [[4, 3, 8, 7], [6, 5, 2, 1]]
    whole = list(taken_again(there, rules(per_step=4), UNCHANGED, parts=1))
    assert [one.parts for one in whole] == [(), ()]


def test_batches_are_held_against_those_of_the_source() -> None:
    there = source(group(0, 3, step=0), group(1, 4, step=0), group(2, 5, step=1), group(3, 6))
    batches = [
        BatchTaken(step=0, groups=(there.groups[0].taken, there.groups[2].taken)),
        BatchTaken(step=1, groups=(there.groups[3].taken,)),
    ]
    assert beside_source(there, batches) == BesideSource(groups=3, untrained=1, moved=1, left=1)
    assert rules_of(FILTER)["groups.per_step"] == 2


GROUPS = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 3), st.integers(0, 1), st.integers(0, 70), st.booleans()
    ),
    max_size=40,
)


@given(GROUPS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_every_batch_is_whole_in_time_in_order_and_of_groups_that_no_other_has(
    drawn: list[tuple[int, int, int, int, bool]], per_step: int, parts: int, first: int
) -> None:
    groups = [
        group(at, ended, version=v, eta=eta, newest=v + more, rewards=(0.0, float(differ)))
        for at, (v, eta, more, ended, differ) in enumerate(drawn)
    ]
    steps = [
        SourceStep(step=first + at, round=10 * at, parts=(10 * at - 4,) * (at > 0))
        for at in range(7)
    ]
    there = EndedGroups(groups=groups, steps=steps, rounds=99)
    batches = list(taken_again(there, rules(per_step=per_step), UNCHANGED, parts=parts))
    assert [one.step for one in batches] == list(range(first, first + len(batches)))
    by_name = {one.taken.group: one for one in groups}
    count = Counter(one.group for batch in batches for one in batch.groups)
    assert set(count.values()) <= {1}
    now = -1
    for batch, at in zip(batches, steps, strict=False):
        taken = [by_name[one.group] for one in batch.groups]
        assert len(taken) == per_step
        assert all(one.newest <= batch.step <= one.taken.deadline for one in taken)
        assert all(len(set(one.rewards.values())) == 2 for one in taken)
        now = max(now, at.round)
        waits = any(one.ended > now for one in taken)
        now = max([now, *(one.ended for one in taken)])
        rest = [one.key for one in taken[sum(batch.parts) :]]
        assert rest == sorted(rest)
        behind = passed_over(groups, batch, now, batches)
        if not waits:
            assert all(one.key > rest[-1] for one in behind)
    if len(batches) < len(steps):
        end = BatchTaken(step=first + len(batches), groups=())
        assert len(passed_over(groups, end, 1 << 30, batches)) < per_step


def passed_over(
    groups: Sequence[EndedGroup], at: BatchTaken, now: int, batches: Sequence[BatchTaken]
) -> list[EndedGroup]:
    """Groups that a step could have taken and that no batch up to it has."""
    taken = {one.group for batch in batches if batch.step <= at.step for one in batch.groups}
    return [
        one
        for one in groups
        if one.ended <= now
        and one.taken.group not in taken
        and one.newest <= at.step <= one.taken.deadline
        and len(set(one.rewards.values())) == 2
    ]
