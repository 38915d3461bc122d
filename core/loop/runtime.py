"""The loop of a role: poll, react, append, run effects.

Every role is a `Machine` without IO, clock or randomness. `Runtime.tick` connects it to the bus and
its ports. One tick:

1. Collect events of ports, acknowledgements and, once per `BUS_TURN_NS`, bus records.
2. Call `react` if there is input or a wake-up is due.
3. Start effects, which never block: slow ones run in threads or processes.
4. Once per `BUS_TURN_NS`, append durably; acknowledgements are input of the next tick. Statuses of
   exclusive roles use `BackgroundWriter`: they are lossy and never block.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

from dora_pipe.bus.bus import Bus, Reader, Writer
from dora_pipe.bus.checks import first_kept, is_trimmed
from dora_pipe.core.errors import BusError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.machine import (
    CaughtUp,
    HeldBack,
    Machine,
    Now,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.metrics import Cost

LOG = logging.getLogger(__name__)

BUS_TURN_NS: Final = 100_000_000
"""Time between reads and appends: a durable append costs the same for one record as for ten. 200 ms
would cost a third of a small run's throughput, because a step is a chain of six turns."""


KEPT_EVERY_NS: Final = 1_000_000_000
"""Time between checks for deleted records."""

WAITING_NS: Final = 20_000_000
"""Minimum wait for work that is not urgent."""

COST_DIGITS: Final = 4


class Port(Protocol):
    """Runner of some effect types that reports events."""

    @property
    def effects(self) -> tuple[type, ...]: ...

    def start(self, effect: Any) -> None:
        """Start an effect without blocking."""
        ...

    def poll(self) -> list[Any]:
        """Return new events; inline work is bounded."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether `poll` has work."""
        ...

    def close(self) -> None: ...


class _Block(AbstractContextManager[None]):
    """Context of `with meter.spend(name)`, created once because ticks are frequent."""

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self._name = name

    def __enter__(self) -> None:
        self._meter.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._meter.end()


class Meter:
    """CPU time of a role by name; `codec` may nest in others.

    Example: ``with meter.spend("codec"): encode(...)``.
    """

    def __init__(self) -> None:
        self._start_s = time.process_time()
        self._spent_s = {"bus": 0.0, "control": 0.0, "codec": 0.0}
        self._blocks = {name: _Block(self, name) for name in self._spent_s}
        self._open: list[str] = []
        self._last_s = 0.0

    def spend(self, name: str) -> AbstractContextManager[None]:
        """Count this thread's CPU time for `name`, without nested blocks."""
        return self._blocks[name]

    def begin(self, name: str) -> None:
        self._turn()
        self._open.append(name)

    def end(self) -> None:
        """Count for the previous name again."""
        self._turn()
        self._open.pop()

    def add(self, name: str, seconds: float) -> None:
        self._spent_s[name] += seconds

    def cost(self) -> Cost:
        return Cost(
            total_s=round(time.process_time() - self._start_s, COST_DIGITS),
            bus_s=round(self._spent_s["bus"], COST_DIGITS),
            control_s=round(self._spent_s["control"], COST_DIGITS),
            codec_s=round(self._spent_s["codec"], COST_DIGITS),
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _turn(self) -> None:
        now_s = time.thread_time()
        if self._open:
            self._spent_s[self._open[-1]] += now_s - self._last_s
        self._last_s = now_s


class Runtime:
    """Loop of one machine.

    `status` is a plain writer for statuses of a role with an exclusive `writer`, whose transactions
    could hold readers back. `waiting` runs before waits of at least `WAITING_NS`. `kept` are
    partitions that must never lose records; default: those that the machine reads.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        bus: Bus,
        writer: Writer,
        ports: Sequence[Port],
        clock: Clock,
        meter: Meter,
        exclusive: bool,
        status: Writer | None = None,
        turn_ns: int = BUS_TURN_NS,
        waiting: Callable[[], None] | None = None,
        kept: Sequence[TopicPartition] | None = None,
    ) -> None:
        self._machine = machine
        self._bus = bus
        self._waiting = waiting
        self._writer = writer
        self._status = status
        self._untold = ""
        """Error of the last status."""
        self._ports = ports
        self._clock = clock
        self._meter = meter
        self._exclusive = exclusive
        positions = machine.positions()
        self._reader: Reader = bus.reader(positions)
        self._ends = {tp: bus.written_end(tp) for tp in positions}
        self._held_back: tuple[TopicPartition, ...] = ()
        self._events: list[Any] = []
        self._held: list[Publish] = []
        self._turn_ns = turn_ns
        self._next_turn_ns = clock.now_ns()
        self._kept = deque(tp for tp in (kept or positions) if not is_trimmed(tp.topic))
        self._next_kept_ns = clock.now_ns()
        self._port_of = {kind: port for port in ports for kind in port.effects}

    def run(self, stop: Callable[[], bool]) -> None:
        """Tick until the machine is finished. Raises errors that end the role."""
        asked = False
        while not self._machine.finished:
            if stop() and not asked:
                asked = True
                self.stop()
            self.tick()
            self._pause()

    @property
    def next_turn_ns(self) -> int:
        """Return when to read and append, monotonic ns."""
        return self._next_turn_ns

    def due_ns(self) -> int:
        """Return when a tick has work without new bus records, monotonic ns; for the simulator."""
        now_ns = self._clock.now_ns()
        if any(port.busy for port in self._ports):
            return now_ns
        return max(now_ns, self.own_due_ns())

    def own_due_ns(self) -> int:
        """Return `due_ns` without ports; may be past."""
        if self._events:
            return self._clock.now_ns()
        due_ns = self._machine.wake_at()
        return min(due_ns, self._next_turn_ns) if self._held or self._ends else due_ns

    def stop(self) -> None:
        self._events.append(StopAsked())

    def tick(self) -> bool:
        """Run one turn; return whether anything happened."""
        turn = self._clock.now_ns() >= self._next_turn_ns
        if turn:
            self._next_turn_ns = self._clock.now_ns() + self._turn_ns
        inputs = self._collect(turn)
        now = Now(mono_ns=self._clock.now_ns(), wall_ns=self._clock.wall_ns())
        reacts = bool(inputs) or now.mono_ns >= self._machine.wake_at()
        if reacts:
            with self._meter.spend("control"):
                outputs = self._machine.react(inputs, now)
            self._held.extend(outputs.publish)
            for effect in outputs.effects:
                self._port_of[type(effect)].start(effect)
        if self._held and (turn or self._machine.finished):
            self._append()
        return reacts

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._reader.close()

    def _collect(self, turn: bool) -> list[Any]:
        inputs, self._events = self._events, []
        for port in self._ports:
            inputs.extend(port.poll())
        if not turn:
            return inputs
        with self._meter.spend("bus"):
            self._check_kept()
            poll = partial(self._reader.poll, timeout_s=0.0)
            inputs.extend(retry_bus("reading", poll, self._clock))
        held_back = tuple(self._reader.held_back())
        if held_back != self._held_back:
            self._held_back = held_back
            inputs.append(HeldBack(held_back))
        if self._ends and all(self._reader.position(tp) >= end for tp, end in self._ends.items()):
            self._ends = {}
            inputs.append(CaughtUp())
        return inputs

    def _check_kept(self) -> None:
        """Raises LogTruncated if a kept partition lost its begin."""
        now_ns = self._clock.now_ns()
        if self._kept and now_ns >= self._next_kept_ns:
            self._next_kept_ns = now_ns + KEPT_EVERY_NS
            self._kept.rotate(-1)
            partition = self._kept[-1]
            begin = partial(self._bus.begin, partition)
            first_kept(partition, 0, retry_bus("reading the log's beginning", begin, self._clock))

    def _pause(self) -> None:
        due_ns = self._due_in_ns()
        if self._waiting is not None and due_ns >= WAITING_NS and not self._machine.finished:
            self._waiting()
            due_ns = self._due_in_ns()
        if due_ns > 0 and not self._machine.finished:
            self._clock.sleep(due_ns / 1e9)

    def _due_in_ns(self) -> int:
        return min(self._next_turn_ns, self.due_ns()) - self._clock.now_ns()

    def _append(self) -> None:
        publish, self._held = self._held, []
        lossy: list[Append] = []
        if self._status is not None:
            lossy = [entry.record for entry in publish if entry.lossy]
            publish = [entry for entry in publish if not entry.lossy]
        if publish:
            self._append_durably(publish)
        if lossy:
            self._append_lossy(lossy)

    def _append_lossy(self, records: list[Append]) -> None:
        """Append without retries: the next status replaces it."""
        assert self._status is not None
        untold = ""
        try:
            with self._meter.spend("bus"):
                self._status.append(records)
        except BusError as error:
            untold = error.message
            if untold != self._untold:
                LOG.warning("statuses omitted: %s", untold)
        self._untold = untold

    def _append_durably(self, publish: list[Publish]) -> None:
        records = [entry.record for entry in publish]
        with self._meter.spend("bus"):
            append = partial(self._writer.append, records)
            offsets = retry_bus("appending", append, self._clock, exclusive=self._exclusive)
        for entry, offset in zip(publish, offsets, strict=True):
            if entry.tag:
                record = entry.record
                event = Published(
                    tag=entry.tag, topic=record.topic, partition=record.partition, offset=offset
                )
                self._events.append(event)
