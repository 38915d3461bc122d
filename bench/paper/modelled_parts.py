"""Decides the pace of a world's engines by modelled rates: production's machines on such hardware.

The engine behind the port is `SimulatedEngine`, with real tokens, real log-probs and export; only
the time between two of its steps depends on how many requests are active. At a published size one
simulated token may stand for many real ones (`coarse`): lengths shrink by that factor and a token
takes so much longer. What it costs: ends are seen up to one coarse token late, and progress records
come no oftener.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.simulated import Lengths
from dora_pipe.producers.worker.effects import LoadWeights
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.sim.modelled_worker import EngineRates
from dora_pipe.sim.paced_port import PacedPort
from dora_pipe.sim.parts import PlainParts, Site, WorkerPlan
from dora_pipe.sim.role import SimPort


@dataclass(frozen=True, kw_only=True)
class ModelledParts(PlainParts):
    """See the head of this file. `steps_max` engine steps make one event of the world.

    Example: ``World(config, workers=plans, parts=ModelledParts(rates=EngineRates(tau_s=0.02)))``
    """

    rates: EngineRates
    coarse: int = 1

    def _engine_port(self, site: Site, engine: Engine, plan: WorkerPlan) -> SimPort:
        inner = EnginePort(
            engine,
            site.store.weights,
            clock=site.clock,
            in_thread=False,
            steps_max=self.steps_max,
        )
        load_ns = int(self.rates.load_s * 1e9)
        return PacedPort(
            inner,
            site.clock,
            delay_ns=lambda effect: load_ns if isinstance(effect, LoadWeights) else 0,
            again_ns=lambda: self.pace_ns(engine.active),
        )

    def pace_ns(self, active: int) -> int:
        """Time of `steps_max` coarse tokens while so many requests are active."""
        return int(self.rates.tau(max(1, active)) * self.coarse * self.steps_max * 1e9)


def coarse_lengths(lengths: Lengths, coarse: int) -> Lengths:
    """Lengths in coarse tokens, rounded up."""
    return lambda seed, turn: ceil(lengths(seed, turn) / coarse)
