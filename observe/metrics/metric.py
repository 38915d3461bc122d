"""What a metric is, and the short ways in which the tables of metrics say one; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dora_pipe.observe.run_stats import Histogram, RunStats

Kind = Literal["gauge", "counter", "histogram"]
Value = float | int | Histogram
Sample = tuple[tuple[str, ...], Value]
"""(values of the labels, in their order; value)."""

PREFIX = "dora_pipe_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of one run. Every sample has the label `run` beside those named here."""

    name: str
    """Without `PREFIX`. Ends in the unit, and a counter in `_total`."""
    kind: Kind
    meaning: str
    source: str
    """Which records say it."""
    read: Callable[[RunStats], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        """The name as Prometheus has it."""
        return PREFIX + self.name


def one(read: Callable[[RunStats], Value | None]) -> Callable[[RunStats], Iterator[Sample]]:
    """A metric without labels; none where the value is not known."""

    def samples(stats: RunStats) -> Iterator[Sample]:
        value = read(stats)
        if value is not None:
            yield (), value

    return samples


def each(read: Callable[[RunStats], Mapping[Any, Value]]) -> Callable[[RunStats], Iterator[Sample]]:
    """A metric with one sample per key of a map; a tuple as the key is several labels."""

    def samples(stats: RunStats) -> Iterator[Sample]:
        for key, value in sorted(read(stats).items()):
            values = key if isinstance(key, tuple) else (key,)
            yield tuple(map(str, values)), value

    return samples


def gauge(
    name: str, meaning: str, source: str, read: Callable[[RunStats], Iterable[Sample]], *labels: str
) -> Metric:
    """What is so at a moment."""
    return Metric(name=name, kind="gauge", meaning=meaning, source=source, read=read, labels=labels)


def counter(
    name: str, meaning: str, source: str, read: Callable[[RunStats], Iterable[Sample]], *labels: str
) -> Metric:
    """What only grows."""
    return Metric(
        name=name, kind="counter", meaning=meaning, source=source, read=read, labels=labels
    )


def histogram(
    name: str, meaning: str, source: str, read: Callable[[RunStats], Histogram]
) -> Metric:
    """What was observed many times."""
    return Metric(name=name, kind="histogram", meaning=meaning, source=source, read=one(read))
