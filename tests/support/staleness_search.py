"""Closed search over every course a run can take, as far as the staleness bound is concerned.

A state is what the rules can see: deadlines of U relative to t, finished or not, in order of
finishing, and whether a step trains. Since everything is relative, the states are finitely many
although runs are endless. Groups finish and fail in every order, any time; admission and taking
may be late. The search ends with the first (so: shortest) story that breaks a promise:

- `broken`: a batch holds a group beyond its deadline (C3);
- `locked`: everything has finished, nothing may be admitted, and no batch may be taken;
- `delayed`: a group fails, and a batch that could be taken without it may not be taken.

The rules under test are passed in, the right ones or a planted mistake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dora_pipe.orchestrator.staleness import Finished, Standing, feasible, may_admit, take

FOR_EVER = 10**6
"""Steps of a run that does not end."""


class Course(NamedTuple):
    """One state. Deadlines are relative to t."""

    unfinished: tuple[int, ...]
    finished: tuple[int, ...]
    """In order of finishing."""
    training: tuple[int, ...]
    """Deadlines of the batch that trains; empty if none does."""


Admit = Callable[[Mapping[int, int], Standing], bool]
Take = Callable[[Sequence[int], Mapping[int, int], int, int], Sequence[int]]
"""(finished in order of finishing, U, step, per_step) -> places of the batch, or nothing."""


def take_earliest(
    finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
) -> Sequence[int]:
    """The rule itself."""
    keys = sorted(Finished(deadline, place, "") for place, deadline in enumerate(finished))
    return [key.ordinal for key in take(keys, deadlines, step=step, per_step=per_step)]


def take_in_order(pick: Callable[[Sequence[int], int], Sequence[int]]) -> Take:
    """The same gate with another order of taking."""

    def choose(
        finished: Sequence[int], deadlines: Mapping[int, int], step: int, per_step: int
    ) -> Sequence[int]:
        if len(finished) < per_step:
            return ()
        places = pick(finished, per_step)
        behind = dict(deadlines)
        for place in places:
            behind[finished[place]] -= 1
        return places if feasible(behind, step + 1, per_step) else ()

    return choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is searched. The defaults are the right rules."""

    eta: int
    per_step: int
    in_flight: float
    admit: Admit = may_admit
    take: Take = take_earliest
    replaces_with_old_stamp: bool = False
    refusals: bool = False
    """Batches may also be refused, with any one of their groups as offender."""
    order_matters: bool = False

    def standing(self, training: bool) -> Standing:
        """At t = 0."""
        return Standing(
            version=0,
            training=training,
            max_staleness=self.eta,
            in_flight_batches=self.in_flight,
            per_step=self.per_step,
            steps=FOR_EVER,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How the search ended; `story` leads to the promise that is broken."""

    verdict: Literal["sound", "broken", "locked", "delayed"]
    states: int
    story: list[str] = field(default_factory=list)


def search(rules: Rules) -> Found:
    """Every reachable course, breadth first, until a promise breaks."""
    start = Course((), (), ())
    came: dict[Course, tuple[Course, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        course = todo.popleft()
        for word, following, verdict in _steps(rules, course):
            if verdict is not None:
                story = [*_story(came, course), word]
                return Found(verdict=verdict, states=len(came), story=story)
            following = _normal(rules, following)
            if following not in came:
                came[following] = (course, word)
                todo.append(following)
    return Found(verdict="sound", states=len(came))


_Step = tuple[str, Course, Literal["broken", "locked", "delayed"] | None]


def _steps(rules: Rules, course: Course) -> Iterator[_Step]:
    unfinished, finished, training = course
    deadlines = _count(unfinished + finished)
    may = rules.admit(deadlines, rules.standing(bool(training)))
    if may:
        yield "admit", course._replace(unfinished=(*unfinished, rules.eta)), None
    for place, deadline in enumerate(unfinished):
        if place and unfinished[place - 1] == deadline:
            continue  # Equal deadlines are alike.
        rest = unfinished[:place] + unfinished[place + 1 :]
        yield (
            f"finish {deadline}",
            Course(rest, (*finished, deadline), training),
            None,
        )
        yield from _failure(rules, course, rest, deadline)
    places = [] if training else rules.take(finished, deadlines, 0, rules.per_step)
    if places:
        yield _taken(course, places)
    elif not training and not unfinished and not may:
        yield "wait", course, "locked"
    if training:
        yield from _ended(rules, course)


def _taken(course: Course, places: Sequence[int]) -> _Step:
    batch = tuple(sorted(course.finished[place] for place in places))
    behind = tuple(one for place, one in enumerate(course.finished) if place not in places)
    verdict: Literal["broken"] | None = "broken" if batch[0] < 0 else None
    return f"take {batch}", Course(course.unfinished, behind, batch), verdict


def _ended(rules: Rules, course: Course) -> Iterator[_Step]:
    """The step is committed, or refused."""
    unfinished, finished, training = course
    later = Course(tuple(one - 1 for one in unfinished), tuple(one - 1 for one in finished), ())
    yield "commit", later, None
    if rules.refusals:
        for place in range(len(training)):
            back = training[:place] + training[place + 1 :]
            yield f"refuse {training[place]}", Course(unfinished, finished + back, ()), None


def _failure(rules: Rules, course: Course, rest: tuple[int, ...], deadline: int) -> Iterator[_Step]:
    """A group fails, or is filtered: it leaves U, unless a replacement takes over its stamp."""
    stays = (*rest, deadline) if rules.replaces_with_old_stamp else rest
    following = course._replace(unfinished=stays)
    delayed = False
    if not course.training:
        without = rules.take(course.finished, _count(rest + course.finished), 0, rules.per_step)
        with_it = rules.take(course.finished, _count(stays + course.finished), 0, rules.per_step)
        delayed = bool(without) and not with_it
    yield f"fail {deadline}", following, "delayed" if delayed else None


def _normal(rules: Rules, course: Course) -> Course:
    """Courses that the rules cannot tell apart are one."""
    finished = course.finished if rules.order_matters else tuple(sorted(course.finished))
    training = course.training
    if training and not rules.refusals:
        training = (0,)
    return Course(tuple(sorted(course.unfinished)), finished, training)


def _count(deadlines: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for deadline in deadlines:
        found[deadline] = found.get(deadline, 0) + 1
    return found


def _story(came: Mapping[Course, tuple[Course, str] | None], course: Course) -> list[str]:
    words: list[str] = []
    step = came[course]
    while step is not None:
        course, word = step
        words.append(word)
        step = came[course]
    return words[::-1]
