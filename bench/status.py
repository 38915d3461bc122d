"""Counts what a worker's statuses add to the metrics topic, in virtual time; decides nothing.

The real machine is played by hand, in turns of the bus: effects are answered in the next turn,
durable records are acknowledged in it, and every running request gets its tokens. Byte for byte the
same wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.bus.port import Record
from dora_pipe.config.model import Timing
from dora_pipe.config.workers import Workers
from dora_pipe.core.runtime import BUS_TURN_NS, Now, Outputs, Published
from dora_pipe.core.status_schedule import quiet_ns
from dora_pipe.producers.engines.port import SamplingParams, TokensSampled, WeightsLoaded
from dora_pipe.producers.tasks.calls import PromptCall
from dora_pipe.producers.worker.effects import (
    EncodeProgress,
    EngineAdd,
    EngineStarted,
    LoadWeights,
    ProgressEncoded,
    PromptReady,
)
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.identity import group_id, group_seed
from dora_pipe.schemas.metrics import Cost
from dora_pipe.schemas.rounds import AnyDecision, Assign, GroupSpec, Place, PlacedSibling, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

RUNNING: Final = (0, 80)
GROUP: Final = 8
TOKENS_PER_S: Final = 20
"""Of each running request: what 80 of them get together is 1600 tokens/s."""

WARM_S: Final = 20
MEASURED_S: Final = 120
WALL_NS: Final = 1_750_000_000_000_000_000
OFFSET: Final = 1_000_000
"""Where the log stands: offsets of a long run have seven digits."""

VERSION: Final = 17
DIGEST: Final = "d" * 64
_TOPICS: Final = Topics("bench")
_TURNS_PER_S: Final = 1_000_000_000 // BUS_TURN_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFigure:
    """Statuses of one worker, with the configuration's defaults: key and value together.

    Example: ``StatusFigure(running=80, tokens_per_s=1600, statuses_per_s=0.7, bytes_per_s=850.0)``
    """

    running: int
    tokens_per_s: int
    statuses_per_s: float
    bytes_per_s: float


def bench_status(running: Sequence[int] = RUNNING) -> list[StatusFigure]:
    """Figures of a worker with so many running requests each."""
    return [_figure(one) for one in running]


def _figure(running: int) -> StatusFigure:
    worker = _PlayedWorker(running)
    worker.play(WARM_S)
    worker.sizes.clear()
    worker.play(MEASURED_S)
    return StatusFigure(
        running=running,
        tokens_per_s=running * TOKENS_PER_S,
        statuses_per_s=len(worker.sizes) / MEASURED_S,
        bytes_per_s=sum(worker.sizes) / MEASURED_S,
    )


class _PlayedWorker:
    """A worker, and whoever answers it."""

    def __init__(self, running: int) -> None:
        self.sizes: list[int] = []
        """Bytes of each status."""
        self._turn = 0
        self._offset = OFFSET
        self._running: list[str] = []
        self._answers: list[Any] = [_round(running)]
        self._machine = WorkerMachine(_setup(running), cost=self._cost, kv_used=self._kv_used)

    def play(self, seconds: int) -> None:
        """So many seconds of virtual time."""
        for _ in range(seconds * _TURNS_PER_S):
            self._turn += 1
            inputs, self._answers = [*self._answers, *self._tokens()], []
            mono_ns = self._turn * BUS_TURN_NS
            self._answer(
                self._machine.react(inputs, Now(mono_ns=mono_ns, wall_ns=WALL_NS + mono_ns))
            )

    def _tokens(self) -> list[TokensSampled]:
        """A second's tokens for one in ten of the requests, each turn another."""
        due = self._running[self._turn % _TURNS_PER_S :: _TURNS_PER_S]
        return [_sampled(request) for request in due]

    def _answer(self, outputs: Outputs) -> None:
        for effect in outputs.effects:
            self._answers.append(_ANSWERS[type(effect)](effect))
            if isinstance(effect, EngineAdd):
                self._running.append(effect.request.request)
        for one in outputs.publish:
            record, self._offset = one.record, self._offset + 1
            if record.topic == _TOPICS.metrics:
                self.sizes.append(len(record.key) + len(record.value))
            if one.tag:
                self._answers.append(
                    Published(
                        tag=one.tag,
                        topic=record.topic,
                        partition=record.partition,
                        offset=self._offset,
                    )
                )

    def _cost(self) -> Cost:
        spent_s = round(1000 + self._turn / 117, 3)
        return Cost(
            total_s=spent_s,
            bus_s=round(spent_s / 7, 3),
            control_s=round(spent_s / 9, 3),
            codec_s=round(spent_s / 11, 3),
            rss_bytes=6_123_456_512,
        )

    def _kv_used(self) -> int:
        return self._machine.requests.tokens_total


def _sampled(request: str) -> TokensSampled:
    zeros = [-1.0] * TOKENS_PER_S
    return TokensSampled(
        request=request,
        token_ids=[7] * TOKENS_PER_S,
        logprobs=zeros,
        sampler_logprobs=zeros,
        first_token_ns=WALL_NS,
    )


_ANSWERS: Final[dict[type, Callable[[Any], Any]]] = {
    LoadWeights: lambda one: WeightsLoaded(version=one.version, digest=one.digest, load_ms=1.0),
    PromptCall: lambda one: PromptReady(request=one.request, token_ids=[1] * 64, episode=False),
    EngineAdd: lambda one: EngineStarted(request=one.request.request, at_ns=WALL_NS),
    EncodeProgress: lambda one: ProgressEncoded(request=one.request, value=b""),
}


def _round(running: int) -> Record:
    """Assign a version, and place the requests."""
    assign = Assign(reason="", worker="w0", epoch=0, version=VERSION, digest=DIGEST)
    places = [
        place_of(ordinal, version=VERSION, digest=DIGEST, size=GROUP, worker="w0", epoch=0)
        for ordinal in range(running // GROUP)
    ]
    decisions: tuple[AnyDecision, ...] = (assign, *places)
    round_ = Round(ordinal=0, role_epoch=0, now_ns=0, control_next=0, decisions=decisions)
    return Record(topic=_TOPICS.decisions, partition=0, offset=0, key=b"", value=encode(round_))


def place_of(
    ordinal: int, *, version: int, digest: str, size: int, worker: str, epoch: int
) -> Place:
    """A whole training group on a worker."""
    spec = GroupSpec(
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        version=version,
        digest=digest,
        deadline=version + 2,
        partition=ordinal % 4,
        dataset_digest=digest,
        index=ordinal,
        data_epoch=0,
        seed=group_seed(1, "train", ordinal),
        size=size,
    )
    siblings = tuple(PlacedSibling(sibling=one, attempt=1) for one in range(size))
    return Place(reason="", spec=spec, worker=worker, epoch=epoch, siblings=siblings)


def _setup(running: int) -> WorkerSetup:
    params = SamplingParams(max_tokens=1_000_000)
    timing = Timing()
    return WorkerSetup(
        topics=_TOPICS,
        worker="w0",
        epoch=0,
        slots=max(1, running),
        prefetch=0,
        context_tokens=1_000_000,
        checkpoint_tokens=Workers().checkpoint_tokens,
        turns_max={"train": 1, "eval": 1},
        heartbeat_ns=int(timing.heartbeat_s * 1e9),
        quiet_ns=quiet_ns(timing),
        stop_timeout_ns=0,
        decisions_from=0,
        digests={"train": DIGEST, "eval": DIGEST},
        params={"train": params, "eval": params},
    )
