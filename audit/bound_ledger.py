"""Independent implementation of the staleness bound, to check the orchestrator's.

U holds the groups dispatched and not yet taken. It is feasible if the k-th earliest deadline is at
least step + ceil(k / B) - 1, with B groups a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.config.model import Rollout, async_batches
from dora_pipe.ledger.history import GroupHistory
from dora_pipe.schemas.rounds import GroupSpec, TakePart

Outlook = Literal["running", "finished", "filtered", "failed", "evaluated"]
"""State of an open group: running, finished, or the outcome it must get."""

_ROUNDING: Final = 1e-9
"""Float tolerance: 1.1 * 10 groups must give 11."""

_AUTOMATIC_MIN: Final = 2.0
"""Initial and smallest automatic `async_batches`; `max_staleness` may lower it."""

_CHANGE_MAX: Final = 0.25


@dataclass(slots=True, kw_only=True)
class BoundLedger:
    """Training groups dispatched and not yet taken (U), and the next step."""

    version: int = 0
    training: tuple[int, int] | None = None
    """(step, attempt) of the batch in training."""
    u: dict[str, GroupSpec] = field(default_factory=dict)
    finished: dict[str, GroupSpec] = field(default_factory=dict)
    """Finished groups that are in no part."""
    in_flight: float = _AUTOMATIC_MIN
    """Automatic `async_batches` of the newest batch."""
    parts: list[tuple[str, ...]] = field(default_factory=list)
    """Parts of the next step."""

    @property
    def step(self) -> int:
        """Next step to take (s)."""
        return self.version if self.training is None else self.version + 1

    @property
    def size(self) -> int:
        return len(self.u)

    @property
    def deadlines(self) -> list[int]:
        held = self.held
        return [self.step if name in held else spec.deadline for name, spec in self.u.items()]

    @property
    def held(self) -> dict[str, None]:
        return dict.fromkeys(name for part in self.parts for name in part)

    def add(self, spec: GroupSpec) -> None:
        self.u[spec.group] = spec

    def settle(self, group: GroupHistory, outlook: Outlook) -> None:
        """Update a group after a trajectory ended."""
        spec = group.spec
        if spec.group not in self.u:
            return
        if outlook == "finished":
            self.finished[spec.group] = spec
        elif outlook != "running":
            self.remove(spec.group)

    def remove(self, group: str) -> None:
        self.u.pop(group, None)
        self.finished.pop(group, None)

    def give_back(self, spec: GroupSpec) -> None:
        """Return a group of a refused batch to U."""
        self.u[spec.group] = spec
        self.finished[spec.group] = spec

    def take_part(self, groups: Sequence[str]) -> None:
        self.parts.append(tuple(groups))
        for name in groups:
            self.finished.pop(name, None)

    def give_up_parts(self) -> None:
        """Cancel all parts; their groups stay finished."""
        held, self.parts = self.held, []
        self.finished |= {name: self.u[name] for name in held if name in self.u}

    def end_training(self) -> None:
        self.give_up_parts()
        self.training = None

    def take(self, batch: tuple[int, int], groups: Sequence[str]) -> None:
        self.training, self.parts = batch, []
        for name in groups:
            self.remove(name)

    def why_not_admit(self, deadline: int, in_force: EffectiveConfig) -> str:
        """Return why one more group with this deadline is not allowed, or ""."""
        config, per_step = in_force.config, in_force.config.rollout.prompts_per_step
        busy = len(self.u) + (per_step if self.training is not None else 0)
        batches = async_batches(config.staleness)
        if config.staleness.async_batches == "auto":
            batches = min(self.in_flight, batches)
        limit = max(per_step, math.ceil(batches * per_step - _ROUNDING))
        if busy >= limit:
            return f"{busy} groups are in flight and the limit is {limit}"
        trainable = (in_force.steps - self.step) * per_step
        if len(self.u) >= trainable:
            return f"{len(self.u)} groups wait and the steps left take {trainable}"
        return why_infeasible([*self.deadlines, deadline], self.step, per_step)

    def why_not_part(self, take: TakePart, in_force: EffectiveConfig) -> str:
        """Return why a part of the next step is not allowed, or ""."""
        config, groups = in_force.config, [taken.group for taken in take.groups]
        per_step, parts = config.rollout.prompts_per_step, config.trainer.batch_parts
        if why := self._why_not_next(take.step, in_force):
            return why
        if self.training is not None and self.parts:
            return f"step {self.training[0]} is being trained, and the next one has a part"
        if take.part != len(self.parts) or take.part >= parts - 1:
            return f"part {len(self.parts)} of at most {parts} is the next one, not {take.part}"
        size = max(1, per_step // parts)
        if groups != self._earliest(size):
            return f"not the {size} earliest deadlines"
        if len(self.held) + size >= per_step:
            return f"with {len(self.held)} before it, nothing is left for the batch of {per_step}"
        rest = [spec.deadline for name, spec in self.u.items() if name not in {*self.held, *groups}]
        due = [take.step] * (len(self.held) + size)
        return why_infeasible([*rest, *due], take.step, per_step)

    def why_not_in_flight(self, batches: float | None, in_force: EffectiveConfig) -> str:
        """Return why a batch may not record this `async_batches`, or ""."""
        staleness, before = in_force.config.staleness, self.in_flight
        if staleness.async_batches != "auto":
            return "" if batches is None else f"it records async_batches {batches:g}, which is set"
        if batches is None:
            return "it records no async_batches"
        most = max(_AUTOMATIC_MIN, staleness.max_staleness + 1.0)
        if batches == before:
            return ""  # a lower bound also applies (`why_not_admit`)
        if not _AUTOMATIC_MIN <= batches <= most:
            return f"async_batches {batches:g} is not between {_AUTOMATIC_MIN:g} and {most:g}"
        if abs(batches - min(before, most)) > _CHANGE_MAX:
            return f"async_batches changes from {before:g} to {batches:g} in one batch"
        return ""

    def why_not_take(
        self, step: int, groups: Sequence[str], in_force: EffectiveConfig, parts: Sequence[int] = ()
    ) -> str:
        """Return why these groups may not be the batch of a step, or ""."""
        per_step, held = in_force.config.rollout.prompts_per_step, list(self.held)
        if why := self._why_not_step(step, in_force):
            return why
        if tuple(parts) != tuple(map(len, self.parts)) or list(groups)[: len(held)] != held:
            return f"{len(self.parts)} parts were taken, and others are named"
        due = self._earliest(per_step - len(held))
        if len(held) + len(due) < per_step:
            return f"{len(held) + len(due)} groups are finished and a batch has {per_step}"
        if set(groups) != {*held, *due} or len(groups) != per_step:
            strange = sorted(set(groups) ^ {*held, *due})[:4]
            return f"not the {per_step} earliest deadlines: {', '.join(strange)}"
        rest = (spec.deadline for name, spec in self.u.items() if name not in groups)
        return why_infeasible(rest, step + 1, per_step)

    def _why_not_step(self, step: int, in_force: EffectiveConfig) -> str:
        if self.training is not None:
            return f"step {self.training[0]} is being trained"
        return self._why_not_next(step, in_force)

    def _why_not_next(self, step: int, in_force: EffectiveConfig) -> str:
        if step != self.step:
            return f"the next step is {self.step}"
        return f"the run ends after {in_force.steps} steps" if step >= in_force.steps else ""

    def _earliest(self, count: int) -> list[str]:
        ordered = sorted(self.finished.values(), key=lambda spec: (spec.deadline, spec.ordinal))
        return [spec.group for spec in ordered[:count]]


def why_infeasible(deadlines: Iterable[int], step: int, per_step: int) -> str:
    """Return the deadline that `per_step` groups a step from `step` on cannot meet, or "".

    Example: ``why_infeasible([4, 4, 5, 5, 5], 4, 2)`` names the fifth group: its turn is step 6.
    """
    for index, deadline in enumerate(sorted(deadlines)):
        turn = step + index // per_step
        if deadline < turn:
            return f"the group {index + 1}. in line, due at step {deadline}, has its turn at {turn}"
    return ""


def outlook_of(group: GroupHistory, rules: Rollout) -> Outlook:
    size, samples, ended = group.spec.size, group.spec.samples, 0
    valid: list[float] = []
    for entry in group.requests.values():
        if (bound := entry.bound) is not None:
            ended += 1
            if (reward := bound.fact.reward) is not None:
                valid.append(reward)
        elif entry.failed:
            ended += 1
    over = group.expired or ended == samples or len(valid) >= size
    scoring, unscored = group.scoring, False
    if scoring is not None:
        unscored = bool(valid) and not (scoring.answer or scoring.failed)
        valid = [] if scoring.failed else list(scoring.rewards.values()) or valid
    if group.spec.purpose == "eval":
        return "evaluated" if over and not unscored else "running"
    reachable = len(valid) if over else samples - (ended - len(valid))
    if reachable < min(rules.min_valid_trajectories, size):
        return "failed"
    if not over or unscored:
        return "running"
    if rules.filter_zero_advantage and len(set(valid)) <= 1:
        return "filtered"
    return "finished"
