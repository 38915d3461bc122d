"""Measured cells for tests of the off-policy study."""

from __future__ import annotations

from dora_pipe.bench.studies.offpolicy import Measured


def measured(
    objective: str,
    eta: int,
    seed: int,
    last: float,
    *,
    setting: str = "s",
    clipped: float = 0.0,
    masked: float | None = None,
    diverged_at: int | None = None,
) -> Measured:
    return Measured(
        setting=setting,
        objective=objective,
        eta=eta,
        seed=seed,
        steps=2,
        samples=64,
        tokens=640,
        rewards=[(0, 0.25), (1, (0.25 + last) / 2), (2, last)],
        clipped=clipped,
        masked=masked,
        ratio_max=1.5,
        cpu_s=1.0,
        diverged_at=diverged_at,
    )
