"""Faults of a run, drawn from its seed: of appends and polls (`FaultyBus`), calls
(`faulty_parts`), and roles or the world (`FaultInjector.strike`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

from dora_pipe.bus.memory import AppendFault, FaultPlan
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.faults import HANGING
from dora_pipe.sim.parts import TimedTaskPort
from dora_pipe.sim.role import ORCHESTRATOR, RESTART_NS, TRAINER, FaultModel, Role
from dora_pipe.sim.scenario import Scenario
from dora_pipe.sim.world import World

STEPS_MIN: Final = 10
"""Steps before a user may stop a long run."""

STOP_SHARE: Final = 0.85
"""Share of steps before a stop."""

ALIVE_MAX: Final = 64
"""Living incarnations above which no zombie is added; in a bad network zombies arrive faster
than they notice their end."""

ARRIVED_SHARE: Final = 0.4
"""Share of moved KV caches hit; moves are few."""

ON_THE_WAY_SHARE: Final = 0.2
"""Share of moves hit earlier; lower because a lost move meets no later fault."""

MOVE_NS: Final = 300_000_000
TRY_NS: Final = 50_000_000
TRIES_MAX: Final = 400
JUMP_NS: Final = 3600 * 10**9
HANG_SHARE: Final = 0.05

_SHARES: Final = {
    HANGING: HANG_SHARE,
    **dict.fromkeys(("move-source-dies", "move-target-dies", "handover-full"), ON_THE_WAY_SHARE),
    **dict.fromkeys(("handover-lost", "handover-damaged"), ARRIVED_SHARE),
}

FOR_EVER_NS: Final = 10**15
"""Longer than any seed."""


class FaultInjector(FaultModel):
    """Faults of one run, counted in `struck`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.chance = Random(f"injector {scenario.seed}")
        self.struck: Counter[str] = Counter()
        self.over = False
        self.outage_ns = 0
        """End of a bus outage for all roles."""
        self.gone: set[str] = set()
        """Workers never restarted."""
        self.ended = False
        self.version: Callable[[], int] = lambda: 0
        self._world: World | None = None
        self._kinds = sorted(_STRIKES.keys() & scenario.faults.keys())
        self._weights = [scenario.faults[name] for name in self._kinds]

    def born(self, role: Role) -> FaultPlan:
        """Return the bus faults of an incarnation."""
        if "clock-jump" in self.scenario.faults and not self.over:
            role.clock.wall_off_ns = self.chance.randint(-JUMP_NS, JUMP_NS)
        return FaultyBus(self, role)

    def died(self, role: Role, why: str) -> int | None:
        if self.ended or role.name in self.gone or why == "ended":
            return None
        if why in ("left", "replaced") and not self.over:
            return None
        return RESTART_NS if self.over else self._while()

    def begin(self, world: World) -> None:
        self._world = world
        if "gaps" in self.scenario.faults:
            self.struck["gaps"] += 1
        if "clock-rate" in self.scenario.faults:
            self.struck["clock-rate"] += 1
        if self._kinds:
            world.after(self._pause(), self._strike)

    def at_least(self, count: int) -> None:
        """Strike until `count` faults happened."""
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
        world = self.world
        self.over, self.outage_ns = True, 0
        for role in list(world.roles.values()):
            role.paused_until_ns = world.clock.ns
            world.wake(role)
        self._return()
        self.command("resume")

    def _return(self) -> None:
        self.gone.clear()
        workers = [plan.name for plan in self.scenario.workers[: self.scenario.first]]
        for name in (ORCHESTRATOR, TRAINER, *workers):
            if self.world.present(name) is None:
                self.world.start(name)

    @property
    def world(self) -> World:
        assert self._world is not None
        return self._world

    def befalls(self, kind: str) -> bool:
        """Draw, and count, whether a fault hits a call."""
        if self.over or kind not in self.scenario.faults:
            return False
        struck = self.chance.random() < _SHARES.get(kind, self.scenario.task_share)
        self.struck[kind] += struck
        return struck

    def hang_ns(self) -> int:
        """Return how long a call hangs: forever if the run can still end, else until the faults
        end."""
        if self.scenario.config.rollout.group_timeout_s is not None:
            return FOR_EVER_NS
        return max(0, self.scenario.faulty_ns - self.world.clock.ns)

    def moved(self, source: str, target: str) -> None:
        """Let the source or target of a move die during it."""
        for kind, name in (("move-source-dies", source), ("move-target-dies", target)):
            role = self.world.present(name)
            if role is not None and self.befalls(kind):
                ns = self.chance.randint(0, MOVE_NS)
                self.world.after(ns, partial(self.world.kill, role))

    def command(self, verb: str, **args: object) -> None:
        if not self.world.begun:
            return
        record = Command(
            at_ns=self.world.clock.wall_ns(),
            user="sim",
            verb=verb,
            args={key.replace("__", "."): value for key, value in args.items()},
        )
        self.append(self.world.topics.control, encode(record))

    def append(self, topic: str, value: bytes) -> None:
        self.world.bus.writer().append([Append(topic=topic, value=value)])

    def _strike(self) -> None:
        if self.over:
            return
        self.strike(self.chance.choices(self._kinds, self._weights)[0])
        self.world.after(self._pause(), self._strike)

    def strike(self, kind: str) -> None:
        if _STRIKES[kind](self) is not False:
            self.struck[kind] += 1

    def _pause(self) -> int:
        return int(self.chance.expovariate(1.0) * self.scenario.strike_ns)

    def _while(self) -> int:
        return int(self.chance.expovariate(1.0) * self.scenario.away_ns)

    def _one(self, name: str) -> Role | None:
        name = name or self.chance.choice(("worker", "worker", TRAINER, ORCHESTRATOR))
        if name != "worker":
            return self.world.present(name)
        workers = [role for role in self.world.roles.values() if not role.exclusive]
        return self.chance.choice(workers) if workers else None


class FaultyBus(FaultPlan):
    def __init__(self, injector: FaultInjector, role: Role) -> None:
        self._injector = injector
        self._role = role
        self.outage_ns = 0
        """End of this incarnation's outage."""
        self.dies = False
        """Whether its next append kills it."""

    def on_append(self, call: int, records: Sequence[Append]) -> AppendFault | None:
        injector = self._injector
        if injector.over:
            return None
        if self._is_away():
            return AppendFault(kind="failed")
        if self.dies:
            injector.world.kill(self._role, "killed while appending")
            return AppendFault(kind="unknown", lands=injector.chance.randint(0, len(records)))
        if injector.chance.random() >= injector.scenario.append_share:
            return None
        return self._befall(len(records))

    def on_poll(self, call: int) -> bool:
        injector = self._injector
        if injector.over:
            return False
        refused = "poll-refused" in injector.scenario.faults
        if refused and injector.chance.random() < injector.scenario.append_share:
            injector.struck["poll-refused"] += 1
            return True
        return self._is_away()

    def _is_away(self) -> bool:
        return self._injector.world.clock.ns < max(self.outage_ns, self._injector.outage_ns)

    def _befall(self, records: int) -> AppendFault | None:
        injector = self._injector
        kinds = [kind for kind in _APPENDS if kind in injector.scenario.faults]
        if self._role.exclusive:  # Exclusive appends are visible when acknowledged.
            kinds = [kind for kind in kinds if kind != "delayed"]
        if not kinds:
            return None
        kind = injector.chance.choice(kinds)
        injector.struck[kind] += 1
        if kind == "append-refused":
            return AppendFault(kind=injector.chance.choice(("failed", "full")))
        if kind == "append-unknown":
            return AppendFault(kind="unknown", lands=records)
        if kind == "append-torn":
            return AppendFault(kind="unknown", lands=injector.chance.randrange(records))
        return AppendFault(kind="delayed", delay_ms=injector.chance.randint(1, 400))


_APPENDS: Final = ("append-refused", "append-unknown", "append-torn", "delayed")


Strike = Callable[[FaultInjector], bool | None]
"""Fault; returns False without a target."""


def _at(name: str, act: Callable[[FaultInjector, Role], bool | None]) -> Strike:
    """Apply to a living incarnation of this name, any worker, or any role."""

    def strike(injector: FaultInjector) -> bool | None:
        role = injector._one(name)
        return False if role is None else act(injector, role)

    return strike


def _kill(injector: FaultInjector, role: Role) -> None:
    injector.world.kill(role)


def _kill_appending(injector: FaultInjector, role: Role) -> None:
    assert isinstance(role.bus.faults, FaultyBus)
    role.bus.faults.dies = True


def _pause(injector: FaultInjector, role: Role) -> None:
    injector.world.pause(role, injector._while())


def _zombie(injector: FaultInjector, role: Role) -> bool | None:
    if role.runtime is None or len(injector.world.roles) >= ALIVE_MAX:
        return False
    injector.world.pause(role, 2 * injector._while())
    injector.world.start(role.name)
    return None


def _outage(injector: FaultInjector) -> None:
    injector.outage_ns = injector.world.clock.ns + injector._while()


def _outage_one(injector: FaultInjector, role: Role) -> None:
    assert isinstance(role.bus.faults, FaultyBus)
    role.bus.faults.outage_ns = injector.world.clock.ns + injector._while()


def _clock_jump(injector: FaultInjector, role: Role) -> None:
    role.clock.wall_off_ns = injector.chance.randint(-JUMP_NS, JUMP_NS)


def _join(injector: FaultInjector) -> bool | None:
    absent = [name for name in injector.world.plans if injector.world.present(name) is None]
    if not absent:
        return False
    name = injector.chance.choice(absent)
    injector.gone.discard(name)
    injector.world.start(name)
    return None


def _drain(injector: FaultInjector, role: Role) -> None:
    injector.command("drain", worker=role.name)


def _terminate(injector: FaultInjector, role: Role) -> bool | None:
    if role.runtime is None:
        return False
    injector.world.stop(role)
    return None


def _depart(injector: FaultInjector, role: Role) -> None:
    injector.gone.add(role.name)
    injector.world.kill(role)


def _task_process_dies(injector: FaultInjector, role: Role) -> bool:
    ports = [port for port in role.ports if isinstance(port, TimedTaskPort)]
    if not any([port.lose("its process ended") for port in ports]):
        return False
    injector.world.wake(role)
    return True


def _endpoint_dies(injector: FaultInjector, role: Role) -> bool:
    ports = [port for port in role.ports if isinstance(port, Agents)]
    for port in ports:
        port.lose_endpoint("the endpoint's process ended with status -9")
    injector.world.wake(role)
    return bool(ports)


def _copies_lost(injector: FaultInjector) -> bool:
    names = [TRAINER, *sorted(injector.world.plans)]
    return injector.world.machines.lose(injector.chance.choice(names), injector.chance)


def _delta_damaged(injector: FaultInjector) -> bool:
    name = injector.chance.choice(sorted(injector.world.plans))
    return injector.world.machines.damage(name, injector.chance)


def _command_pause(injector: FaultInjector) -> None:
    injector.command("pause")
    injector.world.after(injector._while(), lambda: injector.command("resume"))


def _command_bound(injector: FaultInjector) -> None:
    if injector.chance.random() < 0.5:
        injector.command("set", staleness__max_staleness=injector.chance.randrange(4))
    else:
        injector.command("set", staleness__async_batches=1.0 + 2 * injector.chance.random())


def _command_settings(injector: FaultInjector) -> None:
    injector.command("set", trainer__max_grad_norm=0.5 + injector.chance.random())


def _command_odd(injector: FaultInjector) -> None:
    asked: tuple[tuple[str, dict[str, object]], ...] = (
        ("dance", {}),
        ("set", {"staleness__max_staleness": -1}),
        ("drain", {"worker": "nobody"}),
        ("set", {"rollout__group_size": 1}),
    )
    verb, args = asked[injector.chance.randrange(4)]
    injector.command(verb, **args)


def _command_stop(injector: FaultInjector) -> bool | None:
    steps = injector.scenario.config.run.steps
    if injector.version() < max(min(STEPS_MIN, steps - 1), int(STOP_SHARE * steps)):
        return False
    injector.command("stop", now=injector.chance.random() < 0.5)
    return None


def _garbage(injector: FaultInjector) -> bool | None:
    if not injector.world.begun:
        return False
    topics = injector.world.topics
    topic = injector.chance.choice((topics.control, topics.metrics, topics.trajectories))
    values = (b"", b"{", b'{"kind":"dance","at_ns":1}', bytes(range(256)))
    injector.append(topic, injector.chance.choice(values))
    return None


_STRIKES: Final[dict[str, Strike]] = {
    "kill-worker": _at("worker", _kill),
    "kill-trainer": _at(TRAINER, _kill),
    "kill-orchestrator": _at(ORCHESTRATOR, _kill),
    "kill-appending": _at("", _kill_appending),
    "pause-worker": _at("worker", _pause),
    "pause-trainer": _at(TRAINER, _pause),
    "pause-orchestrator": _at(ORCHESTRATOR, _pause),
    "zombie-worker": _at("worker", _zombie),
    "zombie-trainer": _at(TRAINER, _zombie),
    "zombie-orchestrator": _at(ORCHESTRATOR, _zombie),
    "outage": _outage,
    "outage-one": _at("", _outage_one),
    "clock-jump": _at("", _clock_jump),
    "join": _join,
    "drain": _at("worker", _drain),
    "terminate": _at("worker", _terminate),
    "depart": _at("worker", _depart),
    "task-process-dies": _at("worker", _task_process_dies),
    "endpoint-dies": _at("worker", _endpoint_dies),
    "copies-lost": _copies_lost,
    "delta-damaged": _delta_damaged,
    "command-pause": _command_pause,
    "command-bound": _command_bound,
    "command-settings": _command_settings,
    "command-odd": _command_odd,
    "command-fail-batch": lambda injector: injector.command("fail-batch"),
    "command-stop": _command_stop,
    "garbage": _garbage,
}
