"""Watch for full disks on this machine and its Kafka brokers; a thread queries the brokers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.config.model import Config
from dora_pipe.core.errors import BusError, ResourceError
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.topics import Topics

FULL_BYTES: Final = 1 << 20
"""Free space below which an append may fail."""

LOOK_S: Final = 1.0


def free_bytes(path: Path) -> int:
    """Return the free bytes of a path or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    stats = os.statvfs(path)
    blocks = stats.f_bfree if os.geteuid() == 0 else stats.f_bavail
    return blocks * stats.f_frsize


def full_disk(*places: Path) -> str:
    """Describe the full disks among these paths; empty if none is full."""
    for path in places:
        free = free_bytes(path)
        if free < FULL_BYTES:
            return f"the disk under {path} is full: {free:,} B free"
    return ""


class DiskWatch:
    """Report when a disk fills up and has room again; roles retry meanwhile. Call `turn` often."""

    def __init__(
        self,
        places: tuple[Path, ...],
        report: Callable[[str], None],
        clock: Clock,
        *,
        brokers: Callable[[], tuple[str, str]] = lambda: ("", ""),
    ) -> None:
        """`brokers` is the answer of `broker_trouble`."""
        self._places = places
        self._brokers = brokers
        self._warned = False
        self._report = report
        self._clock = clock
        self._look_ns = 0
        self._since_ns: int | None = None

    @property
    def full(self) -> bool:
        return self._since_ns is not None

    def turn(self) -> None:
        """Check the disks. Raises ResourceError when one has been full for `DELIVERY_TIMEOUT_S`."""
        now_ns = self._clock.now_ns()
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + int(LOOK_S * 1e9)
        stops, low = self._brokers()
        if low and not self._warned:
            self._report(f"{low}: free space, or the run will wait")
        self._warned = bool(low)
        warning = full_disk(*self._places) or stops
        if not warning:
            if self._since_ns is not None:
                self._report("disk space is available again; the run continues")
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = now_ns
            limit = f"free space within {DELIVERY_TIMEOUT_S:g} s"
            self._report(f"{warning}; roles wait, dispatch is paused: {limit}")
        elif now_ns - self._since_ns > DELIVERY_TIMEOUT_S * 1e9:
            lasted = f"{warning} for {DELIVERY_TIMEOUT_S:g} s"
            raise ResourceError(
                lasted,
                hint="free space and restart stopped brokers; no logged record is lost",
            )


BROKERS_LOOK_S: Final = 2.0

CLOSE_S: Final = 1.0


def broker_trouble(config: Config, bus: Bus, topics: Topics) -> tuple[str, str]:
    """Return why a Kafka cluster rejects appends, and why it soon may; empty if healthy.

    Raises BusError.
    """
    if not is_watched(config):
        return "", ""
    from dora_pipe.bus.kafka.bus import kafka_of
    from dora_pipe.bus.kafka.cluster import trouble_of

    kafka = kafka_of(bus)
    return ("", "") if kafka is None else trouble_of(kafka, topics.all())


def broker_words(config: Config, bus: Bus, topics: Topics) -> str:
    """Return both messages of `broker_trouble` as one sentence. Raises BusError."""
    stops, low = broker_trouble(config, bus, topics)
    return f"{stops}; the run waits and dispatches nothing" if stops else low


class BrokerWatch:
    """Run `broker_trouble` in a thread."""

    def __init__(self, config: Config, open_bus: Callable[[Config], Bus]) -> None:
        self._config = config
        self._open_bus = open_bus
        self._topics = Topics(config.run.name)
        self._seen = "", ""
        self._away = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker-watch", daemon=True)

    def trouble(self) -> tuple[str, str]:
        """Return the last answer; if the log is away, the likely reason."""
        reason = self._seen[0] or self._seen[1]
        if not self._away or not reason:
            return self._seen
        return f"the log is not reachable; when last reached: {reason}", ""

    def __enter__(self) -> BrokerWatch:
        if is_watched(self._config):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        bus: Bus | None = None
        while not self._ended.is_set():
            try:
                bus = bus or self._open_bus(self._config)
                self._seen, self._away = broker_trouble(self._config, bus, self._topics), False
            except BusError:
                self._away = True
                if bus is not None:
                    bus.close()
                bus = None
            self._ended.wait(BROKERS_LOOK_S)
        if bus is not None:
            bus.close()


def is_watched(config: Config) -> bool:
    """Return whether the log of the run is on Kafka."""
    return config.bus.url.startswith("kafka:")
