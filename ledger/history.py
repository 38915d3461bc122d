"""History of groups, requests, batches and workers: what became of each; only values."""

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
"""How an attempt ended: with its record, because its request moved, with its worker, in an error,
or because it was not needed any more; empty while it goes on."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt at a request: from its placement on a worker until that lets go of it."""

    attempt: int
    worker: str
    epoch: int
    host: WorkerHistory | None
    """The incarnation that has it; None where it never joined."""
    round: int
    placed_ns: int
    reason: str
    resumed: int
    """Sampled tokens it went on from."""
    outcome: Outcome = ""
    ended_ns: int = 0
    why: str = ""
    retryable: bool = True
    """Whether another attempt may follow one that failed."""
    move_ns: int = 0
    """When the worker was asked to let go of it."""
    move_to: str = ""
    move_why: str = ""


@dataclass(slots=True, kw_only=True)
class RequestHistory:
    """One sibling: its attempts, and the record that counts."""

    trajectory: str
    attempts: list[Attempt] = field(default_factory=list)
    logged: TrajectoryLogged | None = None
    offset: int = -1
    """Of the report in control that says so."""

    @property
    def moved(self) -> bool:
        """Whether it went from worker to worker."""
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
    """An incarnation of a worker, from when it joined on."""

    joined: WorkerJoined
    epoch: int
    target: int = -1
    """The version it was assigned; -1: none yet."""
    hosted: int = -1
    """The version it reported ready last."""
    assigned: dict[int, int] = field(default_factory=dict)
    """When it was told to load the versions that it has not loaded yet."""
    draining: bool = False
    gone: WorkerGone | None = None

    @property
    def name(self) -> str:
        """What all its incarnations are called."""
        return self.joined.worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTaken:
    """A part as it was decided; the last one of a batch is what was taken with that."""

    groups: tuple[str, ...]
    taken_ns: int
    reason: str
    last: TrajectoryLogged | None
    """The record that came last of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch decision in force."""

    take: TakeBatch
    taken_ns: int
    round: int
    free_ns: int
    """The trainer was free: the commit before, or its own start; 0 while it is not there."""
    last: TrajectoryLogged | None
    """The record that came last of it."""
    parts: tuple[PartTaken, ...]
    """All of them; none where it was taken as one."""
    part_of: Mapping[str, int]
    """Which part each of its groups is in, where it has several."""

    def taken_of(self, group: str) -> PartTaken | None:
        """The part that a group is in; None where the batch was taken as one."""
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
    """The trainer was free for it."""
    seconds: float | None
    """What was spent on it ahead of the batch; None: it was computed with that."""
    stops: Sequence[Stop] = ()

    @property
    def begun_ns(self) -> int:
        """It was there, and the trainer was free."""
        return max(self.free_ns, self.taken.taken_ns)

    @property
    def ended_ns(self) -> int:
        """The trainer was free again; of one that was computed with the batch, as if at once."""
        return self.begun_ns + int((self.seconds or 0.0) * 1e9)

    @property
    def waited_s(self) -> float:
        """The trainer was free and it was not there."""
        stopped = stopped_ns(self.stops, self.free_ns, self.begun_ns)
        return (self.begun_ns - self.free_ns - stopped) / 1e9


def computed(
    parts: Sequence[PartTaken], ahead_s: Sequence[float], free_ns: int, stops: Sequence[Stop] = ()
) -> Iterator[PartComputed]:
    """All parts of a step, in order, for which the trainer was free at `free_ns`."""
    for number, taken in enumerate(parts):
        seconds = ahead_s[number] if number < len(ahead_s) else None
        one = PartComputed(part=number, taken=taken, free_ns=free_ns, seconds=seconds, stops=stops)
        yield one
        free_ns = one.ended_ns


def batch_of(
    take: TakeBatch, parts: Sequence[PartTaken], *, taken_ns: int, round_: int, free_ns: int
) -> Batch:
    """A batch that was taken in these parts, or as one."""
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
    """Orders records as they came."""
    return fact.at_ns, fact.trajectory


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """A group, from its dispatch on."""

    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Of that round in decisions."""
    dispatched_ns: int
    requests: dict[str, RequestHistory] = field(default_factory=dict)
    """Those that were placed at least once, by trajectory."""
    scoring: ScoreGroup | None = None
    """Who was asked last to score its siblings together, while no answer has come."""
    asked: ScoreGroup | None = None
    """Who was asked last at all."""
    scores: GroupScored | None = None
    """The answer that counts. The rewards of `requests` are those of it then."""
    valid: int = 0
    """Records that count and had a reward of their own."""
    expired: bool = False
    """It was open for too long."""
    left: dict[int, SiblingFate] = field(default_factory=dict)
    """What became of the siblings that it did not wait for."""

    @property
    def closed(self) -> bool:
        """Whether it waits for no sibling although some may be open."""
        return self.expired or (self.spec.spare > 0 and self.valid >= self.spec.size)

    @property
    def whole(self) -> bool:
        """Whether all records are there that it is made of."""
        results = len(self.results)
        return results == self.spec.siblings or (self.closed and results > 0)

    @property
    def results(self) -> list[TrajectoryLogged]:
        """The records that count, by sibling."""
        requests = (self.requests[name] for name in sorted(self.requests))
        return [one.logged for one in requests if one.logged is not None]

    @property
    def rewards(self) -> list[float]:
        """Those of them that are valid."""
        return rewards_of(self.results)

    @property
    def last(self) -> TrajectoryLogged | None:
        """The record that came last."""
        return max(self.results, key=arrival, default=None)


def rewards_of(results: Iterable[TrajectoryLogged]) -> list[float]:
    """The valid rewards of some records."""
    return [one.reward for one in results if one.reward is not None]


def last_of(groups: Iterable[GroupHistory]) -> TrajectoryLogged | None:
    """The record that came last of some groups."""
    found = (one.last for one in groups)
    return max((one for one in found if one is not None), key=arrival, default=None)


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
