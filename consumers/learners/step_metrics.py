"""Metrics of a step, and contribution rows, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.learners.step import Item
from dora_pipe.consumers.objectives.terms import RowMetrics, joined_metrics
from dora_pipe.core.errors import NonFinite
from dora_pipe.schemas.context_tokens import counted_places
from dora_pipe.schemas.trajectory import Trajectory


@dataclass(slots=True, kw_only=True)
class Sums:
    loss: float = 0.0
    router_aux: float = 0.0
    """Unweighted."""
    updates: int = 0
    grad_norms: list[float] = field(default_factory=list)
    padded_tokens: int = 0
    passes: int = 0

    def note_update(self, norm: float) -> None:
        """Count an update with this gradient norm. Raises NonFinite."""
        if not math.isfinite(norm) or not math.isfinite(self.loss):
            raise NonFinite(f"a step gave gradient norm {norm} and loss {self.loss}")
        self.updates += 1
        self.grad_norms.append(norm)

    def add(self, other: Sums) -> None:
        self.loss += other.loss
        self.router_aux += other.router_aux
        self.updates += other.updates
        self.grad_norms += other.grad_norms
        self.padded_tokens += other.padded_tokens
        self.passes += other.passes


def metrics_of(items: Sequence[Item], sums: Sums, settings: StepSettings) -> dict[str, float]:
    """Return the step's metrics; all finite, undefined ones omitted."""
    rewards = [item.trajectory.reward for item in items if item.trajectory.reward is not None]
    rows = [(item.metrics, item.counted) for item in items if item.metrics is not None]
    sampled = sum(item.trajectory.sampled for item in items)
    metrics = {
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
    metrics |= _sampling_metrics([item.trajectory for item in items])
    if rewards:
        metrics["reward_mean"] = _mean(rewards)
    if sums.grad_norms:
        metrics["grad_norm"] = _mean(sums.grad_norms)
        metrics["grad_norm_max"] = max(sums.grad_norms)
    if rows:
        joined = asdict(joined_metrics(rows))
        del joined["loss_share"]
        metrics |= {name: value for name, value in joined.items() if value is not None}
    if settings.router_aux_loss:
        metrics["router_aux_loss"] = sums.router_aux / max(1, sums.updates)
    if settings.reference is not None:
        metrics["reference_version"] = float(settings.reference)
    odd = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if odd:
        raise NonFinite(f"{odd[0]} is {metrics[odd[0]]}")
    return metrics


def _sampling_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return estimated entropy of the sampling policies (mean -log-prob, nats), and the truncated
    share."""
    if not trajectories:
        return {}
    sums, tokens = [], 0
    for trajectory in trajectories:
        own = np.asarray(trajectory.logprobs, np.float64)[counted_places(trajectory)]
        sums.append(math.fsum(own.tolist()))
        tokens += len(own)
    truncated = sum(trajectory.meta.finish == "length" for trajectory in trajectories)
    metrics = {"truncated": truncated / len(trajectories)}
    return metrics | ({"entropy": -math.fsum(sums) / tokens} if tokens else {})


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values) if values else 0.0
    except OverflowError:  # finite values may sum to infinity
        return math.inf


def contribution(item: Item) -> dict[str, Any]:
    """Return a row of the contributions file."""
    trajectory = item.trajectory
    return {
        "trajectory": trajectory.trajectory,
        "group": item.group,
        "version": trajectory.version,
        "staleness": item.staleness,
        "reward": trajectory.reward,
        "advantage": item.advantage,
        "tokens": item.counted,
        "minibatch": item.minibatch,
        "micro_batch": item.micro_batch,
        **{field.name: getattr(item.metrics, field.name, None) for field in fields(RowMetrics)},
    }
