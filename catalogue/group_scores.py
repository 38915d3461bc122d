"""What siblings that are scored together count: decides which answer of a worker that is; and the
means of the parts of rewards, those of a group's scores among them.

Every other part of an account reads the rewards of a group's `requests`: here they become what the
answer says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from dora_pipe.catalogue.evaluations import Sample, part_means, samples_of
from dora_pipe.schemas.control import GroupScored, RunStarted
from dora_pipe.schemas.wire import canonical

if TYPE_CHECKING:
    from dora_pipe.catalogue.attempts import RequestHistory
    from dora_pipe.catalogue.group_history import GroupHistory


def note_scores(group: GroupHistory, fact: GroupScored) -> None:
    """An answer of a worker that is there: it counts if that was asked last."""
    asked = group.scoring
    if asked is None or (asked.attempt, asked.epoch) != (fact.attempt, fact.epoch):
        return
    group.scoring = None
    if fact.error:
        return
    group.scores = fact
    for one in fact.siblings:
        _count(group.requests[one.trajectory], one.reward, one.parts)


def note_end(group: GroupHistory, started: RunStarted) -> None:
    """A group of an evaluation is over: without an answer none of its siblings counts."""
    if group.spec.source in started.scored_together and group.scores is None:
        for request in group.requests.values():
            _count(request, None)


def parts_of(group: GroupHistory, trajectory: str) -> str | None:
    """Scores by name, as JSON, of a sibling that was scored with the others."""
    siblings = () if group.scores is None else group.scores.siblings
    found = (one.parts for one in siblings if one.trajectory == trajectory)
    return next((canonical(parts).decode() for parts in found), None)


def parts_by_task(groups: Iterable[GroupHistory]) -> dict[str, dict[str, float]]:
    """The mean of every part of their rewards (`part_means`), by the name of the task."""
    found: dict[str, list[Sample]] = {}
    for group in groups:
        found.setdefault(group.spec.task, []).extend(samples_of(group.results))
    means = {task: part_means(own) for task, own in sorted(found.items())}
    return {task: own for task, own in means.items() if own}


def _count(
    request: RequestHistory, reward: float | None, parts: Mapping[str, float] = MappingProxyType({})
) -> None:
    logged = request.logged
    if logged is not None and logged.reward is not None:
        request.logged = msgspec.structs.replace(
            logged, reward=reward, parts={**logged.parts, **parts}
        )
