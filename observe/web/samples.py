"""Metrics of a whole run from sampled files: ratios from contributions, times from records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from dora_pipe.audit.group_ledger import Bucket, bucket_of
from dora_pipe.audit.reading import named_records
from dora_pipe.bus.logged import Damage
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.database import COUNTS, LoggedRecord, logged_records
from dora_pipe.observe.ratios import by_staleness, distance, with_ratio
from dora_pipe.observe.web.pages import RunSource
from dora_pipe.observe.web.view import RunView, quantile, short, spaced
from dora_pipe.schemas.trajectory import Described, Times
from dora_pipe.schemas.trajectory_codec import view_trajectory

STEPS_MAX: Final = 40

RECORDS_MAX: Final = 240

PARTS: Final = ("slot", "first token", "sampling", "reward")
"""Placed to started, to first token, to last token (with environments), to reward; from the last
placement."""

_OF_TRAINING: Final = f"{COUNTS} and starts_with(trajectory_id, 'g')"


def mismatch(view: RunView, source: RunSource) -> dict[str, Any]:
    """Return per staleness: trajectories, quantiles of |ln(mean ratio)| and of the clipped share.

    Excludes trajectories without a gradient, which have no ratio.
    """
    chosen = spaced(view.steps(), STEPS_MAX)
    files = [source.contributions(digest) for _, digest in chosen]
    rows = by_staleness(with_ratio(row for rows in files for row in rows))
    return {
        "steps": len(chosen),
        "looked": sum(map(bool, files)),
        "rows": [
            {
                "staleness": stale,
                "n": len(own),
                **{
                    name: short(quantile(sorted(map(distance, own)), share))
                    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
                },
                "clipped": short(fmean(row["clipped_share"] or 0.0 for row in own)),
            }
            for stale, own in rows.items()
        ],
    }


def sampled_times(view: RunView, source: RunSource) -> dict[str, Any]:
    """Return mean seconds per part, by length bucket."""
    of = int(view.value(f"select count(*) from records where {_OF_TRAINING}"))
    chosen = logged_records(
        view.catalogue,
        f"""rowid in (select row_id from (
                select rowid as row_id, row_number() over (order by rowid) - 1 as place
                from records where {_OF_TRAINING})
            where place in (select unnest(?::bigint[])))""",
        [spaced(range(of), RECORDS_MAX)],
    )
    sums: dict[Bucket, list[float]] = {}
    damage = Damage()
    for found in _sound(source, chosen.values(), damage):
        parts = _parts(found.meta.times)
        if parts is not None:
            own = sums.setdefault(bucket_of(found.sampled), [0.0] * (1 + len(PARTS)))
            own[0] += 1
            for place, value in enumerate(parts, 1):
                own[place] += value
    return {
        "phases": list(PARTS),
        "of": of,
        "sampled": int(sum(one[0] for one in sums.values())),
        "damaged": list(damage.lines),
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


def _sound(source: RunSource, rows: Iterable[LoggedRecord], damage: Damage) -> Iterator[Described]:
    """Yield the readable records, partition by partition; count others in `damage`."""
    for record, _ in named_records(source, rows, damage):
        with suppress(SchemaError):  # it is a dead letter
            yield view_trajectory(record.value)


def _parts(times: Times) -> list[float] | None:
    """Return seconds per part; None if the record lacks any."""
    marks = (times.placed, times.started, times.first_token, times.finished)
    known = [one for one in marks if one is not None]
    if len(known) < len(marks):
        return None
    known.append(times.rewarded if times.rewarded is not None else known[-1])
    return [max(0, b - a) / 1e9 for a, b in pairwise(known)]
