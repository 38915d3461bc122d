"""Lists of steps, groups, trajectories and decisions, filtered and in pages; it decides the order.

A list is ``{"total", "offset", "columns", "rows"}``: rows are arrays, so that many of them are
short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from dora_pipe.errors import UsageError
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.ui.asking import Question
from dora_pipe.ui.book import Book
from dora_pipe.ui.figures import seconds, short
from dora_pipe.ui.rows import DecisionRow, GroupRow, StepRow, TrajectoryRow

ROWS: Final = 50
"""Of a page that does not say how many."""
ROWS_MAX: Final = 500

STEP_COLUMNS: Final = (
    "step",
    "reward",
    "invalid",
    "staleness",
    "staleness_max",
    "groups",
    "tokens",
    "waited_s",
    "compute_s",
    "loss",
    "committed_s",
)
GROUP_COLUMNS: Final = (
    "group",
    "version",
    "deadline",
    "fate",
    "step",
    "staleness",
    "reward",
    "tokens",
    "siblings",
    "dispatched_s",
    "why",
)
TRAJECTORY_COLUMNS: Final = (
    "trajectory",
    "fate",
    "step",
    "version",
    "staleness",
    "reward",
    "tokens",
    "finish",
    "worker",
    "attempts",
    "logged_s",
)
DECISION_COLUMNS: Final = ("at_s", "round", "kind", "subject", "reason")

Row = list[Any]


def steps(book: Book, asked: Question) -> dict[str, Any]:
    """Committed steps, newest first."""
    return _page(STEP_COLUMNS, [step_row(book, one) for one in reversed(book.steps)], asked)


def step_row(book: Book, one: StepRow) -> Row:
    """A step as `STEP_COLUMNS` say."""
    stale = one.staleness
    return [
        one.step,
        short(one.reward_sum / one.rewards) if one.rewards else None,
        one.invalid,
        short(sum(stale) / len(stale)) if stale else None,
        max(stale, default=None),
        len(one.groups),
        sum(one.tokens),
        short(one.waited_s),
        short(one.compute_s),
        short(one.figures.get("loss")),
        seconds(one.committed_ns, book.first_ns),
    ]


def groups(book: Book, asked: Question) -> dict[str, Any]:
    """Groups that fit `q`, `fate`, `purpose`, `version` and `step`, newest first."""
    fits = _fitting(asked)
    found = [one for one in reversed(book.groups.values()) if fits(one)]
    return _page(GROUP_COLUMNS, found, asked, lambda one: group_row(book, one))


def group_row(book: Book, one: GroupRow) -> Row:
    """A group as `GROUP_COLUMNS` say."""
    rewards = [row.reward for row in one.trajectories if row.reward is not None]
    return [
        one.group,
        one.version,
        one.deadline,
        one.fate,
        one.step if one.step >= 0 else None,
        staleness(one),
        short(sum(rewards) / len(rewards)) if rewards else None,
        sum(row.tokens for row in one.trajectories),
        len(one.trajectories),
        seconds(one.dispatched_ns, book.first_ns),
        one.why,
    ]


def staleness(group: GroupRow) -> int | None:
    """Of a trained group."""
    return staleness_of(group.step, group.version) if group.fate == "trained" else None


def trajectories(book: Book, asked: Question) -> dict[str, Any]:
    """Trajectories whose groups fit as in `groups`, and that fit `worker`, `finish`, `valid` (yes
    or no), `reward_min`, `reward_max`, `tokens_min`, `tokens_max`, `attempts_min`.

    Sorted by `sort`, a column; `-tokens` is descending. Newest dispatched first without.
    """
    found = list(_wanted(book, asked))
    order = asked.text("sort")
    if order:
        place = _column(order.removeprefix("-"))
        rows = [trajectory_row(book, group, row) for group, row in found]
        some = [row for row in rows if row[place] is not None]
        some.sort(key=lambda row: row[place], reverse=order.startswith("-"))
        rows = some + [row for row in rows if row[place] is None]
        return _page(TRAJECTORY_COLUMNS, rows, asked)
    return _page(TRAJECTORY_COLUMNS, found, asked, lambda one: trajectory_row(book, *one))


def _column(name: str) -> int:
    if name not in TRAJECTORY_COLUMNS:
        raise UsageError(f"no column {name!r}", hint=f"there are: {', '.join(TRAJECTORY_COLUMNS)}")
    return TRAJECTORY_COLUMNS.index(name)


def _wanted(book: Book, asked: Question) -> Iterator[tuple[GroupRow, TrajectoryRow]]:
    fits = _fitting(asked)
    worker, finish, valid = asked.text("worker"), asked.text("finish"), asked.text("valid")
    low, high = asked.number("reward_min"), asked.number("reward_max")
    short_, long = asked.whole("tokens_min"), asked.whole("tokens_max", 1 << 62)
    attempts = asked.whole("attempts_min")
    q = asked.text("q")
    sibling = q if "-" in q else ""
    for group in reversed(book.groups.values()):
        if not fits(group):
            continue
        for row in group.trajectories:
            if sibling and sibling not in row.trajectory:
                continue
            if (worker and row.worker != worker) or (finish and row.finish != finish):
                continue
            if valid and (row.reward is not None) != (valid == "yes"):
                continue
            if low is not None and (row.reward is None or row.reward < low):
                continue
            if high is not None and (row.reward is None or row.reward > high):
                continue
            if short_ <= row.tokens <= long and len(row.placements) >= attempts:
                yield group, row


def trajectory_row(book: Book, group: GroupRow, row: TrajectoryRow) -> Row:
    """A trajectory as `TRAJECTORY_COLUMNS` say."""
    return [
        row.trajectory,
        group.fate,
        group.step if group.step >= 0 else None,
        group.version,
        staleness(group),
        row.reward,
        row.tokens if row.offset >= 0 else None,
        row.finish or None,
        row.worker or None,
        len(row.placements),
        seconds(row.logged_ns, book.first_ns),
    ]


def decisions(book: Book, asked: Question) -> dict[str, Any]:
    """Decisions that fit `kind` and `q` (in subject or reason), newest first."""
    kind, q = asked.text("kind"), asked.text("q").lower()
    found = [
        one
        for one in reversed(book.decisions)
        if (not kind or one.kind == kind)
        and (not q or q in one.subject.lower() or q in one.reason.lower())
    ]
    listed = _page(DECISION_COLUMNS, found, asked, lambda one: decision_row(book, one))
    return {**listed, "counts": dict(sorted(book.counts.items())), "kept": len(book.decisions)}


def decision_row(book: Book, one: DecisionRow) -> Row:
    """A decision as `DECISION_COLUMNS` say."""
    round_ = one.round if one.round >= 0 else None
    return [seconds(one.at_ns, book.first_ns), round_, one.kind, one.subject, one.reason]


def _fitting(asked: Question) -> Callable[[GroupRow], bool]:
    """Whether a group fits what is said of groups."""
    q, fate, purpose = asked.text("q"), asked.text("fate"), asked.text("purpose")
    version, step = asked.whole("version", -1), asked.whole("step", -1)
    stale = asked.whole("staleness", -1)
    name = q.partition("-")[0]

    def fits(one: GroupRow) -> bool:
        return (
            (not name or name in one.group)
            and (not fate or one.fate == fate)
            and (not purpose or one.purpose == purpose)
            and version in (-1, one.version)
            and step in (-1, one.step)
            and stale in (-1, staleness(one))
        )

    return fits


def _page(
    columns: Iterable[str],
    found: list[Any],
    asked: Question,
    row: Callable[[Any], Row] = lambda one: one,
) -> dict[str, Any]:
    limit = min(max(1, asked.whole("limit", ROWS)), ROWS_MAX)
    offset = max(0, asked.whole("offset"))
    return {
        "total": len(found),
        "offset": offset,
        "columns": list(columns),
        "rows": [row(one) for one in found[offset : offset + limit]],
    }
