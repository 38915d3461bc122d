"""The faults of a run: what strikes when, as its seed has drawn it.

Three kinds: what befalls single appends and polls (`FaultyBus`), single calls of the task
(`FaultyParts`), and what strikes a role or the whole world at a time of its own
(`FaultInjector.strike`).
`calm` ends all of it: whoever is stopped goes on, whoever is dead is started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from dora_pipe.bus.memory import FaultPlan
from dora_pipe.bus.port import Append
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.fault_model import RESTART_NS
from dora_pipe.sim.faulty_bus import FaultyBus
from dora_pipe.sim.role import ORCHESTRATOR, TRAINER, Role
from dora_pipe.sim.scenario import Scenario
from dora_pipe.sim.world import World

STEPS_MIN: Final = 10
"""A user stops no run before it has so many steps."""

STOP_SHARE: Final = 0.85
"""Nor before it has committed so much of them."""

ALIVE_MAX: Final = 64
"""No more zombies while so many incarnations live: in a bad network they come faster than they
find out, and a seed of hundreds plays nothing else."""

MOVE_SHARE: Final = 0.4
"""Moves that something befalls, where such faults are enabled: there are few moves."""

MOVE_NS: Final = 300_000_000
"""A move takes about so long."""

TRY_NS: Final = 50_000_000
TRIES_MAX: Final = 400
"""Where a fault finds nobody to strike, it tries again so much later, and so often."""

JUMP_NS: Final = 3600 * 10**9
"""A wall clock jumps by at most so much, either way."""


class FaultInjector:
    """The faults of one run; `struck` counts what happened."""

    def __init__(self, draw: Scenario) -> None:
        self.draw = draw
        self.chance = Random(f"injector {draw.seed}")
        self.struck: Counter[str] = Counter()
        self.over = False
        self.outage_ns = 0
        """Nobody reaches the bus before then."""
        self.gone: set[str] = set()
        """Workers that are not started again."""
        self.ended = False
        """The run is over: nobody is started again."""
        self.version: Callable[[], int] = lambda: 0
        """Committed steps."""
        self._world: World | None = None
        kinds = [name for name in _STRIKES if name in draw.faults]
        self._kinds = sorted(kinds)
        self._weights = [draw.faults[name] for name in self._kinds]

    # What the world asks

    def born(self, role: Role) -> FaultPlan:
        """A bus that is as bad as the seed says; perhaps a wall clock that is off."""
        if "clock-jump" in self.draw.faults and not self.over:
            role.clock.wall_off_ns = self.chance.randint(-JUMP_NS, JUMP_NS)
        return FaultyBus(self, role)

    def died(self, role: Role, why: str) -> int | None:
        """Soon, while there is something to do; never if it is gone for good."""
        if self.ended or role.name in self.gone or why == "ended":
            return None
        if why in ("left", "replaced") and not self.over:
            return None
        return RESTART_NS if self.over else self._while()

    # What strikes

    def begin(self, world: World) -> None:
        """From now on it strikes."""
        self._world = world
        if "gaps" in self.draw.faults:
            self.struck["gaps"] += 1
        if "clock-rate" in self.draw.faults:
            self.struck["clock-rate"] += 1
        if self._kinds:
            world.after(self._pause(), self._strike)

    def at_least(self, count: int) -> None:
        """Strike until so many faults have; where there is nobody to strike, everybody returns."""
        for _ in range(TRIES_MAX):
            if self.struck.total() >= count:
                return
            struck = self.struck.total()
            self.strike(self.chance.choice(self._kinds))
            if self.struck.total() == struck:
                self._return()
                self.world.run(until_ns=self.world.clock.ns + TRY_NS, done=lambda: False)
        raise InvariantBroken(f"nothing to strike: {', '.join(self._kinds)}")

    def calm(self) -> None:
        """No more faults; the living go on, the others are started again."""
        world = self.world
        self.over, self.outage_ns = True, 0
        for role in list(world.roles.values()):
            role.paused_until_ns = world.clock.ns
            world.wake(role)
        self._return()
        self.tell("resume")

    def _return(self) -> None:
        """Whoever is dead or gone starts again."""
        self.gone.clear()
        workers = [plan.name for plan in self.draw.workers[: self.draw.first]]
        for name in (ORCHESTRATOR, TRAINER, *workers):
            if self.world.present(name) is None:
                self.world.start(name)

    @property
    def world(self) -> World:
        """The world that it strikes."""
        assert self._world is not None
        return self._world

    def befalls(self, kind: str) -> bool:
        """Whether this kind befalls a call now; then it is counted."""
        if self.over or kind not in self.draw.faults:
            return False
        moving = kind.startswith(("handover", "move"))
        struck = self.chance.random() < (MOVE_SHARE if moving else self.draw.task_share)
        self.struck[kind] += struck
        return struck

    def moved(self, source: str, target: str) -> None:
        """A request shall move: whoever has it, or waits for it, may die on the way."""
        for kind, name in (("move-source-dies", source), ("move-target-dies", target)):
            role = self.world.present(name)
            if role is not None and self.befalls(kind):
                ns = self.chance.randint(0, MOVE_NS)
                self.world.after(ns, partial(self.world.kill, role))

    def tell(self, verb: str, **args: object) -> None:
        """A user's command, on a bus of the user's own; before the run there is nobody to ask."""
        if not self.world.begun:
            return
        record = Command(
            at_ns=self.world.clock.wall_ns(),
            user="sim",
            verb=verb,
            args={key.replace("__", "."): value for key, value in args.items()},
        )
        self.put(self.world.topics.control, encode(record))

    def put(self, topic: str, value: bytes) -> None:
        """A record from outside."""
        self.world.bus.writer().append([Append(topic=topic, value=value)])

    def _strike(self) -> None:
        if self.over:
            return
        self.strike(self.chance.choices(self._kinds, self._weights)[0])
        self.world.after(self._pause(), self._strike)

    def strike(self, kind: str) -> None:
        """Let one of its faults strike now."""
        if _STRIKES[kind](self):
            self.struck[kind] += 1

    def _pause(self) -> int:
        return int(self.chance.expovariate(1.0) * self.draw.strike_ns)

    def _while(self) -> int:
        return int(self.chance.expovariate(1.0) * self.draw.away_ns)

    def _one(self, name: str) -> Role | None:
        """A living incarnation; of workers, any of them."""
        if name != "worker":
            return self.world.present(name)
        workers = [role for role in self.world.roles.values() if not role.exclusive]
        return self.chance.choice(workers) if workers else None

    def _any(self) -> Role | None:
        return self._one(self.chance.choice(("worker", "worker", TRAINER, ORCHESTRATOR)))


Strike = Callable[[FaultInjector], bool]
"""Strikes; whether there was anything to strike."""


def _kill(name: str) -> Strike:
    def strike(injector: FaultInjector) -> bool:
        role = injector._one(name)
        if role is not None:
            injector.world.kill(role)
        return role is not None

    return strike


def _kill_appending(injector: FaultInjector) -> bool:
    role = injector._any()
    if role is None or not isinstance(role.bus.faults, FaultyBus):
        return False
    role.bus.faults.candidates = True
    return True


def _pause(name: str) -> Strike:
    def strike(injector: FaultInjector) -> bool:
        role = injector._one(name)
        if role is not None:
            injector.world.pause(role, injector._while())
        return role is not None

    return strike


def _zombie(name: str) -> Strike:
    def strike(injector: FaultInjector) -> bool:
        role = injector._one(name)
        if role is None or role.runtime is None or len(injector.world.roles) >= ALIVE_MAX:
            return False
        injector.world.pause(role, 2 * injector._while())
        injector.world.start(role.name)
        return True

    return strike


def _outage(injector: FaultInjector) -> bool:
    injector.outage_ns = injector.world.clock.ns + injector._while()
    return True


def _outage_one(injector: FaultInjector) -> bool:
    role = injector._any()
    if role is None or not isinstance(role.bus.faults, FaultyBus):
        return False
    role.bus.faults.outage_ns = injector.world.clock.ns + injector._while()
    return True


def _clock_jump(injector: FaultInjector) -> bool:
    role = injector._any()
    if role is not None:
        role.clock.wall_off_ns = injector.chance.randint(-JUMP_NS, JUMP_NS)
    return role is not None


def _join(injector: FaultInjector) -> bool:
    absent = [name for name in injector.world.plans if injector.world.present(name) is None]
    if not absent:
        return False
    name = injector.chance.choice(absent)
    injector.gone.discard(name)
    injector.world.start(name)
    return True


def _drain(injector: FaultInjector) -> bool:
    role = injector._one("worker")
    if role is not None:
        injector.tell("drain", worker=role.name)
    return role is not None


def _terminate(injector: FaultInjector) -> bool:
    role = injector._one("worker")
    if role is None or role.runtime is None:
        return False
    injector.world.stop(role)
    return True


def _depart(injector: FaultInjector) -> bool:
    role = injector._one("worker")
    if role is None:
        return False
    injector.gone.add(role.name)
    injector.world.kill(role)
    return True


def _command_pause(injector: FaultInjector) -> bool:
    injector.tell("pause")
    injector.world.after(injector._while(), lambda: injector.tell("resume"))
    return True


def _command_bound(injector: FaultInjector) -> bool:
    if injector.chance.random() < 0.5:
        injector.tell("set", staleness__max_staleness=injector.chance.randrange(4))
    else:
        injector.tell("set", staleness__in_flight_batches=1.0 + 2 * injector.chance.random())
    return True


def _command_moves(injector: FaultInjector) -> bool:
    injector.tell("set", planner__moves=injector.chance.random() < 0.5)
    return True


def _command_odd(injector: FaultInjector) -> bool:
    chance = injector.chance.randrange(4)
    if chance == 0:
        injector.tell("dance")
    elif chance == 1:
        injector.tell("set", staleness__max_staleness=-1)
    elif chance == 2:
        injector.tell("drain", worker="nobody")
    else:
        injector.tell("set", groups__size=1)
    return True


def _command_stop(injector: FaultInjector) -> bool:
    """Not before the run has had its steps."""
    steps = injector.draw.config.run.steps
    if injector.version() < max(STEPS_MIN, int(STOP_SHARE * steps)):
        return False
    injector.tell("stop", now=injector.chance.random() < 0.5)
    return True


def _fail_batch(injector: FaultInjector) -> bool:
    injector.tell("fail-batch")
    return True


def _garbage(injector: FaultInjector) -> bool:
    if not injector.world.begun:
        return False
    topics = injector.world.topics
    topic = injector.chance.choice((topics.control, topics.metrics, topics.trajectories))
    values = (b"", b"{", b'{"kind":"dance","at_ns":1}', bytes(range(256)))
    injector.put(topic, injector.chance.choice(values))
    return True


_STRIKES: Final[dict[str, Strike]] = {
    "kill-worker": _kill("worker"),
    "kill-trainer": _kill(TRAINER),
    "kill-orchestrator": _kill(ORCHESTRATOR),
    "kill-appending": _kill_appending,
    "pause-worker": _pause("worker"),
    "pause-trainer": _pause(TRAINER),
    "pause-orchestrator": _pause(ORCHESTRATOR),
    "zombie-worker": _zombie("worker"),
    "zombie-trainer": _zombie(TRAINER),
    "zombie-orchestrator": _zombie(ORCHESTRATOR),
    "outage": _outage,
    "outage-one": _outage_one,
    "clock-jump": _clock_jump,
    "join": _join,
    "drain": _drain,
    "terminate": _terminate,
    "depart": _depart,
    "command-pause": _command_pause,
    "command-bound": _command_bound,
    "command-moves": _command_moves,
    "command-odd": _command_odd,
    "command-fail-batch": _fail_batch,
    "command-stop": _command_stop,
    "garbage": _garbage,
}
