"""Durations of a role's waits, and alarms for long ones.

Limits by kind of wait:

- `short`: a fixed limit (acknowledgement, reward).
- `work`: `WORK_FACTOR` times the longest recent wait of that name, a configured limit before enough
  are known.
- `free`: no limit (a pause).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.schemas.metrics import Blocker, Wait

LOG = logging.getLogger(__name__)

LimitKind = Literal["short", "work", "free"]

BLOCKERS_MAX: Final = 4
"""Maximum listed blockers."""

WORK_FACTOR: Final = 4.0
"""Factor of the longest recent wait."""

LEARNT_MIN: Final = 4
"""Minimum waits to learn from."""

LEARNT_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits from `config.model.ALARM_S` and `ALARM_WORK_S`."""

    short_s: float = 30.0
    work_s: float = 600.0


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWait:
    """Current wait of a role."""

    name: str
    words: str
    key: str = ""
    """Distinguishes waits of a name: step, request."""
    limit: LimitKind = "short"
    still: bool = False
    since_ns: int | None = None
    """Monotonic ns of the start; None: when first seen."""
    blockers: Sequence[Blocker] = ()
    more: int = 0


@dataclass(slots=True)
class _Open:
    mono_ns: int
    wall_ns: int
    logged: bool = False


class WaitTracker:
    """Waits of one role, on the monotonic clock."""

    def __init__(self, role: str, limits: Limits) -> None:
        self._role = role
        self._limits = limits
        self._open: dict[tuple[str, str], _Open] = {}
        self._lasted: dict[str, deque[float]] = {}

    def update(
        self, pending: Sequence[PendingWait], *, mono_ns: int, wall_ns: int
    ) -> tuple[Wait, ...]:
        """Return the current waits for a status, blocking ones first; log new alarms.

        A wait missing from `pending` has ended.
        """
        before, self._open = self._open, {}
        waits = []
        for wait in pending:
            key = (wait.name, wait.key)
            began = _began(wait, before.get(key), mono_ns, wall_ns)
            if began is before.get(key):
                del before[key]
            self._open[key] = began
            waits.append(self._wait(wait, began, mono_ns))
        for (name, _), ended in before.items():
            lasted = self._lasted.setdefault(name, deque(maxlen=LEARNT_MAX))
            lasted.append((mono_ns - ended.mono_ns) / 1e9)
        return tuple(sorted(waits, key=lambda wait: not wait.blocking))

    def limit_s(self, name: str, kind: LimitKind) -> float | None:
        if kind == "free":
            return None
        if kind == "short":
            return self._limits.short_s
        lasted = self._lasted.get(name, ())
        if len(lasted) < LEARNT_MIN:
            return self._limits.work_s
        return max(self._limits.short_s, WORK_FACTOR * max(lasted))

    def _wait(self, pending: PendingWait, began: _Open, mono_ns: int) -> Wait:
        limit_s = self.limit_s(pending.name, pending.limit)
        overdue = limit_s is not None and mono_ns - began.mono_ns > limit_s * 1e9
        wait = Wait(
            name=pending.name,
            description=pending.words,
            since_ns=began.wall_ns,
            limit_ms=None if limit_s is None else round(limit_s * 1000),
            overdue=overdue,
            blocking=pending.still,
            blockers=tuple(pending.blockers[:BLOCKERS_MAX]),
            more=pending.more + max(0, len(pending.blockers) - BLOCKERS_MAX),
        )
        if overdue and not began.logged:
            began.logged = True
            LOG.warning("%s", alarm_line(self._role, wait, (mono_ns - began.mono_ns) / 1e9))
        return wait


def alarm_line(role: str, wait: Wait, lasted_s: float) -> str:
    """Return an alarm as a line. Example: ``ALARM w1: waiting 31 s for rewards (2) (limit 30
    s)``"""
    limit = "" if wait.limit_ms is None else f" (limit {wait.limit_ms / 1000:.4g} s)"
    return f"ALARM {role}: waiting {lasted_s:.4g} s for {wait.description}{limit}{_named(wait)}"


def _named(wait: Wait) -> str:
    names = [
        f"{blocker.kind} {blocker.id}"
        for blocker in wait.blockers
        if blocker.id not in wait.description
    ]
    if not names:
        return ""
    return ": " + ", ".join(names) + (f" and {wait.more} more" if wait.more else "")


def _began(wait: PendingWait, before: _Open | None, mono_ns: int, wall_ns: int) -> _Open:
    since_ns = mono_ns if wait.since_ns is None else min(wait.since_ns, mono_ns)
    if before is not None and (wait.since_ns is None or before.mono_ns == since_ns):
        return before
    return _Open(since_ns, wall_ns - (mono_ns - since_ns))
