"""Asks the task again what siblings are worth beside each other, where they are scored together.

`rescore_groups` shows it the records that a worker showed it, in the same order: its numbers, added
to the rewards that the records have alone, must be those that `group scored` says, exactly.
`score_groups` shows it those that have a reward now, and says what each comes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from dora_pipe.audit.rescore import IN_FLIGHT_MAX, POLL_S, Rescored, Tasks
from dora_pipe.audit.rescored_file import NewReward
from dora_pipe.core.clock import Clock
from dora_pipe.producers.tasks.calls import GroupRewarded, TaskFailed
from dora_pipe.producers.worker.effects import GroupCall
from dora_pipe.producers.worker.scoring import turns_said
from dora_pipe.schemas.control import INFRASTRUCTURE
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import REWARD_MAX

Answer = GroupRewarded | TaskFailed


@dataclass(frozen=True, slots=True)
class Counted:
    """What control says of a sibling that was scored with the others."""

    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTogether:
    """What the siblings of a group come to. Example: ``ScoredTogether(group="g0000000042",
    siblings=(NewReward(trajectory="g0000000042-000", reward=1.2, parts={"shortest": 0.2}),))``."""

    group: str
    siblings: tuple[NewReward, ...] = ()
    """None where the group was lost."""
    lost: str = ""
    """Why infrastructure gave no answer: another try may get one."""


def rescore_groups(
    tasks: Tasks,
    trajectories: Iterable[Trajectory],
    counted: Mapping[str, Counted],
    *,
    clock: Clock,
) -> Iterator[Rescored]:
    """Ask for every group whose records all come by, and compare, in the order of the answers.

    `counted` is by trajectory; of others nothing is asked. Raises TaskError where the task cannot
    be run at all.
    """
    for siblings, event in _answers(tasks, trajectories, counted, clock=clock):
        yield from (_rescored(siblings, at, event, counted) for at in range(len(siblings)))


def score_groups(
    tasks: Tasks,
    trajectories: Iterable[Trajectory],
    alone: Mapping[str, NewReward],
    *,
    clock: Clock,
) -> Iterator[ScoredTogether]:
    """Ask for every group whose records all come by, in the order of the answers.

    `alone` are the rewards of those that the task is shown, by trajectory: whoever has none is not
    among them. Raises TaskError where the task cannot be run at all.
    """
    for siblings, event in _answers(tasks, trajectories, alone, clock=clock):
        yield _together([alone[one.trajectory] for one in siblings], event)


def _answers(
    tasks: Tasks, trajectories: Iterable[Trajectory], names: Collection[str], *, clock: Clock
) -> Iterator[tuple[list[Trajectory], Answer]]:
    """The groups of these trajectories, some at a time, each with what the task says of it."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for name in names:
        sizes[group_of(name)] += 1
    gathered: defaultdict[str, list[Trajectory]] = defaultdict(list)
    asked: dict[str, list[Trajectory]] = {}
    waiting = (one for one in trajectories if one.trajectory in names)
    over = False
    while not over or asked:
        while not over and len(asked) < IN_FLIGHT_MAX:
            one = next(waiting, None)
            over = one is None
            if one is None:
                continue
            group = group_of(one.trajectory)
            gathered[group].append(one)
            if len(gathered[group]) == sizes[group]:
                asked[group] = sorted(gathered.pop(group), key=lambda each: each.trajectory)
                tasks.start(_call(group, asked[group]))
        events = [event for event in tasks.poll() if event.request in asked]
        for event in events:
            yield asked.pop(event.request), event
        if not events and asked:
            clock.sleep(POLL_S)


def _call(group: str, siblings: list[Trajectory]) -> GroupCall:
    meta = siblings[0].meta
    return GroupCall(
        request=group,
        split=meta.purpose,
        index=meta.index,
        completions=[turns_said(one) for one in siblings],
        source=meta.source,
    )


def _rescored(
    siblings: list[Trajectory],
    at: int,
    event: Answer,
    counted: Mapping[str, Counted],
) -> Rescored:
    """What an answer says of one sibling."""
    one = siblings[at]
    recorded = counted[one.trajectory]
    found: float | None = None
    difference = not_compared = ""
    if isinstance(event, GroupRewarded):
        found = (one.reward or 0.0) + event.rewards[at]
        if found != recorded.reward:
            difference = f"beside its siblings it is worth {found!r}, recorded is"
            difference += f" {recorded.reward!r}"
        elif dict(event.parts[at]) != dict(recorded.parts):
            difference = f"its group's parts are {dict(event.parts[at])!r}, recorded are"
            difference += f" {dict(recorded.parts)!r}"
    elif event.error in INFRASTRUCTURE:
        not_compared = f"{event.error}: {event.message}"
    else:
        difference = f"its group has no scores ({event.error}: {event.message})"
    return Rescored(
        trajectory=one.trajectory,
        recorded=recorded.reward,
        found=found,
        difference=difference,
        not_compared=not_compared,
    )


def _together(alone: list[NewReward], event: Answer) -> ScoredTogether:
    """What an answer makes of the rewards that siblings have alone, as a worker adds them up."""
    group = event.request
    if isinstance(event, GroupRewarded):
        both = zip(alone, event.rewards, event.parts, strict=True)
        summed = [
            NewReward(
                trajectory=one.trajectory,
                reward=(one.reward or 0.0) + added,
                parts={**one.parts, **parts},
            )
            for one, added, parts in both
        ]
        beyond = [one for one in summed if abs(one.reward or 0.0) > REWARD_MAX]
        if not beyond:
            return ScoredTogether(group=group, siblings=tuple(summed))
        error = f"NoAnswer: the reward of {beyond[0].trajectory} is beyond {REWARD_MAX:g}"
    else:
        error = f"{event.error}: {event.message}"
        if event.error in INFRASTRUCTURE:
            return ScoredTogether(group=group, lost=error)
    none = (NewReward(trajectory=one.trajectory, reward=None, error=error) for one in alone)
    return ScoredTogether(group=group, siblings=tuple(none))
