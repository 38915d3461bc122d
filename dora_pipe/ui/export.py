"""The pages as one file that needs nobody: the same scripts, with a sample of the answers inside.

It decides what is in the sample. Sums, charts, steps and decisions are of everything, as far as
they are short; of groups and trajectories those are taken that hang together: the groups of evenly
spaced steps, some that were not trained, and of these groups' siblings some with their tokens. The
file has a limit, and every part of it too.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.errors import ResourceError, UsageError
from dora_pipe.ui import tables
from dora_pipe.ui.asking import Question
from dora_pipe.ui.book import Book
from dora_pipe.ui.desk import Desk
from dora_pipe.ui.figures import spaced
from dora_pipe.ui.rows import GroupRow
from dora_pipe.ui.server import static_files

FILE_BYTES_MAX: Final = 9_500_000

SHARES: Final = {"step": 0.22, "group": 0.22, "version": 0.06, "trajectory": 0.3}
"""Of the file, for pages of one kind, of all runs together."""

STEPS_MAX: Final = 120
"""Steps whose groups are in the file."""
GROUPS_MAX: Final = 8
"""Of such a step."""
OTHERS_MAX: Final = 200
"""Groups that were not trained."""
SIBLINGS_MAX: Final = 2
"""Of a group in the file, with their tokens."""
ROWS_MAX: Final = 6000
"""Of groups, and of trajectories, in the lists."""
DECISIONS_MAX: Final = 4000

MODULES: Final = (
    "dom.js",
    "data.js",
    "charts.js",
    "tokens.js",
    "pages.js",
    "lists.js",
    "overview.js",
    "app.js",
)
"""In an order in which none needs a later one."""

_IMPORT: Final = re.compile(r"^import \{[^}]*\} from \"[^\"]+\";\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=async function|function|const|let|class)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    bytes: int
    pages: int


@dataclass(slots=True)
class _Room:
    """What may still go into the file."""

    left: dict[str, int]
    pages: dict[str, msgspec.Raw] = field(default_factory=dict)

    def put(self, path: str, value: Any) -> None:
        """A page that must be there."""
        self.pages[path] = msgspec.Raw(msgspec.json.encode(value))

    def offer(self, kind: str, path: str, value: Any) -> bool:
        """A page that may be there; whether there was room for it."""
        page = msgspec.json.encode(value)
        if self.left[kind] < len(page):
            return False
        self.left[kind] -= len(page)
        self.pages[path] = msgspec.Raw(page)
        return True


def export_file(desks: Sequence[Desk], path: Path) -> Exported:
    """Write the pages of runs that were read. Raises ResourceError."""
    room = _Room({kind: int(share * FILE_BYTES_MAX) for kind, share in SHARES.items()})
    room.put("runs", {"runs": [desk.ask(Question(path=("run",), fields={})) for desk in desks]})
    for number, desk in enumerate(desks):
        for name in ("run", "overview", "mismatch", "times", "replay"):
            room.put(f"{number}/{name}", desk.ask(Question(path=(name,), fields={})))
        _fill(desk, str(number), room, len(desks))
    page = file_of(msgspec.json.encode({"pages": room.pages}))
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None
    return Exported(bytes=len(page), pages=len(room.pages))


def _fill(desk: Desk, run: str, room: _Room, runs: int) -> None:
    """One run's lists, and pages of single things for as long as there is room."""
    chosen = desk.work(lambda book, _: _chosen(book))
    lists = desk.work(lambda book, _: _lists(book, chosen, ROWS_MAX // runs))
    for name, listed in lists.items():
        room.put(f"{run}/{name}", listed)
    steps = desk.work(lambda book, _: [one.step for one in book.steps])
    of_kind = {
        "step": [str(one) for one in steps],
        "version": [str(one) for one in spaced(range(desk.ask(_RUN)["version"] + 1), 400)],
        "group": [one.group for one in chosen],
        "trajectory": [
            row.trajectory
            for one in chosen
            for row in sorted(one.trajectories, key=lambda row: -row.tokens)[:SIBLINGS_MAX]
        ],
    }
    for kind, names in of_kind.items():
        _offer(desk, run, kind, names, room, runs)


_RUN: Final = Question(path=("run",), fields={})


def _offer(desk: Desk, run: str, kind: str, names: list[str], room: _Room, runs: int) -> None:
    """As many evenly spaced pages of a kind as there is room for, by the size of the first few."""

    def ask(name: str) -> dict[str, Any]:
        return desk.ask(Question(path=(kind, name), fields={}))

    probe = [len(msgspec.json.encode(ask(name))) for name in spaced(names, 5)]
    if not probe:
        return
    fitting = int(room.left[kind] / runs / (sum(probe) / len(probe)))
    for name in spaced(names, max(1, fitting)):
        try:
            if not room.offer(kind, f"{run}/{kind}/{name}", ask(name)):
                return
        except UsageError:
            continue  # a step that was told of and is not there: its pages are not either


def _chosen(book: Book) -> list[GroupRow]:
    """Groups that hang together: of evenly spaced steps, and some that were not trained."""
    found: dict[str, GroupRow] = {}
    for step in spaced(book.steps, STEPS_MAX):
        for name in step.groups[:GROUPS_MAX]:
            if name in book.groups:
                found[name] = book.groups[name]
    others = [one for one in book.groups.values() if one.fate != "trained"]
    found |= {one.group: one for one in spaced(others, OTHERS_MAX)}
    return sorted(found.values(), key=lambda one: (one.dispatched_ns, one.group), reverse=True)


def _lists(book: Book, chosen: list[GroupRow], rows_max: int) -> dict[str, Any]:
    """The lists with all rows that are in the file; `of` says how many there are."""
    groups = _with(spaced(list(book.groups.values()), rows_max), chosen)
    rows = [(one, row) for one in groups for row in one.trajectories]
    some = {row.trajectory: (group, row) for group, row in spaced(rows, rows_max)}
    some |= {row.trajectory: (one, row) for one in chosen for row in one.trajectories}
    ordered = sorted(some.values(), key=lambda pair: (-pair[0].dispatched_ns, pair[1].trajectory))
    newest = list(reversed(book.decisions))[:DECISIONS_MAX]
    return {
        "steps": _listed(
            tables.STEP_COLUMNS,
            [tables.step_row(book, one) for one in reversed(book.steps)],
            len(book.steps),
        ),
        "groups": _listed(
            tables.GROUP_COLUMNS, [tables.group_row(book, one) for one in groups], len(book.groups)
        ),
        "trajectories": _listed(
            tables.TRAJECTORY_COLUMNS,
            [tables.trajectory_row(book, *pair) for pair in ordered],
            len(book.trajectories),
        ),
        "decisions": {
            **_listed(
                tables.DECISION_COLUMNS,
                [tables.decision_row(book, one) for one in newest],
                len(book.decisions),
            ),
            "counts": dict(sorted(book.counts.items())),
        },
    }


def _with(some: list[GroupRow], chosen: list[GroupRow]) -> list[GroupRow]:
    """Both, newest first."""
    both = {one.group: one for one in (*some, *chosen)}
    return sorted(both.values(), key=lambda one: (-one.dispatched_ns, one.group))


def _listed(columns: Sequence[str], rows: list[Any], of: int) -> dict[str, Any]:
    return {
        "total": len(rows),
        "offset": 0,
        "columns": list(columns),
        "rows": rows,
        "kept": len(rows),
        "of": of,
    }


def file_of(data: bytes) -> bytes:
    """The page with its script, its style and these answers inside; nothing else is allowed."""
    static = static_files()
    script, style = joined(static), static["style.css"].decode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    inside = data.replace(b"<", b"\\u003c")
    page = static["index.html"].decode()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}')
    page = page.replace(
        '<link rel="stylesheet" href="/static/style.css">', f"<style>{style}</style>"
    )
    page = page.replace('<script type="module" src="/static/app.js"></script>\n', "")
    head, _, tail = page.partition("</body>")
    scripts = (
        b'<script type="application/json" id="data">',
        inside,
        b"</script>\n",
        f'<script type="module">{script}</script>\n'.encode(),
    )
    return b"".join((head.encode(), *scripts, b"</body>", tail.encode()))


def joined(static: dict[str, bytes]) -> str:
    """All modules as one script. Example: `export function h` becomes `function h`."""
    return "\n".join(_plain(static[name].decode()) for name in MODULES)


def _plain(module: str) -> str:
    return _EXPORT.sub("", _IMPORT.sub("", module))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
