"""Write the pages as one self-contained file of limited size.

Sums, charts, steps and decisions cover the whole run; groups and trajectories are sampled.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ResourceError
from dora_pipe.observe.web import tables
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import static_files
from dora_pipe.observe.web.view import Query, RunView, spaced

FILE_BYTES_MAX: Final = 9_500_000

SHARES: Final = {"step": 0.22, "group": 0.22, "version": 0.06, "trajectory": 0.3}
"""Share of the file by kind of page."""

STEPS_MAX: Final = 120
GROUPS_MAX: Final = 8
OTHERS_MAX: Final = 200
SAMPLES_MAX: Final = 2
ROWS_MAX: Final = 6000
DECISIONS_MAX: Final = 4000
VERSIONS_MAX: Final = 400

MODULES: Final = (
    *("dom.js", "data.js", "charts.js", "contexts.js", "read.js", "lists.js", "pages.js"),
    *("run.js", "app.js"),
)
"""In dependency order."""

_IMPORT: Final = re.compile(r"^import \{[^}]*\} from \"[^\"]+\";\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=async function|function|const|let|class)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    bytes: int
    pages: int


@dataclass(slots=True)
class _Room:
    """Remaining size of the file."""

    left: dict[str, int]
    pages: dict[str, msgspec.Raw] = field(default_factory=dict)

    def put(self, path: str, value: Any) -> None:
        self.pages[path] = msgspec.Raw(msgspec.json.encode(value))

    def offer(self, kind: str, path: str, value: Any) -> bool:
        """Add an optional page; return whether it fits."""
        page = msgspec.json.encode(value)
        if self.left[kind] < len(page):
            return False
        self.left[kind] -= len(page)
        self.pages[path] = msgspec.Raw(page)
        return True


def export_file(worker: QueryWorker, path: Path) -> ExportedFile:
    """Write the pages of a run atomically. Raises ResourceError."""
    room = _Room({kind: int(share * FILE_BYTES_MAX) for kind, share in SHARES.items()})
    for name in ("run", "overview", "mismatch", "health"):
        room.put(name, worker.ask(Query(path=(name,), fields={})))
    chosen, samples = worker.work(_chosen)
    for name, listed in worker.work(lambda view: _lists(view, chosen)).items():
        room.put(name, listed)
    steps, newest = worker.work(lambda view: (view.steps(), view.version))
    _offer(worker, "step", [str(step) for step, _ in steps], room)
    _offer(
        worker,
        "version",
        [str(version) for version in spaced(range(newest + 1), VERSIONS_MAX)],
        room,
    )
    with _narrowed(worker, chosen):
        _offer(worker, "group", chosen, room)
        _offer(worker, "trajectory", samples, room)
    page = file_of(msgspec.json.encode({"pages": room.pages}))
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        unfinished.write_bytes(page)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from None
    return ExportedFile(bytes=len(page), pages=len(room.pages))


@contextmanager
def _narrowed(worker: QueryWorker, groups: list[str]) -> Iterator[None]:
    block = ExitStack()
    worker.work(lambda view: block.enter_context(view.catalogue.narrowed(groups)))
    try:
        yield
    finally:
        worker.work(lambda view: block.close())


def _offer(worker: QueryWorker, kind: str, names: list[str], room: _Room) -> None:
    """Add evenly spaced pages of a kind; the first few predict the size."""

    def ask(name: str) -> dict[str, Any]:
        return worker.ask(Query(path=(kind, name), fields={}))

    probe = [len(msgspec.json.encode(ask(name))) for name in spaced(names, 5)]
    if not probe:
        return
    fitting = int(room.left[kind] / (sum(probe) / len(probe)))
    for name in spaced(names, max(1, fitting)):
        if not room.offer(kind, f"{kind}/{name}", ask(name)):
            return


def _chosen(view: RunView) -> tuple[list[str], list[str]]:
    """Return groups of evenly spaced steps and some untrained ones, newest first; and their longest
    trajectories."""
    untrained = _names(view, "groups where outcome <> 'trained' order by dispatched_ns, group_id")
    groups = _names(
        view,
        """groups where group_id in (select unnest(?::varchar[])) or group_id in (
               select group_id from groups
               where outcome = 'trained' and step in (select unnest(?::integer[]))
               qualify row_number() over (partition by step order by group_id) <= ?)
           order by dispatched_ns desc, group_id""",
        spaced(untrained, OTHERS_MAX),
        [step for step, _ in spaced(view.steps(), STEPS_MAX)],
        GROUPS_MAX,
    )
    samples = view.rows(
        """select trajectory_id from trajectories t join groups g using (group_id)
           where group_id in (select unnest(?::varchar[]))
           qualify row_number() over (
               partition by group_id order by t.tokens desc nulls last, sample) <= ?
           order by dispatched_ns desc, group_id, t.tokens desc nulls last, sample""",
        groups,
        SAMPLES_MAX,
    )
    return groups, [name for (name,) in samples]


def _names(view: RunView, source: str, *values: Any) -> list[str]:
    return [name for (name,) in view.rows(f"select group_id from {source}", *values)]


def _lists(view: RunView, chosen: list[str]) -> dict[str, Any]:
    """Return the included rows; `of` is their number in the run."""
    samples = view.rows(
        "select trajectory_id from trajectories where group_id in (select unnest(?::varchar[]))",
        chosen,
    )
    inside = [name for (name,) in samples]
    newest = tables.DECISIONS.rows(view, limit=DECISIONS_MAX)
    return {
        "steps": _listed(view, tables.STEPS, tables.STEPS.rows(view)),
        "groups": _sampled(view, tables.GROUPS, "g.group_id", chosen),
        "trajectories": _sampled(view, tables.TRAJECTORIES, "t.trajectory_id", inside),
        "decisions": {
            **_listed(view, tables.DECISIONS, newest),
            "counts": tables.decision_counts(view),
        },
    }


def _sampled(view: RunView, listing: tables.Listing, key: str, chosen: list[str]) -> dict[str, Any]:
    keys = view.rows(f"select {key} from {listing.source} order by {listing.order}")
    names = {*spaced([name for (name,) in keys], ROWS_MAX), *chosen}
    rows = listing.rows(view, [(f"{key} in (select unnest(?::varchar[]))", list(names))])
    return _listed(view, listing, rows)


def _listed(view: RunView, listing: tables.Listing, rows: list[tables.Row]) -> dict[str, Any]:
    return {
        "total": len(rows),
        "offset": 0,
        "columns": listing.names,
        "numbers": listing.numbers,
        "rows": rows,
        "kept": len(rows),
        "of": listing.count(view),
    }


def file_of(data: bytes) -> bytes:
    """Inline script, style and answers; the policy forbids anything else."""
    static = static_files()
    script, style = joined(static), static["style.css"].decode()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
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
    """Join all modules into one script; `export function h` becomes `function h`."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", static[name].decode())) for name in MODULES)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
