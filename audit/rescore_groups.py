"""Asks the task again what siblings are worth beside each other, where they were scored together.

The same records are shown to it, in the same order, and its numbers, added to the rewards that the
records have alone, must be those that `group scored` says, exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dora_pipe.audit.rescore import IN_FLIGHT_MAX, POLL_S, Rescored, Tasks
from dora_pipe.core.clock import Clock
from dora_pipe.producers.tasks.calls import GroupRewarded, TaskFailed
from dora_pipe.producers.worker.effects import GroupCall
from dora_pipe.producers.worker.scoring import turns_said
from dora_pipe.schemas.control import INFRASTRUCTURE
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Counted:
    """What control says of a sibling that was scored with the others."""

    reward: float
    parts: Mapping[str, float]


def rescore_groups(
    tasks: Tasks,
    trajectories: Iterable[Trajectory],
    counted: Mapping[str, Counted],
    *,
    clock: Clock,
) -> Iterator[Rescored]:
    """Ask for every group whose records all come by, some at a time, in the order of the answers.

    `counted` is by trajectory; of others nothing is asked. Raises TaskError where the task cannot
    be run at all.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for name in counted:
        sizes[group_of(name)] += 1
    gathered: defaultdict[str, list[Trajectory]] = defaultdict(list)
    asked: dict[str, list[Trajectory]] = {}
    waiting = (one for one in trajectories if one.trajectory in counted)
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
            siblings = asked.pop(event.request)
            yield from (_rescored(siblings, at, event, counted) for at in range(len(siblings)))
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
    event: GroupRewarded | TaskFailed,
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
