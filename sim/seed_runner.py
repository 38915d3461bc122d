"""Execution of one seed, and coverage of many seeds.

First faults strike while checkers examine every record. Then the faults end, and the run must
finish within `LIVE_NS` of virtual time. Finally the log is audited. A failing seed can be replayed:
it depends on the seed alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.prune import plan_prune, prune
from dora_pipe.config.retention import full_every
from dora_pipe.core.errors import DoraError, InvariantBroken
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import AnyDecision, AnyObservation, Outcome
from dora_pipe.schemas.topics import Topics
from dora_pipe.sim.checks import CHECKS
from dora_pipe.sim.fault_injector import STOP_SHARE, FaultInjector
from dora_pipe.sim.faults import FAULTS
from dora_pipe.sim.faulty_parts import FaultyParts
from dora_pipe.sim.invariant_monitor import InvariantMonitor
from dora_pipe.sim.machines import HAD
from dora_pipe.sim.role import ORCHESTRATOR, TRAINER
from dora_pipe.sim.scenario import Scenario, draw
from dora_pipe.sim.world import SECOND_NS, World

LIVE_NS: Final = 1000 * SECOND_NS
END_NS: Final = 30 * SECOND_NS
FAULTY_SHARE: Final = 0.7
FAULTS_MIN: Final = 3
PRUNED_EVERY: Final = 2
HALTS_MAX: Final = 5

FRAMES_MAX: Final = 10_000
"""Recursion limit: a role waiting for its bus sleeps inside its turn while others run there.
Seeds with many zombies nest scores of sleepers, a dozen frames each."""

_BROKEN: Final = (DoraError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """Result of a seed; `check` and `what` are empty if everything held."""

    seed: int
    check: str = ""
    what: str = ""
    steps: int = 0
    events: int = 0
    """Turns, faults and records."""
    records: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)

    @property
    def holds(self) -> bool:
        return not self.check

    @property
    def line(self) -> str:
        return f"{self.check}: {self.what}; again: {self.again}"

    @property
    def again(self) -> str:
        return f"python -m sim --seed {self.seed}"


def run_seed(seed: int, *, steps: int = 1) -> SeedResult:
    return SeedRun(draw(seed, steps=steps)).run()


class SeedRun:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        timing = scenario.config.timing
        self.injector = FaultInjector(scenario)
        self.monitor = InvariantMonitor(
            Topics(scenario.config.run.name),
            heartbeat_ns=int(timing.heartbeat_s * 1e9),
            lease_ns=int(timing.lease_s * 1e9),
        )
        self.world: World | None = None

    def run(self) -> SeedResult:
        check, what = "", ""
        frames = sys.getrecursionlimit()
        sys.setrecursionlimit(max(frames, FRAMES_MAX))
        try:
            self._play()
        except InvariantBroken as error:
            check, _, what = error.message.partition(": ")
            if check not in CHECKS:
                check, what = "role", error.message
        except _BROKEN as error:
            check, what = "role", f"{type(error).__name__}: {error}"
        finally:
            sys.setrecursionlimit(frames)
            if self.world is not None:
                self.world.close()
        return self._result(check, what)

    def _play(self) -> None:
        scenario = self.scenario
        parts = FaultyParts(
            delays=scenario.delays,
            steps_max=scenario.steps_max,
            injector=self.injector,
            observer=self.monitor.calls,
        )
        world = self.world = World(
            scenario.config,
            workers=scenario.workers,
            parts=parts,
            faults=self.injector,
            seed=scenario.seed,
            observer=self.monitor,
            start=False,
        )
        self.monitor.exists = world.machines.can_be_had
        self.injector.begin(world)
        self.monitor.on_move = self.injector.moved
        self.injector.version = lambda: self.monitor.ledger.steps_committed
        world.start_all(scenario.first)
        faulty_steps = int(FAULTY_SHARE * scenario.config.run.steps)
        ledger = self.monitor.ledger
        world.run(until_ns=scenario.faulty_ns, done=lambda: ledger.steps_committed >= faulty_steps)
        self.injector.at_least(FAULTS_MIN)
        world.run(until_ns=world.clock.ns + SECOND_NS // 2, done=lambda: self.monitor.stopped)
        if "command-stop" in scenario.faults:
            late = int(STOP_SHARE * scenario.config.run.steps)
            world.run(
                until_ns=world.clock.ns + scenario.faulty_ns,
                done=lambda: self.monitor.stopped or ledger.steps_committed >= late,
            )
            self.injector.strike("command-stop")
        self.injector.calm()
        self._live(world)
        self._audit(world)

    def _live(self, world: World) -> None:
        until_ns = world.clock.ns + LIVE_NS
        for _ in range(HALTS_MAX):
            world.run(
                until_ns=until_ns,
                done=lambda: self.monitor.stopped or world.present(ORCHESTRATOR) is None,
            )
            if self.monitor.stopped or world.present(ORCHESTRATOR) is not None:
                break
            self.injector.command("resume")
            world.start(ORCHESTRATOR)
        if not self.monitor.stopped:
            raise InvariantBroken(
                f"live: not over after {LIVE_NS / 1e9:.0f} s; {waiting(world, self.monitor.waits)}"
            )
        self.injector.ended = True
        if not world.run(until_ns=world.clock.ns + END_NS):
            for role in list(world.roles.values()):
                world.stop(role)
        if not world.run(until_ns=world.clock.ns + END_NS):
            raise InvariantBroken(
                f"live: the run is over, but {waiting(world, self.monitor.waits)}"
            )

    def _audit(self, world: World) -> None:
        self.monitor.at_end()
        self._audit_log(world)
        if full_every(self.scenario.config, "float32") > 1:
            self._prune(world)
            self._audit_log(world)

    def _prune(self, world: World) -> None:
        bus, topics, store, clock = world.bus, world.topics, world.store, world.clock
        plan = plan_prune(bus, topics, store, keep_every=PRUNED_EVERY, stopped=False, clock=clock)
        files = prune(bus, topics, store, plan, user="sim", clock=clock)
        self.monitor.kinds["pruned files"] += files

    def _audit_log(self, world: World) -> None:
        report = audit(world.bus, world.topics, world.store.root)
        for violation in report.violations:
            if not self._is_garbage(violation.line):
                raise InvariantBroken(f"log: {violation.line}")
        if not report.finished:
            raise InvariantBroken("log: the audit does not see the end of the run")

    def _is_garbage(self, line: str) -> bool:
        return "garbage" in self.scenario.faults and "cannot be read" in line

    def _result(self, check: str, what: str) -> SeedResult:
        world, ledger = self.world, self.monitor.ledger
        states = ledger.states() + self.monitor.calls.counted
        if world is not None:
            states += world.machines.counted
        for _, role in [] if world is None else world.ends:
            who = role.name if role.exclusive else "worker"
            states[f"{who}: {role.end.partition(':')[0]}"] += 1
        records = self.monitor.records
        events = 0 if world is None else world.events
        return SeedResult(
            seed=self.scenario.seed,
            check=check,
            what=what,
            steps=ledger.steps_committed,
            events=events + records,
            records=records,
            virtual_s=0.0 if world is None else world.clock.ns / 1e9,
            faults=self.injector.struck,
            kinds=self.monitor.kinds,
            states=states,
        )


def waiting(world: World, waits: Mapping[str, str]) -> str:
    """Return living roles and their waits."""
    names = (ORCHESTRATOR, TRAINER, *world.plans)
    living = {role.name for role in world.roles.values()}
    parts = []
    for name in names:
        if name in living:
            words = waits.get(name)
            parts.append(f"{name} waits for {words}" if words else f"{name} works")
        elif name in (ORCHESTRATOR, TRAINER):
            parts.append(f"there is no {name}")
    return "; ".join(parts)


NOT_HERE: Final = frozenset(
    {
        "control weights-adopted",  # one kind of machine
        "control batch-refused",  # bytes do not change
        "observed kv-pressure",  # no KV cache
        "observed placeable",
        "decided early-stop",  # runs would end too early
    }
)


def _tags(union: Any, prefix: str) -> list[str]:
    return [f"{prefix} {kind.__struct_config__.tag}" for kind in get_args(union)]


_STATES: Final = (
    *(f"fact {name}" for name in ("bound", "superseded", "fenced", "failed", "released")),
    *(f"group {outcome}" for outcome in get_args(Outcome)),
    *(f"call {how}" for how in ("answered", "answered again", "refused")),
    *HAD,
    *(f"worker {how}" for how in ("left", "fenced", "there")),
    *(f"staleness {number}" for number in range(4)),
    *(f"worker: {how}" for how in ("left", "fenced", "replaced", "failed", "killed")),
    *(f"orchestrator: {how}" for how in ("ended", "killed", "Fenced", "OutcomeUnknown")),
    *(f"trainer: {how}" for how in ("ended", "killed", "Fenced", "OutcomeUnknown")),
    *(
        f"trainer {phase}"
        for phase in ("restoring", "idle", "reading", "training", "publishing", "committing")
    ),
)

EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "faults": tuple(FAULTS),
    "decisions": tuple(_tags(AnyDecision, "decided")),
    "records": tuple(_tags(AnyControl, "control")),
    "observations": tuple(_tags(AnyObservation, "observed")),
    "states": _STATES,
}


@dataclass(slots=True)
class Coverage:
    seeds: int = 0
    events: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    virtual_s: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    seeds_of: Counter[str] = field(default_factory=Counter)
    """Number of seeds with each."""
    broken: list[SeedResult] = field(default_factory=list)

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        self.events.append(result.events)
        self.faults.append(result.faults.total())
        self.steps.append(result.steps)
        self.virtual_s += result.virtual_s
        for counter in (result.faults, result.kinds, result.states):
            self.met.update(counter)
            self.seeds_of.update(name for name, count in counter.items() if count)
        if not result.holds:
            self.broken.append(result)

    def rows(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield (category, kind, count, seeds)."""
        for sort, names in EXPECTED.items():
            for name in names:
                if name not in NOT_HERE:
                    yield sort, name, self.met[name], self.seeds_of[name]

    def unmet(self) -> Sequence[str]:
        """Return kinds that no seed produced."""
        return [name for _, name, count, _ in self.rows() if not count]
