"""What moving cost a run, from its log: how long requests that moved stood still; decides nothing.

A move's pause is from when the request left its slot at the source (`request released`, `left_ns`)
to when it got one at the target (the segment of its trajectory that begins there): export is
before, import behind it, both a few ms in the engine (`moves`). In it lie the handover of the
cache, the last progress record, the orchestrator's round trip, and the wait for a slot. Both times
are wall clocks of the two machines.

`slot_share` compares with the share of total time that the paper gives for transfers (2.1 to
3.6 %): of all the time that requests spent in slots or between two of them, so much was paused.
`time_share` is the strictest reading: the share of the run's time in which any request at all was
paused, as if everything had stood still with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.schemas.control import RequestReleased, decode_control
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory

PAPER_PERCENT: Final = 2.123
"""Transfers' share of total time at 128 GPUs (bench/results/paper.md)."""

Span = tuple[int, int]
"""[start, end) in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadFigure:
    """What moving cost a run. Shares are in percent.

    Example: ``OverheadFigure(moves=31, with_cache=31, megabytes=40.2, pause_p50_ms=61.0,
    pause_max_ms=190.0, paused_s=2.2, generating_s=1400.0, run_s=95.0, slot_share=0.16,
    time_share=0.9, paper=2.123)``
    """

    moves: int
    """Of requests that were running, and whose trajectory is in the log."""
    with_cache: int
    megabytes: float
    """Of their caches."""
    pause_p50_ms: float
    pause_max_ms: float
    paused_s: float
    generating_s: float
    """From the first slot to the last token, over all trajectories."""
    run_s: float
    """From the first of these to the last."""
    slot_share: float
    time_share: float
    paper: float


def overhead_of(bus: Bus, topics: Topics) -> OverheadFigure:
    """Read a run's log. Raises UsageError for one in which nothing moved, BusError."""
    released = [one for one in _released(bus, topics) if one.left_ns and one.resume is not None]
    found = _trajectories(bus, topics)
    pauses = [
        (span, one)
        for one in released
        if (trajectory := found.get(one.trajectory)) is not None
        and (span := pause_of(one, trajectory)) is not None
    ]
    stays = [_stay(one) for one in found.values() if one.meta.times.started is not None]
    if not pauses or not stays:
        raise UsageError("no running request moved in this run")
    return figure_of([span for span, _ in pauses], [one for _, one in pauses], stays)


def pause_of(released: RequestReleased, trajectory: Trajectory) -> Span | None:
    """From slot to slot; None when the trajectory does not go on where this move let it go."""
    assert released.resume is not None
    start = trajectory.meta.prompt_tokens + released.resume.tokens
    for segment in trajectory.segments:
        if segment.kind == "model" and segment.start == start:
            return released.left_ns, max(released.left_ns, segment.start_ns)
    return None


def figure_of(
    pauses: list[Span], released: Iterable[RequestReleased], stays: list[Span]
) -> OverheadFigure:
    """The figures of pauses and of the times between first slot and last token."""
    lengths = [(end - start) / 1e9 for start, end in pauses]
    paused_s, generating_s = sum(lengths), sum((end - start) / 1e9 for start, end in stays)
    run_s = (max(end for _, end in stays) - min(start for start, _ in stays)) / 1e9
    blobs = [one.kv for one in released if one.kv is not None]
    return OverheadFigure(
        moves=len(pauses),
        with_cache=len(blobs),
        megabytes=round(sum(blob.bytes for blob in blobs) / 1e6, 2),
        pause_p50_ms=round(1e3 * statistics.median(lengths), 1),
        pause_max_ms=round(1e3 * max(lengths), 1),
        paused_s=round(paused_s, 3),
        generating_s=round(generating_s, 1),
        run_s=round(run_s, 1),
        slot_share=round(100 * paused_s / generating_s, 3),
        time_share=round(100 * covered_s(pauses) / run_s, 3),
        paper=PAPER_PERCENT,
    )


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds that lie in any of the spans."""
    total_ns, until_ns = 0, 0
    for start, end in sorted(spans):
        total_ns += max(0, end - max(start, until_ns))
        until_ns = max(until_ns, end)
    return total_ns / 1e9


def _released(bus: Bus, topics: Topics) -> Iterator[RequestReleased]:
    tp = TopicPartition(topics.control, 0)
    for record in records_of(bus, {tp: bus.end(tp)}):
        if b'"request-released"' in record.value:  # most records are not, and cost no decoding
            decoded = decode_control(record.value)
            if isinstance(decoded, RequestReleased):
                yield decoded


def _trajectories(bus: Bus, topics: Topics) -> dict[str, Trajectory]:
    """The last record of each that can be read."""
    found: dict[str, Trajectory] = {}
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        try:
            one = decode_trajectory(record.value)
        except SchemaError:
            continue
        found[one.trajectory] = one
    return found


def _stay(trajectory: Trajectory) -> Span:
    times = trajectory.meta.times
    started = times.started or 0
    return started, max(started, times.finished or 0)
