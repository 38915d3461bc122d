"""The log's layer alone: the same encoded bytes through our bus and through kafka-python itself.

It decides how many records one call of ours appends: what a worker gathers in a turn of its loop.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

from dora_pipe.bench.dataplane.raw import RawReader, RawWriter
from dora_pipe.bench.dataplane.source import Source, encoded
from dora_pipe.bench.dataplane.tasks import PARTITIONS, WARM, Done, Layer
from dora_pipe.bench.dataplane.wire import Inside
from dora_pipe.bus import open_bus
from dora_pipe.bus.port import Append, TopicPartition

DISTINCT: Final = 128
"""Records that were encoded before; they are appended round and round."""

CALL_RECORDS: Final = 1024
CALL_BYTES: Final = 16 * 1024 * 1024
"""One append of ours has as many records as fit into both."""

PHASE_BYTES_MAX: Final = 512 * 1024 * 1024
"""A phase ends here at the latest, so that it fits into the machine's memory."""

POLL_S: Final = 1.0


def run_layer(task: Layer, inside: Inside) -> Done:
    """Append for `task.seconds`, or read until the total."""
    return _append(task, inside) if task.does == "append" else _read(task, inside)


def calls_of(records: list[Append]) -> list[list[Append]]:
    """The records round and round, cut into one round's worth of calls."""
    largest = max(len(one.value) for one in records)
    size = max(1, min(CALL_RECORDS, CALL_BYTES // largest))
    endless = itertools.cycle(records)
    count = max(1, len(records) // size)
    return [list(itertools.islice(endless, size)) for _ in range(count)]


def _append(task: Layer, inside: Inside) -> Done:
    source = Source(task.topic, task.tokens)
    records = [encoded(source(number), task.topic) for number in range(DISTINCT)]
    calls = itertools.cycle(calls_of(records))
    bus = open_bus(f"kafka://{task.servers}")
    raw = RawWriter(task.servers) if task.side == "raw" else None
    append = raw.append if raw else bus.writer().append
    append(records[:WARM])
    if raw:
        raw.finish()
    inside.ready()
    start_ns, start_cpu_s = time.monotonic_ns(), time.process_time()
    until_ns = start_ns + round(task.seconds * 1e9)
    count = value_bytes = 0
    while time.monotonic_ns() < until_ns and value_bytes < PHASE_BYTES_MAX:
        call = next(calls)
        append(call)
        count += len(call)
        value_bytes += sum(len(one.value) for one in call)
    if raw:
        raw.finish()
    end_ns, cpu_s = time.monotonic_ns(), time.process_time() - start_cpu_s
    if raw:
        raw.close()
    bus.close()
    return Done(records=count, bytes=value_bytes, start_ns=start_ns, end_ns=end_ns, cpu_s=cpu_s)


def _read(task: Layer, inside: Inside) -> Done:
    """From the beginning, the warm ones included: they are as good as the others."""
    bus = open_bus(f"kafka://{task.servers}")
    raw = RawReader(task.servers, task.topic, PARTITIONS) if task.side == "raw" else None
    positions = {TopicPartition(task.topic, number): 0 for number in range(PARTITIONS)}
    reader = None if raw else bus.reader(positions)
    inside.ready()
    start_ns, start_cpu_s = time.monotonic_ns(), time.process_time()
    count = value_bytes = 0
    end_ns = start_ns
    with inside.listening():
        while inside.total is None or count < inside.total:
            found = raw.poll() if raw else reader.poll(timeout_s=POLL_S) if reader else []
            for one in found:
                value_bytes += len(one.value)
            count += len(found)
            end_ns = time.monotonic_ns() if found else end_ns
    cpu_s = time.process_time() - start_cpu_s
    if raw:
        raw.close()
    bus.close()
    return Done(records=count, bytes=value_bytes, start_ns=start_ns, end_ns=end_ns, cpu_s=cpu_s)
