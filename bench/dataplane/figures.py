"""From what processes counted to the rows of the bench; decides what a figure means. No IO.

1 MB is 10^6 bytes of stored values, 1 GB 10^9. Every figure is the median over the repeats, each
measured in the same round as what stands beside it; `spread` is its smallest and largest value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.bench.dataplane.process import Done, Side

Phase = Literal["append", "read", "through"]
SIDES: Final[tuple[Side, ...]] = ("raw", "bus")
KEEPS: Final[Mapping[str, str]] = {
    "copy": "nothing",
    "disk": "bytes, no names",
    "kafka": "acks=all",
    "sqlite": "fsync",
    "raw": "acks=all",
    "redis": "fsync every s",
    "pipe": "nothing",
    "transferqueue": "nothing",
    "transferqueue-one": "nothing",
}
"""What a plane promises of what it has taken: `acks=all`, that every replica in sync has it, in its
page cache; Kafka leaves the disk to the system."""

STAGES = ("encode", "append", "broker", "fetch", "decode", "assembly")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigure:
    """The log's layer on encoded bytes, beside kafka-python by itself.

    `append` and `read` have the broker to themselves; in `through` one process appends and another
    reads at once. `ratio` is the median of the ratios of the repeats. CPU time is per record, of
    our processes without the broker; unlike MB/s it hardly depends on what else runs here.

    Example: ``LayerFigure(phase="append", tokens=2048, bytes=10_100, raw_mb_per_s=150.0,
    bus_mb_per_s=140.0, ratio=0.93, spread="0.91-0.95", raw_cpu_us=60.0, bus_cpu_us=62.0)``
    """

    phase: Phase
    tokens: int
    bytes: int
    raw_mb_per_s: float
    bus_mb_per_s: float
    ratio: float
    spread: str
    raw_cpu_us: float
    bus_cpu_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneFigure:
    """One way from the worker's hands into the trainer's batch.

    Throughput and CPU (both processes and the broker) at full load, latency at a tenth of it.
    `keeps` says what is left when a process or the machine ends; `cpu_s_per_gb` is empty where
    other processes are part of it whose time is not known.

    Example: ``PlaneFigure(plane="kafka", keeps="acks=all", tokens=2048, bytes=10_100,
    trajectories_per_s=1500.0, spread="1480-1530", mb_per_s=15.1, cpu_s_per_gb=90.0, p50_ms=3.1,
    p50_spread="3.0-3.3", p99_ms=8.0)``
    """

    plane: str
    keeps: str
    tokens: int
    bytes: int
    trajectories_per_s: float
    spread: str
    mb_per_s: float
    cpu_s_per_gb: float | None
    p50_ms: float
    p50_spread: str
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFigure:
    """Where the time of one trajectory goes: CPU microseconds at full load, then the median
    latency at a tenth of it in four parts: until its encoding began (the writer was in an append),
    until its append began, until it was fetched, until its batch was ready.

    `append_us` and `fetch_us` are all that the two processes did beside the codec and the assembly.
    `ack_ms` is what its append took, beside the fetch. `light_cores` is how many cores both
    processes and the broker kept busy at a tenth of full load.

    Example: ``SplitFigure(plane="kafka", tokens=2048, encode_us=480.0, append_us=60.0,
    broker_us=30.0, fetch_us=70.0, decode_us=230.0, assembly_us=60.0, to_encode_ms=0.2,
    to_append_ms=0.6, to_fetch_ms=1.9, to_batch_ms=0.4, ack_ms=1.5, light_cores=1.1)``
    """

    plane: str
    tokens: int
    encode_us: float
    append_us: float
    broker_us: float | None
    fetch_us: float
    decode_us: float
    assembly_us: float
    to_encode_ms: float
    to_append_ms: float
    to_fetch_ms: float
    to_batch_ms: float
    ack_ms: float
    light_cores: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayFigure:
    """From the beginning of an append to the poll that brings it, one record at a time, `per_s` a
    second: of the log's layer on encoded bytes, and of kafka-python by itself. ms.

    Example: ``DelayFigure(tokens=2048, bytes=10_100, per_s=200.0, raw_p50_ms=2.9, bus_p50_ms=2.3,
    bus_spread="2.2-2.5", raw_p99_ms=4.4, bus_p99_ms=4.0)``
    """

    tokens: int
    bytes: int
    per_s: float
    raw_p50_ms: float
    bus_p50_ms: float
    bus_spread: str
    raw_p99_ms: float
    bus_p99_ms: float


LayerRound = Mapping[Side, Sequence[Done]]
"""One repeat of one phase on both sides: its one process, or who appended and who read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load on one plane: who published, who assembled."""

    published: Done
    assembled: Done
    broker_s: float | None
    """CPU seconds of the broker; 0 where there is none, None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRound:
    """One repeat of one plane: at full load, and at a tenth of it."""

    full: Load
    light: Load


def rate(begun: Done, ended: Done) -> float:
    """Records per second from the start of one process to the end of the other."""
    return ended.records / max(1e-9, (ended.end_ns - begun.start_ns) / 1e9)


def cpu_us(*of: Done) -> float:
    """CPU microseconds per record of the processes together."""
    return sum(one.cpu_s / one.records for one in of) * 1e6


def layer_figure(phase: Phase, tokens: int, rounds: Sequence[LayerRound]) -> LayerFigure:
    """The row of one phase."""
    size = statistics.median(map(_record_bytes, rounds))
    raw, bus = (
        [rate(one[side][0], one[side][-1]) * _record_bytes(one) for one in rounds] for side in SIDES
    )
    ratios = [ours / theirs for theirs, ours in zip(raw, bus, strict=True)]
    return LayerFigure(
        phase=phase,
        tokens=tokens,
        bytes=round(size),
        raw_mb_per_s=statistics.median(raw) / 1e6,
        bus_mb_per_s=statistics.median(bus) / 1e6,
        ratio=statistics.median(ratios),
        spread=spread(ratios, digits=2),
        raw_cpu_us=statistics.median(cpu_us(*one["raw"]) for one in rounds),
        bus_cpu_us=statistics.median(cpu_us(*one["bus"]) for one in rounds),
    )


def _record_bytes(one: LayerRound) -> float:
    return one["bus"][-1].bytes / one["bus"][-1].records


def delays_ms(written: Done, read: Done) -> list[float]:
    """Of every record behind the warm ones, whose beginning is 0."""
    pairs = zip(written.moments["begun"], read.moments["polled"], strict=True)
    return [(polled - begun) / 1e6 for begun, polled in pairs if begun]


def delay_figure(tokens: int, per_s: float, rounds: Sequence[LayerRound]) -> DelayFigure:
    """The row of one length; in each round a writer and a reader on each side."""
    raw, bus = ([delays_ms(*one[side]) for one in rounds] for side in SIDES)
    ours = [percentile(one, 50) for one in bus]
    return DelayFigure(
        tokens=tokens,
        bytes=round(statistics.median(map(_record_bytes, rounds))),
        per_s=per_s,
        raw_p50_ms=statistics.median(percentile(one, 50) for one in raw),
        bus_p50_ms=statistics.median(ours),
        bus_spread=spread(ours, digits=2),
        raw_p99_ms=statistics.median(percentile(one, 99) for one in raw),
        bus_p99_ms=statistics.median(percentile(one, 99) for one in bus),
    )


def plane_figure(plane: str, tokens: int, rounds: Sequence[PlaneRound]) -> PlaneFigure:
    """The row of one plane."""
    rates = [rate(one.full.published, one.full.assembled) for one in rounds]
    read = [one.full.assembled for one in rounds]
    record_bytes = statistics.median(one.bytes / one.records for one in read)
    latencies = [latencies_ms(one.light) for one in rounds]
    p50s = [percentile(one, 50) for one in latencies]
    return PlaneFigure(
        plane=plane,
        keeps=KEEPS.get(plane, ""),
        tokens=tokens,
        bytes=round(record_bytes),
        trajectories_per_s=statistics.median(rates),
        spread=spread(rates, digits=0),
        mb_per_s=statistics.median(rates) * record_bytes / 1e6,
        cpu_s_per_gb=_median_or_none([_cpu_s_per_gb(one.full) for one in rounds]),
        p50_ms=statistics.median(p50s),
        p50_spread=spread(p50s, digits=2),
        p99_ms=statistics.median(percentile(one, 99) for one in latencies),
    )


def split_figure(plane: str, tokens: int, rounds: Sequence[PlaneRound]) -> SplitFigure:
    """The row of one plane's split."""
    stages = [stages_us(one.full) for one in rounds]
    parts = [_latency_parts_ms(one.light) for one in rounds]
    figures = {f"{name}_us": _median_or_none([one[name] for one in stages]) for name in STAGES}
    figures |= {name: statistics.median(one[name] for one in parts) for name in parts[0]}
    figures["light_cores"] = _median_or_none([_cores(one.light) for one in rounds])
    return SplitFigure(plane=plane, tokens=tokens, **figures)  # type: ignore[arg-type]


def stages_us(one: Load) -> dict[str, float | None]:
    """CPU microseconds per trajectory by stage; what is no named part is the log's own."""
    count = one.assembled.records / 1e6
    encode_s = one.published.stages["encode"]
    decode_s, assembly_s = (one.assembled.stages[name] for name in ("decode", "assembly"))
    return {
        "encode": encode_s / count,
        "append": (one.published.cpu_s - encode_s) / count,
        "broker": None if one.broker_s is None else one.broker_s / count,
        "fetch": (one.assembled.cpu_s - decode_s - assembly_s) / count,
        "decode": decode_s / count,
        "assembly": assembly_s / count,
    }


def latencies_ms(one: Load) -> list[float]:
    """From finish to batch, per trajectory."""
    return _between_ms(one.published, "finished", one.assembled, "batched")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed (nearest rank).

    Example: ``percentile([3.0, 1.0, 2.0], 50) == 2.0``
    """
    assert values
    assert 0 < percent <= 100
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def spread(values: Sequence[float], *, digits: int) -> str:
    """The smallest and the largest value. Example: ``spread([1.0, 3.0], digits=0) == "1-3"``."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def _latency_parts_ms(one: Load) -> dict[str, float]:
    """Medians of the parts of the latency, and of the append that is part of none."""
    writer, reader = one.published, one.assembled
    return {
        "to_encode_ms": statistics.median(_between_ms(writer, "finished", writer, "begun")),
        "to_append_ms": statistics.median(_between_ms(writer, "begun", writer, "appended")),
        "to_fetch_ms": statistics.median(_between_ms(writer, "appended", reader, "polled")),
        "to_batch_ms": statistics.median(_between_ms(reader, "polled", reader, "batched")),
        "ack_ms": statistics.median(_between_ms(writer, "appended", writer, "acked")),
    }


def _cores(one: Load) -> float | None:
    spent_s = _spent_s(one)
    wall_s = (one.assembled.end_ns - one.published.start_ns) / 1e9
    return None if spent_s is None else spent_s / wall_s


def _spent_s(one: Load) -> float | None:
    """CPU seconds of both processes and the broker."""
    if one.broker_s is None:
        return None
    return one.published.cpu_s + one.assembled.cpu_s + one.broker_s


def _between_ms(first: Done, this: str, second: Done, that: str) -> list[float]:
    pairs = zip(first.moments[this], second.moments[that], strict=True)
    return [(after - before) / 1e6 for before, after in pairs]


def _cpu_s_per_gb(one: Load) -> float | None:
    spent_s = _spent_s(one)
    return None if spent_s is None else spent_s / one.assembled.bytes * 1e9


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None
