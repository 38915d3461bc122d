"""Draws the off-policy study as SVG: courses by staleness, and every objective's last reward.

It decides colours and places. Text is in the page's own font size; a picture has a light
background of its own, so that it can be read wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from dora_pipe.bench.offpolicy import Measured, Summary, mean

WIDTH: Final = 760
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 48
COURSES_HEIGHT: Final = 380
ROW_HEIGHT: Final = 34
NAMES_WIDTH: Final = 130

COLOURS: Final = ("#0f4c81", "#1a936f", "#d08c00", "#d1495b", "#6a3d9a", "#5c5c5c", "#a0522d")
"""By the place of a staleness among those shown."""

INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"
FONT: Final = "font-family='sans-serif' font-size='13'"
TICKS: Final = 7
"""Lines of a grid, at most."""

STEPS: Final = (1, 2, 5, 10, 20)
"""Hundredths between two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Example: ``Scale(low=0, high=1, start=10, end=20)(0.5) == 15``."""
        whole = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / whole * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values from low to high: hundredths, or as many as can be read."""
        step = next(
            (one for one in STEPS if (self.high - self.low) * 100 <= one * TICKS), STEPS[-1]
        )
        first, last = math.ceil(self.low * 100 / step), math.floor(self.high * 100 / step)
        return [round(place * step / 100, 2) for place in range(first, last + 1)]


def courses(measured: Sequence[Measured], objective: str) -> str:
    """The evaluation reward of one objective over the steps: a line per staleness, the mean over
    its seeds, with a band from the lowest to the highest. All cells have the same steps."""
    shown = [one for one in measured if one.objective == objective]
    etas = sorted({one.eta for one in shown})
    values = [reward for one in shown for _, reward in one.rewards]
    last = max(version for one in shown for version, _ in one.rewards)
    x = Scale(low=0, high=last, start=LEFT, end=WIDTH - RIGHT)
    low, high = _bounds(values)
    y = Scale(low=low, high=high, start=COURSES_HEIGHT - BOTTOM, end=TOP)
    parts = [*_rows_of(y), *_columns_of(x, [v for v, _ in shown[0].rewards])]
    for colour, eta in zip(_colours(len(etas)), etas, strict=True):
        parts += _course([one for one in shown if one.eta == eta], x, y, colour)
    parts += _legend(etas)
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, COURSES_HEIGHT - 10, "step", "middle"))
    title = f"{objective}: evaluation reward by staleness (mean of seeds, lowest to highest)"
    return _picture(COURSES_HEIGHT, title, parts)


def ends(summaries: Sequence[Summary]) -> str:
    """The reward after the last step: a row per objective, a dot per staleness, and a line from
    the lowest to the highest of its seeds."""
    names = list(dict.fromkeys(one.objective for one in summaries))
    etas = sorted({one.eta for one in summaries})
    colours = dict(zip(etas, _colours(len(etas)), strict=True))
    height = TOP + BOTTOM + ROW_HEIGHT * len(names)
    low, high = _bounds([edge for one in summaries for edge in (one.last.low, one.last.high)])
    x = Scale(low=low, high=high, start=NAMES_WIDTH, end=WIDTH - RIGHT)
    parts: list[str] = []
    for value in x.ticks():
        at = x(value)
        parts.append(_line(at, TOP, at, height - BOTTOM, GRID))
        parts.append(_text(at, height - BOTTOM + 18, f"{value:.2f}", "middle"))
    for row, name in enumerate(names):
        middle = TOP + ROW_HEIGHT * (row + 0.5)
        if row:
            parts.append(_line(0, TOP + ROW_HEIGHT * row, WIDTH, TOP + ROW_HEIGHT * row, GRID))
        parts.append(_text(NAMES_WIDTH - 10, middle + 4, name, "end"))
        own = [one for one in summaries if one.objective == name]
        for one in own:
            # Beside each other, so that equal rewards are all seen.
            at = middle + (etas.index(one.eta) - (len(etas) - 1) / 2) * ROW_HEIGHT / (len(etas) + 1)
            colour = colours[one.eta]
            parts.append(_line(x(one.last.low), at, x(one.last.high), at, colour, width=2))
            parts.append(f"<circle cx='{x(one.last.mean)}' cy='{at:.1f}' r='4' fill='{colour}'/>")
    parts += _legend(etas)
    parts.append(
        _text(
            (NAMES_WIDTH + WIDTH) / 2, height - 8, "evaluation reward after the last step", "middle"
        )
    )
    title = "every objective by staleness (mean of seeds, lowest to highest)"
    return _picture(height, title, parts)


def _course(seeds: Sequence[Measured], x: Scale, y: Scale, colour: str) -> Iterator[str]:
    by_version: dict[int, list[float]] = {}
    for one in seeds:
        for version, reward in one.rewards:
            by_version.setdefault(version, []).append(reward)
    course = sorted(by_version.items())
    upper = [f"{x(version)},{y(max(values))}" for version, values in course]
    lower = [f"{x(version)},{y(min(values))}" for version, values in reversed(course)]
    middle = " ".join(f"{x(version)},{y(mean(values))}" for version, values in course)
    if len(seeds) > 1:
        band = " ".join([*upper, *lower])
        yield f"<polygon points='{band}' fill='{colour}' fill-opacity='0.12'/>"
    yield f"<polyline points='{middle}' fill='none' stroke='{colour}' stroke-width='2'/>"


def _rows_of(y: Scale) -> Iterator[str]:
    for value in y.ticks():
        at = y(value)
        yield _line(LEFT, at, WIDTH - RIGHT, at, GRID)
        yield _text(LEFT - 8, at + 4, f"{value:.2f}", "end")


def _columns_of(x: Scale, versions: Sequence[int]) -> Iterator[str]:
    for version in versions:
        yield _text(x(version), COURSES_HEIGHT - BOTTOM + 18, str(version), "middle")


def _legend(etas: Sequence[int]) -> Iterator[str]:
    step = 70
    first = WIDTH - RIGHT - step * len(etas)
    for place, (eta, colour) in enumerate(zip(etas, _colours(len(etas)), strict=True)):
        at = first + step * place
        yield f"<rect x='{at}' y='{TOP - 18}' width='12' height='12' fill='{colour}'/>"
        yield _text(at + 17, TOP - 8, f"eta {eta}", "start")


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The tenths around all values, at least one apart."""
    low, high = math.floor(min(values) * 10), math.ceil(max(values) * 10)
    return low / 10, max(high, low + 1) / 10


def _colours(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1) -> str:
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}'"
        f" stroke-width='{width}'/>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='{INK}' {FONT}>"
        f"{escape(text)}</text>"
    )


def _picture(height: int, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'"
            f" width='{WIDTH}' height='{height}' role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>",
            *parts,
            "</svg>",
            "",
        ]
    )
