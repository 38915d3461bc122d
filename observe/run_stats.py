"""Statistics of a run while its log is followed; all times come from records."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.contributions import Contributed
from dora_pipe.ledger.account import (
    BatchEnded,
    GroupEnded,
    LedgerEvent,
    RunAccount,
    StepEnded,
    mean,
)
from dora_pipe.ledger.evaluations import EvaluationEnded
from dora_pipe.ledger.follower import LogFollower, LogMeter
from dora_pipe.ledger.history import (
    GroupHistory,
    RecordLogged,
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
    role_of,
)
from dora_pipe.observe.alarms import Pauses
from dora_pipe.observe.failed import (
    SINCE_STEP_GROUPS,
    FailedShare,
    FailedTrajectories,
    GroupsSinceStep,
)
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
    EndSamples,
    Halt,
    Migrate,
    Round,
    SampleOutcome,
)
from dora_pipe.schemas.topics import Topics

SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
DELAYS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LENGTHS: Final = tuple(float(2**power) for power in range(4, 18))
LOADS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
STALENESS: Final = tuple(float(value) for value in range(9))
STEPS_KEPT: Final = 400
MARKS_KEPT: Final = 400
ROUNDS_KEPT: Final = 64

LEARNING: Final[Mapping[str, str]] = {
    "loss": "Loss of the step, by its objective.",
    "grad_norm": "Mean norm of the updates' gradients, before they are clipped.",
    "entropy": "Mean -log-prob of the batch's sampled tokens: an estimate, nats per token.",
    "truncated": "Share of the batch's trajectories that a limit of tokens or turns ended.",
    "kl": "Mean KL estimate to the reference, per token.",
    "clipped_share": "Share of trained tokens whose gradient the clip took away.",
    "learning_rate": "Learning rate of the step, by its schedule.",
}

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
"""`joined`: has no version yet. `loading`: changes to another version. `asleep`: a colocated worker
that serves none."""


def learning_of(metrics: Mapping[str, float], settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a commit; `settings` are those of its batch."""
    rate = settings.get(RATE)
    values = {**metrics, **({"learning_rate": rate} if isinstance(rate, float) else {})}
    return {name: values[name] for name in LEARNING if name in values}


@dataclass(slots=True)
class Histogram:
    """Histogram of observations; the last bound is infinity."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """Per bucket, not cumulative; the last bucket is above every bound."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def observations(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield (bound, cumulative count), ascending; the last bound is infinity."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    history: WorkerHistory
    heard: LastStatus | None
    """Last status of any incarnation, if any."""

    @property
    def status(self) -> WorkerStatus | None:
        """Newest status of this incarnation, while present."""
        if self.heard is None or self.heard.incarnation != self.history.incarnation:
            return None
        status = self.heard.status
        return status if isinstance(status, WorkerStatus) else None

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def gone(self) -> Literal["", "left", "fenced"]:
        """How the newest incarnation ended; empty while present."""
        return self.history.departure

    @property
    def counts(self) -> WorkerCounts:
        return NOTHING_COUNTED if self.heard is None else self.heard.counts

    @property
    def state(self) -> WorkerState:
        if self.gone:
            return self.gone
        if self.history.draining:
            return "draining"
        if self.status is not None and self.status.active:
            return "generating"
        if self.history.target < 0 and self.history.joined.colocated:
            return "asleep"
        if self.history.target < 0 and self.history.served < 0:
            return "joined"
        return "idle" if self.history.target == self.history.served else "loading"

    @property
    def tokens_per_s(self) -> float:
        """Rate in the last statuses; 0 if gone."""
        if self.heard is None or self.status is None or self.gone:
            return 0.0
        return self.heard.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    step: int
    committed_ns: int
    seconds: float | None
    """Time since the previous commit, or the trainer's start; None if unknown."""
    waited_s: float
    """Time the idle trainer had neither a batch nor a part of one."""
    worker: str
    """Worker of the last trajectory to arrive; empty if the trainer did not wait."""
    version: int
    """Version of that trajectory's group; -1 if the trainer did not wait."""
    early_s: float
    """Time spent on parts before the batch was taken."""
    training_s: float
    """Remaining time, from when the batch was complete and the trainer free."""
    reward: float | None
    task_rewards: tuple[tuple[str, float], ...]
    parts: Mapping[str, Mapping[str, float]]
    """Mean of each reward component, by task name."""
    errors: Mapping[str, int]
    """Error classes of trajectories without a valid reward."""
    failed: FailedShare
    """Share over all groups that ended since the previous commit."""
    gradient: bool
    """The weights were updated."""
    tokens: int
    staleness: tuple[tuple[int, int], ...]

    @property
    def line(self) -> str:
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
    """Statistics of a run.

    Example: ``stats.fact(offset, fact)``, ``stats.round(round_, offset)``,
    ``stats.status(status)``.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.account = RunAccount()
        self.statuses, self.pauses = Statuses(), Pauses()
        self.log_up = True
        """False while the log is unreadable."""
        self.halted = ""
        """Reason of a halt that no user has resumed; else empty."""
        self.last_ns = 0
        """Newest wall clock in any record."""
        self.rounds = 0
        self.bound: int | None = None
        """`max_staleness` at the newest dispatch; before the first, as configured."""
        self.steps_planned: int | None = None
        self.per_step: int | None = None
        self.heartbeat_s: float | None = None
        self.steps: deque[StepStats] = deque(maxlen=STEPS_KEPT)
        self.commit: StepCommitted | None = None
        self.contributed: Contributed | None = None
        self.marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self.recent_rounds: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self.evaluated: dict[str, EvaluationEnded] = {}
        """Newest complete evaluation with a valid reward, by name."""
        self.meter = LogMeter()
        self.control_folded = 0
        self.dispatched: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.left_over: Counter[SampleOutcome] = Counter({"redundant": 0, "expired": 0})
        self.decisions: Counter[str] = Counter()
        self.trajectories: Counter[tuple[str, str]] = Counter()
        """(finish, valid) of every logged trajectory."""
        self.errors: Counter[str] = Counter()
        self.failed = FailedTrajectories()
        self.since_step = GroupsSinceStep()
        self._failed_now = FailedTrajectories(groups=SINCE_STEP_GROUPS)
        self.lost: Counter[str] = Counter({"left": 0, "fenced": 0})
        self.faults, self.attempt_outcomes = Counter[str](), Counter[str]()
        self.migrations = Counter({"decided": 0, "released": 0})
        self.refused = self.without_gradient = self.over_bound = 0
        """Rejected batches; steps without an update; groups trained after their deadline (violates
        C3)."""
        self.waited_by: Counter[str] = Counter()
        """Milliseconds that the trainer waited, by worker."""
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
        return self.account.started

    @property
    def workers(self) -> dict[str, WorkerView]:
        heard = self.statuses.heard
        return {
            name: WorkerView(history=history, heard=heard.get(name))
            for name, history in sorted(self.account.named.items())
        }

    def present(self) -> list[WorkerView]:
        return [worker for worker in self.workers.values() if not worker.gone]

    def worker_states(self) -> Counter[tuple[int, WorkerState]]:
        """Count workers by (served version, state)."""
        return Counter((worker.history.served, worker.state) for worker in self.workers.values())

    @property
    def heard(self) -> dict[str, AnyMetrics]:
        roles = {
            name: heard.status
            for name, heard in self.statuses.heard.items()
            if not isinstance(heard.status, WorkerStatus)
        }
        workers = {
            worker.name: worker.status for worker in self.present() if worker.status is not None
        }
        return roles | workers

    @property
    def version(self) -> int:
        return 0 if self.commit is None else self.commit.step + 1

    @property
    def over(self) -> bool:
        return self.account.over

    @property
    def state(self) -> str:
        if self.over:
            return "finished"
        return "halted: most groups fail, see `why`" if self.halted else "open"

    def follow(self, bus: Bus, topics: Topics, *, statuses: bool = True) -> LogFollower:
        """Return a follower that feeds a log into these statistics."""
        heard = self.status if statuses else None
        return LogFollower(bus, topics, self, statuses=heard, meter=self.meter)

    def read(self, bus: Bus, topics: Topics, *, statuses: bool = True) -> None:
        """Read a log to its present end. Raises BusError, LogTruncated."""
        with closing(self.follow(bus, topics, statuses=statuses)) as follower:
            while follower.advance():
                pass

    def status(self, status: AnyMetrics) -> None:
        """Add a status, unless its incarnation has ended."""
        self.last_ns = max(self.last_ns, status.at_ns)
        worker, incarnation = self.account.named.get(role_of(status)), status.incarnation
        if (
            worker is None
            or incarnation > worker.incarnation
            or (incarnation == worker.incarnation and not worker.gone)
        ):
            self.statuses.receive(self.pauses.excused(status))

    def fact(self, offset: int, fact: AnyControl) -> None:
        if not isinstance(fact, Command | VersionsDropped):  # users may send these after the run
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
                self.migrations["released"] += 1
            case RequestFailed():
                self.faults[fact.error] += 1
            case BatchRefused():
                self.refused += 1
            case Command(verb="resume"):
                self.halted = ""
            case _:
                pass

    def round(self, round_: Round, offset: int) -> None:
        """Add a round, after the facts that it folds."""
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
            elif isinstance(decision, Migrate):
                self.migrations["decided"] += 1
            elif isinstance(decision, EndSamples):
                self.left_over[decision.outcome] += len(decision.samples)
            elif isinstance(decision, Halt):
                self.halted = decision.reason
        if round_.decisions:
            self.recent_rounds.append(round_)
        self._happened(self.account.round(round_, offset))

    def _begin(self, fact: RunStarted) -> None:
        """The configuration may be of another version."""

        def configured(section: str, key: str) -> Any:
            return fact.config.get(section, {}).get(key)

        self.bound = configured("staleness", "max_staleness")
        self.steps_planned = configured("run", "steps")
        self.per_step = configured("rollout", "prompts_per_step")
        self.heartbeat_s = configured("timing", "heartbeat_s")

    def _happened(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            match event:
                case RecordLogged():  # most frequent first
                    self._record(event.fact)
                case GroupEnded():
                    self._group(event)
                case StepEnded():
                    self._step(event)
                case EvaluationEnded():
                    self._evaluated(event)
                case WorkerGone():
                    self.lost[event.gone.how] += 1
                case Mark():
                    self._mark(event)
                case BatchEnded():
                    pass

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)

    def _record(self, fact: TrajectoryLogged) -> None:
        valid = "no" if fact.reward is None else "yes"
        self.trajectories[fact.finish, valid] += 1
        if fact.reward is None:
            self.errors[error_class(fact.error)] += 1
        self.lengths.add(fact.tokens)
        self.meter.count("trajectories", fact.bytes)

    def _group(self, ended: GroupEnded) -> None:
        self.outcomes[ended.outcome] += 1
        self.since_step.happened(ended)
        self.failed.happened(ended)
        self._failed_now.happened(ended)
        for request in ended.group.requests.values():
            self.attempt_outcomes.update(
                attempt.outcome for attempt in request.attempts if attempt.outcome
            )

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
            early_s=sum(fact.early_s),
            training_s=ended.training_s,
            reward=mean(rewards_of(results)),
            task_rewards=_by_task(ended.groups),
            parts=parts_by_task(ended.groups),
            errors=Counter(
                error_class(result.error) for result in results if result.reward is None
            ),
            failed=self._failed_now.share(),
            gradient=fact.metrics.get("updates") != 0,
            tokens=sum(result.tokens for result in results),
            staleness=tuple(sorted(Counter(ended.staleness).items())),
        )
        self._failed_now.clear()
        self.since_step.happened(ended)
        self.steps.append(step)
        self.commit = fact
        self.over_bound += ended.over_bound
        self.without_gradient += not step.gradient
        self._measure(step, fact.compute_s)

    def _measure(self, step: StepStats, compute_s: float) -> None:
        if step.seconds is not None:
            self.step_s.add(step.seconds)
        self.training_s.add(step.training_s)
        self.wait_s.add(step.waited_s)
        self.waited_by[step.worker or "none"] += round(step.waited_s * 1000)
        self.compute_ms += round(compute_s * 1000)
        self.ahead_ms += round(step.early_s * 1000)
        for value, groups in step.staleness:
            self.staleness.add(value, groups)


def evaluation_words(ended: EvaluationEnded) -> str:
    """Return one line. Example: ``evaluation hard of version 4: reward 0.512, pass@4 0.750``"""
    name = f" {ended.evaluation}" if ended.evaluation else ""
    passed = [(metric, value) for metric, value in ended.metrics.items() if metric != "pass@1"]
    more = [
        f", {metric} {value:.3f}"
        for metric, value in passed
        if metric.startswith(("pass@", "maj@"))
    ]
    reward = "-" if ended.reward is None else f"{ended.reward:.3f}"
    return f"evaluation{name} of version {ended.version}: reward {reward}{''.join(more)}"


def _by_task(groups: Iterable[GroupHistory]) -> tuple[tuple[str, float], ...]:
    rewards: dict[str, list[float]] = {}
    for group in groups:
        if group.spec.task:
            rewards.setdefault(group.spec.task, []).extend(group.rewards)
    return tuple((name, sum(own) / len(own)) for name, own in sorted(rewards.items()) if own)
