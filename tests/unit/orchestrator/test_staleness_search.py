"""Exhaustive search of the staleness bound over small runs (`Course`).

No batch exceeds a deadline and no run deadlocks, in any order of events; planted mistakes are
found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import pytest

from dora_pipe.orchestrator.staleness import (
    Finished,
    Standing,
    feasible,
    in_flight_max,
    may_admit,
    next_batch,
    next_part,
)

FOR_EVER = 10**6
"""Steps of an endless run."""


class Course(NamedTuple):
    unfinished: tuple[int, ...]
    finished: tuple[int, ...]
    """In order of finishing."""
    training: tuple[int, ...]
    """Deadlines of the batch in training; empty if there is none."""
    held: tuple[int, ...] = ()
    """Original deadlines of the groups in parts of the next step."""


Admit = Callable[[Mapping[int, int], Standing], bool]
Take = Callable[[Sequence[int], Mapping[int, int], int, int], Sequence[int]]
"""(finished in order of finishing, U, step, per_step) -> indexes of the batch, or nothing."""


def take_earliest(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    keys = sorted(Finished(deadline, index, "") for index, deadline in enumerate(finished))
    return [key.ordinal for key in next_batch(keys, deadlines, step=step, per_step=per_step)]


def take_in_order(pick: Callable[[Sequence[int], int], Sequence[int]]) -> Take:
    def choose(
        finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
    ) -> Sequence[int]:
        if len(finished) < per_step:
            return ()
        places = pick(finished, per_step)
        behind = dict(deadlines)
        for index in places:
            behind[finished[index]] -= 1
        return places if feasible(behind, step + 1, per_step) else ()

    return choose


class Sizes(NamedTuple):
    step: int
    per_step: int
    taken: int
    size: int


Part = Callable[[Sequence[int], Mapping[int, int], Sizes], Sequence[int]]
"""(finished, U, sizes) -> indexes of the next part, or nothing."""


def part_earliest(
    finished: Sequence[int], deadlines: Mapping[int, int], sizes: Sizes
) -> Sequence[int]:
    keys = sorted(Finished(deadline, index, "") for index, deadline in enumerate(finished))
    part = next_part(keys, deadlines, **sizes._asdict())
    return [key.ordinal for key in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    eta: int
    per_step: int
    in_flight: float
    admit: Admit = may_admit
    take: Take = take_earliest
    replaces_with_old_stamp: bool = False
    refusals: bool = False
    """Batches may be refused because of any of their groups."""
    order_matters: bool = False
    parts: bool = False
    """Batches may be taken in parts of any size, the first during the previous step, and given
    up at any time."""
    part: Part = part_earliest
    keeps_parts: bool = False
    """Mistake: a refused batch leaves the next step's part in place."""

    def standing(self, training: bool) -> Standing:
        return Standing(
            version=0,
            training=training,
            max_staleness=self.eta,
            async_batches=self.in_flight,
            per_step=self.per_step,
            steps=FOR_EVER,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    outcome: Literal["sound", "broken", "locked", "delayed"]
    states: int
    path: list[str] = field(default_factory=list)


def search(rules: Rules) -> Found:
    start = Course((), (), ())
    came: dict[Course, tuple[Course, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        course = todo.popleft()
        for word, following, outcome in _steps(rules, course):
            if outcome is not None:
                path = [*_path(came, course), word]
                return Found(outcome=outcome, states=len(came), path=path)
            following = _normal(rules, following)
            if following not in came:
                came[following] = (course, word)
                todo.append(following)
    return Found(outcome="sound", states=len(came))


_Step = tuple[str, Course, Literal["broken", "locked", "delayed"] | None]


def _steps(rules: Rules, course: Course) -> Iterator[_Step]:
    unfinished, finished, training, held = course
    deadlines = _count(unfinished + finished + (int(bool(training)),) * len(held))
    may = rules.admit(deadlines, rules.standing(bool(training)))
    if may:
        yield "admit", course._replace(unfinished=(*unfinished, rules.eta)), None
    for index, deadline in enumerate(unfinished):
        if index and unfinished[index - 1] == deadline:
            continue  # Equal deadlines are equivalent.
        rest = unfinished[:index] + unfinished[index + 1 :]
        yield (
            f"finish {deadline}",
            course._replace(unfinished=rest, finished=(*finished, deadline)),
            None,
        )
        yield from _failure(rules, course, rest, deadline)
    places = [] if training else _batch(rules, course, deadlines)
    if places:
        yield _taken(course, places)
    if rules.parts:
        yield from _parts(rules, course, deadlines)
    if not places and not training and not unfinished and not may:
        yield "wait", course, "locked"
    if training:
        yield from _ended(rules, course)


def _taken(course: Course, places: Sequence[int]) -> _Step:
    batch = tuple(sorted([*course.held, *(course.finished[index] for index in places)]))
    behind = tuple(group for index, group in enumerate(course.finished) if index not in places)
    outcome: Literal["broken"] | None = "broken" if batch[0] < 0 else None
    return f"take {batch}", Course(course.unfinished, behind, batch), outcome


def _batch(rules: Rules, course: Course, deadlines: Mapping[int, int]) -> Sequence[int]:
    if not course.held:
        return rules.take(course.finished, deadlines, 0, rules.per_step)
    keys = sorted(Finished(deadline, index, "") for index, deadline in enumerate(course.finished))
    taken = len(course.held)
    rest = next_batch(keys, deadlines, step=0, per_step=rules.per_step, taken=taken)
    return [key.ordinal for key in rest]


def _parts(rules: Rules, course: Course, deadlines: Mapping[int, int]) -> Iterator[_Step]:
    finished, held, step = course.finished, course.held, int(bool(course.training))
    for size in range(1, rules.per_step if not (step and held) else 1):
        places = rules.part(finished, deadlines, Sizes(step, rules.per_step, len(held), size))
        if places:
            part = tuple(finished[index] for index in places)
            rest = tuple(group for index, group in enumerate(finished) if index not in places)
            yield f"part {part}", course._replace(finished=rest, held=held + part), None
    if held:
        yield "give up", course._replace(finished=finished + held, held=()), None


def _ended(rules: Rules, course: Course) -> Iterator[_Step]:
    unfinished, finished, training, held = course
    less = [tuple(entry - 1 for entry in those) for those in (unfinished, finished, held)]
    yield "commit", Course(less[0], less[1], (), less[2]), None
    if rules.refusals:
        for index in range(len(training)):
            back = training[:index] + training[index + 1 :] + (() if rules.keeps_parts else held)
            following = Course(unfinished, finished + back, (), held if rules.keeps_parts else ())
            yield f"refuse {training[index]}", following, None


def _failure(rules: Rules, course: Course, rest: tuple[int, ...], deadline: int) -> Iterator[_Step]:
    stays = (*rest, deadline) if rules.replaces_with_old_stamp else rest
    following = course._replace(unfinished=stays)
    delayed = False
    if not course.training:
        without = rules.take(course.finished, _count(rest + course.finished), 0, rules.per_step)
        with_it = rules.take(course.finished, _count(stays + course.finished), 0, rules.per_step)
        delayed = bool(without) and not with_it
    yield f"fail {deadline}", following, "delayed" if delayed else None


def _normal(rules: Rules, course: Course) -> Course:
    finished = course.finished if rules.order_matters else tuple(sorted(course.finished))
    training = course.training
    if training and not rules.refusals:
        training = (0,)
    return Course(tuple(sorted(course.unfinished)), finished, training, tuple(sorted(course.held)))


def _count(deadlines: Sequence[int]) -> dict[int, int]:
    results: dict[int, int] = {}
    for deadline in deadlines:
        results[deadline] = results.get(deadline, 0) + 1
    return results


def _path(came: Mapping[Course, tuple[Course, str] | None], course: Course) -> list[str]:
    words: list[str] = []
    step = came[course]
    while step is not None:
        course, word = step
        words.append(word)
        step = came[course]
    return words[::-1]


def configurations(eta_max: int, per_step_max: int) -> list[Rules]:
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
    groups = round(rules.in_flight * rules.per_step)
    return f"eta{rules.eta}-B{rules.per_step}-{groups}groups"


def _verdicts(founds: Sequence[Found]) -> dict[str, int]:
    return {
        outcome: [entry.outcome for entry in founds].count(outcome)
        for outcome in ("sound", "broken", "locked", "delayed")
    }


@pytest.mark.parametrize("rules", QUICK, ids=name)
def test_no_course_of_a_run_breaks_the_bound_or_locks_up(rules: Rules) -> None:
    match = search(rules)
    assert match.outcome == "sound", match.path
    assert match.states > 3


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("rules", LARGE, ids=name)
def test_no_course_of_a_larger_run_breaks_the_bound_or_locks_up(rules: Rules) -> None:
    match = search(rules)
    assert match.outcome == "sound", match.path


@pytest.mark.parametrize("rules", [case for case in SMALL if case.eta <= 2], ids=name)
def test_refused_batches_return_without_breaking_the_bound(rules: Rules) -> None:
    match = search(replace(rules, refusals=True))
    assert match.outcome == "sound", match.path


@pytest.mark.parametrize("rules", [case for case in QUICK if case.per_step > 1], ids=name)
def test_parts_neither_break_the_bound_nor_lock_up(rules: Rules) -> None:
    match = search(replace(rules, parts=True))
    assert match.outcome == "sound", match.path


@pytest.mark.parametrize("rules", [case for case in SMALL if case.eta <= 2], ids=name)
def test_part_of_the_step_after_a_batch_that_is_refused_breaks_no_bound(rules: Rules) -> None:
    match = search(replace(rules, parts=True, refusals=True))
    assert match.outcome == "sound", match.path


def test_part_that_outlives_the_refusal_of_the_step_before_it_is_found() -> None:
    sought = [rules for rules in SMALL if rules.per_step > 1 and 1 <= rules.eta <= 2]
    rules = [replace(case, parts=True, refusals=True, keeps_parts=True) for case in sought]
    assert {search(rule).outcome for rule in rules} > {"sound"}


def test_part_that_leaves_no_room_for_what_is_due_is_found() -> None:
    def any_part(
        finished: Sequence[int], deadlines: Mapping[int, int], sizes: Sizes
    ) -> Sequence[int]:
        fits = len(finished) >= sizes.size and sizes.taken + sizes.size < sizes.per_step
        return range(len(finished))[-sizes.size :] if fits else ()

    sought = [rules for rules in QUICK if rules.per_step > 1 and rules.eta > 0]
    matches = [search(replace(case, parts=True, part=any_part)) for case in sought]
    assert {match.outcome for match in matches} > {"sound"}


# Planted mistakes, each found with a readable path.


def _feasible_from_zero(deadlines: Mapping[int, int], step: int, per_step: int) -> bool:
    top = max([step, *deadlines])
    return all(
        sum(count for entry, count in deadlines.items() if entry <= step + j) <= (j + 1) * per_step
        for j in range(top - step + 1)
    )


def _take_from_zero(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    places = sorted(range(len(finished)), key=lambda index: finished[index])[:per_step]
    behind = dict(deadlines)
    for index in places:
        behind[finished[index]] -= 1
    enough = len(places) == per_step
    return places if enough and _feasible_from_zero(behind, step + 1, per_step) else ()


def test_search_finds_the_violation_when_j_starts_at_zero() -> None:
    match = search(Rules(eta=1, per_step=1, in_flight=2.0, take=_take_from_zero))
    assert match.outcome == "broken"
    # a and b at version 0; a is taken; c of version 1 goes before b; b is too late.
    assert match.path[-1] == "take (-1,)"
    every = [search(replace(rules, take=_take_from_zero)) for rules in SMALL if rules.eta]
    capped = [rules for rules in SMALL if rules.eta and rules.in_flight > 1]
    assert _verdicts(every)["broken"] == len(capped) > 0


def _admit_from_t(deadlines: Mapping[int, int], standing: Standing) -> bool:
    room = in_flight_max(standing.async_batches, standing.per_step)
    if sum(deadlines.values()) + standing.per_step * standing.training >= room:
        return False
    more = dict(deadlines)
    more[standing.deadline] = more.get(standing.deadline, 0) + 1
    return feasible(more, standing.version, standing.per_step)


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_search_finds_the_violation_when_admission_forgets_that_a_step_trains(eta: int) -> None:
    rules = Rules(eta=eta, per_step=1, in_flight=eta + 2.0)
    match = search(replace(rules, admit=_admit_from_t))
    assert match.outcome == ("broken" if eta == 0 else "locked")
    assert search(rules).outcome == "sound"
    # A limit of max_staleness + 1 batches, including the one in training, would hide the mistake.
    assert search(replace(rules, in_flight=eta + 1.0, admit=_admit_from_t)).outcome == "sound"


def _first_finished(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return range(per_step)


def _newest(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return sorted(range(len(finished)), key=lambda index: -finished[index])[:per_step]


def _oldest(finished: Sequence[int], per_step: int) -> Sequence[int]:
    return sorted(range(len(finished)), key=lambda index: finished[index])[:per_step]


@pytest.mark.parametrize("pick", [_first_finished, _newest])
def test_same_gate_with_another_order_locks_up_wherever_batches_overlap(pick: object) -> None:
    take = take_in_order(pick)  # type: ignore[arg-type]
    few = [rules for rules in ALL if rules.eta * rules.per_step <= 6]
    results = {case: search(replace(case, take=take, order_matters=True)) for case in few}
    locked = {entry for entry, result in results.items() if result.outcome == "locked"}
    assert locked == {case for case in few if case.in_flight > 1}
    assert not any(result.outcome == "broken" for result in results.values())


def test_same_gate_with_the_earliest_deadlines_first_is_the_rule() -> None:
    for rules in SMALL:
        assert search(replace(rules, take=take_in_order(_oldest))).outcome == "sound"


def _admit_to_the_budget(deadlines: Mapping[int, int], standing: Standing) -> bool:
    untaken = sum(deadlines.values()) + standing.per_step * standing.training
    return untaken < (standing.max_staleness + 1) * standing.per_step


def _overdue_then_oldest(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    due = sum(count for entry, count in deadlines.items() if entry <= step)
    if len(finished) < per_step or due > sum(group <= step for group in finished):
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
    assert (search(rules).outcome == "broken") == (eta >= 2)


def test_a_replacement_with_the_old_stamp_puts_a_failure_on_the_critical_path() -> None:
    for rules in SMALL:
        match = search(replace(rules, replaces_with_old_stamp=True))
        assert (match.outcome == "delayed") == (rules.in_flight > 1), (rules, match.path)
