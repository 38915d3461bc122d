"""Where the time of trajectories on their workers went, from a sample of records; it decides
which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

from dora_pipe.audit.reading import records_at
from dora_pipe.audit.sums import Bucket, bucket_of
from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import TopicPartition
from dora_pipe.catalogue.logged import COUNTS, LoggedRecord, logged_records
from dora_pipe.core.errors import SchemaError
from dora_pipe.observe.web.figures import short, spaced
from dora_pipe.observe.web.pages import Source
from dora_pipe.observe.web.view import RunView
from dora_pipe.schemas.fast_validate import FastValidator, Glance
from dora_pipe.schemas.trajectory import Times

RECORDS_MAX: Final = 240
"""Records that are opened, evenly spaced over the run."""

PARTS: Final = ("slot", "first token", "sampling", "reward")
"""From placed to started, to the first token, to the last (environments included), to the reward.
A trajectory that was placed again counts from its last placement on."""

_OF_TRAINING: Final = f"{COUNTS} and starts_with(trajectory_id, 'g')"
"""Records of training groups that count."""


def sampled_times(view: RunView, source: Source) -> dict[str, Any]:
    """Mean seconds of every part, by length bucket."""
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


def _sound(source: Source, rows: Iterable[LoggedRecord], damage: Damage) -> Iterator[Glance]:
    """What the records of these rows say, partition by partition; of the others, the damage."""
    places: dict[int, dict[int, LoggedRecord]] = {}
    for row in rows:
        places.setdefault(row.partition, {})[row.offset] = row
    glancer = FastValidator()
    for partition, left in sorted(places.items()):
        at = TopicPartition(source.topics.trajectories, partition)
        for record in records_at(source.bus, at, list(left)):
            if damage.is_sound(record, left.pop(record.offset)):
                with suppress(SchemaError):  # it is among the dead letters
                    yield glancer.look(record.value)
        damage.look_for_the_rest({(partition, offset): row for offset, row in left.items()})


def _parts(times: Times) -> list[float] | None:
    """Seconds of every part; None where the record does not say all."""
    marks = (times.placed, times.started, times.first_token, times.finished)
    known = [one for one in marks if one is not None]
    if len(known) < len(marks):
        return None
    known.append(times.rewarded if times.rewarded is not None else known[-1])
    return [max(0, b - a) / 1e9 for a, b in pairwise(known)]
