"""Automatic halt of a run whose training groups fail.

Since failed groups are replaced, a broken reward would keep a run busy. Counting from the start or
last `resume`, a run halts if

- its first `2 B` training groups (at least `FIRST_MIN`) have all failed, or
- more than `rollout.max_failed_share` of the last `window` groups have failed.

Filtered groups do not count as failed. A halted run keeps its open groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from dora_pipe.config.model import Rollout
from dora_pipe.schemas.control import ERROR_CHARACTERS_MAX
from dora_pipe.schemas.rounds import Halt

FIRST_BATCHES: Final = 2
FIRST_MIN: Final = 8
"""Batches, and minimum groups, that must all fail first."""

WINDOW_BATCHES: Final = 4
WINDOW_MIN: Final = 32
"""Batches, and minimum groups, of the window."""


class FailedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failed training group, the `at`-th that ended."""

    at: int
    error: str
    trajectory: str


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failed groups and the halt."""

    since: int = 0
    """Ended groups at the last resume."""
    failed: tuple[FailedGroup, ...] = ()
    """Newest, oldest first."""
    halted: str = ""
    """Reason; empty if not halted."""


def ended(outcomes: dict[str, int]) -> int:
    """Return the number of trained, failed and filtered training groups."""
    return sum(outcomes.get(outcome, 0) for outcome in ("trained", "failed", "filtered"))


def window(rules: Rollout) -> int:
    """Return the window's size in groups."""
    return max(WINDOW_MIN, WINDOW_BATCHES * rules.prompts_per_step)


def note(
    failures: Failures, rules: Rollout, *, ended_groups: int, error: str, trajectory: str
) -> Failures:
    """Add a failed group unless `max_failed_share` is unset."""
    if rules.max_failed_share is None:
        return failures
    failed = FailedGroup(at=ended_groups, error=error[:ERROR_CHARACTERS_MAX], trajectory=trajectory)
    kept = tuple(old for old in failures.failed if old.at > ended_groups - window(rules))
    return msgspec.structs.replace(failures, failed=(*kept, failed))


def halt_due(failures: Failures, rules: Rollout, *, ended_groups: int) -> Halt | None:
    """Return the halt decision if due."""
    most, count, full = rules.max_failed_share, ended_groups - failures.since, window(rules)
    if failures.halted or most is None or most >= 1 or not failures.failed:
        return None
    size = min(count, full)
    recent = [group for group in failures.failed if group.at > ended_groups - size]
    first = count >= max(FIRST_MIN, FIRST_BATCHES * rules.prompts_per_step) and len(recent) == count
    if not first and not (count >= full and len(recent) > most * full):
        return None
    which = "all of" if len(recent) == size else f"{len(recent)} of"
    error, example = _most_frequent(recent)
    often = f"{which} the last {size} groups failed, most often: {error} ({example})"
    return Halt(reason=f"{often}; the run stops", error=error, trajectory=example)


def _most_frequent(failed: Sequence[FailedGroup]) -> tuple[str, str]:
    """Return the most frequent error and its newest trajectory; errors are grouped by class."""
    kinds = Counter(group.error.partition(":")[0] for group in failed)
    kind, _ = max(kinds.items(), key=lambda item: (item[1], item[0]))
    newest = next(group for group in failed[::-1] if group.error.partition(":")[0] == kind)
    return newest.error, newest.trajectory
