"""Measures what open sessions of agents hold in their worker's process: it decides nothing.

The worker's machine, loop and ports are production's and so is the log, a file; the engine is
simulated, and agents are numbers that call once when they are told to. The process of the endpoint
is measured beside it (`bench.endpoint`).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.endpoint import MemoryFigure, rss_bytes
from dora_pipe.bench.status import place_of
from dora_pipe.bus.port import Append, Bus, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import ResourceError
from dora_pipe.core.runtime import Meter, Runtime
from dora_pipe.producers.engines.port import SamplingParams
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine
from dora_pipe.producers.worker.effects import (
    AgentCall,
    AnswerCall,
    CallAsked,
    CloseSession,
    OpenSession,
    RefuseCall,
)
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.ports import CodecPort
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.resume import ProgressPort
from dora_pipe.schemas.rounds import AnyDecision, Assign, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

TOPICS: Final = Topics("sessions")
WORKER: Final = "w0"
EPOCH: Final = 0
DIGEST: Final = "0" * 64
GROUP_SIZE: Final = 8
GROUPS_OF_ROUND: Final = 50
PROMPT_TOKENS: Final = 64
SAMPLED_TOKENS: Final = 16
WARM: Final = 64
"""Sessions before those that are counted, each with a call: what is loaded once is loaded then."""
TICKS_MAX: Final = 100_000
"""Of the loop, for what is asked of it."""


def bench_worker_memory(sessions: int, *, called: int) -> MemoryFigure:
    """What so many open sessions hold, and what one call each of `called` of them adds. Measured in
    a process of its own: one that was larger before has room for them that nobody sees."""
    command = [sys.executable, "-m", "dora_pipe.bench.worker_memory", str(sessions), str(called)]
    done = subprocess.run(command, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout, type=MemoryFigure)


def _measure(sessions: int, called: int) -> MemoryFigure:
    with (
        tempfile.TemporaryDirectory(prefix="bench-sessions-") as folder,
        closing(SqliteBus(Path(folder) / "log.sqlite")) as bus,
    ):
        worker = _Worker(bus, requests=sessions + WARM)
        worker.open(WARM)
        worker.call(range(WARM))
        empty = _settled_bytes()
        worker.open(sessions)
        opened = _settled_bytes()
        worker.call(range(WARM, WARM + called))
        after = _settled_bytes()
        worker.close()
    return MemoryFigure(
        process="worker",
        sessions=sessions,
        process_mb=opened / 1e6,
        kb_per_session=(opened - empty) / sessions / 1e3,
        kb_per_call=(after - opened) / called / 1e3,
    )


def _settled_bytes() -> int:
    gc.collect()
    return rss_bytes(os.getpid())


class _Agents:
    """Agents that do nothing but what they are told."""

    effects: tuple[type, ...] = (AgentCall, OpenSession, AnswerCall, RefuseCall, CloseSession)

    def __init__(self) -> None:
        self.open: list[str] = []
        self.answered = 0
        self._asked: list[CallAsked] = []

    def call(self, at: int) -> None:
        """This session calls the model, each with a prompt of its own."""
        ids = [3 + (at // 89**place if place < 3 else place) % 89 for place in range(PROMPT_TOKENS)]
        self._asked.append(CallAsked(request=self.open[at], call=1, token_ids=ids, api="generate"))

    def start(self, effect: Any) -> None:
        """See `effects`."""
        if isinstance(effect, OpenSession):
            self.open.append(effect.request)
        assert not isinstance(effect, RefuseCall), effect
        self.answered += isinstance(effect, AnswerCall)

    def poll(self) -> list[CallAsked]:
        """The calls."""
        asked, self._asked = self._asked, []
        return asked

    @property
    def busy(self) -> bool:
        """Whether somebody calls."""
        return bool(self._asked)

    def close(self) -> None:
        """Nothing is held."""


class _Worker:
    """A worker, and the decisions that it reads."""

    def __init__(self, bus: Bus, *, requests: int) -> None:
        many = (TOPICS.trajectories, TOPICS.progress)
        bus.create(
            [TopicSpec(name=one, partitions=4 if one in many else 1) for one in TOPICS.all()]
        )
        self.agents = _Agents()
        self._writer = bus.writer()
        self._rounds = self._groups = 0
        setup = _setup(slots=-(-requests // GROUP_SIZE))
        engine = SimulatedEngine(
            slots=setup.slots,
            context_tokens=setup.context_tokens,
            lengths=lambda seed, turn: SAMPLED_TOKENS,
        )
        clock, meter = SystemClock(), Meter()
        machine = WorkerMachine(
            setup,
            cost=meter.cost,
            kv_used=lambda: engine.kv_used_tokens,
            prompt_tokens=lambda: engine.prompt_tokens,
        )
        self._loop = Runtime(
            machine,
            bus=bus,
            writer=bus.writer(),
            ports=[
                self.agents,
                CodecPort(meter, clock=clock),
                ProgressPort(bus, TOPICS.progress, meter, clock=clock),
                EnginePort(engine, Path, clock=clock, in_thread=False),
            ],
            clock=clock,
            meter=meter,
            exclusive=False,
            turn_ns=0,
        )
        self._decide([Assign(worker=WORKER, epoch=EPOCH, version=0, digest=DIGEST, reason="bench")])

    def open(self, sessions: int) -> None:
        """So many more are placed here, and their agents started."""
        wanted = len(self.agents.open) + sessions
        first, self._groups = self._groups, self._groups - (-sessions // GROUP_SIZE)
        places = [
            place_of(ordinal, version=0, digest=DIGEST, size=GROUP_SIZE, worker=WORKER, epoch=EPOCH)
            for ordinal in range(first, self._groups)
        ]
        for start in range(0, len(places), GROUPS_OF_ROUND):
            self._decide(places[start : start + GROUPS_OF_ROUND])
        self._until(lambda: len(self.agents.open) >= wanted)

    def call(self, places: Sequence[int]) -> None:
        """Each of these sessions calls once, and has its answer."""
        wanted = self.agents.answered + len(places)
        for at in places:
            self.agents.call(at)
        self._until(lambda: self.agents.answered == wanted)

    def close(self) -> None:
        """The loop ends; what is open stays so."""
        self._loop.close()
        self._writer.close()

    def _decide(self, decisions: Sequence[AnyDecision]) -> None:
        one = Round(
            ordinal=self._rounds,
            role_epoch=1,
            now_ns=0,
            control_next=0,
            decisions=tuple(decisions),
        )
        self._rounds += 1
        self._writer.append([Append(topic=TOPICS.decisions, value=encode(one))])

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(TICKS_MAX):
            if done():
                return
            self._loop.tick()
        raise ResourceError("the worker does not do what it was asked")


def _setup(slots: int) -> WorkerSetup:
    params = SamplingParams(max_tokens=1024, stop_ids=(END_TOKEN,))
    return WorkerSetup(
        topics=TOPICS,
        worker=WORKER,
        epoch=EPOCH,
        slots=slots,
        prefetch=0,
        context_tokens=4096,
        checkpoint_tokens=512,
        turns_max={"train": 64},
        heartbeat_ns=10**9,
        stop_timeout_ns=10**9,
        decisions_from=0,
        digests={"train": DIGEST},
        params={"train": params},
        agents=frozenset({"train"}),
        calls_max={"train": 64},
        calls_open_max={"train": 8},
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure(int(sys.argv[1]), int(sys.argv[2]))))
