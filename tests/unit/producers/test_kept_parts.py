"""Engine and task processes that one worker leaves to the next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.model import Config, Task
from dora_pipe.core.clock import SystemClock
from dora_pipe.producers.engines.simulated import SimulatedEngine, long_tailed_length
from dora_pipe.producers.worker import kept_parts
from dora_pipe.producers.worker.kept_parts import KeptParts
from tests.support.orchestrator_records import make_config


class Engine(SimulatedEngine):
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Pool:
    def __init__(self, task: Task, **_: Any) -> None:
        self.task, self.ended = task, 0

    def end(self) -> None:
        self.ended += 1


def test_the_next_worker_has_the_engine_and_the_pools_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Engine] = []

    def factory(*, assets: Path, config: Config, decode: Any) -> Engine:
        made.append(Engine(slots=2, context_tokens=64, lengths=long_tailed_length))
        return made[-1]

    monkeypatch.setattr(kept_parts, "KeptPool", Pool)
    config, clock = make_config(), SystemClock()
    other = msgspec.structs.replace(config.task, name="other")
    with closing(KeptParts(factory)) as kept:
        for _ in range(2):
            engine = kept.engine(assets=Path(), config=config, decode=str)
            assert engine.slots == 2
            engine.close()
        pools: list[Any] = [kept.pool(one, clock=clock) for one in (config.task, other)]
        assert kept.pool(config.task, clock=clock) is pools[0]
        assert (len(made), made[0].closed) == (1, 0)
    assert made[0].closed == 1
    assert [one.ended for one in pools] == [1, 1]
