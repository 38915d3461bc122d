"""Throughput of a log."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

import typer

from dora_pipe.bench.support import emit_figures, scratch
from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import UsageError
from dora_pipe.core.pure.records import Append, TopicPartition

PHASE_BYTES_MAX = 256 * 1024 * 1024
"""Bounds memory and disk use of a phase."""

BATCH_BYTES = 1024 * 1024
BATCH_RECORDS = 64
RECORD_BYTES = (2_000, 65_536, 1_048_576)

Phase = Literal["append one by one", "append in batches", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFigure:
    """Phase of one bus at one record size; 1 MB is 10^6 bytes.

    `cpu_us` is this process's CPU time per record.

    Example: ``BusFigure(bus="sqlite", phase="read", record_bytes=1024, records=9000,
    records_per_s=90000.0, mb_per_s=92.2, cpu_us=10.9)``
    """

    bus: str
    phase: Phase
    record_bytes: int
    records: int
    records_per_s: float
    mb_per_s: float
    cpu_us: float


def command(
    url: Annotated[
        list[str] | None, typer.Option(help="Kafka log to compare with memory and SQLite.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Records per phase.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Measure records and bytes per second of every bus."""
    with scratch() as folder:
        urls = ["memory:", f"sqlite:{folder}/bench.sqlite", *(url or ())]
        figures = bench_bus(urls, record_bytes=RECORD_BYTES, seconds=seconds)
        emit_figures(figures, as_json=as_json)


def bench_bus(
    urls: Sequence[str], *, record_bytes: Sequence[int], seconds: float
) -> list[BusFigure]:
    """Return figures of single and batched durable appends and of reading.

    `urls` are addresses of `open_bus`, or ``memory:``; topics are kept. A SQLite file must not
    exist. Raises UsageError, BusError.
    """
    figures = []
    for url in urls:
        bus = _open(url)
        try:
            for size_bytes in record_bytes:
                figures += _phases(bus, url.partition(":")[0], size_bytes, seconds)
        finally:
            bus.close()
    return figures


def _open(url: str) -> Bus:
    kind, _, rest = url.partition(":")
    if kind == "memory":
        return MemoryBus()
    if kind == "sqlite" and Path(rest).exists():
        raise UsageError(f"{rest} exists", hint="a benchmark needs a new file")
    return open_bus(url)


def _phases(bus: Bus, name: str, size_bytes: int, seconds: float) -> list[BusFigure]:
    topic = f"bench-{uuid4().hex[:12]}"
    bus.create([TopicSpec(name=topic, max_record_bytes=max(1024, 2 * size_bytes))])
    batch = max(1, min(BATCH_RECORDS, BATCH_BYTES // max(1, size_bytes)))
    single = _append(bus, topic, size_bytes, 1, seconds)
    many = _append(bus, topic, size_bytes, batch, seconds)
    read = _read(bus, topic, single.records + many.records, seconds)
    return [
        single.figure(name, "append one by one", size_bytes),
        many.figure(name, "append in batches", size_bytes),
        read.figure(name, "read", size_bytes),
    ]


class _Watch:
    """Counter of records and time."""

    def __init__(self, seconds: float) -> None:
        self.records = 0
        self._seconds = seconds
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._took_wall_s = self._took_cpu_s = 0.0

    def has_room(self, records: int, size_bytes: int) -> bool:
        self.records += records
        self._took_wall_s = time.perf_counter() - self._wall_s
        self._took_cpu_s = time.process_time() - self._cpu_s
        room = self.records * size_bytes < PHASE_BYTES_MAX
        return room and self._took_wall_s < self._seconds

    def figure(self, bus: str, phase: Phase, size_bytes: int) -> BusFigure:
        per_s = self.records / max(self._took_wall_s, 1e-9)
        return BusFigure(
            bus=bus,
            phase=phase,
            record_bytes=size_bytes,
            records=self.records,
            records_per_s=per_s,
            mb_per_s=per_s * size_bytes / 1e6,
            cpu_us=self._took_cpu_s / max(1, self.records) * 1e6,
        )


def _append(bus: Bus, topic: str, size_bytes: int, batch: int, seconds: float) -> _Watch:
    headers = (("run", b"bench"), ("group", b"00000001"), ("version", b"3"))
    value = os.urandom(size_bytes)  # incompressible
    records = [Append(topic=topic, value=value, key=b"00000001", headers=headers)] * batch
    writer = bus.writer()
    writer.append(records[:1])  # the first call also connects
    watch = _Watch(seconds)
    while watch.has_room(len(writer.append(records)), size_bytes):
        pass
    writer.close()
    return watch


def _read(bus: Bus, topic: str, records: int, seconds: float) -> _Watch:
    reader = bus.reader({TopicPartition(topic, 0): 0})
    watch = _Watch(seconds)
    while watch.records < records:
        polled = reader.poll(timeout_s=seconds)
        size_bytes = len(polled[0].value) if polled else 0
        if not watch.has_room(len(polled), size_bytes):
            break
    reader.close()
    return watch
