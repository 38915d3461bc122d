"""The loop of a role: poll, react, append, run effects.

Every role is a `Machine` without IO, clock or randomness. `Runtime.tick` connects it to the bus and
its port. One tick:

1. Collect events of the port, acknowledgements and, once per `BUS_TURN_NS`, bus records.
2. Call `react` if there is input or a wake-up is due.
3. Start effects, which never block: slow ones run in threads or processes.
4. Once per `BUS_TURN_NS`, append durably; acknowledgements are input of the next tick. Statuses of
   exclusive roles use `BackgroundWriter`: they are lossy and never block.

With `background`, a thread reads and appends, so that a stalled log stops no port. At most
`HELD_MAX` records wait for a running append.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from dora_pipe.bus.bus import Bus, Reader, Writer
from dora_pipe.bus.checks import first_kept, is_trimmed
from dora_pipe.core.errors import BusError
from dora_pipe.core.loop.effect_runner import EffectRunner, EventOut, Handler
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.machine import (
    BUS_TURN_NS,
    CaughtUp,
    Effect,
    Event,
    HeldBack,
    LoopEvent,
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

KEPT_EVERY_NS: Final = 1_000_000_000
"""Time between checks for deleted records."""

WAITING_NS: Final = 20_000_000
"""Minimum wait for work that is not urgent."""

HELD_MAX: Final = 4096
"""Records that may wait for an append in the background; with more, the loop waits."""

LOG_EFFECTS_MAX: Final = 2
"""Queued effects of the log's thread: the append of a turn, and the next turn's read."""

COST_DIGITS: Final = 4

EffectIn = TypeVar("EffectIn", contravariant=True)


class Port(Protocol[EffectIn, EventOut]):
    """Runner of some effects that reports events."""

    def start(self, effect: EffectIn) -> None:
        """Start an effect without blocking."""
        ...

    def poll(self) -> Sequence[EventOut]:
        """Return new events; inline work is bounded."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether `poll` has work."""
        ...

    def close(self) -> None: ...


class PortGroup(Generic[Effect, Event]):
    """Ports polled in order as one; the `key` of an effect, by default its type, selects one."""

    def __init__(
        self, ports: Mapping[Any, Port[Any, Event]], key: Callable[[Any], Any] = type
    ) -> None:
        self._of, self._key = ports, key
        self.ports = tuple(dict.fromkeys(ports.values()))

    def start(self, effect: Effect) -> None:
        self._of[self._key(effect)].start(effect)

    def poll(self) -> list[Event]:
        return [event for port in self.ports for event in port.poll()]

    @property
    def busy(self) -> bool:
        return any(port.busy for port in self.ports)

    def close(self) -> None:
        for port in self.ports:
            port.close()


class _Block(AbstractContextManager[None]):
    """Context of `with meter.spend(name)`, created once because ticks are frequent."""

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self._name = name

    def __enter__(self) -> None:
        self._meter.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._meter.end()


class _ThreadTime(threading.local):
    def __init__(self) -> None:
        self.open: list[str] = []
        self.last_s = 0.0


class Meter:
    """CPU time of a role's threads by name; `codec` may nest in others."""

    def __init__(self) -> None:
        self._start_s = time.process_time()
        self._spent_s = {"bus": 0.0, "control": 0.0, "codec": 0.0}
        self._blocks = {name: _Block(self, name) for name in self._spent_s}
        self._own = _ThreadTime()
        self._lock = threading.Lock()

    def spend(self, name: str) -> AbstractContextManager[None]:
        """Count this thread's CPU time for `name`, without nested blocks."""
        return self._blocks[name]

    def begin(self, name: str) -> None:
        self._turn()
        self._own.open.append(name)

    def end(self) -> None:
        """Count for the previous name again."""
        self._turn()
        self._own.open.pop()

    def cost(self) -> Cost:
        return Cost(
            total_s=round(time.process_time() - self._start_s, COST_DIGITS),
            bus_s=round(self._spent_s["bus"], COST_DIGITS),
            control_s=round(self._spent_s["control"], COST_DIGITS),
            codec_s=round(self._spent_s["codec"], COST_DIGITS),
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _turn(self) -> None:
        own, now_s = self._own, time.thread_time()
        if own.open:
            with self._lock:
                self._spent_s[own.open[-1]] += now_s - own.last_s
        own.last_s = now_s


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Effect: read new records."""


@dataclass(frozen=True, slots=True)
class AppendRecords:
    """Effect: append records durably."""

    publish: Sequence[Publish]


@dataclass(frozen=True, slots=True)
class _LogEvent:
    """Answer to `ReadLog` or `AppendRecords`."""

    effect: ReadLog | AppendRecords
    inputs: list[LoopEvent]


class _Log:
    """Reads and appends of one role."""

    def __init__(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        bus: Bus,
        writer: Writer,
        clock: Clock,
        meter: Meter,
        exclusive: bool,
        kept: Sequence[TopicPartition] | None,
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._clock = clock
        self._meter = meter
        self._exclusive = exclusive
        self._reader: Reader = bus.reader(positions)
        self._ends = {tp: bus.written_end(tp) for tp in positions}
        self._held_back: tuple[TopicPartition, ...] = ()
        self._kept = deque(tp for tp in (kept or positions) if not is_trimmed(tp.topic))
        self._next_kept_ns = clock.now_ns()

    @property
    def catching_up(self) -> bool:
        """Return whether records from before the start are still unread."""
        return bool(self._ends)

    def run(self, effect: ReadLog | AppendRecords) -> Iterator[_LogEvent]:
        """Run an effect. Raises BusError."""
        with self._meter.spend("bus"):
            inputs = self._read() if isinstance(effect, ReadLog) else self._append(effect.publish)
        yield _LogEvent(effect, inputs)

    def close(self) -> None:
        self._reader.close()

    def _read(self) -> list[LoopEvent]:
        self._check_kept()
        poll = partial(self._reader.poll, timeout_s=0.0)
        inputs: list[LoopEvent] = list(retry_bus("reading", poll, self._clock))
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

    def _append(self, publish: Sequence[Publish]) -> list[LoopEvent]:
        append = partial(self._writer.append, [entry.record for entry in publish])
        offsets = retry_bus("appending", append, self._clock, exclusive=self._exclusive)
        return [
            Published(
                tag=entry.tag,
                topic=entry.record.topic,
                partition=entry.record.partition,
                offset=offset,
            )
            for entry, offset in zip(publish, offsets, strict=True)
            if entry.tag
        ]


class Runtime(Generic[Effect, Event]):
    """Loop of one machine.

    `status` is a plain writer for statuses of a role with an exclusive `writer`, whose transactions
    could hold readers back. `waiting` runs before waits of at least `WAITING_NS`. `kept` are
    partitions that must never lose records; default: those that the machine reads. `background`
    reads and appends in a thread.
    """

    def __init__(
        self,
        machine: Machine[Effect, Event],
        *,
        bus: Bus,
        writer: Writer,
        port: Port[Effect, Event] | None = None,
        clock: Clock,
        meter: Meter,
        exclusive: bool,
        status: Writer | None = None,
        turn_ns: int = BUS_TURN_NS,
        waiting: Callable[[], None] | None = None,
        kept: Sequence[TopicPartition] | None = None,
        background: bool = False,
    ) -> None:
        self._machine = machine
        self._waiting = waiting
        self._status = status
        self._untold = ""
        """Error of the last status."""
        self._port = port
        self._clock = clock
        self._meter = meter
        self._log = _Log(
            machine.positions(),
            bus=bus,
            writer=writer,
            clock=clock,
            meter=meter,
            exclusive=exclusive,
            kept=kept,
        )
        handlers = [
            Handler[Any, _LogEvent | Exception](kind, self._log.run, lambda _, error: [error])
            for kind in (ReadLog, AppendRecords)
        ]
        self._log_runner = EffectRunner[ReadLog | AppendRecords, _LogEvent | Exception](
            "log", handlers, in_thread=background, asked_max=LOG_EFFECTS_MAX, finish=False
        )
        self._events: list[LoopEvent] = []
        self._held: list[Publish] = []
        self._turn_ns = turn_ns
        self._next_turn_ns = clock.now_ns()

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
        if self._log_runner.busy or (self._port is not None and self._port.busy):
            return now_ns
        return max(now_ns, self.own_due_ns())

    def own_due_ns(self) -> int:
        """Return `due_ns` without ports; may be past."""
        if self._events:
            return self._clock.now_ns()
        due_ns = self._machine.wake_at()
        if self._log_runner.working or not (self._held or self._log.catching_up):
            return due_ns
        return min(due_ns, self._next_turn_ns)

    def stop(self) -> None:
        self._events.append(StopAsked())

    def tick(self) -> bool:
        """Run one turn; return whether anything happened."""
        inputs, has_read = self._collect()
        now = Now(mono_ns=self._clock.now_ns(), wall_ns=self._clock.wall_ns())
        reacts = bool(inputs) or now.mono_ns >= self._machine.wake_at()
        if reacts:
            with self._meter.spend("control"):
                outputs = self._machine.react(inputs, now)
            self._held.extend(outputs.publish)
            for effect in outputs.effects:
                assert self._port is not None, type(effect).__name__
                self._port.start(effect)
        if self._machine.finished or len(self._held) >= HELD_MAX:
            self._await_log()
        if self._held and (has_read or self._machine.finished):
            self._append()
        if self._machine.finished:
            self._await_log()
        return reacts

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
        self._log_runner.close()
        self._log.close()

    def _collect(self) -> tuple[list[LoopEvent | Event], bool]:
        """Return new inputs, and whether they include the read of a bus turn."""
        inputs: list[LoopEvent | Event] = [*self._events]
        self._events = []
        if self._port is not None:
            inputs.extend(self._port.poll())
        if self._clock.now_ns() >= self._next_turn_ns and not self._log_runner.working:
            self._next_turn_ns = self._clock.now_ns() + self._turn_ns
            self._log_runner.start(ReadLog())
        has_read = False
        for event in self._log_events():
            inputs.extend(event.inputs)
            has_read = has_read or isinstance(event.effect, ReadLog)
        return inputs, has_read

    def _log_events(self) -> Iterator[_LogEvent]:
        """Yield answers of the log. Raises its error."""
        for event in self._log_runner.poll():
            if isinstance(event, Exception):
                raise event
            yield event

    def _await_log(self) -> None:
        """Wait for the log. Raises its error."""
        working = True
        while working:
            working = self._log_runner.working  # read before the events, which come first
            for event in self._log_events():
                self._events += event.inputs
            self._log_runner.wait(BUS_TURN_NS / 1e9)

    def _pause(self) -> None:
        due_ns = self._due_in_ns()
        if self._waiting is not None and due_ns >= WAITING_NS and not self._machine.finished:
            self._waiting()
            due_ns = self._due_in_ns()
        if due_ns <= 0 or self._machine.finished:
            return
        if self._log_runner.working:
            self._log_runner.wait(min(due_ns, BUS_TURN_NS) / 1e9)
        else:
            self._clock.sleep(due_ns / 1e9)

    def _due_in_ns(self) -> int:
        due_ns = self.due_ns()
        due_ns = due_ns if self._log_runner.working else min(due_ns, self._next_turn_ns)
        return due_ns - self._clock.now_ns()

    def _append(self) -> None:
        publish, self._held = self._held, []
        lossy: list[Append] = []
        if self._status is not None:
            lossy = [entry.record for entry in publish if entry.lossy]
            publish = [entry for entry in publish if not entry.lossy]
        if publish:
            self._log_runner.start(AppendRecords(publish))
            for event in self._log_events():
                self._events += event.inputs
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
