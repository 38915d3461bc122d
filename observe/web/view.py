"""A run's tables at one moment, as pages ask them; only values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_pipe.catalogue.database import Catalogue
from dora_pipe.observe.web.figures import seconds


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

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row of a query."""
        return self.catalogue.one(sql, values)

    def records(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a query by the names of their columns."""
        return self.catalogue.records(sql, values)

    def keyed(
        self, columns: str, source: str, key: str, value: Any, *, order: str
    ) -> list[tuple[Any, ...]]:
        """The rows in which a key has a value; see `Catalogue.keyed`."""
        return self.catalogue.keyed(columns, source, key, value, order=order)

    def value(self, sql: str, *values: Any) -> Any:
        """The one value of a query; None where it has no row."""
        found = self.row(sql, *values)
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
