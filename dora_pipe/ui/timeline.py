"""Workers over time: which version each hosted, and how full it was; it decides how fine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dora_pipe.ui.book import Book
from dora_pipe.ui.course import FIRST_NS
from dora_pipe.ui.figures import seconds, short
from dora_pipe.ui.rows import Stay, WorkerRow

PIECES_MAX: Final = 4000
"""Stays on one time line, of all workers together."""

COMMITS_MAX: Final = 200
"""Commits that are marked below a time line, evenly spaced."""


def timeline(book: Book, from_s: float | None = None, until_s: float | None = None) -> Any:
    """A row per worker's name, with its stays in the window: [from, ready, until, version].

    Seconds of the run. Where there are too many, those that are shorter than what can be seen are
    taken together as one with version -1.
    """
    last_s = (book.last_ns - book.first_ns) / 1e9
    low, high = from_s or 0.0, last_s if until_s is None else until_s
    names: dict[str, list[WorkerRow]] = {}
    for worker in book.workers.values():
        names.setdefault(worker.worker, []).append(worker)
    per_row = PIECES_MAX // max(1, len(names))
    rows = []
    for name in sorted(names):
        pieces = [one for worker in names[name] for one in _pieces(book, worker, low, high)]
        gone = [
            [seconds(one.gone_ns, book.first_ns), one.gone_why]
            for one in names[name]
            if one.gone_ns
        ]
        joined = [seconds(one.joined_ns, book.first_ns) for one in names[name]]
        rows.append(
            {
                "worker": name,
                "pieces": merged(pieces, per_row, (high - low) / max(1, per_row)),
                "joined": joined,
                "gone": gone,
            }
        )
    commits = [[one.step, seconds(one.committed_ns, book.first_ns)] for one in book.steps]
    seen = [one for one in commits if one[1] is not None and low <= one[1] <= high]
    every = -(-len(seen) // COMMITS_MAX) or 1
    return {"from": low, "until": high, "rows": rows, "commits": seen[::every]}


def merged(pieces: list[list[float]], most: int, narrow_s: float) -> list[list[float]]:
    """The same pieces; of too many, neighbours narrower together than a width become version -1.

    At most twice `most`, where the width is the window's share of one of them.
    """
    if len(pieces) <= most:
        return pieces
    out: list[list[float]] = []
    for piece in pieces:
        if out and piece[2] - out[-1][0] < narrow_s:
            out[-1][2], out[-1][3] = piece[2], -1
        else:
            out.append(list(piece))
    return out


def _pieces(book: Book, worker: WorkerRow, low: float, high: float) -> list[list[float]]:
    """[from, ready, until, version] of every stay that reaches into the window."""
    end_ns = worker.gone_ns or book.last_ns
    found: list[list[float]] = []
    stays: Sequence[Stay] = worker.stays
    for place, stay in enumerate(stays):
        until_ns = stays[place + 1].from_ns if place + 1 < len(stays) else end_ns
        marks = [(at - book.first_ns) / 1e9 for at in (stay.from_ns, stay.ready_ns, until_ns)]
        if marks[2] < low or marks[0] > high or marks[2] <= marks[0]:
            continue
        found.append([*(round(min(max(one, low), high), 3) for one in marks), stay.version])
    return found


def utilisation(book: Book) -> dict[str, Any]:
    """Per slice of the run: share of slots in use of all workers, of the least and the most used
    one, and sampled tokens per second.

    In use is a slot from the placement of a request until its trajectory is logged; requests that
    a worker holds ahead of its slots count for none.
    """
    workers = list(book.workers.values())
    for worker in workers:
        if not worker.gone_ns:
            worker.filling.until(book.last_ns)
    courses = [one.filling for one in workers]
    width_ns = max((one.there.width_ns for one in courses), default=FIRST_NS)
    width_ns = max(width_ns, book.tokens_course.width_ns)
    full = [one.course.widened(width_ns) for one in courses]
    there = [one.there.widened(width_ns) for one in courses]
    tokens = book.tokens_course.widened(width_ns)
    count = max(map(len, [*there, tokens]), default=0)
    out: dict[str, list[Any]] = {name: [] for name in ("at", "mean", "low", "high", "tokens_per_s")}
    for place in range(count):
        pairs = [
            (used[place], known[place])
            for used, known in zip(full, there, strict=True)
            if place < len(known) and known[place] > 0
        ]
        whole = sum(known for _, known in pairs)
        shares = [used / known for used, known in pairs]
        out["at"].append(round((place + 0.5) * width_ns / 1e9, 3))
        out["mean"].append(short(sum(used for used, _ in pairs) / whole) if whole else None)
        out["low"].append(short(min(shares, default=None)))
        out["high"].append(short(max(shares, default=None)))
        rate = tokens[place] * 1e9 / width_ns if place < len(tokens) else 0.0
        out["tokens_per_s"].append(short(rate))
    return out
