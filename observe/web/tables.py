"""Lists of steps, groups, trajectories and decisions, filtered and in pages; it decides the order.

A list is ``{"total", "offset", "columns", "numbers", "rows"}``: rows are arrays, so that many of
them are short; `numbers` are the columns that can be bounded. What is asked for is bound to a
query, never written into it.

A trajectory's columns are those of the catalogue's table: a new one is listed, filtered and sorted
without a line here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.tables import EventRow, GroupRow, StepRow, TrajectoryRow, columns_of
from dora_pipe.ledger.tables import Row as TableRow
from dora_pipe.observe.web.view import Query, RunView, short

ROWS: Final = 50
"""Of a page that does not say how many."""
ROWS_MAX: Final = 500

Row = list[Any]

Condition = tuple[str, Any]
"""SQL with one mark, and the value that is bound to it."""

_ROWS: Final[dict[str, type[TableRow]]] = {
    "s": StepRow,
    "g": GroupRow,
    "t": TrajectoryRow,
    "e": EventRow,
}

_TYPES: Final = {
    f"{alias}.{one.name}": one.sql for alias, row in _ROWS.items() for one in columns_of(row)
}
"""Of what stands in columns, as the catalogue declares it; anything else is text."""

_BOUNDS: Final = {"": "=", "_min": ">=", "_max": "<="}
"""What is behind a column's name in a field that filters by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What stands in the columns of a list: SQL by name. Moments (`..._ns`) are seconds of the run
    on a page."""

    columns: Mapping[str, str]
    source: str
    order: str
    short: frozenset[str] = frozenset()
    """Columns of which a few digits are enough."""

    @property
    def names(self) -> list[str]:
        """Of the columns, in order."""
        return list(self.columns)

    @property
    def numbers(self) -> list[str]:
        """Names of the columns that have numbers or moments."""
        return [
            name for name, sql in self.columns.items() if _TYPES.get(sql, "VARCHAR") != "VARCHAR"
        ]

    def conditions(self, view: RunView, asked: Query) -> list[Condition]:
        """`NAME`, `NAME_min` and `NAME_max` for every column; a bound is for those that have a
        value. Raises UsageError for what is no number."""
        return [
            (f"{sql} {sign} ?", self._bound(view, asked, name, name + suffix))
            for name, sql in self.columns.items()
            for suffix, sign in _BOUNDS.items()
            if asked.text(name + suffix)
        ]

    def _bound(self, view: RunView, asked: Query, name: str, key: str) -> Any:
        sql = self.columns[name]
        match _TYPES.get(sql, "VARCHAR"):
            case "VARCHAR":
                return asked.text(key)
            case _ if sql.endswith("_ns"):
                return view.first_ns + (asked.number(key) or 0.0) * 1e9
            case "DOUBLE":
                return asked.number(key)
            case _:
                return asked.whole(key)

    def count(self, view: RunView, conditions: Sequence[Condition] = ()) -> int:
        """How many rows fit."""
        where, values = _where(conditions)
        return int(view.value(f"select count(*) from {self.source} {where}", *values))

    def rows(
        self,
        view: RunView,
        conditions: Sequence[Condition] = (),
        *,
        order: str = "",
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Row]:
        """Those that fit, in this order; `order` is a column, `-` before it is descending, and
        what has no value there comes last. Raises UsageError for one that is not there."""
        where, values = _where(conditions)
        by = f"{self._order(order)}, {self.order}" if order else self.order
        found = view.rows(
            f"select {', '.join(self.columns.values())} from {self.source} {where} "
            f"order by {by} limit ? offset ?",
            *values,
            limit,
            offset,
        )
        return [self._shown(view, row) for row in found]

    def page(self, view: RunView, asked: Query, conditions: Sequence[Condition]) -> dict[str, Any]:
        offset = max(0, asked.whole("offset"))
        limit = min(max(1, asked.whole("limit", ROWS)), ROWS_MAX)
        return {
            "total": self.count(view, conditions),
            "offset": offset,
            "columns": self.names,
            "numbers": self.numbers,
            "rows": self.rows(
                view, conditions, order=asked.text("sort"), limit=limit, offset=offset
            ),
        }

    def of(self, view: RunView, key: str, value: Any) -> list[Row]:
        columns = ", ".join(self.columns.values())
        found = view.catalogue.keyed(columns, self.source, key, value, order=self.order)
        return [self._shown(view, row) for row in found]

    def one(self, view: RunView, key: str, value: Any) -> dict[str, Any] | None:
        """The row in which a key has a value, by the names of the columns; None without one."""
        found = self.of(view, key, value)
        return dict(zip(self.columns, found[0], strict=True)) if found else None

    def _order(self, order: str) -> str:
        sql = self.columns.get(order.removeprefix("-"))
        if sql is None:
            hint = f"there are: {', '.join(self.columns)}"
            raise UsageError(f"no column {order.removeprefix('-')!r}", hint=hint)
        return f"{sql} {'desc' if order.startswith('-') else 'asc'} nulls last"

    def _shown(self, view: RunView, row: Sequence[Any]) -> Row:
        return [
            view.seconds(value)
            if sql.endswith("_ns")
            else (short(value) if name in self.short else value)
            for (name, sql), value in zip(self.columns.items(), row, strict=True)
        ]


STEPS: Final = Listing(
    columns={
        "step": "s.step",
        "reward": "s.reward",
        "invalid": "s.trajectories - s.valid",
        "staleness": "s.staleness_mean",
        **{name: f"s.{name}" for name in ("staleness_max", "groups", "tokens")},
        **{name: f"s.{name}" for name in ("waited_s", "compute_s", "loss")},
        "committed_s": "s.committed_ns",
    },
    source="steps s",
    order="s.step desc",
    short=frozenset({"reward", "staleness", "waited_s", "compute_s", "loss"}),
)
"""Newest first, as the other lists."""

GROUPS: Final = Listing(
    columns={
        "group": "g.group_id",
        **{name: f"g.{name}" for name in ("version", "deadline", "fate", "step", "staleness")},
        **{name: f"g.{name}" for name in ("reward", "tokens")},
        "siblings": "g.size",
        "dispatched_s": "g.dispatched_ns",
        "why": "g.why",
    },
    source="groups g",
    order="g.dispatched_ns desc, g.group_id desc",
    short=frozenset({"reward"}),
)

ELSEWHERE: Final = frozenset(
    {"trajectory_id", "group_id", "sibling", "placed_ns", "incarnation", "attempt"}
    | {"partition", "record_offset", "error", "reward_answer", "reward_parts", "group_parts"}
)
"""Columns of a trajectory that its own page has."""

TRAJECTORIES: Final = Listing(
    columns={
        "trajectory": "t.trajectory_id",
        **{name: f"g.{name}" for name in ("fate", "step", "version", "staleness")},
        **{name: f"t.{name}" for name in ("reward", "tokens", "finish", "worker", "attempts")},
        **{
            re.sub("_ns$", "_s", one.name): f"t.{one.name}"
            for one in columns_of(TrajectoryRow)
            if one.name not in ELSEWHERE
        },
    },
    source="trajectories t join groups g using (group_id)",
    order=f"{GROUPS.order}, t.sibling",
)
"""What people look for first, then whatever else the table of trajectories has."""

DECISIONS: Final = Listing(
    columns={
        "at_s": "e.at_ns",
        **{name: f"e.{name}" for name in ("round", "kind", "subject", "reason")},
    },
    source="events e",
    order="e.rowid desc",
)


def steps(view: RunView, asked: Query) -> dict[str, Any]:
    return STEPS.page(view, asked, STEPS.conditions(view, asked))


def groups(view: RunView, asked: Query) -> dict[str, Any]:
    """Groups that fit the columns asked for, `q` and `purpose`."""
    wanted: list[Condition] = [
        ("contains(g.group_id, ?)", asked.text("q").partition("-")[0]),
        ("g.purpose = ?", asked.text("purpose")),
    ]
    return GROUPS.page(view, asked, GROUPS.conditions(view, asked) + _given(wanted))


def trajectories(view: RunView, asked: Query) -> dict[str, Any]:
    """Trajectories that fit the columns asked for, `q`, `purpose` and `valid` (yes or no)."""
    valid = asked.text("valid")
    wanted: list[Condition] = [
        ("contains(t.trajectory_id, ?)", asked.text("q")),
        ("g.purpose = ?", asked.text("purpose")),
        ("(t.reward is not null) = ?", valid == "yes" if valid else None),
    ]
    return TRAJECTORIES.page(view, asked, TRAJECTORIES.conditions(view, asked) + _given(wanted))


def decisions(view: RunView, asked: Query) -> dict[str, Any]:
    """Decisions that fit the columns asked for, and `q` (in subject or reason)."""
    sought = "contains(lower(concat_ws(chr(10), subject, reason)), ?)"
    wanted = DECISIONS.conditions(view, asked) + _given([(sought, asked.text("q").lower())])
    listed = DECISIONS.page(view, asked, wanted)
    return {**listed, "counts": decision_counts(view), "kept": DECISIONS.count(view)}


def decision_counts(view: RunView) -> dict[str, int]:
    """Decisions, observations and facts by kind: groups as `dispatch`, attempts as `place`."""
    found = view.rows(
        """select kind, count(*) from events group by kind
           union all select 'dispatch', count(*) from groups
           union all select 'place', count(*) from attempts"""
    )
    return {kind: count for kind, count in sorted(found) if count}


def _given(conditions: Sequence[Condition]) -> list[Condition]:
    """Those that somebody asked for."""
    return [one for one in conditions if one[1] not in (None, "")]


def _where(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    if not conditions:
        return "", []
    return "where " + " and ".join(sql for sql, _ in conditions), [one for _, one in conditions]
