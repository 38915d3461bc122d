"""Marks of a run: changed settings, stops, lost and returned roles.

A run was stopped if its orchestrator and trainer restart without a record of an earlier incarnation
in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from dora_pipe.config.changes import with_settings
from dora_pipe.config.logged import logged_config, logged_keys
from dora_pipe.config.model import Config
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
)
from dora_pipe.schemas.rounds import Round

MarkKind = Literal["setting", "resumed", "restarted", "lost"]

Stop = tuple[int, int]
"""Stopped period: last record until roles return, ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    at_ns: int
    step: int
    """First step in force, or the open step."""
    kind: MarkKind
    subject: str
    before: str | None = None
    after: str | None = None
    why: str = ""
    since_ns: int | None = None
    """Last record before a stop."""

    @property
    def line(self) -> str:
        return f"step {self.step}: {self.description}"

    @property
    def description(self) -> str:
        match self.kind:
            case "setting":
                return f"{self.subject} {self.before} -> {self.after}, set {self.why}"
            case "resumed":
                stopped_s = (self.at_ns - (self.since_ns or self.at_ns)) / 1e9
                return f"resumed after {stopped_s:,.1f} s in which the run was stopped"
            case _:
                return f"{self.subject} {self.kind}" + (f": {self.why}" if self.why else "")


SETTINGS: Final = """
    select step, subject || ' ' || before || ' -> ' || after as change from marks
    where kind = 'setting' order by step, subject"""


def stopped_ns(stops: Iterable[Stop], from_ns: int, until_ns: int) -> int:
    """Return the stopped part of a period. ``stopped_ns([(2, 5)], 0, 4) == 2``"""
    pieces = (min(until_ns, end) - max(from_ns, begin) for begin, end in stops)
    return sum(piece for piece in pieces if piece > 0)


class MarkAccount:
    def __init__(self) -> None:
        self.stops: list[Stop] = []
        self._config: Config | None = None
        self._alive_ns = 0
        """Last record of a known incarnation."""
        self._orchestrator = -1
        self._back: tuple[int, Mark] | None = None
        """Restarted role, until the whole run restarts or not."""
        self._resumed_at = -1
        """Offset of the newest resume; earlier workers ended with the stop."""

    def fact(self, offset: int, fact: AnyControl, *, open_: int, next_: int) -> list[Mark]:
        """Return marks of a control record; `open_` is the step in training, else `next_`."""
        match fact:
            case RunStarted() if self._config is None:
                try:
                    self._config = logged_config(fact.config)
                except ValueError:
                    return []  # unknown version
            case RoleStarted():
                return self._began(offset, fact, open_)
            case Command(verb="set"):
                return self._set(fact, next_)
            case WorkerJoined() | Command():
                return []  # also written in a stopped run
            case StepCommitted() | BatchRefused():
                return self._lived(fact.at_ns, "orchestrator")
            case _ if (
                self._back is not None and getattr(fact, "incarnation", offset) < self._back[0]
            ):
                return self._lived(fact.at_ns, self._back[1].subject)
        self._alive_ns = max(self._alive_ns, fact.at_ns)
        return []

    def round(self, round_: Round) -> list[Mark]:
        if round_.incarnation <= self._orchestrator:
            return self._lived(round_.now_ns, "trainer")
        self._alive_ns = max(self._alive_ns, round_.now_ns)
        return []

    def gone(
        self, worker: str, incarnation: int, why: str, at_ns: int, *, open_: int
    ) -> list[Mark]:
        """Return a fenced worker's mark, unless it ended with the run."""
        since = self._resumed_at if self._back is None else self._back[0]
        if incarnation < since:
            return []
        return [Mark(at_ns=at_ns, step=open_, kind="lost", subject=worker, why=why)]

    def _lived(self, at_ns: int, alone: str) -> list[Mark]:
        """Note that a known incarnation lives, so only the role `alone` restarted."""
        self._alive_ns = max(self._alive_ns, at_ns)
        if self._back is None or self._back[1].subject != alone:
            return []
        (_, mark), self._back = self._back, None
        return [replace(mark, since_ns=None)]

    def _began(self, offset: int, fact: RoleStarted, step: int) -> list[Mark]:
        if fact.role == "orchestrator":
            self._orchestrator = fact.incarnation
        before = self._back
        if before is None and fact.incarnation == 0:
            self._alive_ns = max(self._alive_ns, fact.at_ns)
            return []
        since_ns = (before and before[1].since_ns) or min(self._alive_ns or fact.at_ns, fact.at_ns)
        mark = Mark(
            at_ns=fact.at_ns, step=step, kind="restarted", subject=fact.role, since_ns=since_ns
        )
        if before is None or before[1].subject == fact.role:
            self._back = (offset, mark)
            return [] if before is None else [replace(before[1], since_ns=None)]
        self._back, self._resumed_at = None, before[0]
        until_ns = max(fact.at_ns, before[1].at_ns)
        self.stops.append((since_ns, until_ns))
        self._alive_ns = max(self._alive_ns, until_ns)
        return [replace(mark, kind="resumed", subject="run", at_ns=until_ns)]

    def _set(self, fact: Command, step: int) -> list[Mark]:
        if self._config is None:
            return []
        try:
            changed = with_settings(self._config, fact.args, step=step)
        except ValueError:
            return []  # refused by the orchestrator
        before, after = logged_keys(self._config), logged_keys(changed)
        self._config = changed
        return [
            Mark(
                at_ns=fact.at_ns,
                step=step,
                kind="setting",
                subject=key,
                before=_text(before.get(key)),
                after=_text(after.get(key)),
                why=f"by {fact.user}",
            )
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]


def _text(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
