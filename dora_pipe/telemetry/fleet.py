"""Who takes part in a run and what each said last; it decides which incarnation is believed, and
in which state a worker is."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, Literal

from dora_pipe.schemas.control import AnyControl, WorkerJoined, WorkerLeft, WorkerReady
from dora_pipe.schemas.metrics import AnyMetrics, WorkerStatus
from dora_pipe.schemas.rounds import AnyDecision, Assign, Drain, Fence
from dora_pipe.telemetry.counts import Histogram

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"

LOADS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
"""Bounds for loading weights, s."""

RATE_NS: Final = 10_000_000_000
"""Tokens per second are those of about so long a time."""

POINTS_MAX: Final = 64
"""Statuses that a rate is made of."""

WorkerState = Literal["joined", "loading", "idle", "generating", "draining", "left", "fenced"]

STATES: Final[tuple[WorkerState, ...]] = (
    "joined",
    "loading",
    "idle",
    "generating",
    "draining",
    "left",
    "fenced",
)
"""`joined`: it has no version yet. `loading`: it shall host another version than it does."""


@dataclass(slots=True, kw_only=True)
class WorkerTold:
    """One worker: its newest incarnation, and what earlier ones have sampled."""

    name: str
    epoch: int
    slots: int
    kv_tokens: int
    engine: str
    target: int = -1
    """The version it was assigned; -1: none yet."""
    hosted: int = -1
    """The version it reported ready last."""
    draining: bool = False
    gone: Literal["", "left", "fenced"] = ""
    why: str = ""
    """Why it is gone."""
    status: WorkerStatus | None = None
    """The newest of this incarnation."""
    sampled_before: int = 0
    """Tokens that earlier incarnations had sampled when they were heard last."""
    points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    """(moment, tokens sampled) of this incarnation."""

    @property
    def sampled(self) -> int:
        """Tokens sampled by all its incarnations."""
        return self.sampled_before + (0 if self.status is None else self.status.tokens_total)

    @property
    def state(self) -> WorkerState:
        """What it does, by what was decided and what it said last."""
        if self.gone:
            return self.gone
        if self.draining:
            return "draining"
        if self.status is not None and self.status.active:
            return "generating"
        if self.target < 0 and self.hosted < 0:
            return "joined"
        return "idle" if self.target == self.hosted else "loading"

    @property
    def tokens_per_s(self) -> float:
        """Of about the last `RATE_NS` that its statuses tell of."""
        if self.gone or len(self.points) < 2:
            return 0.0
        (first_ns, first), (last_ns, last) = self.points[0], self.points[-1]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else 0.0


class Fleet:
    """All workers by name, and the newest status of every role."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerTold] = {}
        self.heard: dict[str, AnyMetrics] = {}
        """The newest status of `orchestrator`, `trainer` and each worker's newest incarnation."""
        self.lost: Counter[str] = Counter({"left": 0, "fenced": 0})
        """Incarnations that ended, by how."""
        self.load_s = Histogram(LOADS)
        self._epochs: dict[str, int] = {}
        self._early: dict[tuple[str, int], deque[WorkerStatus]] = {}
        """The last statuses of each incarnation that no fact was read of yet: topics have no common
        order."""

    def fact(self, offset: int, fact: AnyControl) -> None:
        """A control record."""
        match fact:
            case WorkerJoined():
                self._joined(offset, fact)
            case WorkerReady():
                self.load_s.add(fact.load_ms / 1000)
                worker = self._present(fact.worker, fact.epoch)
                if worker is not None:
                    worker.hosted = fact.version
            case WorkerLeft():
                self._lose(fact.worker, fact.epoch, "left", fact.reason)
            case _:
                pass

    def decision(self, decision: AnyDecision, now_ns: int) -> None:
        """A decision of a round at this moment."""
        match decision:
            case Assign():
                worker = self._present(decision.worker, decision.epoch)
                if worker is not None:
                    worker.target = decision.version
            case Drain():
                worker = self._present(decision.worker, decision.epoch)
                if worker is not None:
                    worker.draining = True
            case Fence():
                self._lose(decision.worker, decision.epoch, "fenced", decision.reason)
            case _:
                pass

    def worker_status(self, status: WorkerStatus) -> None:
        """What a worker said; that of an earlier incarnation is history."""
        worker = self.workers.get(status.worker)
        if worker is None or status.epoch > worker.epoch:
            at = (status.worker, status.epoch)
            self._early.setdefault(at, deque(maxlen=POINTS_MAX)).append(status)
            return
        if status.epoch < worker.epoch or worker.gone:
            return
        worker.status = status
        worker.points.append((status.at_ns, status.tokens_total))
        while len(worker.points) > 2 and status.at_ns - worker.points[1][0] > RATE_NS:
            worker.points.popleft()
        self.heard[status.worker] = status

    def role_status(self, role: str, epoch: int, status: AnyMetrics) -> None:
        """What an exclusive role said; that of an earlier incarnation is history."""
        if epoch >= self._epochs.get(role, epoch):
            self._epochs[role] = epoch
            self.heard[role] = status

    def counted(self) -> Counter[tuple[int, WorkerState]]:
        """Workers by hosted version and state."""
        return Counter((worker.hosted, worker.state) for worker in self.workers.values())

    def present(self) -> list[WorkerTold]:
        """Workers that are not gone, by name."""
        return [one for _, one in sorted(self.workers.items()) if not one.gone]

    def _present(self, name: str, epoch: int) -> WorkerTold | None:
        worker = self.workers.get(name)
        return worker if worker is not None and worker.epoch == epoch else None

    def _joined(self, offset: int, fact: WorkerJoined) -> None:
        before = self.workers.get(fact.worker)
        if before is not None and not before.gone:
            self.lost["fenced"] += 1  # It joined again before anybody missed it.
        self.workers[fact.worker] = WorkerTold(
            name=fact.worker,
            epoch=offset,
            slots=fact.slots,
            kv_tokens=fact.kv_tokens,
            engine=fact.engine,
            sampled_before=0 if before is None else before.sampled,
        )
        self.heard.pop(fact.worker, None)
        for early in self._early.pop((fact.worker, offset), ()):
            self.worker_status(early)

    def _lose(self, name: str, epoch: int, how: Literal["left", "fenced"], why: str) -> None:
        worker = self._present(name, epoch)
        if worker is not None and not worker.gone:
            worker.gone, worker.why = how, why
            self.lost[how] += 1
            self.heard.pop(name, None)
