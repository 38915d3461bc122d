"""Decides what a worker says it can, and whether its engine can what the run asks for."""

from __future__ import annotations

from typing import Final

from dora_pipe.config.model import Config
from dora_pipe.errors import ConfigError
from dora_pipe.producers.engines.port import (
    COUNTER_SAMPLING,
    INTERRUPTIBLE,
    KV_EXPORT,
    LORA,
    PREFILL_EXACT,
    Engine,
)

MOVES: Final = "moves"
"""What a worker declares that lets go of running requests; see `producers.moves`."""


def declares(engine: Engine, *, single_turn: bool) -> tuple[str, ...]:
    """What a worker says it can. Requests stay where they are unless they go on elsewhere with
    their cache, or after a prefill with the same random stream."""
    goes_on = {KV_EXPORT, PREFILL_EXACT, COUNTER_SAMPLING} & engine.declares
    return tuple(sorted(engine.declares | ({MOVES} if goes_on and single_turn else set())))


def check_engine(engine: Engine, config: Config) -> None:
    """Raises ConfigError for an engine that cannot do what the run asks for."""
    if config.staleness.interruptible and INTERRUPTIBLE not in engine.declares:
        raise ConfigError(
            f"the run is interruptible, and engine {engine.name} cannot change weights under"
            " running requests",
            hint="use another engine, or start a run with staleness.interruptible = false",
        )
    if config.lora.rank and LORA not in engine.declares:
        raise ConfigError(
            f"the run trains a LoRA adapter, and engine {engine.name} cannot host one",
            hint="workers.engine = torch or vllm, or start a run with lora.rank = 0",
        )
