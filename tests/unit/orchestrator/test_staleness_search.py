"""The bound holds in every course of a run, and the search finds every mistake planted in it.

Goal: no batch beyond a deadline and no lock-up, whatever finishes or fails, in whatever order.
Method: closed search over the states that the rules can see (tests/support/staleness_search.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dora_pipe.orchestrator.staleness import Standing, feasible, in_flight_max
from tests.support.staleness_search import Found, Rules, search, take_in_order


def configurations(eta_max: int, per_step_max: int) -> list[Rules]:
    """Every eta, B, and every C from one batch to the full budget, in steps of one group."""
    return [
        Rules(eta=eta, per_step=per_step, in_flight=groups / per_step)
        for eta in range(eta_max + 1)
        for per_step in range(1, per_step_max + 1)
        for groups in range(per_step, (eta + 1) * per_step + 1)
    ]


ALL = configurations(3, 3)
LARGE = [rules for rules in ALL if rules.eta * rules.per_step == 9 and rules.in_flight > 2.5]
QUICK = [rules for rules in ALL if rules not in LARGE]
SMALL = [rules for rules in ALL if rules.eta * rules.per_step <= 4]


def name(rules: Rules) -> str:
    """Of a configuration, in the list of tests."""
    groups = round(rules.in_flight * rules.per_step)
    return f"eta{rules.eta}-B{rules.per_step}-{groups}groups"


def _verdicts(found: Sequence[Found]) -> dict[str, int]:
    return {
        verdict: [one.verdict for one in found].count(verdict)
        for verdict in ("sound", "broken", "locked", "delayed")
    }


@pytest.mark.parametrize("rules", QUICK, ids=name)
def test_no_course_of_a_run_breaks_the_bound_or_locks_up(rules: Rules) -> None:
    found = search(rules)
    assert found.verdict == "sound", found.story
    assert found.states > 3


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("rules", LARGE, ids=name)
def test_no_course_of_a_larger_run_breaks_the_bound_or_locks_up(rules: Rules) -> None:
    found = search(rules)
    assert found.verdict == "sound", found.story


@pytest.mark.parametrize("rules", [one for one in SMALL if one.eta <= 2], ids=name)
def test_refused_batches_return_without_breaking_the_bound(rules: Rules) -> None:
    found = search(replace(rules, refusals=True))
    assert found.verdict == "sound", found.story


# Planted mistakes. Each must be found, with a story a person can follow.


def _feasible_from_zero(deadlines: Mapping[int, int], step: int, per_step: int) -> bool:
    """The mistake: j starts at 0."""
    top = max([step, *deadlines])
    return all(
        sum(count for one, count in deadlines.items() if one <= step + j) <= (j + 1) * per_step
        for j in range(top - step + 1)
    )


def _take_from_zero(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    places = sorted(range(len(finished)), key=lambda place: finished[place])[:per_step]
    behind = dict(deadlines)
    for place in places:
        behind[finished[place]] -= 1
    enough = len(places) == per_step
    return places if enough and _feasible_from_zero(behind, step + 1, per_step) else ()


def test_search_finds_the_violation_when_j_starts_at_zero() -> None:
    found = search(Rules(eta=1, per_step=1, in_flight=2.0, take=_take_from_zero))
    assert found.verdict == "broken"
    # a and b at version 0; a is taken; c of version 1 goes before b; b comes too late.
    assert found.story[-1] == "take (-1,)"
    every = [search(replace(rules, take=_take_from_zero)) for rules in SMALL if rules.eta]
    capped = [rules for rules in SMALL if rules.eta and rules.in_flight > 1]
    assert _verdicts(every)["broken"] == len(capped) > 0


def _admit_from_t(deadlines: Mapping[int, int], at: Standing) -> bool:
    """The mistake: feasibility is asked at t although step t is training already."""
    room = in_flight_max(at.in_flight_batches, at.per_step)
    if sum(deadlines.values()) + at.per_step * at.training >= room:
        return False
    more = dict(deadlines)
    more[at.deadline] = more.get(at.deadline, 0) + 1
    return feasible(more, at.version, at.per_step)


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_search_finds_the_violation_when_admission_forgets_that_a_step_trains(eta: int) -> None:
    rules = Rules(eta=eta, per_step=1, in_flight=eta + 2.0)
    found = search(replace(rules, admit=_admit_from_t))
    assert found.verdict == ("broken" if eta == 0 else "locked")
    assert search(rules).verdict == "sound"
    # A cap of eta + 1 batches, counting the one in training, happens to hide the mistake.
    assert search(replace(rules, in_flight=eta + 1.0, admit=_admit_from_t)).verdict == "sound"


def _first_finished(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return range(per_step)


def _newest(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return sorted(range(len(finished)), key=lambda place: -finished[place])[:per_step]


def _oldest(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return sorted(range(len(finished)), key=lambda place: finished[place])[:per_step]


@pytest.mark.parametrize("pick", [_first_finished, _newest])
def test_same_gate_with_another_order_locks_up_wherever_batches_overlap(pick: object) -> None:
    take = take_in_order(pick)  # type: ignore[arg-type]
    few = [rules for rules in ALL if rules.eta * rules.per_step <= 6]
    found = {one: search(replace(one, take=take, order_matters=True)) for one in few}
    locked = {one for one, result in found.items() if result.verdict == "locked"}
    assert locked == {one for one in few if one.in_flight > 1}
    assert not any(result.verdict == "broken" for result in found.values())


def test_same_gate_with_the_earliest_deadlines_first_is_the_rule() -> None:
    for rules in SMALL:
        assert search(replace(rules, take=take_in_order(_oldest))).verdict == "sound"


def _admit_to_the_budget(deadlines: Mapping[int, int], at: Standing) -> bool:
    """Capacity (eta + t + 1) * B over the whole run: B * t of them are trained."""
    untaken = sum(deadlines.values()) + at.per_step * at.training
    return untaken < (at.max_staleness + 1) * at.per_step


def _overdue_then_oldest(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    """All that are due, then the oldest finished; waits for those that are due."""
    due = sum(count for one, count in deadlines.items() if one <= step)
    if len(finished) < per_step or due > sum(one <= step for one in finished):
        return ()
    return _oldest(finished, per_step)


@pytest.mark.parametrize("per_step", [1, 2, 3])
@pytest.mark.parametrize("eta", [1, 2, 3])
def test_overdue_ones_then_the_oldest_breaks_from_eta_two_on(eta: int, per_step: int) -> None:
    rules = Rules(
        eta=eta,
        per_step=per_step,
        in_flight=eta + 1.0,
        admit=_admit_to_the_budget,
        take=_overdue_then_oldest,
    )
    assert (search(rules).verdict == "broken") == (eta >= 2)


def test_a_replacement_with_the_old_stamp_puts_a_failure_on_the_critical_path() -> None:
    for rules in SMALL:
        found = search(replace(rules, replaces_with_old_stamp=True))
        assert (found.verdict == "delayed") == (rules.in_flight > 1), (rules, found.story)
