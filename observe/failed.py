"""Failed and filtered groups and trajectories: their share, and an example."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dora_pipe.ledger.account import GroupEnded, LedgerEvent, StepEnded
from dora_pipe.ledger.history import GroupHistory
from dora_pipe.schemas.control import error_class

WINDOW_GROUPS: Final = 64
SINCE_STEP_GROUPS: Final = 4096
VALUES_MAX: Final = 3

SHARE_MIN: Final = 0.03
"""Failed share from which `top` and `why` report it."""

BATCHES: Final = 4
"""Batches' worth of groups without a step before a line reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedShare:
    """Number of failed trajectories, with an error."""

    trajectories: int = 0
    failed: int = 0
    error: str = ""
    example: str = ""

    @property
    def share(self) -> float:
        return self.failed / self.trajectories if self.trajectories else 0.0

    @property
    def brief(self) -> str:
        """``failed 53.1% (IndexError)``; empty if none failed."""
        return f"failed {self.share:.1%} ({error_class(self.error)})" if self.failed else ""

    @property
    def words(self) -> str:
        """One sentence with the example; empty below `SHARE_MIN`."""
        if self.share < SHARE_MIN:
            return ""
        return (
            f"{self.share:.1%} of {self.trajectories:,} trajectories failed, most often "
            f"{self.error} ({self.example})"
        )


class FailedTrajectories:
    """Count ended training trajectories of the newest `groups` groups."""

    def __init__(self, groups: int = WINDOW_GROUPS) -> None:
        self._groups: deque[tuple[int, list[tuple[str, str]]]] = deque(maxlen=groups)

    def happened(self, event: LedgerEvent) -> None:
        match event:
            case GroupEnded(outcome="trained" | "filtered" | "failed") if (
                event.group.spec.purpose == "train"
            ):
                failed = list(_errors(event.group))
                sound = sum(result.reward is not None for result in event.group.results)
                self._groups.append((sound + len(failed), failed))
            case _:
                pass

    def share(self) -> FailedShare:
        count = sum(count for count, _ in self._groups)
        errors = [failure for _, failed in self._groups for failure in failed]
        if not errors:
            return FailedShare(trajectories=count)
        ((most, _),) = Counter(error_class(error) for _, error in errors).most_common(1)
        example, error = next(
            failure for failure in reversed(errors) if error_class(failure[1]) == most
        )
        return FailedShare(trajectories=count, failed=len(errors), error=error, example=example)

    def clear(self) -> None:
        self._groups.clear()


def _errors(group: GroupHistory) -> Iterator[tuple[str, str]]:
    for request in group.placed:
        last = request.attempts[-1]
        if request.logged is not None:
            if request.logged.reward is None:
                yield request.trajectory, request.logged.error
        elif last.outcome == "failed":
            yield request.trajectory, last.why


def no_gradient(ended: StepEnded, count: int, steps: int) -> str:
    """Explain why a step, one of `count` such among `steps`, did not update the weights."""
    rewards = [group.rewards for group in ended.groups if group.rewards]
    if all(len(set(own)) == 1 for own in rewards):
        values = sorted({own[0] for own in rewards})
        shown = ", ".join(f"{value:g}" for value in values[:VALUES_MAX])
        why = f"the rewards of each group were equal ({shown})" if rewards else "no reward is valid"
    else:
        why = "no trajectory has an advantage"
    more = f" ({count} of {steps} steps had none)" if count > 1 else ""
    return f"{why}, so the weights are unchanged{more}"


class GroupsSinceStep:
    """Count groups without a step, except those that a stop cancels."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._why: dict[str, str] = {}
        """Newest reason by outcome."""
        self._rewards: Counter[float] = Counter()

    @property
    def count(self) -> int:
        """Return the groups since the last step, or since the start."""
        return self._outcomes.total()

    def happened(self, event: LedgerEvent) -> None:
        match event:
            case StepEnded():
                self._outcomes.clear()
                self._rewards.clear()
            case GroupEnded(outcome="filtered" | "failed") if event.group.spec.purpose == "train":
                self._outcomes[event.outcome] += 1
                self._why[event.outcome] = event.why
                if event.outcome == "filtered":
                    self._rewards.update(event.group.rewards[:1])
            case _:
                pass

    def words(self, per_step: int | None) -> str:
        """Describe the most common outcome; empty while there are few groups."""
        if per_step is None or self.count < BATCHES * per_step:
            return ""
        ((outcome, times),) = self._outcomes.most_common(1)
        words = f"no step after {self.count} groups: {times} {outcome} ({self._why[outcome]})"
        return words + (self._advice() if outcome == "filtered" else "")

    def _advice(self) -> str:
        ((value, times),) = self._rewards.most_common(1) or [(0.0, 0)]
        equal = f"; every reward is {value:g} in {times} of them" if times else ""
        return (
            f"{equal}. If rewards never differ, rollout.filter_zero_advantage waits without end: "
            "change the reward or the data"
        )
