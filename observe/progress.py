"""Console lines of a run: steps, evaluations, joining and leaving roles, alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.core.system.console import typed
from dora_pipe.ledger.account import GroupEnded, StepEnded
from dora_pipe.ledger.evaluations import EvaluationEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.ledger.marks import Mark
from dora_pipe.observe.alarms import Alarms
from dora_pipe.observe.failed import no_gradient
from dora_pipe.observe.run_stats import RunStats, evaluation_words, learning_of
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    GroupScored,
    RequestFailed,
    StepCommitted,
    TrajectoryLogged,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    error_class,
    fault_of,
)
from dora_pipe.schemas.rounds import NO_VERSION, EarlyStop, Round
from dora_pipe.schemas.topics import Topics

PIECES_MAX: Final = 8
"""Log pieces per call, so that the caller is not blocked."""

ERRORS_SHOWN_MAX: Final = 8


class RunProgress(RunStats):
    """Follow a run; `lines` returns what happened since the last call."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        *,
        alarms: Alarms | None = None,
        logs: Path | None = None,
        past: int = 0,
        verbose: bool = False,
    ) -> None:
        """`logs`: folder of the roles' log files; `past`: end of control at the resume; `verbose`:
        show step metrics."""
        super().__init__(topics.run)
        self._verbose = verbose
        self._logs = logs
        self._past = past
        self._errors_shown: set[str] = set()
        self.evaluations: dict[int, float] = {}
        """Mean reward by version, of the unnamed evaluation."""
        self.served: Counter[str] = Counter()
        self.stopping = False
        """Roles were asked to stop, so their silence is no alarm."""
        self._alarms = alarms
        if alarms:
            alarms.pauses = self.pauses
        self._say_at = 0
        """Number of groups without a step at which the next line is due."""
        self._follower = LogFollower(bus, topics, self)
        self._unreadable = 0
        self._device = ""
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        for _ in range(PIECES_MAX):
            if not self._follower.advance():
                break
        unreadable = self._follower.unreadable.total()
        if unreadable > self._unreadable:
            self._lines.append(
                f"{unreadable - self._unreadable} unreadable records: use `dora-pipe audit`"
            )
            self._unreadable = unreadable
        lines: list[str] = []
        if not self._past:
            lines, self._lines = self._lines, []
        ending = self.stopping or self.over or self.halted
        return lines + (self._alarms.lines(silence=not ending) if self._alarms else [])

    def elsewhere(self, names: Collection[str]) -> int:
        """Count active workers that are not in `names`."""
        there = {worker.name for worker in self.account.present()}
        heard = self._alarms.heard() if self._alarms else there
        return len((there & heard) - set(names))

    def close(self) -> None:
        self._follower.close()
        if self._alarms:
            self._alarms.close()

    def fact(self, offset: int, fact: AnyControl) -> None:
        if self._past and offset >= self._past:
            self._past = 0
            show = typed("show", self._logs.parent if self._logs else self.run)
            self._lines.insert(0, f"resumed at step {self.account.step}; earlier steps: {show}")
        super().fact(offset, fact)
        match fact:
            case WorkerReady() if fact.version != NO_VERSION:
                self.served[fact.worker] += 1
            case WorkerJoined():
                engine = f"{fact.engine} {fact.engine_version}"
                self._say(f"{fact.worker} joined ({engine}, {fact.slots} slots)")
            case WorkerLeft():
                if self._alarms:
                    self._alarms.forget(fact.worker, fact.incarnation)
                self._say(f"{fact.worker} left: {fact.reason}")
            case BatchRefused():
                self._say(f"step {fact.step}: batch refused: {fact.why}")
            case RequestFailed(retryable=False):
                self._failure(fact.trajectory, f"{fact.error}: {fact.message}", fact.worker)
            case GroupScored() if fact.error and not fact.retryable:
                self._failure(fact.group, fact.error, fact.worker)
            case StepCommitted() if (device := fact.numerics.get("device", "")) != self._device:
                self._device = device
                self._say(f"trainer device: {device}")
            case WeightsAdopted():
                self._say(f"step {fact.step}: weights adopted: {fact.reason}")
            case _:
                pass

    def round(self, round_: Round, offset: int) -> None:
        super().round(round_, offset)
        for decision in round_.decisions:
            if isinstance(decision, EarlyStop):
                self._say(f"run ends early: {decision.reason}")
        if self._past:
            self._lines.clear()

    def _say(self, line: str) -> None:
        if not self._past:
            self._lines.append(line)

    def _mark(self, mark: Mark) -> None:
        """Skip marks before the resume: `run --resume -o` changes settings before roles start."""
        super()._mark(mark)
        if mark.kind != "resumed":
            self._lines.append(mark.line)

    def _record(self, fact: TrajectoryLogged) -> None:
        super()._record(fact)
        if fact.reward is None:
            self._failure(fact.trajectory, fact.error, fact.worker)
        if fact.tool_error:
            self._failure(f"a tool of {fact.trajectory}", fact.tool_error, fact.worker)

    def _failure(self, subject: str, error: str, worker: str) -> None:
        name = error_class(error)
        shown = len(self._errors_shown)
        if self._past or name in self._errors_shown or shown == ERRORS_SHOWN_MAX:
            return
        self._errors_shown.add(name)
        log = f"{self._logs}/{worker}.log" if self._logs else f"the log of {worker}"
        more = "traceback" if fault_of(name) == "code" else "more"
        self._say(f"{subject} failed: {error}; {more} in {log}")

    def _group(self, ended: GroupEnded) -> None:
        super()._group(ended)
        words = self.since_step.words(self.per_step)
        count = self.since_step.count
        if words and count >= self._say_at and self.account.batch is None:
            self._say_at = 2 * count
            self._say(words)

    def _step(self, ended: StepEnded) -> None:
        super()._step(ended)
        self._say_at = 0
        self._say(self.steps[-1].line)
        if self._verbose:
            metrics = learning_of(ended.fact.metrics, ended.fact.settings)
            named = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._say(f"           {named}")
        count = self.without_gradient
        if not self.steps[-1].gradient and count & (count - 1) == 0:
            self._say(
                f"step {ended.fact.step} had no gradient: {no_gradient(ended, count, self.version)}"
            )

    def _evaluated(self, ended: EvaluationEnded) -> None:
        super()._evaluated(ended)
        if ended.reward is not None:
            if not ended.evaluation:
                self.evaluations[ended.version] = ended.reward
            self._say(evaluation_words(ended))
