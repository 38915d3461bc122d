"""Slots and speed of a number of GPUs: one law for every published size.

Slots grow with the GPUs that generate, a token takes longer in a full engine, and a training step
has a part that more GPUs make shorter and a part that they do not:

    slots = slots_per_gpu * gpus        tau(active) = tau_s * (1 + rise * active / slots)
    training = train_fixed_s + train_gpu_s / gpus

The two parts of training follow from the two synchronous rows. `slots_per_gpu`, `tau_s` and `rise`
were fitted to the step times of the synchronous and one-step rows at both sizes and to the rollout
times of the synchronous ones. Nothing of DORA's rows enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dora_pipe.bench.studies.paper.hardware import EngineRates, TrainerRates, WorkerSize
from dora_pipe.bench.studies.paper.lengths import EFFICIENCY, Lengths, figures_of

GROUPS: Final = 512
SIBLINGS: Final = 16
GPUS_PER_WORKER: Final = 4
"""GPUs of one serving replica; not published."""
TRAIN_SHARE: Final = 0.5
"""Share of the GPUs that train where generation and training have GPUs of their own.

Not published, and not fitted: the fitted rows alone prefer .25, DORA's rows select .5."""
PREFETCH_SHARE: Final = 0.1
"""Of its slots, a worker holds so many requests ahead."""
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingModel:
    """See the head of this file."""

    slots_per_gpu: int
    tau_s: float
    rise: float
    train_fixed_s: float
    train_gpu_s: float
    train_share: float = TRAIN_SHARE

    def training(self, gpus: int) -> int:
        """GPUs that train, of so many of which the others generate."""
        return int(gpus * self.train_share)

    def workers(self, gpus: int) -> list[WorkerSize]:
        """The workers that so many generating GPUs make."""
        slots = self.slots_per_gpu * GPUS_PER_WORKER
        return [
            WorkerSize(name=f"w{number:03}", slots=slots, prefetch=round(slots * PREFETCH_SHARE))
            for number in range(gpus // GPUS_PER_WORKER)
        ]

    def rates(self) -> EngineRates:
        """The speed of one of them."""
        return EngineRates(
            tau_s=self.tau_s, rise=self.rise, full=self.slots_per_gpu * GPUS_PER_WORKER
        )

    def trainer(self, gpus: int) -> TrainerRates:
        """The speed of a trainer on so many GPUs. What they share goes by tokens, so that parts of
        short responses are the cheap ones; what they do not comes with the last part."""
        token_s = self.train_gpu_s / gpus / step_tokens()
        return TrainerRates(fixed_s=self.train_fixed_s, token_s=token_s)

    def rollout_limit_s(self, gpus: int, tokens: float) -> float:
        """Total tokens x tau / slots, with every slot full all the time."""
        tau_s = self.rates().tau(self.slots_per_gpu * GPUS_PER_WORKER)
        return tokens * tau_s / (self.slots_per_gpu * gpus)


FITTED: Final = ScalingModel(
    slots_per_gpu=28,
    tau_s=0.0239,
    rise=0.25,
    train_fixed_s=174.9,
    train_gpu_s=19567.9,
)
"""Fitted on 2026-11-24 at commit 85419847 to the synchronous and one-step rows."""


def step_tokens(lengths: Lengths = EFFICIENCY) -> float:
    """Tokens of a step of the published size, on the mean."""
    return GROUPS * SIBLINGS * figures_of(lengths, size=SIBLINGS).mean
