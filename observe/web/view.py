"""What a page asks for, as it stands in an address, and a run's tables at one moment.

It decides which addresses are too long or no number, and what of a long series is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.database import Catalogue

T = TypeVar("T")

TEXT_MAX: Final = 200
"""Characters of one value."""

FIELDS_MAX: Final = 32

HIDDEN: Final = "(hidden)"
"""In place of a text that is not to be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Example: ``parse_query("/api/0/trajectories?worker=w1&limit=50")``."""

    path: tuple[str, ...]
    fields: Mapping[str, str]

    def text(self, name: str) -> str:
        """A value; empty without one. Raises UsageError for one that is too long."""
        value = self.fields.get(name, "").strip()
        if len(value) > TEXT_MAX:
            raise UsageError(f"{name} has {len(value)} characters, at most {TEXT_MAX} are read")
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """A whole number. Raises UsageError."""
        found = self.text(name)
        if not found:
            return default
        try:
            return int(found)
        except ValueError:
            raise UsageError(f"{name}={found} is no whole number") from None

    def number(self, name: str) -> float | None:
        """A number; None without one. Raises UsageError."""
        found = self.text(name)
        try:
            return float(found) if found else None
        except ValueError:
            raise UsageError(f"{name}={found} is no number") from None


def parse_query(address: str) -> Query:
    """A path with its fields. Raises UsageError for one that has too many."""
    parts = urlsplit(address)
    path = tuple(unquote(one) for one in parts.path.split("/") if one)
    try:
        fields = dict(parse_qsl(parts.query, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Query(path=path, fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Example: ``view_of(catalogue, "demo").rows("select step from steps where step > ?", 3)``."""

    catalogue: Catalogue
    run: str
    first_ns: int
    """The first moment that a record names; 0 before there is one."""
    last_ns: int
    finished: bool
    read: float
    """The share of the log that the tables have, 0 to 1."""
    revision: int
    """Changes whenever the tables do."""
    _sampled: dict[int, int] = field(default_factory=dict, compare=False)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query; `values` are bound to its marks."""
        return self.catalogue.query(sql, values)

    def records(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a query by the names of their columns."""
        return self.catalogue.records(sql, values)

    def value(self, sql: str, *values: Any) -> Any:
        """The one value of a query; None where it has no row."""
        found = self.catalogue.one(sql, values)
        return None if found is None else found[0]

    def seconds(self, at_ns: int | None) -> float | None:
        """A moment in seconds of the run."""
        return seconds(at_ns, self.first_ns)

    @property
    def version(self) -> int:
        """The newest version; -1 before there is one."""
        newest = self.value("select max(version) from versions")
        return -1 if newest is None else int(newest)

    def sampled_from(self, version: int) -> int:
        """Training groups that a version sampled; counted once, for all versions."""
        if not self._sampled:
            sql = "select version, count(*) from groups where purpose = 'train' group by version"
            self._sampled.update(self.rows(sql))
        return self._sampled.get(version, 0)

    def steps(self) -> Sequence[tuple[int, str]]:
        """Committed steps in order, with the sha256 of their contributions."""
        found = self.rows("select step, contributions from steps order by step")
        return [(int(step), str(digest)) for step, digest in found]


MARKS_MAX: Final = 200
"""Changes and stops on a page, the newest."""


def marks_of(catalogue: Catalogue, first_ns: int) -> list[dict[str, Any]]:
    """Changed settings, stops and lost roles, as every chart by step or time draws them."""
    found = catalogue.query(
        "select step, at_ns, words from marks order by rowid desc limit ?", [MARKS_MAX]
    )
    return [
        {"step": step, "at": seconds(at_ns, first_ns), "words": f"step {step}: {words}"}
        for step, at_ns, words in reversed(found)
    ]


def view_of(catalogue: Catalogue, run: str, *, read: float = 1.0, revision: int = 0) -> RunView:
    """What the tables say of the whole run."""
    found = catalogue.one("select first_ns, last_ns, stopped from runs")
    first_ns, last_ns, stopped = found or (0, 0, False)
    return RunView(
        catalogue=catalogue,
        run=run,
        first_ns=first_ns,
        last_ns=last_ns,
        finished=stopped,
        read=read,
        revision=revision,
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share lies, by nearest rank; None of nothing.

    Example: ``quantile([1, 2, 3, 4], .5) == 2``
    """
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def spaced(values: Sequence[T], most: int) -> list[T]:
    """At most so many of these, evenly spaced, the first and the last among them.

    Example: ``spaced([1, 2, 3, 4, 5], 3) == [1, 3, 5]``
    """
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    last = len(values) - 1
    return [values[place * last // (most - 1)] for place in range(most)]


def short(value: float | None, digits: int = 4) -> float | None:
    """A number with so many digits that count, for JSON; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")


def seconds(at_ns: int | None, first_ns: int) -> float | None:
    """A moment in seconds of the run, to the millisecond; None for one that never was, or was
    before: of another run's groups."""
    return round((at_ns - first_ns) / 1e9, 3) if at_ns and at_ns >= first_ns else None
