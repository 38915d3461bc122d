"""Random kills: a thread waits for a moment and kills a role or broker."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final, Protocol

from dora_pipe.bus import open_bus
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.launch.supervisor import Supervisor
from dora_pipe.schemas.control import TrajectoriesLogged, decode_control
from dora_pipe.schemas.topics import Topics
from tests.support.kill_rounds.brokers import Brokers, Struck
from tests.support.kill_rounds.inject import Files, Hit
from tests.support.kill_rounds.order import BROKER, Chance, Order

POLL_S: Final = 0.05


class Victim(Protocol):
    def pid(self) -> int | None: ...

    def strike(self) -> tuple[int, str] | None:
        """Kill it; return (process id, description), or None if it just ended."""
        ...

    def led(self) -> tuple[tuple[str, int], ...]: ...


class RoleVictim:
    def __init__(self, order: Order, supervisor: Supervisor) -> None:
        self._order = order
        self._supervisor = supervisor

    def pid(self) -> int | None:
        return self._supervisor.pid(self._order.role)

    def strike(self) -> tuple[int, str] | None:
        pid = self.pid()
        if pid is None:
            return None
        try:
            os.kill(pid, signal.SIGSTOP if self._order.stop else signal.SIGKILL)
        except ProcessLookupError:
            return None
        return pid, "at a random moment"

    def led(self) -> tuple[tuple[str, int], ...]:
        return ()


class BrokerVictim:
    def __init__(self, order: Order, topics: Topics, brokers: Brokers) -> None:
        self._order = order
        self._topics = topics
        self._brokers = brokers
        self._struck: Struck | None = None

    def pid(self) -> int | None:
        node = self._brokers.nodes[0].node if self._struck is None else self._struck.node
        return self._brokers.pid(node)

    def strike(self) -> tuple[int, str] | None:
        name, partition = self._order.leads
        down_s = self._order.down_s
        words = f"broker led {name}/{partition}"
        if self._struck is None:
            target = TopicPartition(f"{self._topics.run}.{name}", partition)
            self._struck = self._brokers.strike(target, self._topics.all(), down_s=down_s)
        else:
            self._struck = self._brokers.strike_again(self._struck, down_s=down_s)
            words = "starting"
        return self._struck.pid, words

    def led(self) -> tuple[tuple[str, int], ...]:
        return () if self._struck is None else self._struck.led


@contextmanager
def hunting(order: Order, victim: Victim, files: Files, url: str, topics: Topics) -> Iterator[None]:
    """Kill the victim of a random order while the block runs."""
    if not isinstance(order.at, Chance):
        yield
        return
    hunt = _Hunt(order, order.at, victim, files)
    hunter = threading.Thread(target=hunt.run, args=(url, topics), daemon=True)
    hunter.start()
    try:
        yield
    finally:
        hunt.over.set()
        hunter.join()


class _Hunt:
    def __init__(self, order: Order, chance: Chance, victim: Victim, files: Files) -> None:
        self.over = threading.Event()
        self._order = order
        self._at = chance
        self._victim = victim
        self._files = files

    def run(self, url: str, topics: Topics) -> None:
        self._count(url, TopicPartition(topics.control, 0))
        self.over.wait(self._at.delay_s)
        first = self._strike()
        if first is None or self._at.again_s is None:
            return
        while self._victim.pid() in (None, first.pid) and not self.over.wait(POLL_S):
            pass
        self.over.wait(self._at.again_s)
        self._strike(before=f"{first.phase}; again ")

    def _count(self, url: str, control: TopicPartition) -> None:
        observed = 0
        with closing(open_bus(url)) as bus:
            reader = bus.reader({control: 0})
            while observed < self._at.control and not self.over.is_set():
                observed += sum(map(_facts, reader.poll(timeout_s=POLL_S, records_max=1)))

    def _strike(self, *, before: str = "") -> Hit | None:
        while self._victim.pid() is None and not self.over.wait(POLL_S):
            pass
        struck = None if self.over.is_set() else self._victim.strike()
        if struck is None:
            return None
        pid, words = struck
        hit = Hit(
            role=self._order.role,
            pid=pid,
            phase=before + words,
            at_ns=time.monotonic_ns(),
            led=self._victim.led(),
            down_s=self._order.down_s if self._order.stays_dead else 0.0,
        )
        self._files.write_hit(hit)
        return hit


def _facts(record: Record) -> int:
    control = decode_control(record.value)
    return len(control.trajectories) if isinstance(control, TrajectoriesLogged) else 1


def recovered_s(files: Files, hit: Hit, names: tuple[str, ...]) -> float | None:
    """Return the seconds from a strike to the first record of the role's next incarnation.

    For a broker: until every appending role had a later append acknowledged, one of them on a
    partition that the broker led.
    """
    if hit.role != BROKER:
        later = (ack for ack in files.acks(hit.role) if ack.at_ns > hit.at_ns)
        first_ns = next((ack.at_ns for ack in later if ack.pid != hit.pid), None)
        return None if first_ns is None else (first_ns - hit.at_ns) / 1e9
    after = {name: [ack for ack in files.acks(name) if ack.began_ns > hit.at_ns] for name in names}
    firsts = [min(ack.at_ns for ack in acks) for acks in after.values() if acks]
    led = (ack for acks in after.values() for ack in acks if (ack.topic, ack.partition) in hit.led)
    led_ns = min((ack.at_ns for ack in led), default=0)
    return (max(*firsts, led_ns) - hit.at_ns) / 1e9 if firsts else None
