"""Slots and speed as a function of the number of GPUs.

    slots = slots_per_gpu * gpus        tau(active) = tau_s * (1 + rise * active / slots)
    training = train_fixed_s + train_gpu_s / gpus

Fitted to the synchronous and one-step rows at both sizes; DORA's rows are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dora_pipe.bench.studies.paper.hardware import EngineRates, TrainerRates, WorkerSize
from dora_pipe.bench.studies.paper.lengths import EFFICIENCY, Lengths, figures_of

GROUPS: Final = 512
SAMPLES: Final = 16
GPUS_PER_WORKER: Final = 4
"""GPUs per replica; not published."""
TRAIN_SHARE: Final = 0.5
"""Share of training GPUs if they are separate.

Neither published nor fitted: the fitted rows prefer 0.25, DORA's rows select 0.5.
"""
PREFETCH_SHARE: Final = 0.1
"""Prefetch as a share of a worker's slots."""
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingModel:
    slots_per_gpu: int
    tau_s: float
    rise: float
    train_fixed_s: float
    train_gpu_s: float
    train_share: float = TRAIN_SHARE

    def training(self, gpus: int) -> int:
        return int(gpus * self.train_share)

    def workers(self, gpus: int) -> list[WorkerSize]:
        slots = self.slots_per_gpu * GPUS_PER_WORKER
        return [
            WorkerSize(name=f"w{number:03}", slots=slots, prefetch=round(slots * PREFETCH_SHARE))
            for number in range(gpus // GPUS_PER_WORKER)
        ]

    def rates(self) -> EngineRates:
        return EngineRates(
            tau_s=self.tau_s, rise=self.rise, full=self.slots_per_gpu * GPUS_PER_WORKER
        )

    def trainer(self, gpus: int) -> TrainerRates:
        """Return the speed of a trainer. The scalable part counts by tokens, so parts of short
        responses are cheap; the fixed part comes with the last part."""
        token_s = self.train_gpu_s / gpus / step_tokens()
        return TrainerRates(fixed_s=self.train_fixed_s, token_s=token_s)

    def rollout_limit_s(self, gpus: int, tokens: float) -> float:
        """Return total tokens x tau / slots, with all slots always full."""
        tau_s = self.rates().tau(self.slots_per_gpu * GPUS_PER_WORKER)
        return tokens * tau_s / (self.slots_per_gpu * gpus)


FITTED: Final = ScalingModel(
    slots_per_gpu=28, tau_s=0.0239, rise=0.25, train_fixed_s=174.9, train_gpu_s=19567.9
)
"""Fitted on 2026-11-24 at commit 85419847 to the synchronous and one-step rows."""


def step_tokens(lengths: Lengths = EFFICIENCY) -> float:
    """Return a step's mean tokens."""
    return GROUPS * SAMPLES * figures_of(lengths, size=SAMPLES).mean
