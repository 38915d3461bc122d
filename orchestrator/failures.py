"""Decides when a run in which groups fail stops by itself, and what it says then.

A training group that fails is replaced by another, so a reward with a typo or a broken model would
keep a run busy for ever. Counted is from the start of the run, or from its last `resume`:

- the first `2 B` training groups (at least `FIRST_MIN`) that end have all failed: nothing was
  trained, nothing filtered;
- later, more than `groups.failed_share_max` of the last `window` groups that ended have failed.

A group that is filtered has ended and has not failed: it says something of the task's difficulty,
not that the task is broken. The same functions check the decision, so audit makes it again. A halt
is not `stop run`: groups stay open, and the run can be resumed.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from dora_pipe.config.model import Groups
from dora_pipe.schemas.control import ERROR_CHARACTERS_MAX
from dora_pipe.schemas.rounds import Halt

FIRST_BATCHES: Final = 2
FIRST_MIN: Final = 8
"""So many batches' worth of groups, and never fewer groups than this, all have to fail at the
beginning: two groups that fail say little."""

WINDOW_BATCHES: Final = 4
WINDOW_MIN: Final = 32
"""The window holds so many batches' worth of groups, and never fewer groups than this."""


class FailedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A training group that failed: the `at`-th that ended, with the error of a sibling."""

    at: int
    error: str
    trajectory: str


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """What the state keeps of failed groups: those of the window, and whether that was enough."""

    since: int = 0
    """Training groups that had ended when the run was resumed; they do not count any more."""
    failed: tuple[FailedGroup, ...] = ()
    """The newest, oldest first; all lie in the window or before its end."""
    halted: str = ""
    """Why the run was halted; empty while it goes on."""


def ended(fates: dict[str, int]) -> int:
    """Training groups that trained, failed or were filtered; those that a stop cancels say nothing
    of the task."""
    return sum(fates.get(fate, 0) for fate in ("trained", "failed", "filtered"))


def window(rules: Groups) -> int:
    """Groups that the share is taken of."""
    return max(WINDOW_MIN, WINDOW_BATCHES * rules.per_step)


def note(failures: Failures, rules: Groups, *, at: int, error: str, trajectory: str) -> Failures:
    """One more group has failed. A run whose rules know no share keeps nothing."""
    if rules.failed_share_max is None:
        return failures
    one = FailedGroup(at=at, error=error[:ERROR_CHARACTERS_MAX], trajectory=trajectory)
    kept = tuple(old for old in failures.failed if old.at > at - window(rules))
    return msgspec.structs.replace(failures, failed=(*kept, one))


def resumed(at: int) -> Failures:
    """Nothing that ended so far counts: a user says that what was wrong is mended."""
    return Failures(since=at)


def halt_due(failures: Failures, rules: Groups, *, at: int) -> Halt | None:
    """The decision to halt, if that is due now; `at` groups have ended."""
    most, count = rules.failed_share_max, at - failures.since
    if failures.halted or most is None or most >= 1 or not failures.failed:
        return None
    recent = _recent(failures, rules, at)
    first = count >= max(FIRST_MIN, FIRST_BATCHES * rules.per_step) and len(recent) == count
    full = window(rules)
    if not first and not (count >= full and len(recent) > most * full):
        return None
    error, example = most_frequent(recent)
    return Halt(
        reason=f"{summary(failures, rules, at=at)}; the run stops",
        error=error,
        trajectory=example,
    )


def summary(failures: Failures, rules: Groups, *, at: int) -> str:
    """How many of the last groups failed, and why; empty when none did."""
    recent = _recent(failures, rules, at)
    if not recent:
        return ""
    count = min(at - failures.since, window(rules))
    which = "all of" if len(recent) == count else f"{len(recent)} of"
    error, example = most_frequent(recent)
    return (
        f"{which} the last {count} groups that ended have failed, most often: {error} ({example})"
    )


def most_frequent(failed: tuple[FailedGroup, ...]) -> tuple[str, str]:
    """The error that most groups have, with the newest trajectory that had it.

    Errors are of one kind when what stands before the first colon is the same: their class.
    """
    kinds = Counter(one.error.partition(":")[0] for one in failed)
    kind, _ = max(kinds.items(), key=lambda item: (item[1], item[0]))
    newest = next(one for one in failed[::-1] if one.error.partition(":")[0] == kind)
    return newest.error, newest.trajectory


def _recent(failures: Failures, rules: Groups, at: int) -> tuple[FailedGroup, ...]:
    first = max(failures.since, at - window(rules))
    return tuple(one for one in failures.failed if one.at > first)
