"""Scoring of whole groups after their trajectories have ended.

Such a group is still in U and uses no slot; any usable worker may score it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from dora_pipe.schemas.control import GroupScored, ScoredSample, TakenTrajectory
from dora_pipe.schemas.rounds import ScoreGroup
from dora_pipe.schemas.wire import REWARD_MAX

if TYPE_CHECKING:
    from dora_pipe.orchestrator.state import Group, State, Worker

GROUPS_MAX: Final = 16
"""Maximum per worker."""


class Scoring(msgspec.Struct, kw_only=True):
    """Scoring attempt of a group."""

    attempt: int = 0
    faults: int = 0
    """Failed attempts; bounded."""
    worker: str = ""
    """Empty while it waits."""
    incarnation: int = -1

    def by(self, worker: Worker) -> bool:
        """Report whether this incarnation scores it now."""
        return (self.worker, self.incarnation) == (worker.name, worker.incarnation)


def samples_of(group: Group) -> tuple[TakenTrajectory, ...]:
    """Return trajectories with a valid reward."""
    ended = (one for one in group.results if one is not None and one.reward is not None)
    return tuple(one.taken for one in ended if one.taken is not None)


def is_due(state: State, group: Group) -> bool:
    """Report whether the group only lacks its scores."""
    return (
        state.facts is not None
        and group.spec.source in state.facts.scored_together
        and group.phase == "generating"
        and group.valid > 0
    )


def next_question(state: State) -> ScoreGroup | None:
    """Assign the earliest waiting group to the least busy worker; None if all are full."""
    waiting = [state.groups[name] for name, one in state.scoring.items() if not one.worker]
    if not waiting:
        return None
    asked = Counter(one.worker for one in state.scoring.values())
    usable = [one for one in state.workers.values() if one.usable]
    worker = min(usable, key=lambda one: (asked[one.name], one.load, one.name), default=None)
    if worker is None or asked[worker.name] >= GROUPS_MAX:
        return None
    return question(state, min(waiting, key=lambda one: one.key), worker)


def question(state: State, group: Group, worker: Worker) -> ScoreGroup:
    """Return the scoring request."""
    every = group.ended == group.spec.samples
    done = (
        f"all {group.ended} trajectories have ended"
        if every
        else f"{group.valid} trajectories count"
    )
    return ScoreGroup(
        spec=group.spec,
        worker=worker.name,
        incarnation=worker.incarnation,
        attempt=state.scoring[group.spec.group].attempt + 1,
        trajectories=samples_of(group),
        reason=f"{done}; {worker.name} scores them together",
    )


def answer_error(group: Group, answer: GroupScored) -> str:
    """Return why an answer is wrong; empty if it is not."""
    asked = [one.trajectory for one in samples_of(group)]
    if [one.trajectory for one in answer.samples] != asked:
        return f"{group.spec.group} was scored with other trajectories than were asked about"
    if not all(map(_is_reward, answer.samples)):
        return f"a reward of {group.spec.group} is beyond {REWARD_MAX:g}"
    return ""


def _is_reward(one: ScoredSample) -> bool:
    return math.isfinite(one.reward) and abs(one.reward) <= REWARD_MAX
