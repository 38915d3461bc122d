"""A run in numbers while its log is followed; it decides what is counted.

What became of groups, steps and workers the account of the ledger says, what roles said last its
statuses. Nothing here knows the time: moments are those that records carry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dora_pipe.bus.port import Bus
from dora_pipe.ledger.account import (
    BatchEnded,
    Event,
    GroupEnded,
    RecordLogged,
    RunAccount,
    StepEnded,
    mean,
)
from dora_pipe.ledger.evaluations import EvaluationEnded
from dora_pipe.ledger.follower import LogFollower, LogMeter
from dora_pipe.ledger.history import (
    GroupHistory,
    WorkerGone,
    WorkerHistory,
    parts_by_task,
    rewards_of,
)
from dora_pipe.ledger.marks import Mark
from dora_pipe.ledger.statuses import (
    NOTHING_COUNTED,
    LastStatus,
    Statuses,
    WorkerCounts,
    epoch_of,
    role_of,
)
from dora_pipe.observe.alarms import Pauses
from dora_pipe.observe.failed import (
    SINCE_STEP_GROUPS,
    FailedShare,
    FailedTrajectories,
    GroupsSinceStep,
)
from dora_pipe.observe.ratios import Contributed
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    RunStarted,
    StepCommitted,
    TrajectoryLogged,
    VersionsDropped,
    WorkerReady,
    error_class,
)
from dora_pipe.schemas.metrics import AnyMetrics, WorkerStatus
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    Dispatch,
    EndSiblings,
    Halt,
    Move,
    Round,
    SiblingFate,
)
from dora_pipe.schemas.topics import Topics

SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Bounds for what lasts as long as work does, s."""

DELAYS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for what the log adds, s."""

LENGTHS: Final = tuple(float(2**power) for power in range(4, 18))
"""Bounds for sampled tokens of a trajectory."""

LOADS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
"""Bounds for loading weights, s."""

STALENESS: Final = tuple(float(value) for value in range(9))

STEPS_KEPT: Final = 400
"""Steps that are remembered one by one."""

MARKS_KEPT: Final = 400
"""Changes of settings, stops and lost roles that are remembered one by one."""

ROUNDS_KEPT: Final = 64
"""Rounds that are remembered one by one."""

LEARNING: Final[Mapping[str, str]] = {
    "loss": "Loss of the step, by its objective.",
    "grad_norm": "Mean norm of the updates' gradients, before they are clipped.",
    "entropy": "Mean -log-prob of the batch's sampled tokens: an estimate, nats per token.",
    "truncated": "Share of the batch's trajectories that a limit of tokens or turns ended.",
    "kl": "Mean KL estimate to the reference, per token.",
    "clipped_share": "Share of trained tokens whose gradient the clip took away.",
    "learning_rate": "Learning rate of the step, by its schedule.",
}
"""Names, and what each says. docs/observe.md defines them."""

RATE: Final = "trainer.learning_rate"

WorkerState = Literal[
    "joined", "loading", "idle", "generating", "asleep", "draining", "left", "fenced"
]

STATES: Final[tuple[WorkerState, ...]] = (
    "joined",
    "loading",
    "idle",
    "generating",
    "asleep",
    "draining",
    "left",
    "fenced",
)
"""`joined`: it has no version yet. `loading`: it shall host another version than it does. `asleep`:
an elastic one that shall host none."""


def learning_of(figures: Mapping[str, float], settings: Mapping[str, Any]) -> dict[str, float]:
    """Return those figures that a commit has; `settings` are those of its batch."""
    rate = settings.get(RATE)
    known = {**figures, **({"learning_rate": rate} if isinstance(rate, float) else {})}
    return {name: known[name] for name in LEARNING if name in known}


@dataclass(slots=True)
class Histogram:
    """Observations counted by upper bounds, the last of which is infinity.

    Example: ``Histogram((1.0, 2.0)).add(1.5)``
    """

    bounds: Sequence[float]
    """Ascending, each the largest value that its bucket takes."""
    counts: list[int] = field(default_factory=list)
    """Per bucket, not added up; the last one is of what is above every bound."""
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def observations(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, observations up to it), ascending; the last bound is infinity."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The newest incarnation of a worker, and what was heard of it."""

    history: WorkerHistory
    heard: LastStatus | None
    """What any incarnation said last; None before it was heard."""

    @property
    def status(self) -> WorkerStatus | None:
        """The newest of this incarnation, while it is there."""
        if self.heard is None or self.heard.epoch != self.history.epoch:
            return None
        status = self.heard.status
        return status if isinstance(status, WorkerStatus) else None

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def gone(self) -> Literal["", "left", "fenced"]:
        """How its newest incarnation ended; empty while it is there."""
        return "" if self.history.gone is None else self.history.gone.how

    @property
    def sampled(self) -> int:
        """Tokens sampled by all its incarnations."""
        return self.counts.sampled

    @property
    def counts(self) -> WorkerCounts:
        """Of all its incarnations."""
        return NOTHING_COUNTED if self.heard is None else self.heard.counts

    @property
    def state(self) -> WorkerState:
        """What it does, by what was decided and what it said last."""
        if self.gone:
            return self.gone
        if self.history.draining:
            return "draining"
        if self.status is not None and self.status.active:
            return "generating"
        if self.history.target < 0 and self.history.joined.elastic:
            return "asleep"
        if self.history.target < 0 and self.history.hosted < 0:
            return "joined"
        return "idle" if self.history.target == self.history.hosted else "loading"

    @property
    def tokens_per_s(self) -> float:
        """As of its last statuses; 0 of one that is gone."""
        if self.heard is None or self.status is None or self.gone:
            return 0.0
        return self.heard.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """A committed step in numbers."""

    step: int
    committed_ns: int
    seconds: float | None
    """Since the commit before, or since the trainer began; None where that is not known."""
    waited_s: float
    """The trainer was free and had neither a batch nor a part of it."""
    worker: str
    """Who logged the trajectory that came last; empty where nobody was waited for."""
    version: int
    """Of that trajectory's group; -1 where nobody was waited for."""
    ahead_s: float
    """It computed parts of the batch before that was taken."""
    training_s: float
    """The rest, from when the batch was there and the trainer free."""
    reward: float | None
    """Mean of the batch's valid rewards."""
    task_rewards: tuple[tuple[str, float], ...]
    """The same of each task with a name, by name."""
    parts: Mapping[str, Mapping[str, float]]
    """The mean of every part of these rewards, by the task's name."""
    errors: Mapping[str, int]
    """Classes of the errors of the batch's trajectories without a valid reward."""
    failed: FailedShare
    """Share in groups that ended since the commit before, also those outside the batch."""
    gradient: bool
    """Whether the weights were updated."""
    tokens: int
    """Sampled tokens of the batch."""
    staleness: tuple[tuple[int, int], ...]
    """(staleness, groups)."""

    @property
    def line(self) -> str:
        """The step as the console and `top` in a pipe show it."""
        reward = "  -  " if self.reward is None else f"{self.reward:5.3f}"
        staleness = " ".join(f"{value}:{count}" for value, count in self.staleness)
        seconds = self.seconds or 0.0
        tokens_per_s = self.tokens / seconds if seconds > 0 else 0.0
        notes = [self.failed.brief] if self.failed.failed else []
        notes += [] if self.gradient else ["no gradient"]
        return "  ".join(
            (
                f"step {self.step:>4}  reward {reward}  staleness {staleness:<16}"
                f"  {tokens_per_s:>7,.0f} tok/s  {seconds:5.2f} s",
                *notes,
            )
        )


class RunStats:
    """A run in numbers. Example: ``stats.fact(offset, fact)``, ``stats.round(round_, offset)``,
    ``stats.status(status)``; then read its fields."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.account = RunAccount()
        self.statuses, self.pauses = Statuses(), Pauses()
        self.log_up = True
        """False while the log cannot be read."""
        self.halted = ""
        """Why the run was halted: groups fail, and no user has resumed it; else empty."""
        self.last_ns = 0
        """The newest moment that any record carries: wall clock."""
        self.rounds = 0
        self.bound: int | None = None
        """`max_staleness` as it stood at the newest dispatch; before the first, as configured."""
        self.steps_planned: int | None = None
        self.per_step: int | None = None
        """Groups of a step."""
        self.heartbeat_s: float | None = None
        """Between two statuses of a role."""
        self.steps: deque[StepStats] = deque(maxlen=STEPS_KEPT)
        self.commit: StepCommitted | None = None
        """The newest that counts."""
        self.contributed: Contributed | None = None
        self.marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self.recent_rounds: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self.evaluated: dict[str, EvaluationEnded] = {}
        """The newest one of each name that is complete and has a valid reward."""
        self.meter = LogMeter()
        """Of who tells these numbers."""
        self.control_folded = 0
        """`control_next` of the newest round."""
        self.dispatched: Counter[str] = Counter()
        self.fates: Counter[str] = Counter()
        self.left_over: Counter[SiblingFate] = Counter({"surplus": 0, "expired": 0})
        """Siblings that their groups did not wait for."""
        self.decisions: Counter[str] = Counter()
        self.trajectories: Counter[tuple[str, str]] = Counter()
        """(finish, valid) of every trajectory that was logged, counting or not."""
        self.errors: Counter[str] = Counter()
        """Classes of the errors of those that are not valid."""
        self.failed = FailedTrajectories()
        self.since_step = GroupsSinceStep()
        self._failed_now = FailedTrajectories(groups=SINCE_STEP_GROUPS)
        self.lost: Counter[str] = Counter({"left": 0, "fenced": 0})
        """Incarnations of workers that ended, by how."""
        self.faults, self.outcomes = Counter[str](), Counter[str]()
        """How attempts of requests on workers ended, of groups that have ended."""
        self.moves = Counter({"decided": 0, "released": 0})
        self.refused = self.without_gradient = self.late = 0
        """Batches; steps; and groups that were trained behind their deadline: C3 is broken."""
        self.waited_by: Counter[str] = Counter()
        """ms that the trainer waited, by the worker that it waited for."""
        self.compute_ms = self.ahead_ms = 0
        self.load_s = Histogram(LOADS)
        self.step_s, self.training_s, self.wait_s = (Histogram(SECONDS) for _ in range(3))
        self.delay_s = Histogram(DELAYS)
        self.lengths = Histogram(LENGTHS)
        self.staleness = Histogram(STALENESS)
        self._unfolded: deque[tuple[int, int]] = deque()
        """(offset, moment) of facts that no round has folded."""

    @property
    def started(self) -> RunStarted | None:
        """The run's first record, once it was read."""
        return self.account.started

    @property
    def workers(self) -> dict[str, WorkerView]:
        """The newest incarnation of every worker."""
        heard = self.statuses.heard
        return {
            name: WorkerView(history=one, heard=heard.get(name))
            for name, one in sorted(self.account.named.items())
        }

    def present(self) -> list[WorkerView]:
        """Workers that are not gone, by name."""
        return [one for one in self.workers.values() if not one.gone]

    def worker_states(self) -> Counter[tuple[int, WorkerState]]:
        """Workers by hosted version and state."""
        return Counter((one.history.hosted, one.state) for one in self.workers.values())

    @property
    def heard(self) -> dict[str, AnyMetrics]:
        """What every role said last that is there; a worker is once it has joined."""
        roles = {
            name: one.status
            for name, one in self.statuses.heard.items()
            if not isinstance(one.status, WorkerStatus)
        }
        workers = {one.name: one.status for one in self.present() if one.status is not None}
        return roles | workers

    @property
    def version(self) -> int:
        """The newest policy version."""
        return 0 if self.commit is None else self.commit.step + 1

    @property
    def over(self) -> bool:
        """The round that stops the run was read."""
        return self.account.over

    @property
    def state(self) -> str:
        """Whether the run is finished, open or halted, in words."""
        if self.over:
            return "finished"
        return "halted: most groups fail, see `why`" if self.halted else "open"

    def follow(self, bus: Bus, topics: Topics, *, statuses: bool = True) -> LogFollower:
        """Return a reader that tells these numbers all of a log."""
        heard = self.status if statuses else None
        return LogFollower(bus, topics, self, statuses=heard, meter=self.meter)

    def read(self, bus: Bus, topics: Topics, *, statuses: bool = True) -> None:
        """Read a log up to its present end. Raises BusError, LogTruncated."""
        with closing(self.follow(bus, topics, statuses=statuses)) as follower:
            while follower.advance():
                pass

    def status(self, status: AnyMetrics) -> None:
        """A record of the metrics topic; what an incarnation says that is out is history."""
        self.last_ns = max(self.last_ns, status.at_ns)
        worker, epoch = self.account.named.get(role_of(status)), epoch_of(status)
        if worker is None or epoch > worker.epoch or (epoch == worker.epoch and not worker.gone):
            self.statuses.receive(self.pauses.excused(status))

    def fact(self, offset: int, fact: AnyControl) -> None:
        """A control record, which a round folds."""
        if not isinstance(fact, Command | VersionsDropped):  # of users, also when the run is over
            self.last_ns = max(self.last_ns, fact.at_ns)
        self._unfolded.append((offset, fact.at_ns))
        self.pauses.fact(fact)
        first = self.started is None
        self._happened(self.account.fact(offset, fact))
        match fact:
            case RunStarted() if first:
                self._begin(fact)
            case WorkerReady() if fact.version != NO_VERSION:
                self.load_s.add(fact.load_ms / 1000)
            case RequestReleased():
                self.moves["released"] += 1
            case RequestFailed():
                self.faults[fact.error] += 1
            case BatchRefused():
                self.refused += 1
            case Command(verb="resume"):
                self.halted = ""
            case _:
                pass

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        self.rounds += 1
        self.last_ns = max(self.last_ns, round_.now_ns)
        self.control_folded = round_.control_next
        while self._unfolded and self._unfolded[0][0] < round_.control_next:
            _, at_ns = self._unfolded.popleft()
            self.delay_s.add(max(0, round_.now_ns - at_ns) / 1e9)
        for decision in round_.decisions:
            self.decisions[str(type(decision).__struct_config__.tag)] += 1
            if isinstance(decision, Dispatch):
                spec = decision.spec
                self.dispatched[spec.purpose] += 1
                if spec.purpose == "train":
                    self.bound = spec.deadline - spec.version
            elif isinstance(decision, Move):
                self.moves["decided"] += 1
            elif isinstance(decision, EndSiblings):
                self.left_over[decision.fate] += len(decision.siblings)
            elif isinstance(decision, Halt):
                self.halted = decision.reason
        if round_.decisions:
            self.recent_rounds.append(round_)
        self._happened(self.account.round(round_, offset))

    def _begin(self, fact: RunStarted) -> None:
        """Its configuration may be of another version."""

        def configured(section: str, key: str) -> Any:
            return fact.config.get(section, {}).get(key)

        self.bound = configured("staleness", "max_staleness")
        self.steps_planned = configured("run", "steps")
        self.per_step = configured("groups", "per_step")
        self.heartbeat_s = configured("timing", "heartbeat_s")

    def _happened(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case RecordLogged():  # the most frequent first
                    self._record(event.fact)
                case GroupEnded():
                    self._group(event)
                case StepEnded():
                    self._step(event)
                case EvaluationEnded():
                    self._evaluated(event)
                case WorkerGone():
                    self.lost[event.how] += 1
                case Mark():
                    self._mark(event)
                case BatchEnded():
                    pass

    def _mark(self, mark: Mark) -> None:
        """A setting changed, the run was resumed, a role was lost or came back."""
        self.marks.append(mark)

    def _record(self, fact: TrajectoryLogged) -> None:
        valid = "no" if fact.reward is None else "yes"
        self.trajectories[fact.finish, valid] += 1
        if fact.reward is None:
            self.errors[error_class(fact.error)] += 1
        self.lengths.add(fact.tokens)
        self.meter.count("trajectories", fact.bytes)

    def _group(self, ended: GroupEnded) -> None:
        self.fates[ended.fate] += 1
        self.since_step.happened(ended)
        self.failed.happened(ended)
        self._failed_now.happened(ended)
        for request in ended.group.requests.values():
            self.outcomes.update(attempt.outcome for attempt in request.attempts if attempt.outcome)

    def _evaluated(self, ended: EvaluationEnded) -> None:
        if ended.reward is not None:
            self.evaluated[ended.evaluation] = ended

    def _step(self, ended: StepEnded) -> None:
        fact, last, results = ended.fact, ended.waited_for, ended.results
        step = StepStats(
            step=fact.step,
            committed_ns=fact.at_ns,
            seconds=ended.seconds,
            waited_s=ended.waited_s,
            worker="" if last is None else last.worker,
            version=-1 if last is None else last.version,
            ahead_s=sum(fact.ahead_s),
            training_s=ended.training_s,
            reward=mean(rewards_of(results)),
            task_rewards=_by_task(ended.groups),
            parts=parts_by_task(ended.groups),
            errors=Counter(error_class(one.error) for one in results if one.reward is None),
            failed=self._failed_now.share(),
            gradient=fact.figures.get("updates") != 0,
            tokens=sum(one.tokens for one in results),
            staleness=tuple(sorted(Counter(ended.staleness).items())),
        )
        self._failed_now.clear()
        self.since_step.happened(ended)
        self.steps.append(step)
        self.commit = fact
        self.late += ended.late
        self.without_gradient += not step.gradient
        self._measure(step, fact.compute_s)

    def _measure(self, step: StepStats, compute_s: float) -> None:
        if step.seconds is not None:
            self.step_s.add(step.seconds)
        self.training_s.add(step.training_s)
        self.wait_s.add(step.waited_s)
        self.waited_by[step.worker or "nobody"] += round(step.waited_s * 1000)
        self.compute_ms += round(compute_s * 1000)
        self.ahead_ms += round(step.ahead_s * 1000)
        for value, groups in step.staleness:
            self.staleness.add(value, groups)


def evaluation_words(ended: EvaluationEnded) -> str:
    """On one line. Example: ``evaluation hard of version 4: reward 0.512, pass@4 0.750``"""
    name = f" {ended.evaluation}" if ended.evaluation else ""
    passed = [(figure, value) for figure, value in ended.figures.items() if figure != "pass@1"]
    more = [
        f", {figure} {value:.3f}"
        for figure, value in passed
        if figure.startswith(("pass@", "maj@"))
    ]
    reward = "-" if ended.reward is None else f"{ended.reward:.3f}"
    return f"evaluation{name} of version {ended.version}: reward {reward}{''.join(more)}"


def _by_task(groups: Iterable[GroupHistory]) -> tuple[tuple[str, float], ...]:
    found: dict[str, list[float]] = {}
    for group in groups:
        if group.spec.task:
            found.setdefault(group.spec.task, []).extend(group.rewards)
    return tuple((name, sum(own) / len(own)) for name, own in sorted(found.items()) if own)
