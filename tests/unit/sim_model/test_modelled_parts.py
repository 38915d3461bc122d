"""A world on modelled hardware: production's machines, engines whose pace depends on the load."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.bench.paper.modelled_parts import ModelledParts, coarse_lengths
from dora_pipe.config.model import Config
from dora_pipe.producers.engines.simulated import long_tailed_length
from dora_pipe.sim.modelled_worker import EngineRates
from dora_pipe.sim.parts import WorkerPlan
from dora_pipe.sim.world import SECOND_NS, World

RATES = EngineRates(tau_s=0.05, rise=3.0, full=8, load_s=0.2)


def seconds(**parts: Any) -> float:
    """Return the virtual time of six steps on two workers."""
    config = msgspec.convert(
        {
            "run": {"name": "m", "steps": 6, "seed": 7},
            "model": {"path": "m"},
            "task": {"kind": "arithmetic"},
            "groups": {"size": 4, "per_step": 8},
            "staleness": {"max_staleness": 1},
            "evaluation": {"prompts": 0},
            "bus": {"partitions": 2},
        },
        Config,
    )
    plans = [WorkerPlan(name=f"w{one}", slots=8, prefetch=4) for one in range(2)]
    with World(config, workers=plans, parts=ModelledParts(**parts)) as world:
        began_ns = world.clock.ns
        assert world.run(until_ns=40_000 * SECOND_NS)
        return (world.clock.ns - began_ns) / SECOND_NS


def test_a_slower_engine_takes_longer_by_its_pace() -> None:
    fast = EngineRates(tau_s=RATES.tau_s / 2, rise=3.0, full=8, load_s=0.2)
    assert seconds(rates=RATES, steps_max=1) > 1.5 * seconds(rates=fast, steps_max=1)


def test_coarse_tokens_take_as_long_as_the_tokens_that_they_replace() -> None:
    fine = seconds(rates=RATES, steps_max=1)
    lengths = coarse_lengths(long_tailed_length, 4)
    coarse = seconds(rates=RATES, steps_max=1, coarse=4, lengths=lengths)
    assert coarse == pytest.approx(fine, rel=0.15)
