"""Report each alarm of a run once: waits beyond their limit, silent roles.

Silence counts from the first status read, so that old logs raise no alarm.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.pure.wait_tracker import alarm_line
from dora_pipe.core.system.clock import Clock
from dora_pipe.ledger.statuses import Statuses, role_of
from dora_pipe.observe.text import duration
from dora_pipe.schemas.control import AnyControl, Command
from dora_pipe.schemas.metrics import AnyMetrics, Wait, decode_metrics
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

HEARTBEAT_S: Final = 0.5
SILENT_HEARTBEATS: Final = 12

SILENT_MIN_S: Final = 2.0
"""Minimum, because a loaded machine is late."""

POLL_RECORDS_MAX = 2000
SAID_MAX = 1000

UNFED: Final = frozenset({"requests", "version", "batch"})
"""Waits of workers and the trainer that last as long as a pause."""

FED_AGAIN: Final = UNFED | {"groups", "admission"}
"""Waits that count from the end of a pause if they began before it."""

S = TypeVar("S", bound=AnyMetrics)


class Pauses:
    """Pauses by users; waits that they cause raise no alarm."""

    def __init__(self, commands: Iterable[tuple[int, str]] = ()) -> None:
        self._commands = [command for command in commands if command[1] in ("pause", "resume")]

    def fact(self, fact: AnyControl) -> None:
        if isinstance(fact, Command) and fact.verb in ("pause", "resume"):
            self._commands.append((fact.at_ns, fact.verb))

    def excused(self, status: S) -> S:
        """Return the status; a wait that the last pause caused is not overdue."""
        count = bisect_right(self._commands, status.at_ns, key=lambda command: command[0])
        if not count or not any(wait.overdue for wait in status.waits):
            return status
        at_ns, verb = self._commands[count - 1]
        until_ns, names = (math.inf, UNFED) if verb == "pause" else (at_ns, FED_AGAIN)

        def overdue(wait: Wait) -> bool:
            lasted_ms = (status.at_ns - max(wait.since_ns, until_ns)) / 1e6
            return wait.overdue and (wait.name not in names or lasted_ms > (wait.limit_ms or 0))

        waits = [msgspec.structs.replace(wait, overdue=overdue(wait)) for wait in status.waits]
        return msgspec.structs.replace(status, waits=tuple(waits))


def silent_after_s(heartbeat_s: float | None) -> float:
    """Return the seconds of silence before a role is shown as silent; an alarm takes a lease."""
    return max(SILENT_MIN_S, SILENT_HEARTBEATS * (heartbeat_s or HEARTBEAT_S))


def silence_line(role: str, silent_s: float, last: str) -> str:
    """Return a line about a silent role; `last` is its last known wait."""
    last = f"; it waited for {last}" if last else ""
    return f"ALARM {role}: nothing heard for {duration(silent_s)}{last}"


@dataclass(slots=True, kw_only=True)
class _Watched:
    heard_ns: int
    """Monotonic clock."""
    silent: bool = False


class Alarms:
    """Example: ``Alarms(bus, topics, lease_s=10.0, clock=SystemClock())``; call `lines` often."""

    def __init__(self, bus: Bus, topics: Topics, *, lease_s: float, clock: Clock) -> None:
        self.pauses = Pauses()
        count = bus.partitions(topics.metrics)
        partitions = [TopicPartition(topics.metrics, index) for index in range(count)]
        self._reader = bus.reader({partition: bus.end(partition) for partition in partitions})
        self._lease_ns = int(lease_s * 1e9)
        self._clock = clock
        self._statuses = Statuses()
        self._roles: dict[str, _Watched] = {}
        self._left: dict[str, int] = {}
        self._said: dict[tuple[str, int, str, int], None] = {}

    def lines(self, *, silence: bool = True) -> list[str]:
        """Return new alarms since the last call; with `silence`, also those of silent roles."""
        out: list[str] = []
        for record in self._reader.poll(timeout_s=0.0, records_max=POLL_RECORDS_MAX):
            try:
                status = decode_metrics(record.value)
            except SchemaError:
                continue  # the topic is lossy
            if not isinstance(status, Unknown):
                out += self._heard(self.pauses.excused(status))
        return out + (self._silences() if silence else [])

    def forget(self, worker: str, incarnation: int) -> None:
        """Stop expecting statuses of an incarnation that left in order."""
        self._left[worker] = incarnation
        heard = self._statuses.heard.get(worker)
        if heard is not None and heard.incarnation <= incarnation:
            self._roles.pop(worker, None)

    def heard(self) -> set[str]:
        return {name for name, role in self._roles.items() if not role.silent}

    def close(self) -> None:
        self._reader.close()

    def _heard(self, status: AnyMetrics) -> list[str]:
        name, incarnation = role_of(status), status.incarnation
        if incarnation <= self._left.get(name, -1) or self._statuses.receive(status) is None:
            return []  # of an ended incarnation
        self._roles[name] = _Watched(heard_ns=self._clock.now_ns())
        out = []
        for wait in status.waits:
            key = (name, incarnation, wait.name, wait.since_ns)
            if wait.overdue and key not in self._said:
                self._said[key] = None
                if len(self._said) > SAID_MAX:
                    del self._said[next(iter(self._said))]
                out.append(alarm_line(name, wait, (status.at_ns - wait.since_ns) / 1e9))
        return out

    def _silences(self) -> list[str]:
        now_ns = self._clock.now_ns()
        out = []
        for name, role in self._roles.items():
            silent_ns = now_ns - role.heard_ns
            if silent_ns > self._lease_ns and not role.silent:
                role.silent = True
                last = self._statuses.heard[name].status.waits_for
                out.append(silence_line(name, silent_ns / 1e9, last))
        return out
