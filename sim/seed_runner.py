"""Plays one seed from its beginning to its verdict.

Safety phase: faults strike, checkers watch every record. Then the injector is calmed, and the run
has to end within `LIVE_NS` of virtual time. Then the whole log is audited. A seed that fails says
which checker found what, and can be played again: nothing depends on anything but the seed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.audit.audit import audit
from dora_pipe.core.errors import DoraError, InvariantBroken
from dora_pipe.schemas.topics import Topics
from dora_pipe.sim.checks import CHECKS
from dora_pipe.sim.fault_injector import STOP_SHARE, FaultInjector
from dora_pipe.sim.faulty_parts import FaultyParts
from dora_pipe.sim.invariant_monitor import InvariantMonitor
from dora_pipe.sim.role import ORCHESTRATOR, TRAINER
from dora_pipe.sim.scenario import Scenario, draw
from dora_pipe.sim.tokens import check_tokens
from dora_pipe.sim.world import SECOND_NS, World

LIVE_NS: Final = 1000 * SECOND_NS
"""A run that does not end so long after the last fault never ends."""

END_NS: Final = 30 * SECOND_NS
"""Roles that have not ended so long after the run are asked to."""

FAULTY_SHARE: Final = 0.7
"""Of the steps; then the faults stop."""

FAULTS_MIN: Final = 3

EVENTS_MIN: Final = 2000
"""A seed that comes to fewer is played again with `MORE_STEPS`: about one in a thousand."""

MORE_STEPS: Final = 10

FRAMES_MAX: Final = 10_000
"""Who waits for its bus sleeps inside its turn, and everybody else goes on in there: a seed full of
zombies in a bad network has scores of sleepers inside each other, of a dozen frames each."""

_BROKEN: Final = (DoraError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""How a role says that its own state is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """What a seed came to; `check` and `what` are empty if everything held."""

    seed: int
    resident: bool = False
    """Whether workers hosted several versions at once."""
    check: str = ""
    what: str = ""
    steps: int = 0
    events: int = 0
    """Turns of roles, faults that struck, and records that were appended."""
    records: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    """Records, decisions, observations by kind."""
    states: Counter[str] = field(default_factory=Counter)
    """What requests, groups, workers, batches and roles went through."""

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.check

    @property
    def line(self) -> str:
        """What was found, with the command that finds it again."""
        return f"{self.check}: {self.what}; again: {self.again}"

    @property
    def again(self) -> str:
        """The command that plays it again."""
        return f"dora-pipe sim --seed {self.seed}" + (" --resident" if self.resident else "")


def run_seed(seed: int, *, steps: int = 10, resident: bool = False) -> SeedResult:
    """Play one seed, with at least so many steps, and at least `EVENTS_MIN` events.

    With `resident`, most workers host several versions at once.
    """
    played = SeedRun(draw(seed, steps=steps, resident=resident)).run()
    if played.holds and played.events < EVENTS_MIN:
        played = SeedRun(draw(seed, steps=steps + MORE_STEPS, resident=resident)).run()
    return played


class SeedRun:
    """One seed's world with everything around it."""

    def __init__(self, drawn: Scenario) -> None:
        self.draw = drawn
        timing = drawn.config.timing
        self.injector = FaultInjector(drawn)
        self.watch = InvariantMonitor(
            Topics(drawn.config.run.name),
            heartbeat_ns=int(timing.heartbeat_s * 1e9),
            lease_ns=int(timing.lease_s * 1e9),
        )
        self.world: World | None = None

    def run(self) -> SeedResult:
        """From the beginning to the verdict."""
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
        return self._played(check, what)

    def _play(self) -> None:
        drawn = self.draw
        parts = FaultyParts(delays=drawn.delays, steps_max=drawn.steps_max, injector=self.injector)
        world = self.world = World(
            drawn.config,
            workers=drawn.workers,
            parts=parts,
            faults=self.injector,
            seed=drawn.seed,
            watch=self.watch,
            start=False,
        )
        self.watch.exists = world.store.has_weights
        self.injector.begin(world)
        self.watch.on_move = self.injector.moved
        self.injector.version = lambda: self.watch.ledger.steps_committed
        world.start_all(drawn.first)
        faulty_steps = int(FAULTY_SHARE * drawn.config.run.steps)
        ledger = self.watch.ledger
        world.run(until_ns=drawn.faulty_ns, done=lambda: ledger.steps_committed >= faulty_steps)
        self.injector.at_least(FAULTS_MIN)
        world.run(until_ns=world.clock.ns + SECOND_NS // 2, done=lambda: self.watch.stopped)
        if "command-stop" in drawn.faults:
            late = int(STOP_SHARE * drawn.config.run.steps)
            world.run(
                until_ns=world.clock.ns + drawn.faulty_ns,
                done=lambda: self.watch.stopped or ledger.steps_committed >= late,
            )
            self.injector.strike("command-stop")
        self.injector.calm()
        self._live(world)
        self._look(world)

    def _live(self, world: World) -> None:
        """The run ends, and every role with it."""
        if not world.run(until_ns=world.clock.ns + LIVE_NS, done=lambda: self.watch.stopped):
            raise InvariantBroken(
                f"live: not over after {LIVE_NS / 1e9:.0f} s; {waiting(world, self.watch.waits)}"
            )
        self.injector.ended = True
        if not world.run(until_ns=world.clock.ns + END_NS):
            for role in list(world.roles.values()):
                world.stop(role)
        if not world.run(until_ns=world.clock.ns + END_NS):
            raise InvariantBroken(f"live: the run is over, but {waiting(world, self.watch.waits)}")

    def _look(self, world: World) -> None:
        """The whole log, once more, by others."""
        self.watch.at_end()
        report = audit(world.bus, world.topics, world.store.root)
        for violation in report.violations:
            if not self._planned(violation.line):
                raise InvariantBroken(f"log: {violation.line}")
        if not report.finished:
            raise InvariantBroken("log: the audit does not see the end of the run")
        check_tokens(world, self.watch.wrong)

    def _planned(self, line: str) -> bool:
        """Whether the audit has found what was put there to be found."""
        return "garbage" in self.draw.faults and "cannot be read" in line

    def _played(self, check: str, what: str) -> SeedResult:
        world, ledger = self.world, self.watch.ledger
        states = ledger.states()
        for _, role in [] if world is None else world.ends:
            who = role.name if role.exclusive else "worker"
            states[f"{who}: {role.end.partition(':')[0]}"] += 1
        records = self.watch.records
        events = 0 if world is None else world.events
        return SeedResult(
            seed=self.draw.seed,
            resident=any(plan.versions > 1 for plan in self.draw.workers),
            check=check,
            what=what,
            steps=ledger.steps_committed,
            events=events + records,
            records=records,
            virtual_s=0.0 if world is None else world.clock.ns / 1e9,
            faults=self.injector.struck,
            kinds=self.watch.kinds,
            states=states,
        )


def waiting(world: World, said: Mapping[str, str]) -> str:
    """Who waits for what: the living roles, each with what it said last."""
    names = (ORCHESTRATOR, TRAINER, *world.plans)
    living = {role.name for role in world.roles.values()}
    found = []
    for name in names:
        if name in living:
            words = said.get(name)
            found.append(f"{name} waits for {words}" if words else f"{name} works")
        elif name in (ORCHESTRATOR, TRAINER):
            found.append(f"there is no {name}")
    return "; ".join(found)
