"""Decides what verl's fully asynchronous trainer is predicted to take, from colocated rows alone.

Published (its page on that trainer): Qwen2.5-Math-7B on DAPO-Math-17k, 512 prompts x 16, up to 28K
tokens, seconds a step. Its trainer fetches a quarter of a step at a time and trains it; new weights
come after the fourth. Interrupted samples go on, and the rollouter may hold (1 + threshold) steps
of samples: a pool with parts.

Half of the GPUs generate, half train. What a half takes is what the colocated row on as many GPUs
took; no law over several sizes meets those rows (updates: 314, 133 and 114 s on 32, 64 and 128
GPUs). Lengths are not published: they are those of DORA's efficiency checkpoint, on the same data,
cut at 28K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from dora_pipe.bench.paper.lengths import EFFICIENCY
from dora_pipe.bench.paper.rows import STEPS, figures_of_run
from dora_pipe.bench.paper.scaling_model import (
    GROUPS,
    MINUTE_S,
    RISES_TRIED,
    SIBLINGS,
    SLOTS_TRIED,
    ScalingModel,
    mean_units,
    step_tokens,
)
from dora_pipe.bench.paper.scaling_model import SEEDS as FIT_SEEDS
from dora_pipe.sim.modelled_worker import TrainerRates
from dora_pipe.sim.paradigms import Pool, PoolPlan

LENGTHS: Final = replace(EFFICIENCY, cap=28_672)
PARTS: Final = 4
"""Fetches of a step (`trigger_parameter_sync_step`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    """A published row on shared GPUs; seconds."""

    step: float
    gen: float
    old_log_prob: float
    update: float

    @property
    def rest(self) -> float:
        """Of the step, in none of its parts: weights to the engines, advantages."""
        return self.step - self.gen - self.old_log_prob - self.update


COLOCATED: Final = {
    32: Colocated(step=790.10, gen=357.41, old_log_prob=107.71, update=313.81),
    64: Colocated(step=365.28, gen=150.72, old_log_prob=70.26, update=133.41),
    128: Colocated(step=356.30, gen=177.85, old_log_prob=53.92, update=113.81),
}
"""By GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A published row of the fully asynchronous trainer; it takes log-probs from the engines."""

    gpus: int
    threshold: float
    step: float
    """Seconds."""


STREAMED: Final = (
    Streamed(gpus=128, threshold=0.0, step=231.34),
    Streamed(gpus=128, threshold=0.1, step=171.30),
    Streamed(gpus=128, threshold=0.3, step=146.11),
    Streamed(gpus=128, threshold=0.5, step=150.63),
    Streamed(gpus=64, threshold=0.5, step=189.26),
)
"""The sweep on 128 GPUs, and the other size whose halves have a colocated row."""

SLOTS_PER_GPU, RISE = 28, 2.0
"""What `fit_engines()` found."""


def fit_engines() -> tuple[int, float]:
    """Slots and rise on a grid, by logarithmic errors of generation in the colocated rows, each
    with the same time per token."""
    found = []
    for slots in SLOTS_TRIED:
        for rise in RISES_TRIED:
            logs = [
                math.log(row.gen / _units(gpus, slots, rise)) for gpus, row in COLOCATED.items()
            ]
            mean = sum(logs) / len(logs)
            found.append((sum((one - mean) ** 2 for one in logs), slots, rise))
    _, slots, rise = min(found)
    return slots, rise


@cache
def _units(gpus: int, slots: int, rise: float) -> float:
    return mean_units([_drawn(seed) for seed in FIT_SEEDS], gpus, slots, rise)


@cache
def _drawn(seed: int) -> list[tuple[int, ...]]:
    return [LENGTHS.draw(seed=seed, ordinal=one, size=SIBLINGS) for one in range(GROUPS)]


def engines_of(half: int) -> ScalingModel:
    """The half that generates: a rollout takes it what the colocated row on as many GPUs took."""
    row = COLOCATED[half]
    return ScalingModel(
        slots_per_gpu=SLOTS_PER_GPU,
        tau_s=row.gen / _units(half, SLOTS_PER_GPU, RISE),
        rise=RISE,
        train_fixed_s=row.rest,
        train_gpu_s=row.update * half,
    )


def trainer_of(half: int) -> TrainerRates:
    """The half that trains: updates by tokens, and what is in none of them with the last part."""
    row = COLOCATED[half]
    return TrainerRates(fixed_s=row.rest, token_s=row.update / step_tokens(LENGTHS))


def limit_s(row: Streamed) -> float:
    """max(T_train, T_rollout)."""
    half = row.gpus // 2
    rollout_s = engines_of(half).rollout_limit_s(half, step_tokens(LENGTHS))
    return max(engines_of(half).train_s(half), rollout_s)


def simulate_streamed(row: Streamed, *, seed: int, steps: int = STEPS, parts: int = PARTS) -> float:
    """Seconds of a step of its steady part."""
    half = row.gpus // 2
    plan = PoolPlan(
        workers=engines_of(half).workers(half),
        rates=replace(engines_of(half).rates(), load_s=0.0),
        trainer=trainer_of(half),
        lengths=cache(lambda one: LENGTHS.draw(seed=seed, ordinal=one, size=SIBLINGS)),
        group_size=SIBLINGS,
        per_step=GROUPS,
        steps=steps,
        in_flight=round(GROUPS * (1 + row.threshold)),
        parts=parts,
    )
    return figures_of_run(Pool(plan).run()).step_min * MINUTE_S


def mean_step_s(row: Streamed, *, seeds: Sequence[int], steps: int, parts: int = PARTS) -> float:
    """`simulate_streamed` over seeds."""
    found = [simulate_streamed(row, seed=seed, steps=steps, parts=parts) for seed in seeds]
    return sum(found) / len(found)
