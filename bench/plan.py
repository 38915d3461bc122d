"""Longest turn of the orchestrator's machine in a full, busy run.

Workers report, requests move, batches train, versions load, and workers are lost. Figures are CPU
time of the loop's thread; `wall` includes the snapshot thread.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from dora_pipe.bench.records import (
    NO_DIGEST,
    role_started,
    run_started,
    step_committed,
    worker_joined,
    worker_ready,
)
from dora_pipe.bench.support import emit_figures
from dora_pipe.cli.options import JsonOption
from dora_pipe.config.model import Config
from dora_pipe.core.pure.machine import BUS_TURN_NS, CaughtUp, Now, Published
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.orchestrator.entities import Worker
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.process.role import Tidying, settle_memory
from dora_pipe.orchestrator.process.snapshot_files import SnapshotPort
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import (
    Control,
    LoggedEntry,
    RequestReleased,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.metrics import Cost, WorkerStatus
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY, Assign, Migrate, TakeBatch, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

WORKERS: Final = (512,)
SLOTS: Final = 200
GROUP_SIZE: Final = 16
ROWS: Final = 1_000_000
KV_TOKENS: Final = 1_000_000
"""KV cache capacity of a worker."""
STEPS: Final = 1_000_000
PER_STEP: Final = 512
"""Groups of a batch: 8192 trajectories."""
RECORDS_MAX: Final = 500
ROUNDS: Final = 1500
FILL_TURNS_MAX: Final = 5000
WARM_STEPS: Final = 3
REPORTING: Final = 32
"""Workers that report trajectories per turn."""
REPORTED: Final = 2
"""Trajectories per report, any of a worker's older ones."""
SPARE: Final = 2.0
"""Groups in flight relative to the slots; trajectories of a group end far apart."""
LOSS_TURNS: Final = 150
"""Turns between losses of a worker."""
MORE_MAX: Final = 1000
"""Maximum follow-up turns; planning all requests takes a fifth."""
STATUS_TURNS: Final = 5
"""Turns between a worker's statuses."""
SNAPSHOT_EVERY: Final = 4 * STATE_DIGEST_EVERY
"""More often than in production."""
TOPICS: Final = Topics("bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigure:
    """Longest turn and its garbage collection."""

    workers: int
    requests: int
    turns: int
    steps: int
    gc_ms: float
    p50_ms: float
    """Median per poll, with follow-up turns."""
    turn_ms: float
    wall_ms: float


def command(
    workers: Annotated[
        list[int] | None, typer.Option(help="Workers of 200 slots each; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the longest turn of the orchestrator in a busy run of 102,400 open requests."""
    emit_figures(bench_turns(workers or WORKERS, slots=SLOTS), as_json=as_json)


def bench_turns(
    workers: Sequence[int], *, slots: int = SLOTS, rounds: int = ROUNDS
) -> list[TurnFigure]:
    return [_measure(count, slots=slots, rounds=rounds) for count in sorted(set(workers))]


def _measure(workers: int, *, slots: int, rounds: int) -> TurnFigure:
    threshold = gc.get_threshold()
    with tempfile.TemporaryDirectory(prefix="bench-turns-") as folder:
        run = _Run(workers, slots, Path(folder))
        try:
            run.fill()
            run.warm()
            run.meter = Meter()
            begun = run.machine.state.version
            settle_memory()
            with run.meter.attached():
                for _ in range(rounds):
                    run.turn()
        finally:
            run.close()
            gc.unfreeze()
            gc.set_threshold(*threshold)
    return TurnFigure(
        workers=workers,
        requests=len(run.machine.state.requests),
        turns=rounds,
        steps=run.machine.state.version - begun,
        p50_ms=statistics.median(run.meter.turns_ms),
        **{f"{part}_ms": most for part, most in run.meter.most_ms.items()},
    )


class Meter:
    def __init__(self) -> None:
        self.most_ms = dict.fromkeys(("gc", "turn", "wall"), 0.0)
        self.turns_ms: list[float] = []
        """Per poll, with follow-up turns."""
        self._gc_ms = self._since_s = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        gc.callbacks.append(self._collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collecting)

    def whole(self, react: Callable[[], Any]) -> Any:
        self._gc_ms = 0.0
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        result = react()
        turn_ms = (time.thread_time() - cpu_s) * 1e3
        wall_ms = (time.perf_counter() - wall_s) * 1e3
        self.turns_ms[-1] += turn_ms
        for part, spent in (("gc", self._gc_ms), ("turn", turn_ms), ("wall", wall_ms)):
            self.most_ms[part] = max(self.most_ms[part], spent)
        return result

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since_s = time.thread_time()
        else:
            self._gc_ms += (time.thread_time() - self._since_s) * 1e3


class _Run:
    """Machine with scripted roles."""

    def __init__(self, workers: int, slots: int, folder: Path) -> None:
        self.meter = Meter()
        self._port = SnapshotPort(folder, TOPICS.run)
        self._chance = random.Random(workers)
        self._slots = slots
        self._offset = 0
        self._decided = 0
        self._turns = 0
        self._mono_ns = 0
        self._tidy = Tidying()
        self._due: deque[tuple[int, Callable[[], Control | None]]] = deque()
        self._inputs: list[Any] = [CaughtUp()]
        config = _config(workers, slots)
        self.machine = OrchestratorMachine(
            state=State(),
            topics=TOPICS,
            incarnation=0,
            metrics={TopicPartition(TOPICS.metrics, 0): 0},
            timing=config.timing,
            cost=_no_cost,
            snapshot_every=SNAPSHOT_EVERY,
        )
        self._append(run_started(config, rows=ROWS))
        self._append(role_started("orchestrator"))
        self._append(role_started("trainer"))
        for number in range(workers):
            self._append(self._joined(f"w{number:05d}"))

    def fill(self) -> None:
        state = self.machine.state
        for _ in range(FILL_TURNS_MAX):
            self._react()
            placed = len(state.requests) - sum(map(len, state.queues.values()))
            if placed >= len(state.workers) * self._slots > 0:
                return
        raise AssertionError(f"{len(state.requests)} requests after {FILL_TURNS_MAX} turns")

    def warm(self) -> None:
        """Run until workers host several versions."""
        for _ in range(FILL_TURNS_MAX):
            self.turn()
            if self.machine.state.version >= WARM_STEPS:
                return
        raise AssertionError(f"{self.machine.state.version} steps")

    def turn(self) -> None:
        state = self.machine.state
        busy = [worker for worker in state.workers.values() if len(worker.requests) >= REPORTED]
        for worker in self._chance.sample(busy, min(REPORTING, len(busy))):
            for version, names in self._by_version(worker.requests).items():
                self._append(_logged(state, worker, names, self._offset, version))
        if self._turns % LOSS_TURNS == 0:
            worker = state.workers[self._chance.choice(sorted(state.workers))]
            self._append(
                WorkerLeft(
                    at_ns=0, worker=worker.name, incarnation=worker.incarnation, reason="bench"
                )
            )
            self._append(self._joined(worker.name))
        self._react()

    def close(self) -> None:
        self._port.close()

    def _by_version(self, requests: set[str]) -> dict[int, list[str]]:
        requests_by_version, state = dict[int, list[str]](), self.machine.state
        oldest = sorted(requests)[: max(REPORTED, len(requests) // 16)]
        for name in self._chance.sample(oldest, REPORTED):
            request = state.requests[name]
            requests_by_version.setdefault(state.groups[request.group].spec.version, []).append(
                name
            )
        return requests_by_version

    def _react(self) -> None:
        self._turns += 1
        workers = self.machine.state.workers
        for number, name in enumerate(sorted(workers)):
            if (number + self._turns) % STATUS_TURNS == 0:
                self._say(workers[name].incarnation, name)
        while self._due and self._due[0][0] <= self._turns:
            answer = self._due.popleft()[1]()
            if answer is not None:
                self._append(answer)
        inputs, self._inputs = self._inputs[:RECORDS_MAX], self._inputs[RECORDS_MAX:]
        self._mono_ns += BUS_TURN_NS
        self._tidy()
        self.meter.turns_ms.append(0.0)
        self._turn(inputs)
        for _ in range(MORE_MAX):
            if self.machine.wake_at() > self._mono_ns:
                return
            self._turn([])
        raise AssertionError(f"more than {MORE_MAX} turns at once")

    def _turn(self, inputs: list[Any]) -> None:
        now = Now(mono_ns=self._mono_ns, wall_ns=self._mono_ns)
        outputs = self.meter.whole(lambda: self.machine.react(inputs, now))
        for effect in outputs.effects:
            self._port.start(effect)
        for message in outputs.publish:
            if message.record.topic == TOPICS.decisions:
                self._durable(message)

    def _durable(self, message: Any) -> None:
        topic = TOPICS.decisions
        if message.tag:
            self._inputs.append(
                Published(tag=message.tag, topic=topic, partition=0, offset=self._decided)
            )
        self._decided += 1
        for decision in decode_round(message.record.value).decisions:
            self._answer(decision)

    def _answer(self, decision: Any) -> None:
        state = self.machine.state
        if isinstance(decision, Assign):
            worker = state.workers.get(decision.worker)
            if worker is not None and worker.incarnation == decision.incarnation and worker.loading:
                self._later(0, lambda: _ready(worker))
        elif isinstance(decision, Migrate):
            self._later(0, lambda: _released(state, decision))
        elif isinstance(decision, TakeBatch):
            taken = sum(len(group.trajectories) for group in decision.groups)
            self._later(
                taken // REPORTING // REPORTED // 2, lambda: step_committed(state, decision)
            )

    def _later(self, turns: int, answer: Callable[[], Control | None]) -> None:
        self._due.append((self._turns + turns, answer))
        self._due = deque(sorted(self._due, key=lambda entry: entry[0]))

    def _joined(self, name: str) -> WorkerJoined:
        return worker_joined(name, self._slots, kv_tokens=KV_TOKENS)

    def _append(self, record: Control) -> None:
        self._inputs.append(_record(TOPICS.control, self._offset, encode(record)))
        self._offset += 1

    def _say(self, incarnation: int, name: str) -> None:
        status = WorkerStatus(
            at_ns=0,
            cost=_no_cost(),
            worker=name,
            incarnation=incarnation,
            version=0,
            active=self._slots,
            waiting=0,
            kv_used_tokens=1000,
            tokens_total=1000,
            progress={},
        )
        self._inputs.append(_record(TOPICS.metrics, self._offset, encode(status)))


def _record(topic: str, offset: int, value: bytes) -> Record:
    return Record(topic=topic, partition=0, offset=offset, key=b"", value=value)


def _released(state: State, move: Migrate) -> RequestReleased | None:
    request = state.requests.get(move.trajectory)
    if request is None or request.attempt != move.attempt or request.moving is None:
        return None
    return RequestReleased(
        at_ns=0,
        worker=move.worker,
        incarnation=move.incarnation,
        trajectory=move.trajectory,
        attempt=move.attempt,
    )


def _no_cost() -> Cost:
    return Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)


def _config(workers: int, slots: int) -> Config:
    per_step = min(PER_STEP, max(1, workers * slots // GROUP_SIZE // 4))
    in_flight = SPARE * workers * slots / GROUP_SIZE / per_step + 1
    plain = {
        "run": {"name": "bench", "steps": STEPS},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "prompts_per_step": per_step},
        "staleness": {"max_staleness": int(in_flight) + 1, "async_batches": in_flight},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)


def _logged(
    state: State, worker: Worker, names: Sequence[str], offset: int, version: int
) -> TrajectoriesLogged:
    return TrajectoriesLogged(
        at_ns=0,
        worker=worker.name,
        incarnation=worker.incarnation,
        version=version,
        digest=state.policies[version],
        trajectories=tuple(_entry(state, name, offset) for name in names),
    )


def _entry(state: State, trajectory: str, offset: int) -> LoggedEntry:
    request = state.requests[trajectory]
    return LoggedEntry(
        trajectory=trajectory,
        attempt=request.attempt,
        partition=state.groups[request.group].spec.partition,
        offset=offset,
        sha256=NO_DIGEST,
        bytes=1000,
        tokens=100,
        reward=float((request.sample + offset) % 2),
        finish="stop",
    )


def _ready(worker: Worker) -> WorkerReady:
    return worker_ready(
        worker.name, worker.incarnation, worker.target, worker.digest, load_ms=1000.0
    )
