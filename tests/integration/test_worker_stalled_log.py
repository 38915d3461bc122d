"""A log that stalls stops no engine step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from dora_pipe.bus.bus import Writer
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import WorkerLeft
from tests.support.worker import TOPICS, World

LIMIT_S = 60.0
STEPS = 200
ENDLESS = 1 << 20


class StallingBus(MemoryBus):
    def __init__(self) -> None:
        super().__init__(MemoryLog())
        self.stalled, self.go = threading.Event(), threading.Event()

    def writer(self, *, exclusive: str | None = None) -> Any:
        return StallingWriter(self, super().writer(exclusive=exclusive))


class StallingWriter:
    def __init__(self, bus: StallingBus, inner: Writer) -> None:
        self._bus, self._inner = bus, inner

    def append(self, records: Sequence[Append]) -> list[int]:
        if any(record.topic == TOPICS.progress for record in records):
            self._bus.stalled.set()
            assert self._bus.go.wait(LIMIT_S), "the engine made no step during the append"
        return self._inner.append(records)

    def close(self) -> None:
        self._inner.close()


def test_engine_steps_while_an_append_is_held() -> None:
    bus = StallingBus()
    world = World(bus=bus, background=True, lengths=lambda seed, turn: ENDLESS)
    worker = world.join(context_tokens=ENDLESS, max_tokens=ENDLESS)
    world.decide(world.assign(worker, 0), *(world.place(worker, 0, sample) for sample in range(4)))
    tokens: list[int] = []

    def stop() -> bool:
        if bus.stalled.is_set():
            tokens.append(worker.machine.requests.tokens_total)
        if len(tokens) >= STEPS:
            bus.go.set()
        return bus.go.is_set()

    worker.runtime.run(stop)
    worker.runtime.close()
    assert tokens[STEPS - 1] - tokens[0] >= 4 * (STEPS // 2)
    (record,) = world.facts(WorkerLeft)
    assert [resume.tokens > 0 for resume in record.progress.values()] == [True] * 4
