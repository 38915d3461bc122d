"""Tests of the staleness bound and of the counterexamples in docs/staleness.md."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.orchestrator.staleness import (
    Finished,
    Standing,
    admissible,
    feasible,
    in_flight_max,
    lacking,
    may_admit,
    next_batch,
)

DEADLINES = st.dictionaries(st.integers(0, 8), st.integers(1, 4), max_size=5)


def at(
    *,
    version: int = 0,
    training: bool = False,
    eta: int = 1,
    batches: float = 2.0,
    per_step: int = 1,
    steps: int = 1000,
) -> Standing:
    return Standing(
        version=version,
        training=training,
        max_staleness=eta,
        async_batches=batches,
        per_step=per_step,
        steps=steps,
    )


def keys(*deadlines: int) -> list[Finished]:
    return sorted(
        Finished(deadline, index, f"g{index}") for index, deadline in enumerate(deadlines)
    )


def literally(deadlines: Mapping[int, int], step: int, per_step: int, first: int = -1) -> bool:
    last = max([step, *deadlines]) - step
    return all(
        sum(count for entry, count in deadlines.items() if entry <= step + j) <= (j + 1) * per_step
        for j in range(first, last + 1)
    )


@given(DEADLINES, st.integers(0, 6), st.integers(1, 4))
def test_feasible_is_its_definition(deadlines: dict[int, int], step: int, per_step: int) -> None:
    # j < -1 adds nothing: what is due then is due at j = -1 too.
    assert feasible(deadlines, step, per_step) == literally(deadlines, step, per_step)


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 3), st.integers(1, 2))
def test_feasible_is_that_some_order_of_training_keeps_every_deadline(
    groups: list[int], step: int, per_step: int
) -> None:
    deadlines = {group: groups.count(group) for group in groups}
    schedulable = any(
        all(step + index // per_step <= entry for index, entry in enumerate(order))
        for order in permutations(groups)
    )
    assert feasible(deadlines, step, per_step) == schedulable


@given(
    DEADLINES,
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([1.0, 1.5, 2.0, 2.25, 9.0]),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_admissible_counts_how_often_one_more_may_be_admitted(
    deadlines: dict[int, int],
    version: int,
    training: bool,
    eta: int,
    batches: float,
    per_step: int,
    left: int,
) -> None:
    where = at(
        version=version,
        training=training,
        eta=eta,
        batches=batches,
        per_step=per_step,
        steps=version + left,
    )
    if not feasible(deadlines, where.step, per_step):
        return
    more, count = dict(deadlines), 0
    while _may_admit_literally(more, where):
        assert may_admit(more, where)
        more[where.deadline] = more.get(where.deadline, 0) + 1
        count += 1
    assert not may_admit(more, where)
    assert admissible(deadlines, where) == count
    assert feasible(more, where.step, per_step)


def _may_admit_literally(deadlines: Mapping[int, int], where: Standing) -> bool:
    more = dict(deadlines)
    more[where.deadline] = more.get(where.deadline, 0) + 1
    untaken = sum(deadlines.values())
    cap = in_flight_max(where.async_batches, where.per_step)
    in_flight = untaken + where.per_step * where.training < cap
    used = untaken < (where.steps - where.step) * where.per_step
    return in_flight and used and literally(more, where.step, where.per_step)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=9), st.integers(1, 3))
def test_take_gives_the_earliest_deadlines_and_leaves_the_rest_feasible(
    groups: list[tuple[int, bool]], per_step: int
) -> None:
    deadlines = {entry: [d for d, _ in groups].count(entry) for entry, _ in groups}
    if not feasible(deadlines, 0, per_step):
        return
    finished = sorted(
        Finished(entry, index, "") for index, (entry, done) in enumerate(groups) if done
    )
    batch = next_batch(finished, deadlines, step=0, per_step=per_step)
    behind = dict(deadlines)
    for group in finished[:per_step]:
        behind[group.deadline] -= 1
    allowed = len(finished) >= per_step and literally(behind, 1, per_step)
    assert list(batch) == (finished[:per_step] if allowed else [])
    if len(finished) == len(groups) >= per_step:
        assert allowed, "everything has finished, and still the trainer waits"


def test_in_flight_batches_become_whole_groups() -> None:
    assert in_flight_max(2.0, 32) == 64
    assert in_flight_max(2.25, 2) == 5
    assert in_flight_max(1.1, 10) == 11, "not 12, which 11.000000000000002 would give"
    assert in_flight_max(0.2, 10) == 10, "with less than a batch no step could be taken"


def test_trainer_that_waits_can_name_the_deadline_it_waits_for() -> None:
    # Due at step 1: one unfinished. It must go into step 1, so step 0 takes the other due one.
    assert next_batch(keys(4), {1: 2, 4: 1}, step=0, per_step=1) == ()
    assert lacking(keys(4), {1: 2, 4: 1}, step=0, per_step=1).until == 1
    assert lacking(keys(), {1: 2}, step=0, per_step=1).until is None, "for any group at all"


def test_end_of_run_admits_only_what_a_step_is_left_for() -> None:
    near = at(version=8, eta=2, batches=3.0, per_step=2, steps=10)
    assert admissible({}, near) == 4
    assert admissible({10: 3}, near) == 1
    assert admissible({10: 4}, near) == 0
    assert admissible({}, at(version=9, training=True, eta=2, batches=3.0, steps=10)) == 0
    # Without the bound, more groups would be open than steps could train.
    assert admissible({}, at(version=8, eta=2, batches=3.0, per_step=2)) == 6


# The counterexamples by counting; `test_staleness_search` finds the others.


def test_counterexample_a_batch_in_training_that_keeps_its_deadlines_starves_the_workers() -> None:
    during = at(eta=1, training=True)
    assert not feasible({1: 2}, during.step, 1), "the variant still counts a, due at 1"
    assert admissible({}, during) == 1


def test_counterexample_a_batch_in_training_that_does_not_count_exceeds_the_cap() -> None:
    during = at(eta=3, batches=2.0, per_step=2, training=True)
    assert admissible({3: 2}, during) == 0, "2 in training and 2 of U are 2 batches"
    forgotten = at(version=1, eta=3, batches=2.0, per_step=2)
    assert admissible({3: 2}, forgotten) == 2, "the variant admits a third batch"


@given(st.data())
def test_eta_may_change_at_any_time(data: st.DataObject) -> None:
    per_step = data.draw(st.integers(1, 3))
    eta, version, training = 2, 0, False
    groups: list[tuple[int, bool]] = []
    for _ in range(60):
        eta = data.draw(st.integers(0, 3)) if data.draw(st.booleans()) else eta
        where = at(
            version=version, training=training, eta=eta, batches=eta + 1.0, per_step=per_step
        )
        deadlines = {entry: [d for d, _ in groups].count(entry) for entry, _ in groups}
        assert feasible(deadlines, where.step, per_step)
        finished = sorted(Finished(d, index, "") for index, (d, f) in enumerate(groups) if f)
        batch = next_batch(finished, deadlines, step=where.step, per_step=per_step)
        if may_admit(deadlines, where):
            groups.append((where.deadline, False))
        elif batch and not training:
            assert batch[0].deadline >= version
            ordinals = {entry.ordinal for entry in batch}
            groups = [group for index, group in enumerate(groups) if index not in ordinals]
            training = True
        elif training:
            version, training = version + 1, False
        else:
            assert any(not done for _, done in groups), "locked up"
            index = data.draw(st.sampled_from([i for i, (_, f) in enumerate(groups) if not f]))
            groups[index] = (groups[index][0], True)
