"""Histories of groups, requests, batches and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import msgspec

from dora_pipe.ledger.evaluations import Sample, part_means, samples_of
from dora_pipe.ledger.marks import Stop, stopped_ns
from dora_pipe.schemas.control import GroupScored, RunStarted, TrajectoryLogged, WorkerJoined
from dora_pipe.schemas.rounds import GroupSpec, SampleOutcome, ScoreGroup, TakeBatch
from dora_pipe.schemas.wire import canonical

AttemptOutcome = Literal["", "logged", "migrated", "left", "fenced", "failed", "cancelled"]
"""End of an attempt; empty while it runs."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An attempt, from placement to release."""

    attempt: int
    worker: str
    incarnation: int
    host: WorkerHistory | None
    """None if it never joined."""
    round: int
    scheduled_ns: int
    reason: str
    resumed: int
    outcome: AttemptOutcome = ""
    ended_ns: int = 0
    why: str = ""
    retryable: bool = True
    migration_ns: int = 0
    """Time of the release request."""
    migration_target: str = ""
    migration_reason: str = ""


@dataclass(slots=True, kw_only=True)
class RequestHistory:
    """A trajectory of a group."""

    trajectory: str
    attempts: list[Attempt] = field(default_factory=list)
    logged: TrajectoryLogged | None = None
    offset: int = -1

    @property
    def moved(self) -> bool:
        return len(self.attempts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    worker: WorkerHistory = field(compare=False, repr=False)
    how: Literal["left", "fenced"]
    why: str
    at_ns: int


@dataclass(slots=True, kw_only=True)
class WorkerHistory:
    """A worker incarnation."""

    joined: WorkerJoined
    incarnation: int
    target: int = -1
    """-1: none yet."""
    served: int = -1
    """Version last reported ready."""
    assigned: dict[int, int] = field(default_factory=dict)
    """Assignment times of versions not loaded yet."""
    draining: bool = False
    gone: WorkerGone | None = None

    @property
    def name(self) -> str:
        """Shared by incarnations."""
        return self.joined.worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTaken:
    """A decided part; the last one comes with its batch."""

    groups: tuple[str, ...]
    taken_ns: int
    reason: str
    last: TrajectoryLogged | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch decision in force."""

    take: TakeBatch
    taken_ns: int
    round: int
    free_ns: int
    """Last commit or the trainer's start; 0 without one."""
    last: TrajectoryLogged | None
    parts: tuple[PartTaken, ...]
    """Empty if taken whole."""
    part_of: Mapping[str, int]
    """By group, if there are several."""

    def taken_of(self, group: str) -> PartTaken | None:
        """Return a group's part, if any."""
        number = self.part_of.get(group)
        return None if number is None else self.parts[number]

    def taken_ns_of(self, group: str) -> int:
        part = self.taken_of(group)
        return self.taken_ns if part is None else part.taken_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComputed:
    """A part of a committed step."""

    part: int
    taken: PartTaken
    free_ns: int
    """Time when the trainer became free."""
    seconds: float | None
    """Computed early; None if computed with the batch."""
    stops: Sequence[Stop] = ()

    @property
    def begun_ns(self) -> int:
        """Time when it was taken and the trainer free."""
        return max(self.free_ns, self.taken.taken_ns)

    @property
    def ended_ns(self) -> int:
        """Time when the trainer was free again; the start if computed with the batch."""
        return self.begun_ns + int((self.seconds or 0.0) * 1e9)

    @property
    def waited_s(self) -> float:
        """Wait of the free trainer."""
        stopped = stopped_ns(self.stops, self.free_ns, self.begun_ns)
        return (self.begun_ns - self.free_ns - stopped) / 1e9


def computed(
    parts: Sequence[PartTaken], early_s: Sequence[float], free_ns: int, stops: Sequence[Stop] = ()
) -> Iterator[PartComputed]:
    """Yield a step's parts; the trainer became free at `free_ns`."""
    for number, taken in enumerate(parts):
        seconds = early_s[number] if number < len(early_s) else None
        one = PartComputed(part=number, taken=taken, free_ns=free_ns, seconds=seconds, stops=stops)
        yield one
        free_ns = one.ended_ns


def batch_of(
    take: TakeBatch, parts: Sequence[PartTaken], *, taken_ns: int, round_: int, free_ns: int
) -> Batch:
    """Return a batch taken in parts or whole."""
    arrived = [one.last for one in parts if one.last is not None]
    several = tuple(parts) if len(parts) > 1 else ()
    numbered = enumerate(several)
    return Batch(
        take=take,
        taken_ns=taken_ns,
        round=round_,
        free_ns=free_ns,
        last=max(arrived, key=arrival, default=None),
        parts=several,
        part_of={name: number for number, part in numbered for name in part.groups},
    )


def arrival(fact: TrajectoryLogged) -> tuple[int, str]:
    """Return the sort key of arrival."""
    return fact.at_ns, fact.trajectory


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """A group since its dispatch."""

    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Offset of its dispatch round."""
    dispatched_ns: int
    requests: dict[str, RequestHistory] = field(default_factory=dict)
    """Placed ones, by trajectory."""
    scoring: ScoreGroup | None = None
    asked: ScoreGroup | None = None
    scores: GroupScored | None = None
    """Answer that counts; sets the rewards of `requests`."""
    valid: int = 0
    """Records with a reward of their own."""
    expired: bool = False
    left: dict[int, SampleOutcome] = field(default_factory=dict)
    """Outcomes of trajectories that it did not wait for."""

    @property
    def closed(self) -> bool:
        """Report whether it waits for no trajectory."""
        return self.expired or (self.spec.redundancy > 0 and self.valid >= self.spec.size)

    @property
    def whole(self) -> bool:
        """Report whether all its records are there."""
        results = len(self.results)
        return results == self.spec.samples or (self.closed and results > 0)

    @property
    def results(self) -> list[TrajectoryLogged]:
        requests = (self.requests[name] for name in sorted(self.requests))
        return [one.logged for one in requests if one.logged is not None]

    @property
    def rewards(self) -> list[float]:
        return rewards_of(self.results)

    @property
    def last(self) -> TrajectoryLogged | None:
        return max(self.results, key=arrival, default=None)


def rewards_of(results: Iterable[TrajectoryLogged]) -> list[float]:
    return [one.reward for one in results if one.reward is not None]


def last_of(groups: Iterable[GroupHistory]) -> TrajectoryLogged | None:
    found = (one.last for one in groups)
    return max((one for one in found if one is not None), key=arrival, default=None)


def note_scores(group: GroupHistory, fact: GroupScored) -> None:
    """Note a score if its request is the latest."""
    asked = group.scoring
    if asked is None or (asked.attempt, asked.incarnation) != (fact.attempt, fact.incarnation):
        return
    group.scoring = None
    if fact.error:
        return
    group.scores = fact
    for one in fact.samples:
        _count(group.requests[one.trajectory], one.reward, one.parts)


def note_end(group: GroupHistory, started: RunStarted) -> None:
    """Note an evaluation group's end; without scores none of its trajectories count."""
    if group.spec.source in started.scored_together and group.scores is None:
        for request in group.requests.values():
            _count(request, None)


def parts_of(group: GroupHistory, trajectory: str) -> str | None:
    """Return a trajectory's group scores as JSON."""
    samples = () if group.scores is None else group.scores.samples
    found = (one.parts for one in samples if one.trajectory == trajectory)
    return next((canonical(parts).decode() for parts in found), None)


def parts_by_task(groups: Iterable[GroupHistory]) -> dict[str, dict[str, float]]:
    """Return mean reward parts by task."""
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
