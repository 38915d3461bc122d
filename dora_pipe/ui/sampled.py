"""Where the time of trajectories on their workers went, from a sample of records; it decides
which."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from dora_pipe.bus.port import TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.reading import records_at
from dora_pipe.history.sums import Bucket, bucket_of
from dora_pipe.schemas.trajectory import Times
from dora_pipe.schemas.trajectory_glance import Glancer
from dora_pipe.ui.book import Book
from dora_pipe.ui.figures import short, spaced
from dora_pipe.ui.pages import Source

RECORDS_MAX: Final = 240
"""Records that are opened, evenly spaced over the run."""

PARTS: Final = ("slot", "first token", "sampling", "reward")
"""From placed to started, to the first token, to the last (environments included), to the reward.
A trajectory that was placed again counts from its last placement on."""


def sampled_times(book: Book, source: Source) -> dict[str, Any]:
    """Mean seconds of every part, by length bucket."""
    rows = [
        row
        for group in book.groups.values()
        if group.purpose == "train"
        for row in group.trajectories
        if row.offset >= 0
    ]
    chosen = spaced(rows, RECORDS_MAX)
    sums: dict[Bucket, list[float]] = {}
    places: dict[int, list[int]] = {}
    for row in chosen:
        places.setdefault(row.partition, []).append(row.offset)
    glancer = Glancer()
    for partition, offsets in sorted(places.items()):
        at = TopicPartition(source.topics.trajectories, partition)
        for record in records_at(source.bus, at, offsets):
            try:
                found = glancer.look(record.value)
            except SchemaError:
                continue
            parts = _parts(found.meta.times)
            if parts is not None:
                own = sums.setdefault(bucket_of(found.sampled), [0.0] * (1 + len(PARTS)))
                own[0] += 1
                for place, value in enumerate(parts, 1):
                    own[place] += value
    return {
        "phases": list(PARTS),
        "of": len(rows),
        "sampled": int(sum(one[0] for one in sums.values())),
        "rows": [
            {
                "low": low,
                "high": high,
                "n": int(own[0]),
                "seconds": [short(value / own[0]) for value in own[1:]],
            }
            for (low, high), own in sorted(sums.items())
        ],
    }


def _parts(times: Times) -> list[float] | None:
    """Seconds of every part; None where the record does not say all."""
    marks = (times.placed, times.started, times.first_token, times.finished)
    known = [one for one in marks if one is not None]
    if len(known) < len(marks):
        return None
    known.append(times.rewarded if times.rewarded is not None else known[-1])
    return [max(0, b - a) / 1e9 for a, b in pairwise(known)]
