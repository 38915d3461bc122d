"""Measures the longest turn of the orchestrator's machine in a full, busy run.

The real machine, with real bytes: every turn of the bus some workers report trajectories and all
their statuses, requests move and are let go of, batches are trained and versions loaded, now and
then a worker is lost. Every slot is full before anything is measured. As in a run, a machine that
has more to do reacts again before the bus brings anything, which is a turn of its own, and garbage
is looked for where the loop waits.

Times are CPU time of the loop's thread, so that what else the machine does does not count; `wall`
is the longest turn as the clock has it, with the thread beside it that writes snapshots.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from unittest import mock

import msgspec
import typer

from dora_pipe.bench.support import emit_figures
from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.cli.options import JsonOption
from dora_pipe.config.model import Config
from dora_pipe.core.runtime import BUS_TURN_NS, CaughtUp, Now, Published
from dora_pipe.orchestrator import machine
from dora_pipe.orchestrator.digest import Leaves
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.role import Tidying, settle_memory
from dora_pipe.orchestrator.snapshots import SnapshotPort
from dora_pipe.orchestrator.state import State, Worker
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
from dora_pipe.schemas.rounds import (
    STATE_DIGEST_EVERY,
    Assign,
    Move,
    TakeBatch,
    decode_round,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.modelled_cluster import (
    NO_DIGEST,
    role_started,
    run_started,
    step_committed,
    worker_joined,
    worker_ready,
)

WORKERS: Final = (512,)
SLOTS: Final = 200
GROUP_SIZE: Final = 16
ROWS: Final = 1_000_000
"""Of the data set."""
KV_TOKENS: Final = 1_000_000
"""Room of a worker."""
STEPS: Final = 1_000_000
"""More than any measurement commits."""
PER_STEP: Final = 512
"""Groups of a batch: 8192 trajectories."""
RECORDS_MAX: Final = 500
"""A poll brings so many."""
ROUNDS: Final = 1500
FILL_TURNS_MAX: Final = 5000
"""Turns until every slot runs a request."""
WARM_STEPS: Final = 3
"""Committed before anything is measured."""
REPORTING: Final = 32
"""Workers that report in one turn."""
REPORTED: Final = 2
"""Trajectories that one reports: any of the older ones that it has."""
SPARE: Final = 2.0
"""Groups in flight, beside those that fill all slots: siblings of one group end far apart."""
LOSS_TURNS: Final = 150
"""A worker is lost so often, with all that it runs, and comes back."""
MORE_MAX: Final = 1000
"""Turns that follow at once; a plan of all requests takes a fifth of them."""
STATUS_TURNS: Final = 5
"""Each worker says so often how it is."""
SNAPSHOT_EVERY: Final = 4 * STATE_DIGEST_EVERY
"""Oftener than in a run, so that there are several to measure."""
TOPICS: Final = Topics("bench")


_PARTS: Final = (
    "decide",
    "encode",
    "digest",
    "snapshot",
    "waits",
    "gc",
    "wait_gc",
    "turn",
    "wall",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigure:
    """The longest of each part of a turn, and of all parts together."""

    workers: int
    requests: int
    """Open ones."""
    turns: int
    steps: int
    decide_ms: float
    encode_ms: float
    digest_ms: float
    """The share of a turn, or the digest that its round carries."""
    snapshot_ms: float
    waits_ms: float
    gc_ms: float
    """Garbage collection in a turn."""
    wait_gc_ms: float
    """Garbage collection between two turns of the bus, where the loop waits."""
    p50_ms: float
    """The median of all turns that one turn of the bus leads to, together."""
    turn_ms: float
    wall_ms: float


def command(
    workers: Annotated[
        list[int] | None, typer.Option(help="Workers of 200 slots each; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Longest turn of the orchestrator in a busy run of 102,400 open requests, part by part."""
    emit_figures(bench_turns(workers or WORKERS, slots=SLOTS), as_json=as_json)


def bench_turns(
    workers: Sequence[int], *, slots: int = SLOTS, rounds: int = ROUNDS
) -> list[TurnFigure]:
    """A figure per number of workers."""
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
    """Milliseconds that each part took of one turn, the most of all turns."""

    def __init__(self) -> None:
        self.most_ms = dict.fromkeys(_PARTS, 0.0)
        self.turns_ms: list[float] = []
        """Of each turn of the bus, with those that followed at once."""
        self._now_ms: defaultdict[str, float] = defaultdict(float)
        self._since_s = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the parts of the machine's turns while the block lasts."""
        with ExitStack() as stack:
            for owner, name, part in (
                (machine, "decide", "decide"),
                (machine, "seal", "encode"),
                (machine, "body_of", "snapshot"),
                (machine, "waits", "waits"),
                (Leaves, "digest", "digest"),
                (Leaves, "settle", "share"),
            ):
                timed = self._timed(getattr(owner, name), part)
                stack.enter_context(mock.patch.object(owner, name, timed))
            gc.callbacks.append(self._collecting)
            stack.callback(gc.callbacks.remove, self._collecting)
            yield

    def tidied(self, tidy: Callable[[], None]) -> None:
        """The loop waits; a turn of the bus comes next."""
        cpu_s = time.thread_time()
        tidy()
        spent_ms = (time.thread_time() - cpu_s) * 1e3
        self.most_ms["wait_gc"] = max(self.most_ms["wait_gc"], spent_ms)
        self.turns_ms.append(0.0)

    def whole(self, react: Callable[[], Any]) -> Any:
        """One turn."""
        self._now_ms.clear()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        found = react()
        self._now_ms["turn"] = (time.thread_time() - cpu_s) * 1e3
        self._now_ms["wall"] = (time.perf_counter() - wall_s) * 1e3
        self.turns_ms[-1] += self._now_ms["turn"]
        self._now_ms["digest"] = max(self._now_ms["digest"], self._now_ms.pop("share", 0.0))
        for part, spent in self._now_ms.items():
            self.most_ms[part] = max(self.most_ms[part], spent)
        return found

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._now_ms[part] += (time.thread_time() - began_s) * 1e3

        return timed

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since_s = time.thread_time()
        else:
            self._now_ms["gc"] += (time.thread_time() - self._since_s) * 1e3


class _Run:
    """The machine, and everybody who answers it."""

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
            role_epoch=0,
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
        """Until every slot runs a request."""
        state = self.machine.state
        for _ in range(FILL_TURNS_MAX):
            self._react()
            placed = len(state.requests) - sum(map(len, state.queues.values()))
            if placed >= len(state.workers) * self._slots > 0:
                return
        raise AssertionError(f"{len(state.requests)} requests after {FILL_TURNS_MAX} turns")

    def warm(self) -> None:
        """Until some steps are committed, and workers host several versions."""
        for _ in range(FILL_TURNS_MAX):
            self.turn()
            if self.machine.state.version >= WARM_STEPS:
                return
        raise AssertionError(f"{self.machine.state.version} steps")

    def turn(self) -> None:
        """Workers report, and whoever has something to answer answers."""
        state = self.machine.state
        busy = [one for one in state.workers.values() if len(one.requests) >= REPORTED]
        for worker in self._chance.sample(busy, min(REPORTING, len(busy))):
            for version, names in self._by_version(worker.requests).items():
                self._append(_logged(state, worker, names, self._offset, version=version))
        if self._turns % LOSS_TURNS == 0:
            worker = state.workers[self._chance.choice(sorted(state.workers))]
            self._append(
                WorkerLeft(at_ns=0, worker=worker.name, epoch=worker.epoch, reason="bench")
            )
            self._append(self._joined(worker.name))
        self._react()

    def close(self) -> None:
        """Stop the thread that writes."""
        self._port.close()

    def _by_version(self, requests: set[str]) -> dict[int, list[str]]:
        found, state = dict[int, list[str]](), self.machine.state
        oldest = sorted(requests)[: max(REPORTED, len(requests) // 16)]
        for name in self._chance.sample(oldest, REPORTED):
            request = state.requests[name]
            found.setdefault(state.groups[request.group].spec.version, []).append(name)
        return found

    def _react(self) -> None:
        self._turns += 1
        workers = self.machine.state.workers
        for number, name in enumerate(sorted(workers)):
            if (number + self._turns) % STATUS_TURNS == 0:
                self._say(workers[name].epoch, name)
        while self._due and self._due[0][0] <= self._turns:
            answer = self._due.popleft()[1]()
            if answer is not None:
                self._append(answer)
        inputs, self._inputs = self._inputs[:RECORDS_MAX], self._inputs[RECORDS_MAX:]
        self._mono_ns += BUS_TURN_NS
        self.meter.tidied(self._tidy)
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
        for one in outputs.publish:
            if one.record.topic == TOPICS.decisions:
                self._durable(one)

    def _durable(self, one: Any) -> None:
        at = TOPICS.decisions
        if one.tag:
            self._inputs.append(Published(tag=one.tag, topic=at, partition=0, offset=self._decided))
        self._decided += 1
        for decision in decode_round(one.record.value).decisions:
            self._answer(decision)

    def _answer(self, decision: Any) -> None:
        """What a role does about a decision, later."""
        state = self.machine.state
        if isinstance(decision, Assign):
            worker = state.workers.get(decision.worker)
            if worker is not None and worker.epoch == decision.epoch and worker.loading:
                self._later(0, lambda: _ready(worker))
        elif isinstance(decision, Move):
            self._later(0, lambda: _released(state, decision))
        elif isinstance(decision, TakeBatch):
            taken = sum(len(one.trajectories) for one in decision.groups)
            self._later(
                taken // REPORTING // REPORTED // 2, lambda: step_committed(state, decision)
            )

    def _later(self, turns: int, answer: Callable[[], Control | None]) -> None:
        self._due.append((self._turns + turns, answer))
        self._due = deque(sorted(self._due, key=lambda one: one[0]))

    def _joined(self, name: str) -> WorkerJoined:
        return worker_joined(name, self._slots, kv_tokens=KV_TOKENS)

    def _append(self, record: Control) -> None:
        self._inputs.append(_record(TOPICS.control, self._offset, encode(record)))
        self._offset += 1

    def _say(self, epoch: int, name: str) -> None:
        status = WorkerStatus(
            at_ns=0,
            cost=_no_cost(),
            worker=name,
            epoch=epoch,
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


def _released(state: State, move: Move) -> RequestReleased | None:
    """A worker lets go of a request, unless it has ended meanwhile."""
    request = state.requests.get(move.trajectory)
    if request is None or request.attempt != move.attempt or request.moving is None:
        return None
    return RequestReleased(
        at_ns=0,
        worker=move.worker,
        epoch=move.epoch,
        trajectory=move.trajectory,
        attempt=move.attempt,
    )


def _no_cost() -> Cost:
    return Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)


def _config(workers: int, slots: int) -> Config:
    """The trainer is twice as fast as the workers, which always have something to run."""
    per_step = min(PER_STEP, max(1, workers * slots // GROUP_SIZE // 4))
    in_flight = SPARE * workers * slots / GROUP_SIZE / per_step + 1
    return _config_of(
        per_step=per_step, max_staleness=int(in_flight) + 1, in_flight_batches=in_flight
    )


def _config_of(*, per_step: int, max_staleness: int, in_flight_batches: float) -> Config:
    """A run that never ends and evaluates nothing."""
    plain = {
        "run": {"name": "bench", "steps": STEPS},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "groups": {"size": GROUP_SIZE, "per_step": per_step},
        "staleness": {"max_staleness": max_staleness, "in_flight_batches": in_flight_batches},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)


def _logged(
    state: State, worker: Worker, names: Sequence[str], offset: int, *, version: int | None = None
) -> TrajectoriesLogged:
    """A worker has logged some of its requests; under its own version, if nothing is said."""
    known = worker.target if version is None else version
    return TrajectoriesLogged(
        at_ns=0,
        worker=worker.name,
        epoch=worker.epoch,
        version=known,
        digest=state.policies[known],
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
        reward=float((request.sibling + offset) % 2),
        finish="stop",
    )


def _ready(worker: Worker) -> WorkerReady:
    """A worker has loaded its target."""
    return worker_ready(worker.name, worker.epoch, worker.target, worker.digest, load_ms=1000.0)
