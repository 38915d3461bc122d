"""Lists of steps, groups, trajectories and decisions, filtered and in pages; it decides the order.

A list is ``{"total", "offset", "columns", "rows"}``: rows are arrays, so that many of them are
short. What is asked for is bound to a query, never written into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web.figures import short
from dora_pipe.observe.web.query import Query
from dora_pipe.observe.web.view import RunView

ROWS: Final = 50
"""Of a page that does not say how many."""
ROWS_MAX: Final = 500

Row = list[Any]

Condition = tuple[str, Any]
"""SQL with one mark, and the value that is bound to it."""

_SECONDS: Final = frozenset({"committed_s", "dispatched_s", "logged_s", "at_s"})
"""Columns that are moments: ns in the tables, seconds of the run on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What stands in the columns of a list: SQL by name."""

    columns: Mapping[str, str]
    source: str
    order: str
    short: frozenset[str] = frozenset()
    """Columns of which a few digits are enough."""

    @property
    def names(self) -> list[str]:
        """Of the columns, in order."""
        return list(self.columns)

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
        """The page of a list that is asked for."""
        offset = max(0, asked.whole("offset"))
        limit = min(max(1, asked.whole("limit", ROWS)), ROWS_MAX)
        return {
            "total": self.count(view, conditions),
            "offset": offset,
            "columns": self.names,
            "rows": self.rows(
                view, conditions, order=asked.text("sort"), limit=limit, offset=offset
            ),
        }

    def of(self, view: RunView, key: str, value: Any) -> list[Row]:
        """The rows in which a key has a value."""
        columns = ", ".join(self.columns.values())
        found = view.keyed(columns, self.source, key, value, order=self.order)
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
        out: Row = []
        for name, value in zip(self.columns, row, strict=True):
            if name in _SECONDS:
                out.append(view.seconds(value))
            else:
                out.append(short(value) if name in self.short else value)
        return out


STEPS: Final = Listing(
    columns={
        "step": "step",
        "reward": "reward",
        "invalid": "trajectories - valid",
        "staleness": "staleness_mean",
        "staleness_max": "staleness_max",
        "groups": "groups",
        "tokens": "tokens",
        "waited_s": "waited_s",
        "compute_s": "compute_s",
        "loss": "loss",
        "committed_s": "committed_ns",
    },
    source="steps",
    order="step desc",
    short=frozenset({"reward", "staleness", "waited_s", "compute_s", "loss"}),
)
"""Newest first, as the other lists."""

GROUPS: Final = Listing(
    columns={
        "group": "g.group_id",
        "version": "g.version",
        "deadline": "g.deadline",
        "fate": "g.fate",
        "step": "g.step",
        "staleness": "g.staleness",
        "reward": "g.reward",
        "tokens": "g.tokens",
        "siblings": "g.size",
        "dispatched_s": "g.dispatched_ns",
        "why": "g.why",
    },
    source="groups g",
    order="g.dispatched_ns desc, g.group_id desc",
    short=frozenset({"reward"}),
)

TRAJECTORIES: Final = Listing(
    columns={
        "trajectory": "t.trajectory_id",
        "fate": "g.fate",
        "step": "g.step",
        "version": "g.version",
        "staleness": "g.staleness",
        "reward": "t.reward",
        "tokens": "t.tokens",
        "finish": "t.finish",
        "worker": "t.worker",
        "attempts": "t.attempts",
        "logged_s": "t.logged_ns",
    },
    source="trajectories t join groups g using (group_id)",
    order=f"{GROUPS.order}, t.sibling",
)

DECISIONS: Final = Listing(
    columns={
        "at_s": "at_ns",
        "round": "round",
        "kind": "kind",
        "subject": "subject",
        "reason": "reason",
    },
    source="events",
    order="rowid desc",
)


def steps(view: RunView, asked: Query) -> dict[str, Any]:
    """Committed steps."""
    return STEPS.page(view, asked, [])


def groups(view: RunView, asked: Query) -> dict[str, Any]:
    """Groups that fit `q`, `fate`, `purpose`, `version`, `step` and `staleness`."""
    return GROUPS.page(view, asked, _of_groups(asked))


def trajectories(view: RunView, asked: Query) -> dict[str, Any]:
    """Trajectories whose groups fit as in `groups`, and that fit `worker`, `finish`, `valid` (yes
    or no), `reward_min`, `reward_max`, `tokens_min`, `tokens_max`, `attempts_min`; a bound is for
    those that have a value.
    """
    conditions = _of_groups(asked)
    q = asked.text("q")
    valid = asked.text("valid")
    wanted: list[Condition] = [
        ("contains(t.trajectory_id, ?)", q if "-" in q else None),
        ("t.worker = ?", asked.text("worker")),
        ("t.finish = ?", asked.text("finish")),
        ("(t.reward is not null) = ?", valid == "yes" if valid else None),
        ("t.reward >= ?", asked.number("reward_min")),
        ("t.reward <= ?", asked.number("reward_max")),
        ("t.tokens >= ?", _whole(asked, "tokens_min")),
        ("t.tokens <= ?", _whole(asked, "tokens_max")),
        ("t.attempts >= ?", _whole(asked, "attempts_min")),
    ]
    return TRAJECTORIES.page(view, asked, conditions + _given(wanted))


def decisions(view: RunView, asked: Query) -> dict[str, Any]:
    """Decisions that fit `kind` and `q` (in subject or reason)."""
    wanted: list[Condition] = [
        ("kind = ?", asked.text("kind")),
        ("contains(lower(concat_ws(chr(10), subject, reason)), ?)", asked.text("q").lower()),
    ]
    counts = decision_counts(view)
    listed = DECISIONS.page(view, asked, _given(wanted))
    return {**listed, "counts": counts, "kept": DECISIONS.count(view)}


def decision_counts(view: RunView) -> dict[str, int]:
    """Decisions, observations and facts by kind: groups as `dispatch`, attempts as `place`."""
    found = view.rows(
        """select kind, count(*) from events group by kind
           union all select 'dispatch', count(*) from groups
           union all select 'place', count(*) from attempts"""
    )
    return {kind: count for kind, count in sorted(found) if count}


def _of_groups(asked: Query) -> list[Condition]:
    """What is said of groups."""
    return _given(
        [
            ("contains(g.group_id, ?)", asked.text("q").partition("-")[0]),
            ("g.fate = ?", asked.text("fate")),
            ("g.purpose = ?", asked.text("purpose")),
            ("g.version = ?", _whole(asked, "version")),
            ("g.step = ?", _whole(asked, "step")),
            ("g.staleness = ?", _whole(asked, "staleness")),
        ]
    )


def _whole(asked: Query, name: str) -> int | None:
    return asked.whole(name) if asked.text(name) else None


def _given(conditions: Sequence[Condition]) -> list[Condition]:
    """Those that somebody asked for."""
    return [one for one in conditions if one[1] not in (None, "")]


def _where(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    if not conditions:
        return "", []
    return "where " + " and ".join(sql for sql, _ in conditions), [one for _, one in conditions]
