"""Format numbers for people: sparklines, short numbers, durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TICKS: Final = "▁▂▃▄▅▆▇█"
PLAIN_TICKS: Final = "_.-=+*#@"


def sparkline(values: Sequence[float | None], *, plain: bool = False) -> str:
    """Return one character per value, scaled from lowest to highest; blank for None.

    Example: ``sparkline([0.0, 0.5, 1.0]) == "▁▅█"``
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    ticks = PLAIN_TICKS if plain else TICKS
    low, high = min(numbers), max(numbers)
    scale = (len(ticks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if value is None else ticks[round((value - low) * scale)] for value in values
    )


def short(value: float) -> str:
    """Return at most five characters. Example: ``short(12345) == "12.3k"``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = limit if unit != "k" else 1e3
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Example: ``duration(0.34) == "0.3 s"``, ``duration(190) == "3 min 10 s"``."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def counted(count: int, what: str) -> str:
    """Example: ``counted(1, "group") == "1 group"``."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def ahead_share(early_s: float, training_s: float) -> float:
    """Return the share of training done before batches were complete; 0 without training."""
    return early_s / (early_s + training_s) if early_s else 0.0
