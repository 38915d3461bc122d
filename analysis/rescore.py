"""Score logged trajectories again with the run's own task, or with other rewards.

The task runs through the worker's port. Prompts, answers and rewards must be equal. Trajectories
are scored alone, then by group. Answers lost to infrastructure (timeout, dead process, `Retry`) and
rewards from agents are only counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    GroupCall,
    GroupRewarded,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    SampledTurns,
    TaskFailed,
)
from dora_pipe.producers.worker.scoring import turns_said
from dora_pipe.schemas.context_tokens import tokens_before
from dora_pipe.schemas.control import INFRASTRUCTURE, error_class
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.trajectory import SegmentKind, Trajectory, answer_of, turns_of
from dora_pipe.schemas.wire import REWARD_MAX

IN_FLIGHT_MAX: Final = 64
POLL_S: Final = 0.005
AGENTS_OWN: Final = "its agent gave the reward"
IN_ERROR: Final = "it ended in an error"


class Tasks(Protocol):
    """Task calls, as in `producers.worker.ports.TaskPorts`."""

    def start(self, effect: PromptCall | EnvStep | RewardCall | GroupCall | Forget) -> None: ...

    def poll(self) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    trajectory: str
    recorded: float | None
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    difference: str = ""
    """First difference, or ""."""
    not_compared: str = ""
    """Why it cannot be compared."""

    @property
    def lost(self) -> bool:
        return self.reward is None and bool(self.error) and bool(self.not_compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTogether:
    """A group with group scoring."""

    size: int
    valid_min: int
    """With fewer valid rewards, the group fails unscored."""
    recorded: Mapping[str, tuple[float | None, Mapping[str, float]]]
    """Group reward and parts, by trajectory."""


@dataclass(slots=True)
class _Asked:
    recorded: Trajectory
    left: deque[tuple[SegmentKind, list[int]]]
    """Turns that the environment lacks."""


def rescore(
    tasks: Tasks,
    trajectories: Iterable[Trajectory],
    *,
    clock: Clock,
    stopped: Callable[[Sequence[int]], bool],
    together: Mapping[str, ScoredTogether] | None = None,
    agents: bool = False,
) -> Iterator[Rescored]:
    """Score trajectories concurrently; yield them as they complete.

    `stopped`: whether a turn ended by itself, so that the environment received it; `together`:
    groups with group scoring; `agents`: include rewards from agents. Raises TaskError if the task
    cannot run.
    """
    scoring = _Scoring(tasks, stopped, together or {}, agents=agents)
    waiting = iter(trajectories)
    over = False
    while not over or scoring.open:
        while not over and len(scoring.open) < IN_FLIGHT_MAX:
            trajectory = next(waiting, None)
            over = trajectory is None
            if trajectory is not None:
                scoring.begin(trajectory)
        events = tasks.poll()
        for event in events:
            scoring.handle(event)
        yield from scoring.done
        scoring.done.clear()
        if not events and scoring.open:
            clock.sleep(POLL_S)


class _Scoring:
    def __init__(
        self,
        tasks: Tasks,
        stopped: Callable[[Sequence[int]], bool],
        together: Mapping[str, ScoredTogether],
        *,
        agents: bool,
    ) -> None:
        self._tasks, self._stopped, self._agents = tasks, stopped, agents
        self._together = together
        self.open: dict[str, _Asked | list[Rescored]] = {}
        self.done: list[Rescored] = []
        self._gathered: defaultdict[str, list[tuple[Trajectory, Rescored]]] = defaultdict(list)

    def begin(self, trajectory: Trajectory) -> None:
        """Request its prompt, unless it ended in an error and was never scored."""
        meta = trajectory.meta
        if meta.finish == "error":
            wrong = "" if trajectory.reward is None else "it ended in an error and has a reward"
            self._end(trajectory, error=IN_ERROR, difference=wrong)
        elif meta.rewarded_by == "agent" and not self._agents:
            parts = dict(meta.reward_parts)
            self._end(trajectory, reward=trajectory.reward, parts=parts, not_compared=AGENTS_OWN)
        else:
            asked = _Asked(trajectory, deque(turns_of(trajectory.segments, trajectory.token_ids)))
            self.open[trajectory.trajectory] = asked
            if meta.calls:
                self._score(trajectory)
            else:
                self._tasks.start(
                    PromptCall(
                        request=trajectory.trajectory,
                        split=meta.purpose,
                        index=meta.index,
                        source=meta.source,
                    )
                )

    def handle(self, event: Any) -> None:
        asked = self.open.get(event.request)
        match asked, event:
            case list(), GroupRewarded() | TaskFailed():
                self._group_ended(asked, event)
            case _Asked(), PromptReady():
                self._prompted(asked, event)
            case _Asked(), EnvObserved():
                self._observed(asked, event)
            case _Asked(), Rewarded():
                self._rewarded(asked.recorded, event)
            case _Asked(), TaskFailed():
                self._failed(asked.recorded, event)
            case _Asked(), EpisodeLost():
                lost = f"EpisodeLost: {event.message}"
                self._end(asked.recorded, error=lost, not_compared=lost)

    def _prompted(self, asked: _Asked, event: PromptReady) -> None:
        recorded = asked.recorded
        if list(event.token_ids) != list(recorded.token_ids[: recorded.meta.prompt_tokens]):
            self._differs(recorded, f"its prompt is not that of row {recorded.meta.index}")
        elif event.episode:
            self._step(asked)
        else:
            self._score(recorded)

    def _step(self, asked: _Asked) -> None:
        recorded = asked.recorded
        if not asked.left:
            self._score(recorded)
            return
        _, ids = asked.left.popleft()
        if asked.left or recorded.meta.finish == "environment" or self._stopped(ids):
            source = recorded.meta.source
            self._tasks.start(EnvStep(request=recorded.trajectory, token_ids=ids, source=source))
        else:
            self._score(recorded)

    def _observed(self, asked: _Asked, event: EnvObserved) -> None:
        """Compare an answer; a truncated one lacks its end in the record."""
        if asked.left:
            _, ids = asked.left.popleft()
            if list(event.token_ids) != ids:
                self._differs(asked.recorded, "its environment answers differently")
                return
        self._step(asked)

    def _score(self, trajectory: Trajectory) -> None:
        meta = trajectory.meta
        self._tasks.start(
            RewardCall(
                request=trajectory.trajectory,
                split=meta.purpose,
                index=meta.index,
                sampled=SampledTurns(
                    answer=answer_of(trajectory),
                    turns=[ids for _, ids in turns_of(trajectory.segments, trajectory.token_ids)],
                    before=tokens_before(trajectory, meta.calls[-1].start) if meta.calls else (),
                ),
                agent_answer=meta.agent_answer,
                source=meta.source,
            )
        )

    def _rewarded(self, trajectory: Trajectory, event: Rewarded) -> None:
        meta, parts = trajectory.meta, dict(event.parts)
        if trajectory.reward is None and error_class(meta.reward_error or "") in INFRASTRUCTURE:
            why = meta.reward_error or ""
            self._end(trajectory, reward=event.reward, parts=parts, not_compared=why)
            return
        pairs = (
            ("reward", trajectory.reward, event.reward),
            ("raw reward", meta.reward_raw, event.raw),
            ("reward's parts", dict(meta.reward_parts), parts),
            ("answer", meta.reward_answer, event.answer),
        )
        differences = (
            f"its {name} is {now!r}, recorded is {recorded!r}"
            for name, recorded, now in pairs
            if recorded != now
        )
        self._end(trajectory, reward=event.reward, parts=parts, difference=next(differences, ""))

    def _failed(self, trajectory: Trajectory, event: TaskFailed) -> None:
        error = f"{event.error}: {event.message}"
        if event.error in INFRASTRUCTURE:
            self._end(trajectory, error=error, not_compared=error)
        else:
            difference = "" if trajectory.reward is None else f"it has no reward ({error})"
            self._end(trajectory, error=error, difference=difference)

    def _differs(self, trajectory: Trajectory, difference: str) -> None:
        self._tasks.start(Forget(request=trajectory.trajectory, source=trajectory.meta.source))
        self._end(trajectory, error=difference, difference=difference)

    def _end(self, trajectory: Trajectory, *, reward: float | None = None, **fields: Any) -> None:
        name, group = trajectory.trajectory, group_of(trajectory.trajectory)
        self.open.pop(name, None)
        result = Rescored(trajectory=name, recorded=trajectory.reward, reward=reward, **fields)
        if group not in self._together:
            self.done.append(result)
            return
        self._gathered[group].append((trajectory, result))
        if len(self._gathered[group]) == self._together[group].size:
            self._score_group(group, self._gathered.pop(group))

    def _score_group(self, group: str, members: list[tuple[Trajectory, Rescored]]) -> None:
        members.sort(key=lambda member: member[0].trajectory)
        lost = next((result for _, result in members if result.lost), None)
        if lost is not None:
            why = f"{lost.trajectory} of its group was lost ({lost.error})"
            self.done += (
                replace(result, reward=None, error=result.error or why, not_compared=why)
                for _, result in members
            )
            return
        valid = [(member, result) for member, result in members if result.reward is not None]
        if len(valid) < self._together[group].valid_min:
            self.done += (result for _, result in members)
            return
        self.done += (result for _, result in members if result.reward is None)
        self.open[group] = [result for _, result in valid]
        meta = members[0][0].meta
        self._tasks.start(
            GroupCall(
                request=group,
                split=meta.purpose,
                index=meta.index,
                sampled=tuple(turns_said(member) for member, _ in valid),
                source=meta.source,
            )
        )

    def _group_ended(self, alone: list[Rescored], event: GroupRewarded | TaskFailed) -> None:
        del self.open[event.request]
        if isinstance(event, TaskFailed):
            error = f"{event.error}: {event.message}"
            lost = error if event.error in INFRASTRUCTURE else ""
            wrong = "" if lost else f"its group has no scores ({error})"
            self.done += (
                replace(member, reward=None, error=error, difference=wrong, not_compared=lost)
                for member in alone
            )
            return
        sums = [
            (member.reward or 0.0) + added
            for member, added in zip(alone, event.rewards, strict=True)
        ]
        if any(abs(total) > REWARD_MAX for total in sums):
            error = f"NoAnswer: a reward of its group is beyond {REWARD_MAX:g}"
            self.done += (
                replace(member, reward=None, error=error, difference=error) for member in alone
            )
            return
        recorded = self._together[event.request].recorded
        self.done += (
            _with_group(member, total, dict(parts), recorded.get(member.trajectory))
            for member, total, parts in zip(alone, sums, event.parts, strict=True)
        )


def _with_group(
    alone: Rescored,
    reward: float,
    parts: dict[str, float],
    recorded: tuple[float | None, Mapping[str, float]] | None,
) -> Rescored:
    result = replace(alone, reward=reward, parts={**alone.parts, **parts})
    if recorded is None:
        return result
    counted, of_group = recorded
    difference = alone.difference
    if not difference and counted != reward:
        difference = f"its reward within its group is {reward!r}, recorded is {counted!r}"
    elif not difference and parts != dict(of_group):
        difference = f"its group's parts are {parts!r}, recorded are {dict(of_group)!r}"
    return replace(result, recorded=counted, difference=difference)
