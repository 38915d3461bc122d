"""Decides how fast a run's engines were, from the times of its requests; pure.

The speed is a regression over all requests: the time from entering a slot to the last token,
against its tokens, its tokens times the requests that were active beside it, and the share of that
time in which a step was being trained:

    seconds = tokens * (t0 + t1 * active) * (1 + slower * training share)

Everything is as the run measured it, on a machine that may have had other things to do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

SLOWER_TRIED = tuple(one / 50 for one in range(151))
"""Slow-downs while a step trains that the regression looks at: 0 .. 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTime:
    """A request in a slot. Times are seconds since the run started."""

    trajectory: str
    worker: str
    placed_s: float
    """When it was decided."""
    start_s: float
    end_s: float
    tokens: int
    reported_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What the regression found."""

    t0_s: float
    t1_s: float
    slower: float
    r2: float
    """Share of the variance of the requests' times that it explains."""


def speed_of(requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]) -> Speed:
    """The regression at the head of this file; `training` are the times of the steps."""
    rows = list(_regressors(requests, training))
    tokens = np.array([row[0] for row in rows])
    beside = np.array([row[0] * row[1] for row in rows])
    share = np.array([row[2] for row in rows])
    seconds = np.array([row[3] for row in rows])
    spread = float(((seconds - seconds.mean()) ** 2).sum()) or 1.0
    best: tuple[float, Speed] | None = None
    for slower in SLOWER_TRIED:
        factor = 1.0 + slower * share
        table = np.stack([tokens * factor, beside * factor], axis=1)
        (t0, t1), *_ = np.linalg.lstsq(table, seconds, rcond=None)
        t0, t1 = max(float(t0), 1e-6), max(float(t1), 0.0)
        wrong = float(((table @ np.array([t0, t1]) - seconds) ** 2).sum())
        if best is None or wrong < best[0]:
            best = wrong, Speed(t0_s=t0, t1_s=t1, slower=slower, r2=1.0 - wrong / spread)
    assert best is not None
    return best[1]


class Steps:
    """A function of time that is constant between given moments, and its integral."""

    def __init__(self, changes: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(changes)
        self._at = [moment for moment, _ in ordered]
        self._value = list(accumulate(by for _, by in ordered))
        spans = [
            (after - before) * value
            for before, after, value in zip(self._at, self._at[1:], self._value, strict=False)
        ]
        self._sum = [0.0, *accumulate(spans)]

    def integral(self, until: float) -> float:
        """From the beginning."""
        place = bisect_right(self._at, until) - 1
        if place < 0:
            return 0.0
        return self._sum[place] + (until - self._at[place]) * self._value[place]

    def mean(self, start: float, end: float) -> float:
        """Between two moments."""
        return (self.integral(end) - self.integral(start)) / (end - start)


def _regressors(
    requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, float, float]]:
    """Tokens, mean active requests, training share, seconds of every request."""
    trains = Steps([(a, 1.0) for a, _ in training] + [(b, -1.0) for _, b in training])
    by_worker: dict[str, list[SlotTime]] = {}
    for one in requests:
        by_worker.setdefault(one.worker, []).append(one)
    for found in by_worker.values():
        changes = [(one.start_s, 1.0) for one in found] + [(one.end_s, -1.0) for one in found]
        active = Steps(changes)
        for one in found:
            span = one.end_s - one.start_s
            if span > 0:
                beside = active.mean(one.start_s, one.end_s)
                yield one.tokens, beside, trains.mean(one.start_s, one.end_s), span


def busy_workers(requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]) -> float:
    """Workers with a request, on the mean over these times."""
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for one in requests:
        by_worker.setdefault(one.worker, []).append((one.start_s, one.end_s))
    total = sum(end - start for start, end in training)
    busy = 0.0
    for spans in by_worker.values():
        changes = [
            change for span in _joined(spans) for change in ((span[0], 1.0), (span[1], -1.0))
        ]
        at = Steps(changes)
        busy += sum(at.integral(end) - at.integral(start) for start, end in training)
    return busy / total if total else 0.0


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as spans that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
