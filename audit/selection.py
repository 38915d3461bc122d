"""Completion order is a selection: whoever comes last is left out, or trained later.

What comes last is long, or slow. What a group does not wait for is cancelled, most of it, so its
length and reward are not known; what is known is how long it had been under way, at least, and of
those whose record came late, all. What is not in the first parts of a batch is in a later one, or
in a later batch, and all of it is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from dora_pipe.audit.entries import GroupEntry, RequestEntry

QUANTITIES: Final = ("tokens", "reward", "seconds")
"""What siblings are compared by."""

Sum = tuple[str, str, str]
"""Fate or part, quantity, and which sum: of ones, values or squares."""

CONFIDENT: Final = 1.96
"""Standard errors on either side of a mean: 95 % of a normal distribution."""


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean, and half of its interval of 95 % as if every sibling stood for itself."""

    count: int
    value: float | None
    error: float | None
    """None of fewer than two."""


class PartLine(msgspec.Struct, frozen=True, kw_only=True):
    """Trained siblings of batches that were taken in parts, by their part.

    Example: part 1, 512 siblings, 41 ± 2 tokens.
    """

    part: int
    """From 1 on; 0: all of them."""
    siblings: int
    tokens: Mean
    """Sampled ones."""
    reward: Mean
    seconds: Mean
    """From the first placement to the record."""


class SelectionLine(msgspec.Struct, frozen=True, kw_only=True):
    """Siblings of one fate, of training groups that did not, or need not, wait for all.

    Example: ``surplus``, 412 siblings, 7 of them with a record that came late.
    """

    fate: str
    siblings: int
    tokens: Mean
    """Sampled ones, of those with a record."""
    reward: Mean
    """Of those with a record and a valid one."""
    seconds: Mean
    """From the first placement to the record, or until nobody waited: then it is the least."""


def add(sums: Counter[Sum], group: GroupEntry, times: int) -> None:
    """Count the siblings of a group; -1 takes them off."""
    impatient = group.spec.spare or any(entry.left for entry in group.requests.values())
    if group.spec.purpose != "train" or not impatient:
        return
    for entry in group.requests.values():
        fate = entry.left or ("trained" if _is_trained(group, entry) else None)
        if fate is None:
            continue
        _count(sums, fate, group, entry, times)


def add_part(sums: Counter[Sum], group: GroupEntry, times: int) -> None:
    """Count the siblings of a group that was trained in a part; -1 takes them off."""
    for entry in group.requests.values() if group.part else ():
        if _is_trained(group, entry):
            for key in (str(group.part), _ALL):
                _count(sums, key, group, entry, times)


_ALL: Final = "0"


def part_lines(sums: Counter[Sum]) -> tuple[PartLine, ...]:
    """All, then one for each part; none where batches were taken whole."""
    parts = sorted({int(key) for (key, _, _), count in sums.items() if count})
    return tuple(
        PartLine(
            part=part,
            siblings=sums[str(part), "", "count"],
            **{one: _mean(sums, str(part), one) for one in QUANTITIES},
        )
        for part in parts
    )


def _count(
    sums: Counter[Sum], key: str, group: GroupEntry, entry: RequestEntry, times: int
) -> None:
    sums[key, "", "count"] += times
    for quantity, value in _values(group, entry):
        exact = round(value * 1e6)  # What is added in one order is taken off in another.
        sums[key, quantity, "count"] += times
        sums[key, quantity, "sum"] += times * exact
        sums[key, quantity, "squares"] += times * exact * exact


def selection_lines(sums: Counter[Sum]) -> tuple[SelectionLine, ...]:
    """One for each fate; none where groups wait for everybody."""
    return tuple(
        SelectionLine(
            fate=fate,
            siblings=sums[fate, "", "count"],
            **{one: _mean(sums, fate, one) for one in QUANTITIES},
        )
        for fate in ("trained", "surplus", "expired")
        if sums[fate, "", "count"]
    )


def selection_in(rows: Iterable[Mapping[str, Any]]) -> tuple[SelectionLine, ...]:
    """The same from the rows of the catalogue's view `selection`."""
    return tuple(
        SelectionLine(
            fate=row["fate"],
            siblings=row["siblings"],
            **{
                one: Mean(count=row[f"{one}_count"], value=row[one], error=row[f"{one}_error"])
                for one in QUANTITIES
            },
        )
        for row in rows
    )


def _is_trained(group: GroupEntry, entry: RequestEntry) -> bool:
    bound = entry.bound
    return group.fate == "trained" and bound is not None and bound.fact.reward is not None


def _values(group: GroupEntry, entry: RequestEntry) -> Iterator[tuple[str, float]]:
    late = (one for one in group.records if one.fact.trajectory == entry.trajectory)
    logged = entry.bound or next(late, None)
    if logged is not None:
        yield "tokens", logged.fact.tokens
        reward = group.reward_of(logged.fact)
        if reward is not None:
            yield "reward", reward
    ended_ns = entry.left_ns if entry.bound is None else entry.bound.at.now_ns
    if entry.placements:
        yield "seconds", (ended_ns - entry.placements[0].at.now_ns) / 1e9


def _mean(sums: Counter[Sum], fate: str, quantity: str) -> Mean:
    count = sums[fate, quantity, "count"]
    if not count:
        return Mean(count=0, value=None, error=None)
    total, squares = sums[fate, quantity, "sum"], sums[fate, quantity, "squares"]
    error = None
    if count > 1:
        variance = (squares * count - total * total) / (count * (count - 1))
        error = CONFIDENT * math.sqrt(variance / count) / 1e6
    return Mean(count=count, value=total / count / 1e6, error=error)
