"""The log's layer alone: the same encoded bytes through our bus and through kafka-python itself.

It decides how many records one call of ours appends: what a worker gathers in a turn of its loop,
or one where latency is looked at.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Final

from dora_pipe.bench.dataplane.raw import RawReader, RawWriter
from dora_pipe.bench.dataplane.source import Source, encoded
from dora_pipe.bench.dataplane.tasks import PARTITIONS, WARM, Done, Layer
from dora_pipe.bench.dataplane.wire import Inside
from dora_pipe.bus import open_bus
from dora_pipe.bus.kafka.client import LINGER_MS
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
    linger_ms = 0 if task.per_s else LINGER_MS
    raw = RawWriter(task.servers, linger_ms=linger_ms) if task.side == "raw" else None
    append = raw.append if raw else bus.writer().append
    append(records[:WARM])
    if raw:
        raw.finish()
    if task.per_s:
        return _one_by_one(task, inside, append if raw is None else _durable(raw), records)
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


def _durable(raw: RawWriter) -> Callable[[list[Append]], object]:
    """Send and wait, as an append of ours does."""

    def append(records: list[Append]) -> None:
        raw.append(records)
        raw.finish()

    return append


def _one_by_one(
    task: Layer, inside: Inside, append: Callable[[list[Append]], object], records: list[Append]
) -> Done:
    """Each at its moment; the process ends with what it has open."""
    begun: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for one in records[:WARM]:
        begun[one.partition].append(0)
    inside.ready()
    start_ns, start_cpu_s = time.monotonic_ns(), time.process_time()
    count = max(1, round(task.per_s * task.seconds))
    value_bytes = 0
    for number, one in enumerate(itertools.islice(itertools.cycle(records), count)):
        due_ns = start_ns + round(number * 1e9 / task.per_s)
        time.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        begun[one.partition].append(time.monotonic_ns())
        append([one])
        value_bytes += len(one.value)
    return Done(
        records=count,
        bytes=value_bytes,
        start_ns=start_ns,
        end_ns=time.monotonic_ns(),
        cpu_s=time.process_time() - start_cpu_s,
        moments={"begun": list(itertools.chain.from_iterable(begun))},
    )


def _read(task: Layer, inside: Inside) -> Done:
    """From the beginning, the warm ones included: they are as good as the others."""
    bus = open_bus(f"kafka://{task.servers}")
    positions = {TopicPartition(task.topic, number): 0 for number in range(PARTITIONS)}
    raw = RawReader(task.servers, list(positions)) if task.side == "raw" else None
    reader = None if raw else bus.reader(positions)
    inside.ready()
    start_ns, start_cpu_s = time.monotonic_ns(), time.process_time()
    count = value_bytes = 0
    end_ns = start_ns
    polled: list[tuple[int, int, int]] = []
    with inside.listening():
        while inside.total is None or count < inside.total:
            found = raw.poll() if raw else reader.poll(timeout_s=POLL_S) if reader else []
            end_ns = time.monotonic_ns() if found else end_ns
            for one in found:
                value_bytes += len(one.value)
            if task.per_s:
                polled += [(one.partition, one.offset, end_ns) for one in found]
            count += len(found)
    cpu_s = time.process_time() - start_cpu_s
    if raw:
        raw.close()
    bus.close()
    return Done(
        records=count,
        bytes=value_bytes,
        start_ns=start_ns,
        end_ns=end_ns,
        cpu_s=cpu_s,
        moments={"polled": [moment_ns for _, _, moment_ns in sorted(polled)]},
    )
