"""Decides what an order of dispatch could win: likely long rows first, among those of one step.

In each block of a step's rows those come first that are expected to be longest, so that no step
gets other rows. What is known is more than any counter knows: the row's own part of the length
exactly (`prompts`), or all lengths (`oracle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, Literal

from dora_pipe.bench.paper.lengths import EFFICIENCY, Lengths
from dora_pipe.bench.paper.rows import PARTS, STEPS, Scenario, Seeds, simulate
from dora_pipe.bench.paper.scaling_model import (
    FITTED,
    SIBLINGS,
    ScalingModel,
    step_tokens,
)
from dora_pipe.bench.paper.scaling_model import GROUPS as FULL_GROUPS

Order = Literal["data", "prompts", "oracle"]
ORDERS: Final[tuple[Order, ...]] = ("data", "prompts", "oracle")
Draw = Callable[[int], Sequence[int]]

GPUS, GROUPS = 16, 128
"""A quarter of the published row of 64 GPUs: two workers generate."""


def ordered(
    order: Order, *, seed: int, block: int, lengths: Lengths = EFFICIENCY, size: int = SIBLINGS
) -> Draw:
    """Lengths by ordinal, where each block of so many rows is dispatched in this order."""
    draw = cache(lambda one: lengths.draw(seed=seed, ordinal=one, size=size))
    if order == "data":
        return draw

    def expected(ordinal: int) -> float:
        if order == "oracle":
            return sum(draw(ordinal))
        return lengths.prompt_effect(seed=seed, ordinal=ordinal)

    @cache
    def rows_of(number: int) -> list[int]:
        rows = range(number * block, (number + 1) * block)
        return sorted(rows, key=lambda one: -expected(one))

    return lambda ordinal: draw(rows_of(ordinal // block)[ordinal % block])


def order_rows() -> list[Scenario]:
    """With steps that overlap and without, in parts and whole."""
    return [
        Scenario(
            name=f"bound {bound}, C {batches:g}, parts {parts}",
            gpus=GPUS,
            part="ours",
            max_staleness=bound,
            in_flight_batches=batches,
            parts=parts,
        )
        for bound, batches in ((0, 1.0), (2, 2.0))
        for parts in (1, PARTS)
    ]


def order_train_s(scenario: Scenario, law: ScalingModel) -> float:
    """Training a step of a row of `order_rows`, in seconds: no step takes less."""
    tokens = round(step_tokens() * GROUPS / FULL_GROUPS)
    return law.trainer(scenario.training(law)).step_s(tokens=tokens)


def simulate_order(
    scenario: Scenario,
    order: Order,
    *,
    seeds: Sequence[int],
    steps: int = STEPS,
    law: ScalingModel = FITTED,
) -> Seeds:
    """A row of `order_rows` with its dispatches in this order."""
    return Seeds(
        runs=[
            simulate(
                scenario,
                law=law,
                seed=seed,
                steps=steps,
                per_step=GROUPS,
                lengths=ordered(order, seed=seed, block=GROUPS),
            )
            for seed in seeds
        ]
    )
