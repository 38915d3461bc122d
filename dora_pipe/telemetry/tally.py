"""What a run's log says in numbers so far, told record by record; it decides which records count.

A group's course counts by the rules of the fold (`telemetry.course`): the first result of a
request's present attempt, the commit of the batch that is in force. Statuses are claims of their
roles, and the newest of the newest incarnation is believed. Nothing here knows the time: moments
are those that records carry.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
)
from dora_pipe.schemas.metrics import AnyMetrics, OrchestratorStatus, TrainerStatus, WorkerStatus
from dora_pipe.schemas.rounds import Dispatch, Move, Round, TakeBatch
from dora_pipe.telemetry.counts import Histogram
from dora_pipe.telemetry.course import Courses, Ended, GroupEnded, StepEnded
from dora_pipe.telemetry.deeds import Deed, deeds_of
from dora_pipe.telemetry.fleet import ORCHESTRATOR, TRAINER, Fleet

SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Bounds for what lasts as long as work does, s."""

DELAYS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for what the log adds, s."""

LENGTHS: Final = tuple(float(2**power) for power in range(4, 18))
"""Bounds for sampled tokens of a trajectory."""

STALENESS: Final = tuple(float(value) for value in range(9))

STEPS_KEPT: Final = 400
"""Steps that are remembered one by one."""

DEEDS_KEPT: Final = 64
"""Decisions that are remembered one by one."""

EVALUATIONS_OPEN_MAX: Final = 8
"""Versions whose evaluation is under way or was left half-way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTold:
    """A committed step in numbers."""

    step: int
    committed_ns: int
    seconds: float | None
    """Since the commit before, or since the trainer began; None where that is not known."""
    waited_s: float
    """The trainer was free and had no batch."""
    worker: str
    """Who logged the trajectory that came last; empty where nobody was waited for."""
    version: int
    """Of that trajectory's group; -1 where nobody was waited for."""
    training_s: float
    reward: float | None
    """Mean of the batch's valid rewards."""
    tokens: int
    """Sampled tokens of the batch."""
    staleness: tuple[tuple[int, int], ...]
    """(staleness, groups)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """What the contributions file of a step says of its ratios; see docs/metrics.md."""

    step: int
    effective: float | None
    """Effective sample size over the number of trajectories, 0 to 1."""
    mismatch: tuple[tuple[int, float], ...]
    """(staleness, mean of |ln(mean ratio)| over its trajectories)."""


@dataclass(slots=True, kw_only=True)
class TopicCount:
    """Records of a topic that were read, or were named by those that were."""

    records: int = 0
    bytes: int = 0
    unreadable: int = 0


@dataclass(slots=True, kw_only=True)
class Place:
    """How far a reader is in one partition."""

    position: int
    end: int


class Tally:
    """A run in numbers. Example: ``tally.fact(offset, fact)``, ``tally.round(round_, offset)``,
    ``tally.status(status)``; then read its fields."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.started: RunStarted | None = None
        self.courses = Courses()
        self.fleet = Fleet()
        self.log_up = True
        """False while the log cannot be read."""
        self.last_ns = 0
        """The newest moment that any record carries: wall clock."""
        self.rounds = 0
        self.round_ns = 0
        """Of the newest round."""
        self.bound: int | None = None
        """`max_staleness` as it stood at the newest dispatch; before the first, as configured."""
        self.steps: deque[StepTold] = deque(maxlen=STEPS_KEPT)
        self.commit: StepCommitted | None = None
        """The newest that counts."""
        self.contributed: Contributed | None = None
        self.taken: TakeBatch | None = None
        """The batch that is being trained."""
        self.taken_ns = 0
        self.deeds: deque[Deed] = deque(maxlen=DEEDS_KEPT)
        self.evaluation: tuple[int, float] | None = None
        """(version, mean reward) of the newest evaluation that is complete."""
        self.topics: dict[str, TopicCount] = {}
        """By the end of the topic's name."""
        self.places: dict[tuple[str, int], Place] = {}
        """Of the reader that tells this tally, by (end of the topic's name, partition)."""
        self.control_end = 0
        """Position behind the last control record."""
        self.control_folded = 0
        """`control_next` of the newest round."""
        self.dispatched: Counter[str] = Counter()
        self.fates: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.trajectories: Counter[tuple[str, str]] = Counter()
        """(finish, valid) of every trajectory that was logged, counting or not."""
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        """How stays of requests on workers ended, of groups that have ended."""
        self.moves = Counter({"decided": 0, "released": 0})
        self.refused = 0
        self.late = 0
        """Groups that were trained behind their deadline: C3 is broken."""
        self.waited_by: Counter[str] = Counter()
        """ms that the trainer waited, by the worker that it waited for."""
        self.compute_ms = 0
        self.step_s = Histogram(SECONDS)
        self.training_s = Histogram(SECONDS)
        self.wait_s = Histogram(SECONDS)
        self.delay_s = Histogram(DELAYS)
        self.lengths = Histogram(LENGTHS)
        self.staleness = Histogram(STALENESS)
        self._unfolded: deque[tuple[int, int]] = deque()
        """(offset, moment) of facts that no round has folded."""
        self._evaluating: dict[int, dict[str, float | None]] = {}
        self._evaluation_size = 0

    @property
    def version(self) -> int:
        """The newest policy version."""
        return 0 if self.commit is None else self.commit.step + 1

    @property
    def over(self) -> bool:
        """The round that stops the run was read."""
        return self.courses.over

    @property
    def steps_planned(self) -> int | None:
        """How many steps the run was configured to have."""
        return self._configured("run", "steps")

    @property
    def per_step(self) -> int | None:
        """Groups of a step."""
        return self._configured("groups", "per_step")

    @property
    def heartbeat_s(self) -> float | None:
        """Between two statuses of a role."""
        config = {} if self.started is None else self.started.config
        found = config.get("timing", {}).get("heartbeat_s")
        return found if isinstance(found, int | float) else None

    def _configured(self, section: str, key: str) -> int | None:
        """A key of the configuration, which may be of another version."""
        config = {} if self.started is None else self.started.config
        found = config.get(section, {}).get(key)
        return found if isinstance(found, int) else None

    def count(self, topic: str, size: int, *, unreadable: bool = False) -> None:
        """A record of a topic was read, or named by one that was."""
        told = self.topics.setdefault(topic, TopicCount())
        told.records += 1
        told.bytes += size
        told.unreadable += unreadable

    def fact(self, offset: int, fact: AnyControl) -> None:
        """A control record, which a round folds."""
        self.last_ns = max(self.last_ns, fact.at_ns)
        self._unfolded.append((offset, fact.at_ns))
        self.fleet.fact(offset, fact)
        match fact:
            case RunStarted() if self.started is None:
                self._begin(fact)
            case TrajectoriesLogged():
                for one in fact.trajectories:
                    valid = "no" if one.reward is None else "yes"
                    self.trajectories[one.finish, valid] += 1
                    self.lengths.add(one.tokens)
                    self.count("trajectories", one.bytes)
            case RequestReleased():
                self.moves["released"] += 1
            case RequestFailed():
                self.faults[fact.error] += 1
            case BatchRefused():
                self.refused += 1
                self.taken = None
            case Command(verb="fail-batch"):
                self.taken = None
            case _:
                pass
        self._ended(self.courses.fact(offset, fact))

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        self.rounds += 1
        self.round_ns = round_.now_ns
        self.last_ns = max(self.last_ns, round_.now_ns)
        self.control_folded = round_.control_next
        while self._unfolded and self._unfolded[0][0] < round_.control_next:
            _, at_ns = self._unfolded.popleft()
            self.delay_s.add(max(0, round_.now_ns - at_ns) / 1e9)
        for decision in round_.decisions:
            self.fleet.decision(decision, round_.now_ns)
            self.decisions[str(type(decision).__struct_config__.tag)] += 1
            if isinstance(decision, Dispatch):
                spec = decision.spec
                self.dispatched[spec.purpose] += 1
                if spec.purpose == "train":
                    self.bound = spec.deadline - spec.version
            elif isinstance(decision, Move):
                self.moves["decided"] += 1
            elif isinstance(decision, TakeBatch):
                self.taken, self.taken_ns = decision, round_.now_ns
        self.deeds.extend(deeds_of(round_))
        self._ended(self.courses.round(round_, offset))

    def status(self, status: AnyMetrics) -> None:
        """A record of the metrics topic."""
        self.last_ns = max(self.last_ns, status.at_ns)
        match status:
            case WorkerStatus():
                self.fleet.worker_status(status)
            case TrainerStatus():
                self.fleet.role_status(TRAINER, status.role_epoch, status)
            case OrchestratorStatus():
                self.fleet.role_status(ORCHESTRATOR, status.role_epoch, status)

    def _begin(self, fact: RunStarted) -> None:
        self.started = fact
        self.bound = self._configured("staleness", "max_staleness")
        prompts = min(self._configured("evaluation", "prompts") or 0, fact.eval_rows)
        self._evaluation_size = prompts

    def _ended(self, ended: Iterable[Ended]) -> None:
        for one in ended:
            if isinstance(one, GroupEnded):
                self._group(one)
            else:
                self._step(one)

    def _group(self, ended: GroupEnded) -> None:
        self.fates[ended.fate] += 1
        for way in ended.course.ways.values():
            self.outcomes.update(stay.outcome for stay in way.stays if stay.outcome)
        if ended.fate == "evaluated":
            self._evaluated(ended)

    def _evaluated(self, ended: GroupEnded) -> None:
        """An evaluation is complete with its last prompt."""
        spec = ended.course.spec
        found = self._evaluating.setdefault(spec.version, {})
        rewards = [one.reward for one in ended.course.results if one.reward is not None]
        found[spec.group] = sum(rewards) / len(rewards) if rewards else None
        valid = [reward for reward in found.values() if reward is not None]
        if len(found) == self._evaluation_size:
            del self._evaluating[spec.version]
            if valid:
                self.evaluation = spec.version, sum(valid) / len(valid)
        elif len(self._evaluating) > EVALUATIONS_OPEN_MAX:
            del self._evaluating[min(self._evaluating)]

    def _step(self, ended: StepEnded) -> None:
        fact, batch, last = ended.fact, ended.batch, ended.last
        staleness = Counter(fact.step - group.version for group in fact.groups)
        results = [one for course in ended.courses for one in course.results]
        rewards = [one.reward for one in results if one.reward is not None]
        free_ns = batch.free_ns or batch.taken_ns
        waited_s = max(0, batch.taken_ns - free_ns) / 1e9
        there = bool(waited_s) and last is not None and last.at_ns > free_ns
        told = StepTold(
            step=fact.step,
            committed_ns=fact.at_ns,
            seconds=(fact.at_ns - batch.free_ns) / 1e9 if batch.free_ns else None,
            waited_s=waited_s,
            worker=last.worker if there and last is not None else "",
            version=last.version if there and last is not None else -1,
            training_s=max(0, fact.at_ns - max(batch.taken_ns, free_ns)) / 1e9,
            reward=sum(rewards) / len(rewards) if rewards else None,
            tokens=sum(one.tokens for one in results),
            staleness=tuple(sorted(staleness.items())),
        )
        self.steps.append(told)
        self.commit, self.taken = fact, None
        self.late += sum(group.deadline < fact.step for group in fact.groups)
        self._measure(told, fact.compute_s)

    def _measure(self, told: StepTold, compute_s: float) -> None:
        if told.seconds is not None:
            self.step_s.add(told.seconds)
        self.training_s.add(told.training_s)
        self.wait_s.add(told.waited_s)
        self.waited_by[told.worker or "nobody"] += round(told.waited_s * 1000)
        self.compute_ms += round(compute_s * 1000)
        for value, groups in told.staleness:
            self.staleness.add(value, groups)
