"""Filtered, paged lists of steps, groups, trajectories and decisions.

A list is ``{"total", "offset", "columns", "numbers", "rows"}``: rows are arrays, `numbers` the
columns with bounds. Values are bound to queries, never written into SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.tables import EventRow, GroupRow, StepRow, TrajectoryRow, columns_of
from dora_pipe.ledger.tables import Row as TableRow
from dora_pipe.observe.web.view import Query, RunView, short

ROWS: Final = 50
ROWS_MAX: Final = 500

Row = list[Any]

Condition = tuple[str, Any]
"""SQL with one placeholder, and its value."""

_ROWS: Final[dict[str, type[TableRow]]] = {
    "s": StepRow,
    "g": GroupRow,
    "t": TrajectoryRow,
    "e": EventRow,
}

_TYPES: Final = {
    f"{alias}.{one.name}": one.sql for alias, row in _ROWS.items() for one in columns_of(row)
}

_BOUNDS: Final = {"": "=", "_min": ">=", "_max": "<="}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Columns of a list as SQL by name. Moments (`..._ns`) become seconds of the run."""

    columns: Mapping[str, str]
    source: str
    order: str
    short: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    @property
    def numbers(self) -> list[str]:
        return [
            name for name, sql in self.columns.items() if _TYPES.get(sql, "VARCHAR") != "VARCHAR"
        ]

    def conditions(self, view: RunView, asked: Query) -> list[Condition]:
        """Return conditions for `NAME`, `NAME_min` and `NAME_max`; bounds exclude missing values.
        Raises UsageError for an invalid number."""
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
        """Return matching rows sorted by `order` (a column; `-` for descending), missing values
        last. Raises UsageError for an unknown column."""
        where, values = _where(conditions)
        by = f"{self._order(order)}, {self.order}" if order else self.order
        rows = view.rows(
            f"select {', '.join(self.columns.values())} from {self.source} {where} "
            f"order by {by} limit ? offset ?",
            *values,
            limit,
            offset,
        )
        return [self._shown(view, row) for row in rows]

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

    def one(self, view: RunView, key: str, value: Any) -> dict[str, Any] | None:
        """Return the row with this key as a mapping, if any."""
        rows = self.rows(view, [(f"{key} = ?", value)])
        return dict(zip(self.columns, rows[0], strict=True)) if rows else None

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
        **{name: f"s.{name}" for name in ("loss", "grad_norm")},
        "staleness": "s.staleness_mean",
        **{name: f"s.{name}" for name in ("groups", "tokens")},
        **{name: f"s.{name}" for name in ("seconds", "waited_s", "compute_s")},
    },
    source="steps s",
    order="s.step desc",
    short=frozenset(
        {"reward", "staleness", "grad_norm", "loss"} | {"seconds", "waited_s", "compute_s"}
    ),
)

GROUPS: Final = Listing(
    columns={
        "group": "g.group_id",
        "reward": "g.reward",
        "outcome": "g.outcome",
        "tokens": "g.tokens",
        "trajectories": "g.size",
        **{name: f"g.{name}" for name in ("version", "step", "staleness", "deadline")},
        "dispatched_s": "g.dispatched_ns",
        "end_reason": "g.end_reason",
    },
    source="groups g",
    order="g.dispatched_ns desc, g.group_id desc",
    short=frozenset({"reward"}),
)

TRAJECTORIES: Final = Listing(
    columns={
        "trajectory": "t.trajectory_id",
        **{name: f"t.{name}" for name in ("reward", "tokens")},
        "outcome": "coalesce(t.outcome, g.outcome)",
        "finish": "t.finish",
        **{name: f"g.{name}" for name in ("version", "step", "staleness")},
        **{name: f"t.{name}" for name in ("worker", "attempts")},
        "error": "t.error_class",
        "logged_s": "t.logged_ns",
    },
    source="trajectories t join groups g using (group_id)",
    order=f"{GROUPS.order}, t.sample",
    short=frozenset({"reward"}),
)

DECISIONS: Final = Listing(
    columns={
        "at_s": "e.at_ns",
        **{name: f"e.{name}" for name in ("kind", "subject", "reason", "round")},
    },
    source="events e",
    order="e.rowid desc",
)


def steps(view: RunView, asked: Query) -> dict[str, Any]:
    return STEPS.page(view, asked, STEPS.conditions(view, asked))


def groups(view: RunView, asked: Query) -> dict[str, Any]:
    """Return groups that match the column filters, `q` and `purpose`."""
    conditions: list[Condition] = [
        ("contains(g.group_id, ?)", asked.text("q").partition("-")[0]),
        ("g.purpose = ?", asked.text("purpose")),
    ]
    return GROUPS.page(view, asked, GROUPS.conditions(view, asked) + _given(conditions))


def trajectories(view: RunView, asked: Query) -> dict[str, Any]:
    """Return trajectories that match the column filters, `q`, `purpose` and `valid` (yes or no)."""
    valid = asked.text("valid")
    conditions: list[Condition] = [
        ("contains(t.trajectory_id, ?)", asked.text("q")),
        ("g.purpose = ?", asked.text("purpose")),
        ("(t.reward is not null) = ?", valid == "yes" if valid else None),
    ]
    return TRAJECTORIES.page(view, asked, TRAJECTORIES.conditions(view, asked) + _given(conditions))


def decisions(view: RunView, asked: Query) -> dict[str, Any]:
    """Return decisions that match the column filters and `q` (subject or reason)."""
    sought = "contains(lower(concat_ws(chr(10), subject, reason)), ?)"
    conditions = DECISIONS.conditions(view, asked) + _given([(sought, asked.text("q").lower())])
    listed = DECISIONS.page(view, asked, conditions)
    return {**listed, "counts": decision_counts(view), "kept": DECISIONS.count(view)}


def decision_counts(view: RunView) -> dict[str, int]:
    """Count decisions and events by kind: groups as `dispatch`, attempts as `schedule`."""
    counts = view.rows(
        """select kind, count(*) from events group by kind
           union all select 'dispatch', count(*) from groups
           union all select 'schedule', count(*) from attempts"""
    )
    return {kind: count for kind, count in sorted(counts) if count}


def _given(conditions: Sequence[Condition]) -> list[Condition]:
    return [condition for condition in conditions if condition[1] not in (None, "")]


def _where(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    if not conditions:
        return "", []
    return "where " + " and ".join(sql for sql, _ in conditions), [value for _, value in conditions]
