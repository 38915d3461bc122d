"""What became of groups and steps, as rounds and facts tell it: the matter that spans are made of.

It decides which records count for a course, by the rules of the fold: the first `trajectory logged`
of a request's present attempt, by an incarnation that is not out; the commit of the batch that is
in force. Memory is bounded by what is open: whoever asks takes what has ended away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Cancel,
    Dispatch,
    End,
    Fate,
    Fence,
    GroupSpec,
    Move,
    Place,
    PlacedRequest,
    Round,
    StopRun,
    TakeBatch,
)
from dora_pipe.telemetry.ids import RunKey

Outcome = Literal["", "logged", "moved", "left", "fenced", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What holds for all traces of a run."""

    key: RunKey
    package: str
    model: str
    """Folder of version 0, without where it lies."""
    system: str
    """What the log is: `kafka` or `sqlite`."""
    sampling: dict[str, Any]
    eval_sampling: dict[str, Any]


def run_facts(fact: RunStarted) -> RunFacts:
    """What `run started` says of it; a configuration of another version may lack what is asked."""
    config = fact.config
    sampling = dict(config.get("sampling", {}))
    kafka = str(config.get("bus", {}).get("url", "")).startswith("kafka:")
    return RunFacts(
        key=RunKey(fact.run, fact.at_ns),
        package=fact.package,
        model=str(config.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2],
        system="kafka" if kafka else "sqlite",
        sampling=sampling,
        eval_sampling=sampling | config.get("evaluation", {}).get("sampling", {}),
    )


@dataclass(slots=True, kw_only=True)
class Stay:
    """One attempt at a request: from its placement on a worker until that lets go of it."""

    attempt: int
    worker: str
    epoch: int
    placed_ns: int
    reason: str
    resumed: int
    """Sampled tokens it went on from."""
    outcome: Outcome = ""
    ended_ns: int = 0
    why: str = ""
    move_ns: int = 0
    """When the worker was asked to let go of it."""
    move_to: str = ""
    move_why: str = ""


@dataclass(slots=True, kw_only=True)
class Way:
    """One sibling: its stays, and the record that counts."""

    trajectory: str
    stays: list[Stay] = field(default_factory=list)
    logged: TrajectoryLogged | None = None

    @property
    def moved(self) -> bool:
        """Whether it went from worker to worker."""
        return len(self.stays) > 1


@dataclass(slots=True, kw_only=True)
class Course:
    """A group, from its dispatch on."""

    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Of that round in decisions."""
    dispatched_ns: int
    ways: dict[str, Way] = field(default_factory=dict)

    @property
    def results(self) -> list[TrajectoryLogged]:
        """The records that count, by sibling."""
        ways = (self.ways[name] for name in sorted(self.ways))
        return [way.logged for way in ways if way.logged is not None]

    @property
    def last(self) -> TrajectoryLogged | None:
        """The record that came last."""
        return max(self.results, key=lambda one: (one.at_ns, one.trajectory), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch decision in force."""

    take: TakeBatch
    taken_ns: int
    round: int
    free_ns: int
    """The trainer was free: the commit before, or its own start; 0 while it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """A group has its fate, at `ended_ns`."""

    course: Course
    fate: Fate | Literal["open"]
    """`open`: it has none yet, and is looked at as it is."""
    why: str
    ended_ns: int
    batch: Batch | None = None
    """That it was trained in."""
    batch_last: TrajectoryLogged | None = None
    """The record that this batch waited for."""

    @property
    def step(self) -> int | None:
        """The step that trained it."""
        return None if self.batch is None else self.batch.take.step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A step is committed. `courses` are of its batch, those that were not met left out."""

    fact: StepCommitted
    batch: Batch
    courses: tuple[Course, ...]

    @property
    def last(self) -> TrajectoryLogged | None:
        """The record that came last of the batch."""
        return last_of(self.courses)


Ended = GroupEnded | StepEnded


def last_of(courses: tuple[Course, ...]) -> TrajectoryLogged | None:
    """The record that came last of some groups."""
    found = (one.last for one in courses)
    return max(
        (one for one in found if one is not None),
        key=lambda one: (one.at_ns, one.trajectory),
        default=None,
    )


class Courses:
    """All open groups of a run, turn by turn. Example: ``courses.fact(record)``,
    ``courses.round(round_, offset)``; both yield what has ended by it."""

    def __init__(self, run: RunFacts | None = None) -> None:
        self.run = run
        self.open: dict[str, Course] = {}
        self.workers: dict[int, WorkerJoined] = {}
        """By role epoch; those that are gone stay for as long as a trace may name them."""
        self.over = False
        """The run was stopped, or has done its steps."""
        self.free_ns = 0
        self._gone: set[int] = set()
        self._trainer_epoch = -1
        """-1 where it is not known: who begins in the middle of a log."""
        self._batch: Batch | None = None

    def fact(self, offset: int, fact: AnyControl) -> Iterator[Ended]:
        """A control record."""
        match fact:
            case RunStarted():
                self.run = self.run or run_facts(fact)
            case RoleStarted(role="trainer"):
                self._trainer_epoch = fact.role_epoch
                self.free_ns = max(self.free_ns, fact.at_ns)
            case WorkerJoined():
                self._joined(offset, fact)
            case WorkerLeft():
                self._gone.add(fact.epoch)
                self._depart(fact.epoch, "left", fact.at_ns, fact.reason)
            case TrajectoriesLogged() if fact.epoch not in self._gone:
                for one in fact.facts():
                    self._logged(one)
            case RequestReleased():
                self._end_stay(fact.trajectory, fact.attempt, fact.epoch, "moved", fact.at_ns)
            case RequestFailed():
                why = f"{fact.error}: {fact.message}"
                self._end_stay(fact.trajectory, fact.attempt, fact.epoch, "failed", fact.at_ns, why)
            case StepCommitted():
                yield from self._committed(fact)
            case BatchRefused() if self._trainer_epoch in (-1, fact.role_epoch):
                self._revoke(fact.step, fact.attempt)
            case Command(verb="fail-batch"):
                self._batch = None
            case _:
                pass

    def round(self, round_: Round, offset: int) -> Iterator[Ended]:
        """The decisions of a round, after the facts that it folds."""
        for decision in round_.decisions:
            if isinstance(decision, End):
                course = self.open.pop(decision.group, None)
                if course is not None:
                    yield GroupEnded(
                        course=course,
                        fate=decision.fate,
                        why=decision.reason,
                        ended_ns=round_.now_ns,
                    )
            else:
                self._decided(decision, round_, offset)

    def now(self, group: str, now_ns: int) -> GroupEnded | None:
        """An open group as it is at this moment; None for one that is not open."""
        course, batch = self.open.get(group), self._batch
        if course is None:
            return None
        taken = batch is not None and any(one.group == group for one in batch.take.groups)
        return GroupEnded(
            course=course,
            fate="open",
            why="",
            ended_ns=now_ns,
            batch=batch if taken else None,
        )

    def _decided(self, decision: AnyDecision, round_: Round, offset: int) -> None:
        match decision:
            case Dispatch(spec=spec):
                self.open[spec.group] = Course(
                    spec=spec,
                    reason=decision.reason,
                    round=round_.ordinal,
                    offset=offset,
                    dispatched_ns=round_.now_ns,
                )
            case Place():
                for request in decision.requests():
                    self._placed(request, round_.now_ns)
            case Move():
                self._asked_to_move(decision, round_.now_ns)
            case Cancel():
                at = (decision.trajectory, decision.attempt, decision.epoch)
                self._end_stay(*at, "cancelled", round_.now_ns, decision.reason)
            case Fence():
                self._gone.add(decision.epoch)
                self._depart(decision.epoch, "fenced", round_.now_ns, decision.reason)
            case TakeBatch():
                self._batch = Batch(
                    take=decision,
                    taken_ns=round_.now_ns,
                    round=round_.ordinal,
                    free_ns=self.free_ns,
                )
            case StopRun():
                self.over = True
            case _:
                pass

    def _joined(self, offset: int, fact: WorkerJoined) -> None:
        for epoch, worker in self.workers.items():
            if worker.worker == fact.worker and epoch not in self._gone:
                self._gone.add(epoch)
                self._depart(epoch, "fenced", fact.at_ns, "it joined again")
        self.workers[offset] = fact

    def _placed(self, request: PlacedRequest, now_ns: int) -> None:
        course = self.open.get(request.spec.group)
        if course is None:
            return
        way = course.ways.setdefault(request.trajectory, Way(trajectory=request.trajectory))
        way.stays.append(
            Stay(
                attempt=request.attempt,
                worker=request.worker,
                epoch=request.epoch,
                placed_ns=now_ns,
                reason=request.reason,
                resumed=0 if request.resume is None else request.resume.tokens,
            )
        )

    def _present(self, trajectory: str, attempt: int, epoch: int) -> tuple[Way, Stay] | None:
        """The stay that is meant, if it is the present one and has not ended."""
        course = self.open.get(group_of(trajectory))
        way = None if course is None else course.ways.get(trajectory)
        stay = way.stays[-1] if way is not None and way.stays else None
        if way is None or stay is None or stay.outcome:
            return None
        return (way, stay) if (stay.attempt, stay.epoch) == (attempt, epoch) else None

    def _end_stay(
        self,
        trajectory: str,
        attempt: int,
        epoch: int,
        outcome: Outcome,
        at_ns: int,
        why: str = "",
    ) -> None:
        found = self._present(trajectory, attempt, epoch)
        if found is not None:
            found[1].outcome, found[1].ended_ns, found[1].why = outcome, at_ns, why

    def _logged(self, fact: TrajectoryLogged) -> None:
        found = self._present(fact.trajectory, fact.attempt, fact.epoch)
        if found is not None:
            way, stay = found
            way.logged, stay.outcome, stay.ended_ns = fact, "logged", fact.at_ns

    def _asked_to_move(self, decision: Move, now_ns: int) -> None:
        found = self._present(decision.trajectory, decision.attempt, decision.epoch)
        if found is not None:
            stay = found[1]
            stay.move_ns, stay.move_to, stay.move_why = now_ns, decision.to, decision.reason

    def _depart(self, epoch: int, outcome: Outcome, at_ns: int, why: str) -> None:
        for course in self.open.values():
            for way in course.ways.values():
                stay = way.stays[-1]
                if stay.epoch == epoch and not stay.outcome:
                    stay.outcome, stay.ended_ns, stay.why = outcome, at_ns, why

    def _revoke(self, step: int, attempt: int) -> None:
        batch = self._batch
        if batch is not None and (batch.take.step, batch.take.attempt) == (step, attempt):
            self._batch = None

    def _committed(self, fact: StepCommitted) -> Iterator[Ended]:
        batch = self._batch
        if batch is None or (batch.take.step, batch.take.attempt) != (fact.step, fact.attempt):
            return  # it does not count: its batch was ended meanwhile
        self._batch, self.free_ns = None, fact.at_ns
        popped = (self.open.pop(one.group, None) for one in fact.groups)
        courses = tuple(one for one in popped if one is not None)
        last = last_of(courses)
        for course in courses:
            yield GroupEnded(
                course=course,
                fate="trained",
                why=f"batch of step {fact.step}, attempt {fact.attempt}",
                ended_ns=fact.at_ns,
                batch=batch,
                batch_last=last,
            )
        yield StepEnded(fact=fact, batch=batch, courses=courses)
