"""Compares a run with others of its root for a page, those that were trained again on it among
them, in a thread of its own: both logs are read from end to end, which may take longer than a page
waits. It decides how long an answer is waited for and how many are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.audit.compared_logs import ComparedLogs, compared_logs
from dora_pipe.audit.run_diff import ComparedRun
from dora_pipe.bus.logged import Damage
from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.observe.web.retrained import Pair, retrained_page
from dora_pipe.observe.web.view import HIDDEN, short

WAIT_S: Final = 0.5
"""For a comparison before a page is told how far it is; it asks again."""

KEPT_MAX: Final = 8
"""Comparisons that are remembered, the newest ones."""

VALUE_CHARACTERS: Final = 200
"""Of a configuration's value on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRuns:
    """Runs that a run can be compared with."""

    names: Callable[[], Collection[str]]
    opened: Callable[[str], AbstractContextManager[Pair]]
    """The run itself and that one, their logs open."""
    related: Callable[[], Collection[str]] = list
    """Of these, the run that it was trained again on, or those that were trained again on it."""
    beside: str = ""
    """The one that was named for that; a file has no other comparison."""


class RunDiffs:
    """Comparisons of one run, to be closed.

    Example: ``RunDiffs("demo", others).ask("diff", "two", 7)``
    """

    def __init__(self, run: str, others: OtherRuns, *, redact: bool = False) -> None:
        self._run, self._others, self._redact = run, others, redact
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ui-diff")
        self._found: dict[tuple[str, str, int], Future[dict[str, Any]]] = {}
        self._read = 0
        self._closing = False

    def ask(self, kind: str, name: str, revision: int) -> dict[str, Any]:
        """Where the two part (`diff`) or what training again has changed (`retrained`), or how far
        the comparison is; `revision` is that of the run's tables.

        Raises UsageError for a run that is not there, the errors of either log.
        """
        if name not in self._others.names():
            there = ", ".join(self._others.names()) or "none"
            raise UsageError(f"no run {name!r} lies beside this one", hint=f"there are: {there}")
        key = (kind, name, revision)
        if key not in self._found:
            for old in list(self._found)[: 1 - KEPT_MAX]:
                del self._found[old]
            self._found[key] = self._thread.submit(self._compare, kind, name)
        try:
            return self._found[key].result(WAIT_S)
        except TimeoutError:
            return {"comparing": name, "read": self._read}
        except DoraError:
            self._found.pop(key, None)  # another try may go well
            raise

    def close(self) -> None:
        """Stop comparing."""
        self._closing = True
        self._thread.shutdown(cancel_futures=True)

    def _compare(self, kind: str, name: str) -> dict[str, Any]:
        damage = Damage()
        with self._others.opened(name) as (one, other):
            if kind == "retrained":
                return retrained_page((one, other))
            found = compared_logs(one, other, damage, self._told)
        return diff_page(found, (self._run, name), damage, redact=self._redact)

    def _told(self, read: int) -> None:
        if self._closing:
            raise CancelledError
        self._read = read


def diff_page(
    found: ComparedLogs, names: tuple[str, str], damage: Damage, *, redact: bool
) -> dict[str, Any]:
    """Lines, tables and curves of a comparison."""
    return {
        "names": list(names),
        "words": found.words,
        "trajectory": None if found.first is None else found.first.trajectory,
        "config": _pairs("key", names, found.found.config, redact=redact),
        "made_of": _pairs("made of", names, found.found.made_of, redact=False),
        "runs": [_curves(one) for one in found.runs],
        "marks": [
            {"step": step, "words": f"{name}: {change} at step {step}"}
            for name, run in zip(names, found.runs, strict=True)
            for step, change in run.changes
        ],
        "damaged": list(damage.lines),
    }


def _pairs(
    title: str, names: tuple[str, str], pairs: Mapping[str, tuple[Any, Any]], *, redact: bool
) -> dict[str, Any]:
    def said(key: str, value: Any) -> str | None:
        if redact and key.startswith("task.") and isinstance(value, str | dict | list | tuple):
            return HIDDEN
        return None if value is None else str(value)[:VALUE_CHARACTERS]

    rows = [[key, *(said(key, value) for value in both)] for key, both in pairs.items()]
    return {"columns": [title, *names], "rows": rows}


def _curves(run: ComparedRun) -> dict[str, Any]:
    """Columns by step, and evaluations by name."""
    evaluations: dict[str, dict[str, list[Any]]] = {}
    for (name, version), reward in run.evaluations.items():
        own = evaluations.setdefault(name, {"version": [], "reward": []})
        own["version"].append(version)
        own["reward"].append(short(reward))
    return {
        "step": [step for step, *_ in run.steps],
        "reward": [short(reward) for _, reward, *_ in run.steps],
        "seconds": [short(seconds) for _, _, seconds, _ in run.steps],
        "staleness": [short(staleness) for *_, staleness in run.steps],
        "evaluations": evaluations,
    }
