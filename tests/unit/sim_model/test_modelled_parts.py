"""A world on modelled hardware: production's machines, engines whose pace depends on the load."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import pytest

from dora_pipe.bench.paper.modelled_parts import ModelledParts, coarse_lengths
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.config.model import Config
from dora_pipe.producers.engines.simulated import long_tailed_length
from dora_pipe.sim.modelled_worker import EngineRates
from dora_pipe.sim.parts import WorkerPlan
from dora_pipe.sim.whatif_facts import Measured, measure
from dora_pipe.sim.world import SECOND_NS, World

RATES = EngineRates(tau_s=0.05, rise=3.0, full=8, load_s=0.2)


def run(**parts: Any) -> Measured:
    """Six steps on two workers, measured from the log."""
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
        assert world.run(until_ns=40_000 * SECOND_NS)
        with closing(read_catalogue(world.bus, world.topics)) as catalogue:
            return measure(world.bus, world.topics, catalogue)


def test_the_pace_of_a_modelled_engine_is_what_a_log_says_of_it() -> None:
    speed = run(rates=RATES, steps_max=1).speed
    full_s = speed.t0_s + 8 * speed.t1_s
    assert full_s == pytest.approx(RATES.tau(8), rel=0.1)
    assert speed.t0_s + speed.t1_s == pytest.approx(RATES.tau(1), rel=0.35)


def test_coarse_tokens_take_as_long_as_the_ones_they_stand_for() -> None:
    fine = run(rates=RATES, steps_max=1)
    coarse = run(rates=RATES, steps_max=1, coarse=4, lengths=coarse_lengths(long_tailed_length, 4))
    assert coarse.wall_s == pytest.approx(fine.wall_s, rel=0.15)
    assert sum(coarse.lengths.values()) < sum(fine.lengths.values()) / 3
