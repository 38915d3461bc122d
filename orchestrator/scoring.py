"""Scoring of whole groups after their trajectories have ended.

Such a group is still in U and uses no slot; any usable worker may score it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from dora_pipe.orchestrator.entities import Group, Worker
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import GroupScored, ScoredSample, TakenTrajectory
from dora_pipe.schemas.rounds import ScoreGroup
from dora_pipe.schemas.wire import REWARD_MAX

GROUPS_MAX: Final = 16
"""Maximum per worker."""


def samples_of(group: Group) -> tuple[TakenTrajectory, ...]:
    """Return trajectories with a valid reward."""
    ended = (result for result in group.results if result is not None and result.reward is not None)
    return tuple(result.taken for result in ended if result.taken is not None)


def is_due(state: State, group: Group) -> bool:
    """Report whether the group only lacks its scores."""
    return (
        state.started is not None
        and group.spec.source in state.started.scored_together
        and group.phase == "generating"
        and group.valid > 0
    )


def next_question(state: State) -> ScoreGroup | None:
    """Assign the earliest waiting group to the least busy worker; None if all are full."""
    waiting = [state.groups[name] for name, scoring in state.scoring.items() if not scoring.worker]
    if not waiting:
        return None
    asked = Counter(scoring.worker for scoring in state.scoring.values())
    usable = [worker for worker in state.workers.values() if worker.usable]
    worker = min(
        usable, key=lambda worker: (asked[worker.name], worker.load, worker.name), default=None
    )
    if worker is None or asked[worker.name] >= GROUPS_MAX:
        return None
    return question(state, min(waiting, key=lambda group: group.key), worker)


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
    asked = [sample.trajectory for sample in samples_of(group)]
    if [sample.trajectory for sample in answer.samples] != asked:
        return f"{group.spec.group} was scored with other trajectories than were asked about"
    if not all(map(_is_reward, answer.samples)):
        return f"a reward of {group.spec.group} is beyond {REWARD_MAX:g}"
    return ""


def _is_reward(sample: ScoredSample) -> bool:
    return math.isfinite(sample.reward) and abs(sample.reward) <= REWARD_MAX
