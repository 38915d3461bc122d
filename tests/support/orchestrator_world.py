"""Simulated workers and trainer around the real orchestrator, in virtual time on a memory log.

A seed determines everything. Players see only the log. `World.ledger` checks decisions and facts
without reading State.

    world = World(seed=3, config=make_config(), workers={"w0": (4, 1)}, chances=Chances(crash=0.1))
    world.run()
    assert world.machine.state.done
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from dora_pipe.bus.bus import Reader, TopicSpec, Writer
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.config.model import Config
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.process.role import Instance, start_machine
from dora_pipe.schemas.control import AnyControl, StepCommitted, WorkerJoined
from dora_pipe.schemas.metrics import Cost, WorkerStatus
from dora_pipe.schemas.rounds import (
    Dispatch,
    End,
    Fence,
    GroupSpec,
    Migrate,
    Round,
    Schedule,
    TakeBatch,
    decode_round,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_players import PlayTrainer, PlayWorker


class Ledger:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.specs: dict[str, GroupSpec] = {}
        self.skipped: list[int] = []
        self.outcomes: dict[str, str] = {}
        self.trained: dict[str, int] = {}
        """Step by trained trajectory."""
        self.placements: dict[str, dict[int, int]] = {}
        """Role incarnations by attempt, by trajectory."""
        self.taken: dict[tuple[int, int], TakeBatch] = {}
        self.moves: dict[str, int] = {}
        """Number of requested moves by trajectory."""
        self.fenced: set[int] = set()
        self.incarnations: dict[str, int] = {}
        self.staleness: dict[int, int] = {}
        self.step = 0
        self.rounds = 0
        self._offset = 0

    def next_offset(self) -> int:
        self._offset += 3
        return self._offset

    def fact(self, offset: int, record: AnyControl) -> None:
        if isinstance(record, WorkerJoined):
            if record.worker in self.incarnations:
                self.fenced.add(self.incarnations[record.worker])
            self.incarnations[record.worker] = offset
        elif isinstance(record, StepCommitted):
            self._commit(record)

    def round(self, round_: Round) -> None:
        assert round_.ordinal == self.rounds
        self.rounds += 1
        for decision in round_.decisions:
            assert decision.reason, "a decision without a reason"
            if isinstance(decision, Dispatch):
                assert decision.spec.group not in self.specs, "dispatched twice"
                self.specs[decision.spec.group] = decision.spec
                self.skipped += decision.skipped
            elif isinstance(decision, Schedule):
                assert decision.spec == self.specs[decision.spec.group]
                for request in decision.requests():
                    attempts = self.placements.setdefault(request.trajectory, {})
                    assert request.attempt == len(attempts) + 1, "attempts are not contiguous"
                    attempts[request.attempt] = decision.incarnation
            elif isinstance(decision, Migrate):
                placed = self.placements[decision.trajectory]
                assert placed[decision.attempt] == decision.incarnation, (
                    "moves from where it is not"
                )
                assert decision.attempt == len(placed), "moves under an old attempt"
                assert decision.to_incarnation not in self.fenced
                bounded = bool(decision.to)
                self.moves[decision.trajectory] = self.moves.get(decision.trajectory, 0) + bounded
            elif isinstance(decision, TakeBatch):
                self._take(decision)
            elif isinstance(decision, End):
                self._end(decision.group, decision.outcome)
            elif isinstance(decision, Fence):
                self.fenced.add(decision.incarnation)

    def check_end(self) -> None:
        """Every group has exactly one outcome, and all steps are trained."""
        assert self.step == self.config.run.steps
        assert self.specs.keys() == self.outcomes.keys(), "a group without an outcome"
        trained = [group for group, outcome in self.outcomes.items() if outcome == "trained"]
        assert len(trained) == self.config.run.steps * self.config.rollout.prompts_per_step
        for group, spec in self.specs.items():
            ends = ("evaluated",) if spec.purpose == "eval" else ("trained", "filtered", "failed")
            assert self.outcomes[group] in ends

    def _take(self, batch: TakeBatch) -> None:
        assert batch.step == self.step, "not the next step"
        assert (batch.step, batch.attempt) not in self.taken
        assert len(batch.groups) == self.config.rollout.prompts_per_step
        for group in batch.groups:
            spec = self.specs[group.group]
            assert spec.purpose == "train"
            assert (group.version, group.deadline) == (spec.version, spec.deadline)
            assert spec.version <= batch.step <= spec.deadline, "C3"
            assert group.group not in self.outcomes, "taken after its end"
            for trajectory in group.trajectories:
                placed = self.placements[trajectory.trajectory][trajectory.attempt]
                assert trajectory.incarnation == placed, (
                    "a trajectory of an incarnation it was not placed on"
                )
        self.taken[batch.step, batch.attempt] = batch

    def _commit(self, record: StepCommitted) -> None:
        batch = self.taken[record.step, record.attempt]
        assert batch.groups == record.groups
        if record.step != self.step:
            return
        self.step += 1
        for group in record.groups:
            self._end(group.group, "trained")
            spec = self.specs[group.group]
            staleness = record.step - spec.version
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            for trajectory in group.trajectories:
                assert trajectory.trajectory not in self.trained, "trained twice"
                self.trained[trajectory.trajectory] = record.step

    def _end(self, group: str, outcome: str) -> None:
        assert group not in self.outcomes, f"{group} ends twice"
        self.outcomes[group] = outcome


SECOND_NS = 1_000_000_000
WALL_NS = 1_700_000_000 * SECOND_NS
EVENTS_MAX = 400_000
"""Limit that detects endless runs."""

ETA_MAX = 3
"""Largest max_staleness that users set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    invalid: float = 0.0
    """A trajectory has no valid reward."""
    failure: float = 0.0
    """A request fails, half of them permanently."""
    crash: float = 0.0
    """Per placed request: its worker dies for `away_s`."""
    freeze: float = 0.0
    """Per placed request: its worker freezes for `away_s`."""
    refusal: float = 0.0
    """The trainer rejects a batch."""
    trainer_restart: float = 0.0
    """The trainer restarts during a batch."""
    restart: float = 0.0
    """Per second: the orchestrator restarts."""
    command: float = 0.0
    """Per second: a user drains a worker, pauses, resumes, or sets max_staleness or
    async_batches."""
    token_s: float = 0.01
    tokens_mean: float = 20.0
    train_s: float = 1.0
    load_s: float = 0.5
    away_s: float = 12.0
    moves: bool = False
    """Workers release requests on demand."""
    release_s: float = 0.3
    """Maximum delay of a release."""
    kv_tokens: int = 0
    """KV tokens (of 1024) of each running request."""
    score_s: float = 0.0
    """Maximum scoring time, without a slot."""
    equal_rewards: float = 0.0
    """All rewards of a group are equal."""

    def calm(self) -> Chances:
        return Chances(
            token_s=self.token_s,
            tokens_mean=self.tokens_mean,
            train_s=self.train_s,
            load_s=self.load_s,
            moves=self.moves,
            release_s=self.release_s,
            kv_tokens=self.kv_tokens,
            score_s=self.score_s,
        )


@dataclass
class WorldClock:
    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return WALL_NS + self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@dataclass
class World:
    """World of players; `workers` maps names to (slots, prefetch)."""

    seed: int
    config: Config
    workers: dict[str, tuple[int, int]]
    versions: dict[str, int] = field(default_factory=dict)
    """Versions served by a worker at a time; default 1."""
    colocated: frozenset[str] = frozenset()
    """Colocated workers."""
    chances: Chances = field(default_factory=Chances)
    rows: int = 50
    eval_rows: int = 3

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.clock = WorldClock()
        self.topics = Topics(self.config.run.name)
        self.log = MemoryLog()
        self.bus = MemoryBus(self.log, now_ms=lambda: self.clock.ns // 1_000_000)
        self.bus.create([TopicSpec(name=name) for name in self.topics.all()])
        self.writer: Writer = self.bus.writer()
        self.ledger = Ledger(self.config)
        self.rounds: Reader = self.bus.reader({TopicPartition(self.topics.decisions, 0): 0})
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = count()
        self.commands = 0
        self.start_orchestrator()
        self.trainer = PlayTrainer(self)
        self.players = {
            name: PlayWorker(self, name, slots, prefetch, self.versions.get(name, 1))
            for name, (slots, prefetch) in self.workers.items()
        }
        for player in self.players.values():
            self.after(self.chance.random(), player.join)
        self.after(1.0, self._every_second)

    def start_orchestrator(self) -> None:
        self.meter = Meter()
        bus = MemoryBus(self.log, now_ms=lambda: self.clock.ns // 1_000_000)
        writer = bus.writer(exclusive="orchestrator")
        self.machine: OrchestratorMachine = start_machine(
            bus=bus,
            writer=writer,
            topics=self.topics,
            timing=self.config.timing,
            clock=self.clock,
            instance=Instance(name="o", host="h", pid=1, package="0"),
            meter=self.meter,
            run_started=records.run_started(self.config, rows=self.rows, eval_rows=self.eval_rows),
        )
        self.runtime = Runtime(
            self.machine,
            bus=bus,
            writer=writer,
            clock=self.clock,
            meter=self.meter,
            exclusive=True,
            status=bus.writer(),
            turn_ns=0,
        )

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        at_ns = self.clock.ns + int(seconds * 1e9)
        heapq.heappush(self._events, (at_ns, next(self._number), event))

    def tell(self, record: AnyControl) -> int:
        append = Append(topic=self.topics.control, value=encode(record))
        (offset,) = self.writer.append([append])
        self.ledger.fact(offset, record)
        return offset

    def status(self, status: WorkerStatus) -> None:
        self.writer.append([Append(topic=self.topics.metrics, value=encode(status))])

    def cost(self) -> Cost:
        return Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)

    def run(self, *, seconds: float = 1e5) -> None:
        until_ns = self.clock.ns + int(seconds * 1e9)
        for _ in range(EVENTS_MAX):
            self._turn()
            if self.machine.finished or self.clock.ns >= until_ns:
                return
            due_ns = self._events[0][0] if self._events else until_ns
            due_ns = min(due_ns, max(self.machine.wake_at(), self.clock.ns + 1), until_ns)
            self.clock.ns = max(self.clock.ns, due_ns)
            while self._events and self._events[0][0] <= self.clock.ns:
                heapq.heappop(self._events)[2]()
        raise AssertionError(f"seed {self.seed}: no end after {EVENTS_MAX} events")

    def heal(self) -> None:
        if self.chances.command:
            self.commands += 1
            self.tell(records.command("resume"))
        self.chances = self.chances.calm()

    def _turn(self) -> None:
        while self.runtime.tick():
            for record in self.rounds.poll(timeout_s=0):
                round_ = decode_round(record.value)
                self.ledger.round(round_)
                for decision in round_.decisions:
                    self.trainer.hear(decision)
                    for player in self.players.values():
                        player.hear(decision)

    def _every_second(self) -> None:
        if self.chance.random() < self.chances.restart:
            self.start_orchestrator()
        if self.chance.random() < self.chances.command:
            self.commands += 1
            self.tell(self._command())
        self.after(1.0, self._every_second)

    def _command(self) -> AnyControl:
        eta = self.chance.randrange(ETA_MAX + 1)
        return self.chance.choice(
            [
                records.command("pause"),
                records.command("resume"),
                records.command("drain", worker=self.chance.choice(sorted(self.workers))),
                records.command("set", staleness__max_staleness=eta),
                records.command("set", staleness__async_batches=1.0 + self.chance.random()),
                records.command("set", trainer__max_grad_norm=0.5 + self.chance.random()),
                records.command("dance"),
            ]
        )
