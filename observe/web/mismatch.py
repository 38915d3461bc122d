"""How far ratios were from 1, by staleness: from what the steps' contributions say of each
trajectory; it decides which steps are looked at."""

from __future__ import annotations

import math
from typing import Any, Final

from dora_pipe.observe.web.figures import quantile, short, spaced
from dora_pipe.observe.web.pages import Source
from dora_pipe.observe.web.view import RunView

STEPS_MAX: Final = 40
"""Steps that are looked at, evenly spaced."""


def mismatch(view: RunView, source: Source) -> dict[str, Any]:
    """Per staleness: trajectories, and quantiles of |ln(mean ratio)| and of the clipped share.

    Also [step, staleness, median] for the course over the run. Trajectories without a gradient have
    no ratio and are left out.
    """
    sizes: dict[int, list[float]] = {}
    clipped: dict[int, list[float]] = {}
    course: list[list[float | None]] = []
    chosen = spaced(view.steps(), STEPS_MAX)
    looked = 0
    for step, digest in chosen:
        own: dict[int, list[float]] = {}
        rows = source.contributions(digest)
        looked += bool(rows)
        for row in rows:
            ratio, stale = row["ratio_mean"], row["staleness"]
            if ratio is None or ratio <= 0:
                continue
            own.setdefault(stale, []).append(abs(math.log(ratio)))
            clipped.setdefault(stale, []).append(row["clipped_share"] or 0.0)
        for stale, values in sorted(own.items()):
            course.append([step, stale, short(quantile(sorted(values), 0.5))])
            sizes.setdefault(stale, []).extend(values)
    return {
        "steps": len(chosen),
        "looked": looked,
        "rows": [
            {
                "staleness": stale,
                "n": len(values),
                **{
                    name: short(quantile(sorted(values), share))
                    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0))
                },
                "clipped": short(sum(clipped[stale]) / len(values)),
            }
            for stale, values in sorted(sizes.items())
        ],
        "course": course,
    }
