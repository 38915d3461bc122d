"""The one loop: poll, react, append, run the effects. It decides nothing about the run.

Every role is a `Machine`: it reacts to inputs with outputs and touches no IO, no clock, no chance.
`Runtime.tick` connects it to the bus and to its ports. Production calls `tick` for ever, the
simulator once per event.

Order inside a tick:

1. collect what ports and the last append have to say and, once per `BUS_TURN_NS`, records of the
   bus;
2. `react`, only if there is an input or the machine asked to be woken;
3. start the effects. Effects never block the loop: what is slow runs in its port's own thread or
   process, so that heartbeats go on;
4. once per `BUS_TURN_NS`, append what was published in one durable call; acknowledgements are
   inputs of the next tick. Statuses of exclusive roles go another way, and may be lost: they must
   cost the loop nothing, not a broker that is away from the metrics' partition alone, nor a write
   lock, nor a slow disk (`BackgroundWriter`).
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from dora_pipe.bus.checks import first_kept, is_trimmed
from dora_pipe.bus.port import Append, Bus, Reader, TopicPartition, Writer
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError
from dora_pipe.core.retry import retry_bus
from dora_pipe.schemas.metrics import Cost

LOG = logging.getLogger(__name__)

BUS_TURN_NS: Final = 100_000_000
"""A loop reads and appends once in so many ns. What comes in between is gathered, because a durable
append costs about as much for one record as for ten; requests placed ahead hide the wait. A turn of
200 ms costs a third of a small run's throughput, because a step is a chain of six turns."""


KEPT_EVERY_NS: Final = 1_000_000_000
"""Time between two checks for deleted records, each of one partition."""

WAITING_NS: Final = 20_000_000
"""A wait this long has room for what is not urgent."""

COST_DIGITS: Final = 4
"""Books go into every status: a ten-thousandth of a second is exact enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The time handed to a machine: monotonic ns to decide by, wall clock ns to write down."""

    mono_ns: int
    wall_ns: int


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """A record to append; with a tag, its acknowledgement comes back as `Published`."""

    record: Append
    tag: str = ""
    lossy: bool = False
    """A status: where a role has a writer for those (`Runtime.status`), it costs nobody anything if
    it does not get into the log."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A tagged record is durable at (topic, partition, offset)."""

    tag: str
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything that was in the log when this role started has been read, also what its readers
    were held back from then."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """From now on acknowledged records lie in these partitions behind what may be read.

    Comes when that changes: with no partition, everything may be read again.
    """

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The process was asked to stop (SIGTERM, Ctrl-C); the machine ends in order."""


@dataclass(slots=True, kw_only=True)
class Outputs:
    """What a reaction wants done: records first, then effects, each in order."""

    publish: list[Publish] = field(default_factory=list)
    effects: list[Any] = field(default_factory=list)


class Machine(Protocol):
    """A role without IO. Inputs are bus records and typed events; one call at a time."""

    def positions(self) -> Mapping[TopicPartition, int]:
        """The partitions to read, and from where."""
        ...

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs:
        """Take inputs in order; say what to append and which effects to start."""
        ...

    def wake_at(self) -> int:
        """Monotonic ns at which `react` is due even without inputs."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the loop may end."""
        ...


class Port(Protocol):
    """Runs effects of some types and reports events."""

    @property
    def effects(self) -> tuple[type, ...]: ...

    def start(self, effect: Any) -> None:
        """Begin an effect; returns at once."""
        ...

    def poll(self) -> list[Any]:
        """Events since the last call; for a port that computes in the loop, a bounded bit of it."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `poll` has work to do right now, so that the loop must not wait."""
        ...

    def close(self) -> None:
        """Stop whatever runs; idempotent."""
        ...


class _Block(AbstractContextManager[None]):
    """`with meter.spend(name)`: made once, for a role enters it several times in each tick."""

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self._name = name

    def __enter__(self) -> None:
        self._meter.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._meter.end()


class Meter:
    """Where the CPU time of this role went; `codec` may be spent inside the others' time.

    Example: ``with meter.spend("codec"): encode(...)``.
    """

    def __init__(self) -> None:
        self._start_s = time.process_time()
        self._spent_s = {"bus": 0.0, "control": 0.0, "codec": 0.0}
        self._blocks = {name: _Block(self, name) for name in self._spent_s}
        self._open: list[str] = []
        self._last_s = 0.0

    def spend(self, name: str) -> AbstractContextManager[None]:
        """Book the CPU time of this thread to `name`; an inner block is not booked to the outer."""
        return self._blocks[name]

    def begin(self, name: str) -> None:
        """What this thread spends from now on is booked to `name`."""
        self._turn()
        self._open.append(name)

    def end(self) -> None:
        """What it spends from now on is booked as before `begin`."""
        self._turn()
        self._open.pop()

    def add(self, name: str, seconds: float) -> None:
        """Book CPU time that another thread of this role measured."""
        self._spent_s[name] += seconds

    def cost(self) -> Cost:
        """The books as a metrics field."""
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
    """Connects one machine to the bus, its ports and the clock.

    `status` is the plain writer of a role whose `writer` is exclusive: a status in a transaction
    would hold back everybody's behind it if its writer died in there. What it cannot append is
    left out. Without one, statuses go with the other records. `waiting` is called where the loop
    would wait for `WAITING_NS` or more: what takes time and is not urgent has its place there.
    `kept` are partitions whose records nobody may delete; by default those that the machine reads.
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
        """Why the last status is not in the log."""
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
        """Tick until the machine is finished. Raises whatever ends a role."""
        asked = False
        while not self._machine.finished:
            if stop() and not asked:
                asked = True
                self.stop()
            self.tick()
            self._pause()

    @property
    def next_turn_ns(self) -> int:
        """Monotonic ns from which a tick reads from the bus and appends to it."""
        return self._next_turn_ns

    def due_ns(self) -> int:
        """Monotonic ns at which a tick has something to do even if the bus brings nothing new.

        Production looks at the bus every `BUS_TURN_NS` all the same; the simulator knows when a
        record comes, and spares the turns in between.
        """
        now_ns = self._clock.now_ns()
        if any(port.busy for port in self._ports):
            return now_ns
        return max(now_ns, self.own_due_ns())

    def own_due_ns(self) -> int:
        """The same of all but the ports, which the simulator asks itself; it may be past."""
        if self._events:
            return self._clock.now_ns()
        due_ns = self._machine.wake_at()
        return min(due_ns, self._next_turn_ns) if self._held or self._ends else due_ns

    def stop(self) -> None:
        """Let the machine end in order; it hears of it in the next tick."""
        self._events.append(StopAsked())

    def tick(self) -> bool:
        """One turn; whether anything happened."""
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
        """Close the ports and the reader."""
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
        """Raises LogTruncated when the beginning of a partition was deleted."""
        now_ns = self._clock.now_ns()
        if self._kept and now_ns >= self._next_kept_ns:
            self._next_kept_ns = now_ns + KEPT_EVERY_NS
            self._kept.rotate(-1)
            at = self._kept[-1]
            begin = partial(self._bus.begin, at)
            first_kept(at, 0, retry_bus("reading the log's beginning", begin, self._clock))

    def _pause(self) -> None:
        """Nothing to do before the next turn: let time pass."""
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
            lossy = [one.record for one in publish if one.lossy]
            publish = [one for one in publish if not one.lossy]
        if publish:
            self._append_durably(publish)
        if lossy:
            self._append_lossy(lossy)

    def _append_lossy(self, records: list[Append]) -> None:
        """Once: what cannot be said now will be said anew in a moment."""
        assert self._status is not None
        untold = ""
        try:
            with self._meter.spend("bus"):
                self._status.append(records)
        except BusError as error:
            untold = error.message
            if untold != self._untold:
                LOG.warning("statuses are left out: %s", untold)
        self._untold = untold

    def _append_durably(self, publish: list[Publish]) -> None:
        records = [one.record for one in publish]
        with self._meter.spend("bus"):
            append = partial(self._writer.append, records)
            offsets = retry_bus("appending", append, self._clock, exclusive=self._exclusive)
        for one, offset in zip(publish, offsets, strict=True):
            if one.tag:
                at = one.record
                event = Published(
                    tag=one.tag, topic=at.topic, partition=at.partition, offset=offset
                )
                self._events.append(event)
