"""Parsed queries, and the tables and records of a run at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.database import Catalogue
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]
TEXT_MAX: Final = 200
FIELDS_MAX: Final = 32
HIDDEN: Final = "(hidden)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Example: ``parse_query("/api/0/trajectories?worker=w1&limit=50")``."""

    path: tuple[str, ...]
    fields: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a value, or "". Raises UsageError if it is too long."""
        value = self.fields.get(name, "").strip()
        if len(value) > TEXT_MAX:
            raise UsageError(f"{name} has {len(value)} characters, at most {TEXT_MAX} are read")
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """Return an integer. Raises UsageError."""
        return default if (value := self._parsed(name, int, "an integer")) is None else value

    def number(self, name: str) -> float | None:
        """Return a number, or None. Raises UsageError."""
        return self._parsed(name, float, "a number")

    def _parsed(self, name: str, parse: Callable[[str], T], kind: str) -> T | None:
        text = self.text(name)
        try:
            return parse(text) if text else None
        except ValueError:
            raise UsageError(f"{name} must be {kind}, got {text!r}") from None


def parse_query(address: str) -> Query:
    """Parse a path with its fields. Raises UsageError for too many fields."""
    parts = urlsplit(address)
    path = tuple(unquote(word) for word in parts.path.split("/") if word)
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
    """0 without records."""
    last_ns: int
    finished: bool
    read: float
    """Share of the log that the tables contain, 0 to 1."""
    revision: int

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.catalogue.query(sql, values)

    def records(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return self.catalogue.records(sql, values)

    def value(self, sql: str, *values: Any) -> Any:
        row = self.catalogue.one(sql, values)
        return None if row is None else row[0]

    def seconds(self, at_ns: int | None) -> float | None:
        return seconds(at_ns, self.first_ns)

    @property
    def version(self) -> int:
        newest = self.value("select max(version) from versions")
        return -1 if newest is None else int(newest)

    def sampled_from(self, version: int) -> int:
        """Count the training groups of a version."""
        sql = "select count(*) from groups where purpose = 'train' and version = ?"
        return int(self.value(sql, version))

    def steps(self) -> Sequence[tuple[int, str]]:
        """Return committed steps in order, with the sha256 of their contributions."""
        rows = self.rows("select step, contributions from steps order by step")
        return [(int(step), str(digest)) for step, digest in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """Access to a run's records; used by one thread."""

    bus: Bus
    topics: Topics
    policies: PolicyStore
    decode: Decode | None
    """None without a tokenizer."""
    redact: bool = False
    catalogue: Path | None = None
    """Folder of a finished run's cached tables; None if read-only."""

    def shown(self, text: str | None) -> str | None:
        """Return a task's text unless it is hidden."""
        return HIDDEN if text and self.redact else text

    def contributions(self, sha256: str) -> list[dict[str, Any]]:
        """Return the rows of a step; empty if unreadable."""
        return stored_contributions(self.policies, sha256)


def marks_of(catalogue: Catalogue, first_ns: int) -> list[dict[str, Any]]:
    """Return changed settings, stops and lost roles, for charts."""
    rows = catalogue.query(
        "select step, at_ns, kind, description from marks order by rowid desc limit 200"
    )
    return [
        {"step": step, "at": seconds(at_ns, first_ns), "kind": kind, "text": f"step {step}: {text}"}
        for step, at_ns, kind, text in reversed(rows)
    ]


def view_of(catalogue: Catalogue, run: str, *, read: float = 1.0, revision: int = 0) -> RunView:
    row = catalogue.one("select first_ns, last_ns, stopped from runs")
    first_ns, last_ns, stopped = row or (0, 0, False)
    return RunView(
        catalogue=catalogue,
        run=run,
        first_ns=first_ns,
        last_ns=last_ns,
        finished=stopped,
        read=read,
        revision=revision,
    )


def spaced(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` values, evenly spaced, including first and last.

    Example: ``spaced([1, 2, 3, 4, 5], 3) == [1, 3, 5]``
    """
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[index * last // (most - 1)] for index in range(most)]


def short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def seconds(at_ns: int | None, first_ns: int) -> float | None:
    """Convert a moment to seconds of the run (ms precision); None if missing or before the run."""
    return round((at_ns - first_ns) / 1e9, 3) if at_ns and at_ns >= first_ns else None
