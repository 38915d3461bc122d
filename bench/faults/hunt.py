"""Meets random moments from outside: waits in a thread until it comes, and kills a role or broker.

It decides nothing: who dies when stands in the order.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, Protocol

from dora_pipe.bench.faults.brokers import Brokers, Struck
from dora_pipe.bench.faults.episodes import AGENT
from dora_pipe.bench.faults.inject import Files, Hit
from dora_pipe.bench.faults.order import BROKER, ROLES, WORKERS, Chance, Order
from dora_pipe.bench.faults.servers import Servers
from dora_pipe.bus import open_bus
from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.launch import local_roles
from dora_pipe.launch.supervisor import Supervisor
from dora_pipe.schemas.control import TrajectoriesLogged, decode_control
from dora_pipe.schemas.topics import Topics

POLL_S: Final = 0.05


class Victim(Protocol):
    """What an order is for."""

    def pid(self) -> int | None:
        """Its process while it is there."""
        ...

    def strike(self) -> tuple[int, str] | None:
        """Kill it: (process id, what was going on); None when it has just ended by itself."""
        ...

    def led(self) -> tuple[tuple[str, int], ...]:
        """Partitions that went down with it; empty: all, or it is a role."""
        ...


class RoleVictim:
    """A role of the run."""

    def __init__(self, order: Order, files: Files, supervisor: Supervisor) -> None:
        self._order = order
        self._files = files
        self._supervisor = supervisor

    def pid(self) -> int | None:
        """See Victim."""
        return self._supervisor.pid(self._order.role)

    def strike(self) -> tuple[int, str] | None:
        """See Victim."""
        pid = self.pid()
        if pid is None:
            return None
        try:
            os.kill(pid, signal.SIGSTOP if self._order.stop else signal.SIGKILL)
        except ProcessLookupError:
            return None
        return pid, self._files.doing(self._order.role)

    def led(self) -> tuple[tuple[str, int], ...]:
        """See Victim."""
        return ()


class BrokerVictim:
    """The broker that leads the partition of the order."""

    def __init__(self, order: Order, files: Files, topics: Topics, brokers: Brokers) -> None:
        self._order = order
        self._files = files
        self._topics = topics
        self._brokers = brokers
        self._struck: Struck | None = None

    def pid(self) -> int | None:
        """See Victim."""
        node = self._brokers.nodes[0].node if self._struck is None else self._struck.node
        return self._brokers.pid(node)

    def strike(self) -> tuple[int, str] | None:
        """See Victim."""
        name, partition = self._order.leads
        down_s = self._order.down_s
        words = f"broker led {name}/{partition}"
        if self._struck is None:
            target = TopicPartition(f"{self._topics.run}.{name}", partition)
            self._struck = self._brokers.strike(target, self._topics.all(), down_s=down_s)
            doing = (f"{role} {self._files.doing(role)}" for role in _BESIDE_A_BROKER)
            words = f"{words}; {', '.join(doing)}"
        else:
            self._struck = self._brokers.strike_again(self._struck, down_s=down_s)
            words = "starting"
        return self._struck.pid, words

    def led(self) -> tuple[tuple[str, int], ...]:
        """See Victim."""
        return () if self._struck is None else self._struck.led


class AgentVictim:
    """The process in which a worker's agents run."""

    def __init__(self, order: Order, files: Files, supervisor: Supervisor) -> None:
        self._worker = WORKERS[order.which]
        self._files = files
        self._supervisor = supervisor

    def pid(self) -> int | None:
        """See Victim."""
        worker = self._supervisor.pid(self._worker)
        return None if worker is None else _child_called(worker, f"task {AGENT} of")

    def strike(self) -> tuple[int, str] | None:
        """See Victim."""
        pid = self.pid()
        if pid is None:
            return None
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return pid, f"agents of {self._worker}, {self._files.doing(self._worker)}"

    def led(self) -> tuple[tuple[str, int], ...]:
        """See Victim."""
        return ()


class ServerVictim:
    """A server of a task."""

    def __init__(self, order: Order, files: Files, servers: Servers) -> None:
        self._order = order
        self._files = files
        self._servers = servers

    def pid(self) -> int | None:
        """See Victim."""
        return self._servers.pid(self._order.which)

    def strike(self) -> tuple[int, str] | None:
        """See Victim."""
        pid = self._servers.strike(self._order.which, down_s=self._order.down_s)
        doing = (f"{worker} {self._files.doing(worker)}" for worker in WORKERS)
        return None if pid is None else (pid, f"server {self._order.which}, {', '.join(doing)}")

    def led(self) -> tuple[tuple[str, int], ...]:
        """See Victim."""
        return ()


def _child_called(parent: int, words: str) -> int | None:
    """A child of a process whose command line has these words."""
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            children = listed.read_text().split()
            for child in children:
                if words.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return None


_BESIDE_A_BROKER: Final = (local_roles.TRAINER, local_roles.ORCHESTRATOR)


@contextmanager
def hunting(
    prey: Sequence[tuple[Order, Victim]], files: Files, url: str, topics: Topics
) -> Iterator[None]:
    """For random moments: kill each victim when its comes, while the block lasts."""
    with ExitStack() as stack:
        for nth, (order, victim) in enumerate(prey):
            if isinstance(order.at, Chance):
                hunt = _Hunt(order, order.at, victim, files, nth)
                hunter = threading.Thread(target=hunt.run, args=(url, topics), daemon=True)
                hunter.start()
                stack.callback(hunter.join)
                stack.callback(hunt.over.set)
        yield


class _Hunt:
    """One thread's work."""

    def __init__(self, order: Order, at: Chance, victim: Victim, files: Files, nth: int) -> None:
        self.over = threading.Event()
        self._order = order
        self._at = at
        self._nth = nth
        self._victim = victim
        self._files = files

    def run(self, url: str, topics: Topics) -> None:
        """Until the moment has come, and come again if it shall."""
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
        seen = 0
        with closing(open_bus(url)) as bus:
            reader = bus.reader({control: 0})
            while seen < self._at.control and not self.over.is_set():
                seen += sum(map(_facts, reader.poll(timeout_s=POLL_S, records_max=1)))

    def _strike(self, *, before: str = "") -> Hit | None:
        """Kill it as soon as it is there; None when the run ended first."""
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
        self._files.write_hit(hit, self._nth)
        return hit


def _facts(record: Record) -> int:
    """How many facts a control record says: a worker reports several trajectories at once."""
    found = decode_control(record.value)
    return len(found.trajectories) if isinstance(found, TrajectoriesLogged) else 1


def recovered_s(files: Files, hit: Hit, names: tuple[str, ...]) -> float | None:
    """From a strike to the first record of the role's next incarnation.

    For a broker: until every role that still appends has had an append acknowledged that began
    afterwards, and one of them went to a partition that the broker had led.
    """
    if hit.role != BROKER:
        if hit.role not in ROLES:
            return None
        later = (ack for ack in files.acks(hit.role) if ack.at_ns > hit.at_ns)
        first_ns = next((ack.at_ns for ack in later if ack.pid != hit.pid), None)
        return None if first_ns is None else (first_ns - hit.at_ns) / 1e9
    after = {name: [ack for ack in files.acks(name) if ack.began_ns > hit.at_ns] for name in names}
    firsts = [min(ack.at_ns for ack in acks) for acks in after.values() if acks]
    led = (ack for acks in after.values() for ack in acks if (ack.topic, ack.partition) in hit.led)
    led_ns = min((ack.at_ns for ack in led), default=0)
    return (max(*firsts, led_ns) - hit.at_ns) / 1e9 if firsts else None
