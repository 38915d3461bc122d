"""A batch as items on their way through a step, and what a step says of itself; without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_pipe.consumers.objectives.advantage import group_advantages
from dora_pipe.consumers.objectives.grpo import RowFigures
from dora_pipe.consumers.trainers.port import TrainGroup
from dora_pipe.consumers.trainers.settings import StepSettings
from dora_pipe.errors import NonFinite
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.trajectory import Trajectory


@dataclass(slots=True, kw_only=True)
class Item:
    """A trajectory on its way through a step."""

    trajectory: Trajectory
    group: str
    ordinal: int
    sibling: int
    staleness: int
    advantage: float | None
    counted: int
    """Tokens that enter the loss."""
    token_staleness: int
    """Staleness of every sampled token by the version that sampled it, added up."""
    minibatch: int = 0
    micro_batch: int | None = None
    figures: RowFigures | None = None


@dataclass(slots=True, kw_only=True)
class Sums:
    """What the updates of a step add up to."""

    loss: float = 0.0
    updates: int = 0
    grad_norms: list[float] = field(default_factory=list)
    padded_tokens: int = 0


def items_of(step: int, group: TrainGroup, settings: StepSettings) -> list[Item]:
    advantages = group_advantages(
        [trajectory.reward for trajectory in group.trajectories],
        divide_by_std=settings.advantage_std,
    )
    items = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        _, ordinal, sibling = parse_trajectory_id(trajectory.trajectory)
        items.append(
            Item(
                trajectory=trajectory,
                group=group.group,
                ordinal=ordinal,
                sibling=sibling,
                staleness=step - group.version,
                advantage=advantage,
                counted=int(sum(trajectory.loss_mask[1:])),
                token_staleness=sum(
                    staleness_of(step, one.version) * (one.end - one.start)
                    for one in trajectory.segments
                    if one.kind == "model"
                ),
            )
        )
    return items


def figures_of(items: Sequence[Item], sums: Sums) -> dict[str, float]:
    """The step's figures; all finite, and no figure where there is nothing to say."""
    rewards = [item.trajectory.reward for item in items if item.trajectory.reward is not None]
    rows = [(item.figures, item.counted) for item in items if item.figures is not None]
    tokens = sum(count for _, count in rows)
    sampled = sum(item.trajectory.sampled for item in items)
    figures = {
        "loss": sums.loss / max(1, sums.updates),
        "updates": float(sums.updates),
        "trajectories": float(len(items)),
        "masked": float(sum(item.advantage is None for item in items)),
        "without_gradient": float(len(items) - len(rows)),
        "tokens": float(sum(item.counted for item in items)),
        "padded_tokens": float(sums.padded_tokens),
        "staleness_mean": _mean([item.staleness for item in items]),
        "token_staleness": sum(item.token_staleness for item in items) / max(1, sampled),
        "staleness_max": float(max((item.staleness for item in items), default=0)),
    }
    if rewards:
        figures["reward_mean"] = _mean(rewards)
    if sums.grad_norms:
        figures["grad_norm"] = _mean(sums.grad_norms)
        figures["grad_norm_max"] = max(sums.grad_norms)
    if rows:
        figures |= {
            "ratio_mean": sum(one.ratio_mean * count for one, count in rows) / tokens,
            "ratio_min": min(one.ratio_min for one, _ in rows),
            "ratio_max": max(one.ratio_max for one, _ in rows),
            "clipped_share": sum(one.clipped_share * count for one, count in rows) / tokens,
            "kl": sum(one.kl * count for one, count in rows) / tokens,
        }
    odd = sorted(name for name, value in figures.items() if not math.isfinite(value))
    if odd:
        raise NonFinite(f"{odd[0]} is {figures[odd[0]]}")
    return figures


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def contribution(item: Item) -> dict[str, Any]:
    """A row of the contributions file."""
    figures = item.figures
    trajectory = item.trajectory
    return {
        "trajectory": trajectory.trajectory,
        "group": item.group,
        "version": trajectory.version,
        "staleness": item.staleness,
        "reward": trajectory.reward,
        "advantage": item.advantage,
        "tokens": item.counted,
        "ratio_mean": figures.ratio_mean if figures else None,
        "ratio_min": figures.ratio_min if figures else None,
        "ratio_max": figures.ratio_max if figures else None,
        "clipped_share": figures.clipped_share if figures else None,
        "kl": figures.kl if figures else None,
        "loss_share": figures.loss_share if figures else None,
        "minibatch": item.minibatch,
        "micro_batch": item.micro_batch,
    }
