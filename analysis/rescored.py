"""Compare two rewards of a run's trajectories: outcomes, advantage signs, means.

Batches keep their groups, so only direct effects show.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Final

import msgspec

from dora_pipe.analysis.rescore import ScoredTogether
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Rollout
from dora_pipe.consumers.learners.settings import advantage_rule
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.ledger.database import Catalogue
from dora_pipe.schemas.identity import source_of

Rewards = Sequence[float | None]

ENDED: Final = """
    select group_id, g.version, size, g.outcome, step, ended_ns, purpose,
           case purpose when 'eval' then evaluation else task end as name,
           list(trajectory_id order by sample) as trajectories,
           list(t.reward order by sample) as rewards,
           list(group_parts order by sample) as group_parts
    from groups g join trajectories t using (group_id)
    where t.outcome is null and record_offset is not null
      and g.outcome in ('trained', 'filtered', 'failed', 'evaluated')
    group by all order by group_id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group: str
    version: int
    size: int
    outcome: str
    step: int
    """Step that trained it, else the first batch after its end."""
    trajectories: tuple[str, ...]
    old: tuple[float | None, ...]
    new: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedGroup:
    group: str
    step: int
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    trajectories: int
    """Scored ones that count."""
    left_out: int
    """Groups that were not scored completely."""
    differ: Sequence[tuple[str, float | None, float | None]]
    """Trajectories with both rewards; largest distance first."""
    old: float | None
    new: float | None
    outcomes: Sequence[ChangedGroup]
    advantages: int
    signs: Sequence[str]
    """Trajectories with another advantage sign."""
    first: int | None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def comparison_of(tables: Catalogue, rewards: Mapping[str, float | None]) -> Comparison:
    """Compare with the logged rewards; skips groups that are not covered."""
    taken = [taken_ns for (taken_ns,) in tables.query("select taken_ns from steps order by step")]
    rows = tables.records(ENDED)
    groups = [
        ScoredGroup(
            group=row["group_id"],
            version=row["version"],
            size=row["size"],
            outcome=row["outcome"],
            step=bisect_left(taken, row["ended_ns"]) if row["step"] is None else row["step"],
            trajectories=tuple(row["trajectories"]),
            old=tuple(row["rewards"]),
            new=tuple(rewards[name] for name in row["trajectories"]),
        )
        for row in rows
        if all(name in rewards for name in row["trajectories"])
    ]
    settings = {
        step: msgspec.json.decode(logged)
        for step, logged in tables.query("select step, settings from steps")
    }
    return compare(groups, rules_of(tables), settings, left_out=len(rows) - len(groups))


def rules_of(tables: Catalogue) -> Rollout:
    ((config,),) = tables.query("select config from runs")
    return logged_config(msgspec.json.decode(config)).rollout


def scored_together(tables: Catalogue, sources: frozenset[str]) -> dict[str, ScoredTogether]:
    """Return the ended groups of these sources."""
    rules = rules_of(tables)
    return {
        row["group_id"]: ScoredTogether(
            size=len(row["trajectories"]),
            valid_min=1
            if row["purpose"] == "eval"
            else min(rules.min_valid_trajectories, row["size"]),
            recorded={
                name: (reward, msgspec.json.decode(parts, type=dict[str, float]))
                for name, reward, parts in zip(
                    row["trajectories"], row["rewards"], row["group_parts"], strict=True
                )
                if parts is not None
            },
        )
        for row in tables.records(ENDED)
        if source_of(row["purpose"], row["name"]) in sources
    }


def compare(
    groups: Sequence[ScoredGroup],
    rules: Rollout,
    settings: Mapping[int, Mapping[str, Any]],
    *,
    left_out: int = 0,
) -> Comparison:
    """Compare both rewards of groups; `settings` are logged, by step."""
    train = [group for group in groups if group.outcome != "evaluated"]
    outcomes = [
        ChangedGroup(group=group.group, step=group.step, old=group.outcome, new=new)
        for group in sorted(train, key=lambda group: (group.step, group.group))
        if (new := outcome_of(group.new, group.size, rules)) != group.outcome
    ]
    trained: defaultdict[int, list[ScoredGroup]] = defaultdict(list)
    for group in train:
        if group.outcome == "trained":
            trained[group.step].append(group)
    pairs = {
        step: _advantages(step_groups, settings.get(step, {}))
        for step, step_groups in trained.items()
    }
    other = [outcome.step for outcome in outcomes]
    other += (
        step
        for step, step_pairs in pairs.items()
        if any(not _close(old, new) for _, old, new in step_pairs)
    )
    every = [pair for _, step_pairs in sorted(pairs.items()) for pair in step_pairs]
    return Comparison(
        trajectories=sum(len(group.trajectories) for group in groups),
        left_out=left_out,
        differ=sorted(_differing(groups), key=_distance, reverse=True),
        old=_mean(reward for group in train for reward in group.old),
        new=_mean(reward for group in train for reward in group.new),
        outcomes=outcomes,
        advantages=len(every),
        signs=[name for name, old, new in every if _sign(old) != _sign(new)],
        first=min(other, default=None),
    )


def outcome_of(rewards: Rewards, size: int, rules: Rollout) -> str:
    """Return a complete group's outcome, like `state_ops.outcome_of`.

    Example: with filtering, ``outcome_of([1.0, 1.0], 2, rules) == "filtered"``
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < min(rules.min_valid_trajectories, size):
        return "failed"
    return "filtered" if rules.filter_zero_advantage and len(set(valid)) <= 1 else "trained"


def _advantages(
    groups: Sequence[ScoredGroup], settings: Mapping[str, Any]
) -> list[tuple[str, float | None, float | None]]:
    rule = advantage_rule(dict(settings))
    old = batch_advantages([(group.version, group.old) for group in groups], *rule)
    new = batch_advantages([(group.version, group.new) for group in groups], *rule)
    names = chain.from_iterable(group.trajectories for group in groups)
    return list(zip(names, chain(*old), chain(*new), strict=True))


def _differing(groups: Iterable[ScoredGroup]) -> list[tuple[str, float | None, float | None]]:
    return [
        (name, old, new)
        for group in groups
        for name, old, new in zip(group.trajectories, group.old, group.new, strict=True)
        if old != new
    ]


def _distance(pair: tuple[str, float | None, float | None]) -> float:
    _, old, new = pair
    return math.inf if old is None or new is None else abs(new - old)


def _mean(rewards: Iterable[float | None]) -> float | None:
    valid = [reward for reward in rewards if reward is not None]
    return fmean(valid) if valid else None


def _sign(advantage: float | None) -> int:
    return 0 if not advantage else 1 if advantage > 0 else -1


def _close(first: float | None, other: float | None) -> bool:
    return math.isclose(first or 0.0, other or 0.0, rel_tol=1e-9, abs_tol=1e-9)
