"""Mean rewards of data rows, to check skipped solved rows, by groups that ended before the newest
commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum

from dora_pipe.config.model import Config, Task
from dora_pipe.ledger.history import GroupHistory
from dora_pipe.orchestrator.curriculum import HELD_BATCHES, SOLVED_GROUPS
from dora_pipe.schemas.rounds import Dispatch


@dataclass(slots=True, kw_only=True)
class RowLedger:
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Last rewards within the window."""
    held: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    """Results until the next commit: row, mean, window."""

    def ended(self, group: GroupHistory, config: Config) -> None:
        spec = group.spec
        task = next(task for task in config.tasks if task.name == spec.task)
        if task.max_solve_rate is None:
            return
        rewards = group.rewards
        mean = fsum(rewards) / len(rewards)
        held = self.held.setdefault(spec.source, [])
        held.append((f"{spec.source}#{spec.index}", mean, SOLVED_GROUPS))
        if len(held) == HELD_BATCHES * config.rollout.prompts_per_step:
            self._count(spec.source)

    def committed(self) -> None:
        for source in list(self.held):
            self._count(source)

    def _count(self, source: str) -> None:
        for row, reward, of in self.held.pop(source):
            self.rewards[row] = [*self.rewards.get(row, []), reward][-of:]

    def why_not(self, decision: Dispatch, task: Task, turns: Iterable[int]) -> str:
        """Return why this row may not be dispatched and the others skipped, or "".

        `turns`: rows in order.
        """
        spec = decision.spec
        if task.max_solve_rate is None or task.sampler:
            return "it skips rows without a window" if decision.skipped else ""
        strange = [row for row in decision.skipped if not self._solved(task, spec.source, row)]
        if strange:
            return f"row {strange[0]} is skipped and not solved"
        if not self._solved(task, spec.source, spec.index):
            return ""
        unsolved = (row for row in turns if not self._solved(task, spec.source, row))
        if decision.skipped or (other := next(unsolved, None)) is not None:
            return f"row {spec.index} is solved" + ("" if decision.skipped else f", {other} is not")
        return ""

    def _solved(self, task: Task, source: str, row: int) -> bool:
        rewards = self.rewards.get(f"{source}#{row}", [])
        assert task.max_solve_rate is not None
        return len(rewards) == SOLVED_GROUPS and min(rewards) >= task.max_solve_rate
