"""Event-driven run of production's machines in one thread, in virtual time.

A heap of (due time, role) selects the next turn. Equal config, parts, faults and seed give the same
log, byte for byte. While a role sleeps inside a turn, other turns run inside its sleep; a role
killed meanwhile never wakes.

Example::

    with World(config, workers=[WorkerPlan(name="w0", slots=8, prefetch=2)]) as world:
        assert world.run(until_ns=600 * SECOND_NS)
        report = audit(world.bus, world.topics, world.store.root)
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.config.model import Config
from dora_pipe.config.retention import full_every
from dora_pipe.core.errors import BusError, LogTruncated, ResourceError
from dora_pipe.core.loop.runtime import Runtime
from dora_pipe.core.pure.records import Record
from dora_pipe.schemas.topics import Topics
from dora_pipe.sim.machines import Machines
from dora_pipe.sim.parts import MS, Parts, PlainParts, Site, StillMeter, WorkerPlan
from dora_pipe.sim.role import (
    NEVER_NS,
    ORCHESTRATOR,
    TRAINER,
    FaultModel,
    Killed,
    Observer,
    Role,
    RoleClock,
    WorldClock,
)
from dora_pipe.sim.roles import create_topics, run_started, start_role
from dora_pipe.store.store import PolicyStore

SECOND_NS: Final = 1_000_000_000
TICK_NS: Final = 100_000

WAIT_NS: Final = 250 * MS
"""Polling interval until the run has started."""

EVENTS_MAX: Final = 2_000_000
RUN_STARTED: Final = b'"run-started"'

ROOM: Final = Path("/dev/shm")
"""Folder for policies, if it exists; nothing must survive."""


class World:
    def __init__(
        self,
        config: Config,
        *,
        workers: Sequence[WorkerPlan],
        parts: Parts | None = None,
        faults: FaultModel | None = None,
        seed: int = 0,
        observer: Observer | None = None,
        start: bool = True,
    ) -> None:
        self.config = config
        self.parts: Parts = parts or PlainParts()
        self.faults = faults or FaultModel()
        self.clock = WorldClock()
        self.topics = Topics(config.run.name)
        self.plans = {plan.name: plan for plan in workers}
        self.seed = seed
        self.roles: dict[int, Role] = {}
        self.begun = False
        self.events = 0
        self.ends: list[tuple[int, Role]] = []
        self.observer = observer
        self._heap: list[tuple[int, int, int, Role | Callable[[], None]]] = []
        self._serial = count()
        self._numbers = count()
        self._acting: Role | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="dora-sim-", dir=ROOM if ROOM.is_dir() else None
        )
        folder = Path(self._folder.name)
        self.store = PolicyStore(folder / "policies")
        self.machines = Machines(
            self.store, folder / "machines", self.clock, apart=full_every(config, "float32") > 1
        )
        self.log = MemoryLog()
        self.bus = MemoryBus(self.log, now_ms=self._now_ms)
        create_topics(self.bus, self.topics, config)
        self.log.watch = self._appended
        self.run_started = run_started(config, self.parts, self.store, folder, self.clock)
        if start:
            self.start_all(len(self.plans))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str) -> Role:
        """Start a role; a living one of that name becomes a zombie."""
        number = next(self._numbers)
        chance = Random(f"{self.seed}/{number}")
        role = Role(name, number, RoleClock(self.clock, lambda ns: None), chance, StillMeter())
        role.clock.pause = lambda until_ns: self._sleep(role, until_ns)
        role.clock.start_ns = self.clock.ns
        if name in self.plans:
            role.clock.rate = self.plans[name].rate
        role.bus = MemoryBus(self.log, faults=self.faults.born(role), now_ms=self._now_ms)
        self.roles[number] = role
        self._turn(role)
        return role

    def start_all(self, workers: int) -> None:
        """Start all roles, with `workers` workers."""
        for name in (ORCHESTRATOR, *list(self.plans)[:workers], TRAINER):
            self.start(name)

    def present(self, name: str) -> Role | None:
        """Return the newest living incarnation."""
        return next((role for role in reversed(self.roles.values()) if role.name == name), None)

    def kill(self, role: Role, why: str = "killed") -> None:
        """Kill like SIGKILL."""
        if role.dead:
            return
        self._ended(role, why)
        ns = self.faults.died(role, why)
        if ns is not None:
            self.after(ns, lambda: self._restart(role.name))

    def pause(self, role: Role, ns: int) -> None:
        """Suspend like SIGSTOP and SIGCONT."""
        role.paused_until_ns = max(role.paused_until_ns, self.clock.ns + ns)

    def stop(self, role: Role) -> None:
        """Stop like SIGTERM."""
        if role.runtime is not None and not role.dead:
            role.runtime.stop()
            self.wake(role)

    def wake(self, role: Role) -> None:
        if role.runtime is not None and not (role.dead or role.asleep):
            self._schedule(role, self.clock.ns)

    def after(self, ns: int, action: Callable[[], None]) -> None:
        due_ns = self.clock.ns + max(0, ns)
        heapq.heappush(self._heap, (due_ns, -1, next(self._serial), action))

    def run(self, *, until_ns: int, done: Callable[[], bool] | None = None) -> bool:
        """Run until all roles ended or `done`; False on timeout."""
        while not (done() if done is not None else not self.roles):
            if not self._heap or self._heap[0][0] > until_ns:
                self.clock.ns = max(self.clock.ns, until_ns)
                return False
            self._next()
        return True

    def close(self) -> None:
        for role in list(self.roles.values()):
            self._ended(role, "the world ends")
        self._folder.cleanup()

    def _advance(self, until_ns: int) -> None:
        while self._heap and self._heap[0][0] <= until_ns:
            self._next()
        self.clock.ns = max(self.clock.ns, until_ns)

    def _next(self) -> None:
        due_ns, _, _, what = heapq.heappop(self._heap)
        if isinstance(what, Role):
            if what.dead or what.asleep or what.due_ns != due_ns:
                return
            if what.paused_until_ns > due_ns:
                self._schedule(what, what.paused_until_ns)
                return
        self.events += 1
        if self.events > EVENTS_MAX:
            raise ResourceError(f"{EVENTS_MAX} events without an end: the world loops")
        self.clock.ns = max(self.clock.ns, due_ns)
        if isinstance(what, Role):
            self._turn(what)
        else:
            what()

    def _turn(self, role: Role) -> None:
        outer, self._acting = self._acting, role
        role.due_ns, role.acting = NEVER_NS, True
        try:
            if role.runtime is None:
                self._build(role)
            else:
                self._tick(role.runtime, role)
        except Killed:
            assert role.dead
        except LogTruncated:
            raise
        except BusError as error:
            self.kill(role, f"{type(error).__name__}: {error.message}")
        finally:
            self._acting, role.acting = outer, False
            if role.dead:
                self._close(role)

    def _tick(self, runtime: Runtime[Any, Any], role: Role) -> None:
        turn_ns = runtime.next_turn_ns
        runtime.tick()
        if runtime.next_turn_ns != turn_ns:
            role.pending_ns = [ns for ns in role.pending_ns if ns > self.clock.ns]
        if role.machine.finished:
            self.kill(role, str(getattr(role.machine, "outcome", "ended")))
        elif not role.dead:
            self._schedule(role, self._due_ns(runtime, role))

    def _due_ns(self, runtime: Runtime[Any, Any], role: Role) -> int:
        own_ns = runtime.own_due_ns()
        for port in role.ports:
            port_ns = port.due_ns()
            if port_ns < own_ns:
                own_ns = port_ns
        due_ns = role.clock.world_ns(own_ns)
        if role.pending_ns:
            turn_ns = role.clock.world_ns(runtime.next_turn_ns)
            due_ns = min(due_ns, max(turn_ns, min(role.pending_ns)))
        return max(due_ns, self.clock.ns + TICK_NS)

    def _schedule(self, role: Role, due_ns: int) -> None:
        if due_ns < NEVER_NS and due_ns != role.due_ns:
            role.due_ns = due_ns
            heapq.heappush(self._heap, (due_ns, role.number, next(self._serial), role))

    def _sleep(self, role: Role, until_ns: int) -> None:
        """Run the others until then. Raises Killed if this role died meanwhile."""
        if not role.dead:
            outer, self._acting, role.asleep = self._acting, None, True
            self._advance(max(until_ns, role.paused_until_ns))
            self._acting, role.asleep = outer, False
        if role.dead:
            raise Killed

    def _build(self, role: Role) -> None:
        if role.name != ORCHESTRATOR and not self.begun:
            self._schedule(role, self.clock.ns + WAIT_NS)
            return
        site = self._site(role)
        started = start_role(site, self.parts, self.plans.get(role.name))
        role.machine, role.incarnation = started.machine, started.incarnation
        role.ports = () if started.port is None else started.port.ports
        driven = role.machine
        if self.observer is not None:
            driven = self.observer.wrap(role, role.machine)
        role.runtime = started.loop(site, driven)
        role.reads = frozenset(tp.topic for tp in role.machine.positions())
        self._schedule(role, self.clock.ns + TICK_NS)

    def _site(self, role: Role) -> Site:
        return Site(
            name=role.name,
            number=role.number,
            topics=self.topics,
            config=self.config,
            clock=role.clock,
            meter=role.meter,
            chance=role.chance,
            store=self.machines.of(role.name) if role.name in self.plans else self.store,
            bus=role.bus,
            # Other buses of the incarnation have the same faults.
            open_bus=lambda: MemoryBus(self.log, faults=role.bus.faults, now_ms=self._now_ms),
            run_started=self.run_started,
        )

    def _ended(self, role: Role, why: str) -> None:
        role.dead, role.end = True, why
        self.roles.pop(role.number, None)
        self.ends.append((self.clock.ns, role))
        if not role.acting:
            self._close(role)

    def _close(self, role: Role) -> None:
        if role.runtime is not None:
            role.runtime.close()

    def _restart(self, name: str) -> None:
        if self.present(name) is None:
            self.start(name)

    def _appended(self, records: Sequence[Record], visible_ms: int) -> None:
        topics = {record.topic for record in records}
        self.begun = self.begun or any(RUN_STARTED in record.value for record in records)
        ns = max(self.clock.ns, visible_ms * MS)
        for role in self.roles.values():
            if role.runtime is not None and not topics.isdisjoint(role.reads):
                role.pending_ns.append(ns)
                if role is not self._acting and not role.asleep:
                    turn_ns = role.clock.world_ns(role.runtime.next_turn_ns)
                    due_ns = max(ns, turn_ns, self.clock.ns)
                    if due_ns < role.due_ns:
                        self._schedule(role, due_ns)
        if self.observer is not None:
            self.observer.appended(records, self._acting)

    def _now_ms(self) -> int:
        return self.clock.ns // MS
