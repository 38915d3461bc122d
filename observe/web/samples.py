"""Ratios from the contributions of sampled steps; excerpts of texts from records."""

from __future__ import annotations

from contextlib import closing, suppress
from statistics import fmean
from typing import Any, Final

from dora_pipe.bus.logged import Damage, PlaceReader
from dora_pipe.consumers.contributions import by_staleness, distance, with_ratio
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.database import COUNTS, logged_records
from dora_pipe.observe.web import tables
from dora_pipe.observe.web.view import Decode, Query, RunSource, RunView, short, spaced
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory

STEPS_MAX: Final = 40
EXCERPT_TOKENS: Final = 160


def mismatch(view: RunView, source: RunSource) -> dict[str, Any]:
    """Return per staleness: trajectories, quantiles of |ln(mean ratio)| and of the clipped share.

    Excludes trajectories without a gradient, which have no ratio.
    """
    import numpy as np

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
                    name: short(np.quantile([*map(distance, own)], share, method="inverted_cdf"))
                    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
                },
                "clipped": short(fmean(row["clipped_share"] or 0.0 for row in own)),
            }
            for stale, own in rows.items()
        ],
    }


def texts(view: RunView, source: RunSource, asked: Query) -> dict[str, list[str]]:
    """Return the excerpts of a page of trajectories: [prompt, response] by id; empty if hidden."""
    decode = source.decode
    if source.redact or decode is None:
        return {}
    names = [row[0] for row in tables.trajectories(view, asked)["rows"]]
    condition = f"{COUNTS} and trajectory_id in (select unnest(?::varchar[]))"
    rows = logged_records(view.catalogue, condition, [names])
    texts_by_name: dict[str, list[str]] = {}
    with closing(PlaceReader(source.bus, source.topics.trajectories, gap=0)) as reader:
        for record, named in reader.named(rows.values(), Damage()):
            with suppress(SchemaError):  # a dead letter
                texts_by_name[named.trajectory] = excerpts(decode_trajectory(record.value), decode)
    return texts_by_name


def excerpts(trajectory: Trajectory, decode: Decode) -> list[str]:
    """Return the end of the prompt and the start of the response."""
    first = next(
        (segment.start for segment in trajectory.segments if segment.kind == "model"),
        trajectory.length,
    )
    ids = trajectory.token_ids
    prompt = decode(ids[max(0, first - EXCERPT_TOKENS) : first])
    return [prompt, decode(ids[first : first + EXCERPT_TOKENS])]
