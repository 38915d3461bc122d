"""Histories of groups, requests, batches and workers.

The numerous ones are Structs, because audit encodes them when it spills what has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from dora_pipe.ledger.evaluations import Sample, part_means, samples_of
from dora_pipe.ledger.marks import Stop, stopped_ns
from dora_pipe.schemas.control import (
    GroupScored,
    ScoredSample,
    TakenTrajectory,
    TrajectoryLogged,
    WorkerJoined,
)
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.rounds import GroupSpec, Outcome, SampleOutcome, ScoreGroup, TakeBatch
from dora_pipe.schemas.wire import canonical

RecordStatus = Literal["bound", "superseded", "fenced"]
"""Counts for its group; replaced by another; its worker was out."""

Departure = Literal["left", "fenced"]

AttemptOutcome = Literal["", "logged", "migrated", "left", "fenced", "failed", "cancelled"]
"""End of an attempt; empty while it runs."""

REQUEUED: Final = frozenset({"migrated", "left", "fenced", "failed"})
"""Ends of an attempt after which another one may follow."""


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Place in the log where something took effect.

    Example: ``Moment(round=12, offset=31, now_ns=8_000_000_000)``; `round` is -1 for unfolded
    events.
    """

    round: int
    offset: int
    now_ns: int


class Attempt(msgspec.Struct, kw_only=True, array_like=True):
    attempt: int
    worker: str
    incarnation: int
    host: str | None
    engine: str | None
    """Host and engine of the worker; None if it never joined."""
    round: int
    scheduled_ns: int
    reason: str
    resumed: int
    outcome: AttemptOutcome = ""
    ended_ns: int = 0
    why: str = ""
    retryable: bool = True
    migration_ns: int = 0
    migration_target: str = ""
    migration_reason: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.incarnation


class RecordLogged(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A logged trajectory and whether it counts."""

    fact: TrajectoryLogged
    status: RecordStatus
    offset: int
    """Offset of its report in control."""
    engine: int = -1
    """Index in `GroupLedger.engines`; -1 if the worker is unknown."""

    @property
    def place(self) -> tuple[int, int]:
        return self.fact.partition, self.fact.offset

    @property
    def taken(self) -> TakenTrajectory:
        fact = self.fact
        return TakenTrajectory(
            trajectory=fact.trajectory,
            attempt=fact.attempt,
            incarnation=fact.incarnation,
            partition=fact.partition,
            offset=fact.offset,
            sha256=fact.sha256,
        )


class RequestHistory(msgspec.Struct, kw_only=True, array_like=True):
    """A trajectory of a group, with its attempts."""

    trajectory: str
    attempts: list[Attempt] = []
    bound: RecordLogged | None = None
    scored: TrajectoryLogged | None = None
    faults: int = 0
    """Attempts lost by error or with the worker."""
    failed: bool = False
    trained: int | None = None
    left: SampleOutcome | None = None
    """Its outcome if the group did not wait for it."""

    @property
    def logged(self) -> TrajectoryLogged | None:
        """Return the record that counts, with the reward that counts."""
        if self.scored is not None:
            return self.scored
        return None if self.bound is None else self.bound.fact

    @property
    def over(self) -> bool:
        return self.bound is not None or self.failed or self.left is not None

    @property
    def running(self) -> Attempt | None:
        """Return the newest attempt while it runs."""
        last = self.attempts[-1] if self.attempts else None
        return None if last is None or last.outcome or self.over else last

    @property
    def waiting(self) -> bool:
        """Report whether it lost its worker and waits for a placement."""
        last = self.attempts[-1].outcome if self.attempts else ""
        return last in REQUEUED and not self.over

    @property
    def moving(self) -> bool:
        """Report whether the worker of its newest attempt must release it."""
        return bool(self.attempts) and self.attempts[-1].migration_ns > 0

    @property
    def moved(self) -> bool:
        return len(self.attempts) > 1

    def was_placed(self, attempt: int, worker: str, incarnation: int) -> bool:
        placement = (attempt, worker, incarnation)
        return any((a.attempt, a.worker, a.incarnation) == placement for a in self.attempts)


class Scoring(msgspec.Struct, kw_only=True, array_like=True):
    """Scoring of a group as a whole."""

    asked: list[ScoreGroup] = []
    open: bool = False
    """Neither answered nor lost."""
    faults: int = 0
    failed: bool = False
    answer: GroupScored | None = None

    @property
    def samples(self) -> dict[str, ScoredSample]:
        return (
            {}
            if self.answer is None
            else {sample.trajectory: sample for sample in self.answer.samples}
        )

    @property
    def rewards(self) -> dict[str, float]:
        return {name: sample.reward for name, sample in self.samples.items()}

    @property
    def request(self) -> ScoreGroup | None:
        """Return the newest decision, while it is open."""
        return self.asked[-1] if self.open else None

    def was_asked(self, attempt: int, worker: str, incarnation: int) -> ScoreGroup | None:
        """Return the decision that asked this incarnation."""
        key = (attempt, worker, incarnation)
        for decision in self.asked:
            if (decision.attempt, decision.worker, decision.incarnation) == key:
                return decision
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    how: Departure
    why: str
    at_ns: int


@dataclass(slots=True, kw_only=True)
class WorkerHistory:
    joined: WorkerJoined
    incarnation: int
    engine: int = -1
    """Index in `GroupLedger.engines`."""
    target: int = -1
    """-1: none yet."""
    served: int = -1
    """Version last reported ready."""
    assigned: dict[int, int] = field(default_factory=dict)
    first_ready: dict[int, int] = field(default_factory=dict)
    """Control offset at which each version was first ready; kept by audit."""
    held: set[int] = field(default_factory=set)
    """Versions served at once; kept by audit."""
    awake: bool = False
    """Assigned a version, no sleep reported since; kept by audit."""
    draining: bool = False
    gone: Gone | None = None

    @property
    def name(self) -> str:
        """Shared by incarnations."""
        return self.joined.worker

    @property
    def departure(self) -> Literal["", "left", "fenced"]:
        """How it ended; empty while present."""
        return "" if self.gone is None else self.gone.how

    @property
    def several(self) -> bool:
        """Report whether it can serve several versions at once."""
        return self.joined.max_resident_versions > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    worker: WorkerHistory
    gone: Gone


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
        part = PartComputed(part=number, taken=taken, free_ns=free_ns, seconds=seconds, stops=stops)
        yield part
        free_ns = part.ended_ns


def batch_of(
    take: TakeBatch, parts: Sequence[PartTaken], *, taken_ns: int, round_: int, free_ns: int
) -> Batch:
    """Return a batch taken in parts or whole."""
    arrived = [part.last for part in parts if part.last is not None]
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


class GroupHistory(msgspec.Struct, kw_only=True, array_like=True):
    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Offset of its dispatch round."""
    dispatched_ns: int
    requests: dict[str, RequestHistory] = {}
    records: list[RecordLogged] = []
    """All logged records in fold order."""
    scoring: Scoring | None = None
    """None unless its source is scored as a group."""
    valid: int = 0
    """Records with a reward of their own."""
    expired: bool = False
    """Exceeded the group timeout."""
    taken: tuple[int, int] | None = None
    """(step, attempt) of its batch; kept by audit."""
    outcome: Outcome | None = None
    why: str = ""
    step: int | None = None
    part: int = 0
    """From 1; 0 if the batch had no parts; kept by audit."""

    @property
    def closed(self) -> SampleOutcome | None:
        """Outcome of open trajectories that it does not wait for."""
        if self.expired:
            return "expired"
        return "redundant" if self.spec.redundancy and self.valid >= self.spec.size else None

    @property
    def whole(self) -> bool:
        """Report whether all its records are there."""
        results = len(self.bound)
        return results == self.spec.samples or (self.closed is not None and results > 0)

    @property
    def placed(self) -> list[RequestHistory]:
        """Requests with an attempt, by trajectory."""
        return [
            self.requests[name] for name in sorted(self.requests) if self.requests[name].attempts
        ]

    @property
    def open_samples(self) -> tuple[int, ...]:
        numbered = enumerate(sorted(self.requests))
        return tuple(sample for sample, name in numbered if not self.requests[name].over)

    @property
    def left(self) -> dict[int, SampleOutcome]:
        """Outcomes of trajectories that it did not wait for, by sample."""
        return {
            parse_trajectory_id(name)[2]: request.left
            for name, request in self.requests.items()
            if request.left is not None
        }

    @property
    def bound(self) -> list[RecordLogged]:
        """Records that count, by trajectory."""
        requests = (self.requests[name] for name in sorted(self.requests))
        return [request.bound for request in requests if request.bound is not None]

    @property
    def results(self) -> list[TrajectoryLogged]:
        """Records that count by trajectory, with the rewards that count."""
        logged = (self.requests[name].logged for name in sorted(self.requests))
        return [fact for fact in logged if fact is not None]

    @property
    def rewards(self) -> list[float]:
        return rewards_of(self.results)

    @property
    def last(self) -> TrajectoryLogged | None:
        return max(self.results, key=arrival, default=None)

    @property
    def tokens(self) -> int:
        return sum(record.fact.tokens for record in self.bound)

    @property
    def asked(self) -> ScoreGroup | None:
        return self.scoring.asked[-1] if self.scoring and self.scoring.asked else None

    @property
    def scores(self) -> GroupScored | None:
        return None if self.scoring is None else self.scoring.answer


def rewards_of(results: Iterable[TrajectoryLogged]) -> list[float]:
    return [record.reward for record in results if record.reward is not None]


def last_of(groups: Iterable[GroupHistory]) -> TrajectoryLogged | None:
    records = (group.last for group in groups)
    return max((record for record in records if record is not None), key=arrival, default=None)


def note_scores(group: GroupHistory, fact: GroupScored) -> None:
    """Note the scores that count as the rewards of a group."""
    for sample in fact.samples:
        _count(group.requests[sample.trajectory], sample.reward, sample.parts)


def note_end(group: GroupHistory) -> None:
    """Note an evaluation group's end; without scores none of its trajectories count."""
    if group.scoring is not None and group.scoring.answer is None:
        for request in group.requests.values():
            _count(request, None)


def parts_of(group: GroupHistory, trajectory: str) -> str | None:
    """Return a trajectory's group scores as JSON."""
    samples = () if group.scores is None else group.scores.samples
    matches = (sample.parts for sample in samples if sample.trajectory == trajectory)
    return next((canonical(parts).decode() for parts in matches), None)


def parts_by_task(groups: Iterable[GroupHistory]) -> dict[str, dict[str, float]]:
    """Return mean reward parts by task."""
    by_task: dict[str, list[Sample]] = {}
    for group in groups:
        by_task.setdefault(group.spec.task, []).extend(samples_of(group.results))
    means = {task: part_means(own) for task, own in sorted(by_task.items())}
    return {task: own for task, own in means.items() if own}


def _count(
    request: RequestHistory, reward: float | None, parts: Mapping[str, float] = MappingProxyType({})
) -> None:
    logged = request.logged
    if logged is not None and logged.reward is not None:
        request.scored = msgspec.structs.replace(
            logged, reward=reward, parts={**logged.parts, **parts}
        )
