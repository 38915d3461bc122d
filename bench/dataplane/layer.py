"""The log's layer alone: the same encoded bytes through our bus and through kafka-python itself.

It decides how many records one call of ours appends: what a worker gathers in a turn of its loop,
or one where latency is looked at.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from dora_pipe.bench.dataplane.process import PARTITIONS, WARM, Done, Inside, Layer
from dora_pipe.bench.dataplane.raw import RawReader, RawWriter
from dora_pipe.bench.dataplane.source import Source, encoded
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

Appending = tuple[Callable[[Sequence[Append]], object], Callable[[], None]]
"""Append, and wait until everything is acknowledged."""


def run_layer(task: Layer, inside: Inside) -> Done:
    """Append for `task.seconds`, or read until the total."""
    if task.does == "read":
        return _read(task, inside)
    source = Source(task.topic, task.tokens)
    records = [encoded(source(number), task.topic) for number in range(DISTINCT)]
    with _appending(task) as (append, finish):
        append(records[:WARM])
        finish()
        phase = _one_by_one if task.per_s else _flat_out
        return phase(task, inside, records, (append, finish))


def calls_of(records: list[Append]) -> list[list[Append]]:
    """The records round and round, cut into one round's worth of calls."""
    largest = max(len(one.value) for one in records)
    size = max(1, min(CALL_RECORDS, CALL_BYTES // largest))
    endless = itertools.cycle(records)
    count = max(1, len(records) // size)
    return [list(itertools.islice(endless, size)) for _ in range(count)]


@contextmanager
def _appending(task: Layer) -> Iterator[Appending]:
    """An append of ours is durable when it returns; kafka-python's waits only where it must."""
    if task.side == "raw":
        linger_ms = 0 if task.per_s else LINGER_MS
        with closing(RawWriter(task.servers, linger_ms=linger_ms)) as raw:
            yield raw.append, raw.finish
    else:
        with closing(open_bus(f"kafka://{task.servers}")) as bus:
            yield bus.writer().append, lambda: None


def _flat_out(task: Layer, inside: Inside, records: list[Append], appending: Appending) -> Done:
    """Many records a call, as fast as it goes."""
    append, finish = appending
    calls = itertools.cycle(calls_of(records))
    watch = inside.ready()
    until_ns = watch.start_ns + round(task.seconds * 1e9)
    count = value_bytes = 0
    while time.monotonic_ns() < until_ns and value_bytes < PHASE_BYTES_MAX:
        call = next(calls)
        append(call)
        count += len(call)
        value_bytes += sum(len(one.value) for one in call)
    finish()
    return watch.stop(records=count, value_bytes=value_bytes)


def _one_by_one(task: Layer, inside: Inside, records: list[Append], appending: Appending) -> Done:
    """Each at its moment, and durable before the next."""
    append, finish = appending
    begun: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for one in records[:WARM]:
        begun[one.partition].append(0)
    watch = inside.ready()
    count = max(1, round(task.per_s * task.seconds))
    value_bytes = 0
    for number, one in enumerate(itertools.islice(itertools.cycle(records), count)):
        due_ns = watch.start_ns + round(number * 1e9 / task.per_s)
        time.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        begun[one.partition].append(time.monotonic_ns())
        append([one])
        finish()
        value_bytes += len(one.value)
    done = watch.stop(records=count, value_bytes=value_bytes)
    return replace(done, moments={"begun": list(itertools.chain.from_iterable(begun))})


@contextmanager
def _polling(task: Layer) -> Iterator[Callable[[], Sequence[Any]]]:
    positions = {TopicPartition(task.topic, number): 0 for number in range(PARTITIONS)}
    if task.side == "raw":
        with closing(RawReader(task.servers, list(positions))) as raw:
            yield raw.poll
    else:
        with closing(open_bus(f"kafka://{task.servers}")) as bus:
            yield partial(bus.reader(positions).poll, timeout_s=POLL_S)


def _read(task: Layer, inside: Inside) -> Done:
    """From the beginning, the warm ones included: they are as good as the others."""
    with _polling(task) as poll:
        watch = inside.ready()
        count = value_bytes = 0
        end_ns = watch.start_ns
        polled: list[tuple[int, int, int]] = []
        with inside.listening():
            while inside.total is None or count < inside.total:
                found = poll()
                end_ns = time.monotonic_ns() if found else end_ns
                for one in found:
                    value_bytes += len(one.value)
                if task.per_s:
                    polled += [(one.partition, one.offset, end_ns) for one in found]
                count += len(found)
        done = watch.stop(records=count, value_bytes=value_bytes, end_ns=end_ns)
    return replace(done, moments={"polled": [moment_ns for _, _, moment_ns in sorted(polled)]})
