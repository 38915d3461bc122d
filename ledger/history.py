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
from dora_pipe.schemas.rounds import GroupSpec, ScoreGroup, SiblingFate, TakeBatch
from dora_pipe.schemas.wire import canonical

Outcome = Literal["", "logged", "moved", "left", "fenced", "failed", "cancelled"]
"""End of an attempt: logged, moved, left or fenced with its worker, failed, or cancelled; empty
while it runs.
"""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt at a request, from its placement until the worker releases it."""

    attempt: int
    worker: str
    epoch: int
    host: WorkerHistory | None
    """Incarnation that runs it; None if it never joined."""
    round: int
    placed_ns: int
    reason: str
    resumed: int
    """Sampled tokens it resumed from."""
    outcome: Outcome = ""
    ended_ns: int = 0
    why: str = ""
    retryable: bool = True
    """Another attempt may follow a failure."""
    move_ns: int = 0
    """Time at which the worker was asked to release it."""
    move_to: str = ""
    move_why: str = ""


@dataclass(slots=True, kw_only=True)
class RequestHistory:
    """One trajectory: its attempts, and the record that counts."""

    trajectory: str
    attempts: list[Attempt] = field(default_factory=list)
    logged: TrajectoryLogged | None = None
    offset: int = -1
    """Offset of the report in control."""

    @property
    def moved(self) -> bool:
        """Report whether it moved between workers."""
        return len(self.attempts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """An incarnation of a worker is out."""

    worker: WorkerHistory = field(compare=False, repr=False)
    how: Literal["left", "fenced"]
    why: str
    at_ns: int


@dataclass(slots=True, kw_only=True)
class WorkerHistory:
    """An incarnation of a worker since it joined."""

    joined: WorkerJoined
    epoch: int
    target: int = -1
    """Assigned version; -1: none yet."""
    hosted: int = -1
    """Version last reported ready."""
    assigned: dict[int, int] = field(default_factory=dict)
    """Assignment times of versions that are not loaded yet."""
    draining: bool = False
    gone: WorkerGone | None = None

    @property
    def name(self) -> str:
        """Name of the worker, shared by its incarnations."""
        return self.joined.worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTaken:
    """A decided part; the last one is taken with its batch."""

    groups: tuple[str, ...]
    taken_ns: int
    reason: str
    last: TrajectoryLogged | None
    """Last record of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch decision in force."""

    take: TakeBatch
    taken_ns: int
    round: int
    free_ns: int
    """Time at which the trainer became free (commit or start); 0 without a trainer."""
    last: TrajectoryLogged | None
    """Last record of the batch."""
    parts: tuple[PartTaken, ...]
    """All parts; none if taken whole."""
    part_of: Mapping[str, int]
    """Part of each group, if there are several."""

    def taken_of(self, group: str) -> PartTaken | None:
        """Return a group's part; None if the batch was taken whole."""
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
    """Time at which the trainer was free for it."""
    seconds: float | None
    """Seconds computed before the batch; None if computed with it."""
    stops: Sequence[Stop] = ()

    @property
    def begun_ns(self) -> int:
        """Time at which it was taken and the trainer was free."""
        return max(self.free_ns, self.taken.taken_ns)

    @property
    def ended_ns(self) -> int:
        """Time at which the trainer was free again; equals the start if computed with the batch."""
        return self.begun_ns + int((self.seconds or 0.0) * 1e9)

    @property
    def waited_s(self) -> float:
        """Seconds for which the free trainer waited for it."""
        stopped = stopped_ns(self.stops, self.free_ns, self.begun_ns)
        return (self.begun_ns - self.free_ns - stopped) / 1e9


def computed(
    parts: Sequence[PartTaken], ahead_s: Sequence[float], free_ns: int, stops: Sequence[Stop] = ()
) -> Iterator[PartComputed]:
    """Yield all parts of a step, in order; the trainer became free at `free_ns`."""
    for number, taken in enumerate(parts):
        seconds = ahead_s[number] if number < len(ahead_s) else None
        one = PartComputed(part=number, taken=taken, free_ns=free_ns, seconds=seconds, stops=stops)
        yield one
        free_ns = one.ended_ns


def batch_of(
    take: TakeBatch, parts: Sequence[PartTaken], *, taken_ns: int, round_: int, free_ns: int
) -> Batch:
    """Build a batch taken in these parts, or whole."""
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
    """Sort key of records by arrival."""
    return fact.at_ns, fact.trajectory


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """A group since its dispatch."""

    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Offset of its dispatch round in decisions."""
    dispatched_ns: int
    requests: dict[str, RequestHistory] = field(default_factory=dict)
    """Requests placed at least once, by trajectory."""
    scoring: ScoreGroup | None = None
    """Open scoring request."""
    asked: ScoreGroup | None = None
    """Latest scoring request."""
    scores: GroupScored | None = None
    """Answer that counts; `requests` then have its rewards."""
    valid: int = 0
    """Records that count with a reward of their own."""
    expired: bool = False
    """It exceeded the group timeout."""
    left: dict[int, SiblingFate] = field(default_factory=dict)
    """Outcomes of the trajectories that it did not wait for."""

    @property
    def closed(self) -> bool:
        """Report whether it waits for no trajectory, although some may be open."""
        return self.expired or (self.spec.spare > 0 and self.valid >= self.spec.size)

    @property
    def whole(self) -> bool:
        """Report whether all its records are there."""
        results = len(self.results)
        return results == self.spec.siblings or (self.closed and results > 0)

    @property
    def results(self) -> list[TrajectoryLogged]:
        """Records that count, by trajectory."""
        requests = (self.requests[name] for name in sorted(self.requests))
        return [one.logged for one in requests if one.logged is not None]

    @property
    def rewards(self) -> list[float]:
        """Valid rewards of the records that count."""
        return rewards_of(self.results)

    @property
    def last(self) -> TrajectoryLogged | None:
        """Last record."""
        return max(self.results, key=arrival, default=None)


def rewards_of(results: Iterable[TrajectoryLogged]) -> list[float]:
    """Return the valid rewards of some records."""
    return [one.reward for one in results if one.reward is not None]


def last_of(groups: Iterable[GroupHistory]) -> TrajectoryLogged | None:
    """Return the last record of some groups."""
    found = (one.last for one in groups)
    return max((one for one in found if one is not None), key=arrival, default=None)


def note_scores(group: GroupHistory, fact: GroupScored) -> None:
    """Note a scoring answer; it counts if its request is the latest."""
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
    """Note the end of an evaluation group; without an answer none of its trajectories count."""
    if group.spec.source in started.scored_together and group.scores is None:
        for request in group.requests.values():
            _count(request, None)


def parts_of(group: GroupHistory, trajectory: str) -> str | None:
    """Return the scores by name, as JSON, of a trajectory that was scored with its group."""
    siblings = () if group.scores is None else group.scores.siblings
    found = (one.parts for one in siblings if one.trajectory == trajectory)
    return next((canonical(parts).decode() for parts in found), None)


def parts_by_task(groups: Iterable[GroupHistory]) -> dict[str, dict[str, float]]:
    """Return the mean of every reward part (`part_means`), by task."""
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
