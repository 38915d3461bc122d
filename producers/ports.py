"""The worker's hands: engine, task pool, codec and progress reader as ports of the runtime.

They decide how much is done at a time, nothing else. All but the loading of weights happens in the
loop's own thread, in bounded bits: tokens for `STEP_BUDGET_NS` at a time, records for
`CODEC_BUDGET_NS`, progress chains record by record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.clock import Clock
from dora_pipe.errors import BusError, DoraError, SchemaError
from dora_pipe.producers.effects import (
    EncodeFailed,
    EncodeProgress,
    EncodeTrajectory,
    EngineAdd,
    EngineCancel,
    FetchProgress,
    LoadFailed,
    LoadWeights,
    Observed,
    ProgressEncoded,
    ProgressFetched,
    Prompted,
    Score,
    StepEnvironment,
    TrajectoryEncoded,
)
from dora_pipe.producers.engines.port import (
    Engine,
    EngineRequest,
    RequestFinished,
    WeightsLoaded,
)
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    TaskCall,
    TaskEvent,
)
from dora_pipe.runtime import FINAL_ERRORS, Meter
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.trajectory_codec import (
    decode_progress,
    encode_progress,
    encode_trajectory,
    header_pairs,
)

STEP_BUDGET_NS: Final = 10_000_000
"""The engine steps until so much time has passed, so that one turn of the loop, with its durable
append, costs little beside it. No slot waits for that: the port has requests ahead."""

STEPS_MAX: Final = 64
"""Steps in one poll, also where no time passes."""

PAUSES_MAX: Final = 4
"""Turns of the loop in a row in which the engine lets finished requests go first."""

CODEC_BUDGET_NS: Final = 5_000_000

CHAIN_MAX: Final = 4096
"""Progress records of one request; a longer chain is not followed."""

CHAIN_TIMEOUT_NS: Final = 10_000_000_000
"""A chain that could not be read in this time is given up: its request starts from the prompt."""


class Tasks(Protocol):
    """What the task port needs of a `TaskPool`."""

    @property
    def busy(self) -> bool:
        """Whether it has work for the next poll."""
        ...

    def start(self, effect: TaskCall | Forget) -> None:
        """Begin a call."""
        ...

    def poll(self) -> Sequence[TaskEvent]:
        """Events since the last call."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class Texts(Protocol):
    """What the task port needs of a `Tokenizer`."""

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that is appended."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens."""
        ...


class EnginePort:
    """Drives an engine, and refills its slots between two steps from the requests it was handed.

    With `in_thread`, weights are loaded beside the loop. While `urgent` says that records are on
    their way into the log, polls return without a step, boundedly often: a request that waited
    for the engine between every two of its records would be counted as open for long.
    """

    effects: tuple[type, ...] = (EngineAdd, EngineCancel, LoadWeights)

    def __init__(
        self,
        engine: Engine,
        weights_path: Callable[[str], Path],
        *,
        clock: Clock,
        in_thread: bool = True,
        steps_max: int = STEPS_MAX,
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._weights_path = weights_path
        self._clock = clock
        self._in_thread = in_thread
        self._steps_max = steps_max
        self._urgent = urgent
        self._pauses = 0
        self._events: list[Any] = []
        self._ahead: dict[str, EngineRequest] = {}
        self._loading: threading.Thread | None = None
        self._loaded: list[WeightsLoaded | LoadFailed] = []

    def start(self, effect: EngineAdd | EngineCancel | LoadWeights) -> None:
        """See the effects."""
        if isinstance(effect, EngineAdd):
            self._ahead[effect.request.request] = effect.request
        elif isinstance(effect, EngineCancel):
            if self._ahead.pop(effect.request, None) is None:
                self._engine.cancel(effect.request)
        elif self._in_thread:
            assert self._loading is None, "weights are loaded one version at a time"
            self._loading = threading.Thread(
                target=self._load, args=(effect,), name="load-weights", daemon=True
            )
            self._loading.start()
        else:
            self._load(effect)

    def poll(self) -> list[Any]:
        """Steps for the budget; or whether loading has come to an end."""
        events, self._events = self._events, []
        if self._loading is not None:
            if self._loading.is_alive():
                return events
            self._loading.join()
            self._loading = None
        events += self._loaded
        self._loaded = []
        if self._pauses < PAUSES_MAX and self._urgent():
            self._pauses += 1
            return events
        self._pauses = 0
        until_ns = self._clock.now_ns() + STEP_BUDGET_NS
        for _ in range(self._steps_max):
            self._refill(events)
            if not self._engine.active:
                break
            events += self._engine.step()
            if self._clock.now_ns() >= until_ns:
                break
        return events

    @property
    def busy(self) -> bool:
        """Whether there are tokens to sample."""
        return bool(self._events or self._loaded or self._ahead) or self._engine.active > 0

    def close(self) -> None:
        """Wait for weights under way. Who made the engine closes it."""
        if self._loading is not None:
            self._loading.join()
            self._loading = None

    def _refill(self, events: list[Any]) -> None:
        """Fill free slots in order. A request that the engine refuses has ended with an error."""
        while self._ahead and self._engine.active < self._engine.slots:
            name = next(iter(self._ahead))
            try:
                self._engine.add(self._ahead.pop(name))
            except ValueError as error:
                events.append(RequestFinished(request=name, reason="error", error=str(error)))

    def _load(self, effect: LoadWeights) -> None:
        try:
            loaded = self._engine.load(
                self._weights_path(effect.digest), version=effect.version, digest=effect.digest
            )
        except DoraError as error:
            self._loaded.append(LoadFailed(version=effect.version, message=error.message))
        except OSError as error:
            self._loaded.append(LoadFailed(version=effect.version, message=str(error)))
        else:
            self._loaded.append(loaded)


class TaskPort:
    """Text on one side, token ids on the other: prompts, environments and rewards."""

    effects: tuple[type, ...] = (PromptCall, StepEnvironment, Score, Forget)

    def __init__(self, tasks: Tasks, texts: Texts) -> None:
        self._tasks = tasks
        self._texts = texts

    def start(self, effect: PromptCall | StepEnvironment | Score | Forget) -> None:
        """Hand a call to the pool."""
        if isinstance(effect, StepEnvironment):
            text = self._texts.text(effect.token_ids)
            self._tasks.start(EnvStep(request=effect.request, text=text))
        elif isinstance(effect, Score):
            self._tasks.start(self._reward_call(effect))
        else:
            self._tasks.start(effect)

    def poll(self) -> list[Any]:
        """The pool's events, texts as token ids."""
        return [self._translated(event) for event in self._tasks.poll()]

    @property
    def busy(self) -> bool:
        """Whether the pool has calls to hand out or events to give."""
        return self._tasks.busy

    def close(self) -> None:
        """Stop the pool."""
        self._tasks.close()

    def _reward_call(self, effect: Score) -> RewardCall:
        answer = self._texts.text(effect.answer)
        single = len(effect.turns) == 1
        turns = (answer,) if single else tuple(map(self._texts.text, effect.turns))
        return RewardCall(
            request=effect.request,
            split=effect.split,
            index=effect.index,
            text=answer,
            turns=turns,
        )

    def _translated(self, event: TaskEvent) -> Any:
        if isinstance(event, PromptReady):
            ids = self._texts.prompt_ids(event.text)
            return Prompted(request=event.request, token_ids=ids, episode=event.episode)
        if isinstance(event, EnvObserved):
            return Observed(
                request=event.request,
                token_ids=self._texts.ids(event.text),
                done=event.done,
                tool=event.tool,
                ok=event.ok,
            )
        return event


class CodecPort:
    """Makes the bytes of trajectories and progress records, booked to the meter as `codec`."""

    effects: tuple[type, ...] = (EncodeTrajectory, EncodeProgress)

    def __init__(self, meter: Meter, *, clock: Clock) -> None:
        self._meter = meter
        self._clock = clock
        self._queue: deque[EncodeTrajectory | EncodeProgress] = deque()

    def start(self, effect: EncodeTrajectory | EncodeProgress) -> None:
        """Queue a record."""
        self._queue.append(effect)

    def poll(self) -> list[Any]:
        """Records for the budget, in order."""
        if not self._queue:
            return []
        events: list[Any] = []
        until_ns = self._clock.now_ns() + CODEC_BUDGET_NS
        with self._meter.spend("codec"):
            while self._queue:
                events.append(_encoded(self._queue.popleft()))
                if self._clock.now_ns() >= until_ns:
                    break
        return events

    @property
    def busy(self) -> bool:
        """Whether records wait."""
        return bool(self._queue)

    def close(self) -> None:
        """Forget what waits."""
        self._queue.clear()


def _encoded(
    effect: EncodeTrajectory | EncodeProgress,
) -> TrajectoryEncoded | ProgressEncoded | EncodeFailed:
    try:
        if isinstance(effect, EncodeProgress):
            return ProgressEncoded(request=effect.request, value=encode_progress(effect.progress))
        value, headers = encode_trajectory(effect.trajectory)
        return TrajectoryEncoded(
            request=effect.request,
            value=value,
            headers=header_pairs(headers),
            sha256=headers.sha256,
        )
    except SchemaError as error:
        return EncodeFailed(request=effect.request, message=error.message)


@dataclass(slots=True, kw_only=True)
class _Chain:
    """A chain while it is read, newest record first."""

    request: str
    tp: TopicPartition
    wanted: int
    """Offset of the record that is read next."""
    until_ns: int
    reader: Reader | None = None
    found: list[Progress] = field(default_factory=list)


class ProgressPort:
    """Follows chains of progress records back to their beginning.

    A chain that breaks (a record that is not there, cannot be read, or names a later one as the
    one before it) comes back empty, with the reason.
    """

    effects: tuple[type, ...] = (FetchProgress,)

    def __init__(self, bus: Bus, topic: str, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._meter = meter
        self._clock = clock
        self._chains: deque[_Chain] = deque()

    def start(self, effect: FetchProgress) -> None:
        """Begin at the newest record."""
        chain = _Chain(
            request=effect.request,
            tp=TopicPartition(self._topic, effect.resume.partition),
            wanted=effect.resume.offset,
            until_ns=self._clock.now_ns() + CHAIN_TIMEOUT_NS,
        )
        self._chains.append(chain)

    def poll(self) -> list[Any]:
        """The next record of the chain whose turn it is."""
        if not self._chains:
            return []
        chain = self._chains.popleft()
        event = self._next(chain)
        if event is None:
            self._chains.append(chain)
            return []
        _let_go(chain)
        return [event]

    @property
    def busy(self) -> bool:
        """Whether a chain is being read."""
        return bool(self._chains)

    def close(self) -> None:
        """Give up what is being read."""
        while self._chains:
            _let_go(self._chains.popleft())

    def _next(self, chain: _Chain) -> ProgressFetched | None:
        record = self._read(chain)
        if record is None:
            late = self._clock.now_ns() >= chain.until_ns
            return _broken(chain, "it could not be read in time") if late else None
        if record.offset != chain.wanted:
            return _broken(chain, f"there is no record at offset {chain.wanted}")
        try:
            with self._meter.spend("codec"):
                chunk = decode_progress(record.value)
        except SchemaError as error:
            return _broken(chain, f"the record at offset {record.offset}: {error.message}")
        chain.found.append(chunk)
        if chunk.previous < 0:
            return ProgressFetched(request=chain.request, chunks=chain.found[::-1])
        if chunk.previous >= chain.wanted or len(chain.found) >= CHAIN_MAX:
            return _broken(chain, f"the record at offset {record.offset} names no earlier one")
        chain.wanted = chunk.previous
        return None

    def _read(self, chain: _Chain) -> Record | None:
        """The first record from the wanted offset on; None as long as the bus has none to give."""
        with self._meter.spend("bus"):
            try:
                if chain.reader is None:
                    chain.reader = self._bus.reader({chain.tp: chain.wanted})
                chain.reader.seek(chain.tp, chain.wanted)
                records = chain.reader.poll(timeout_s=0.0, records_max=1)
            except FINAL_ERRORS:
                raise
            except BusError:
                return None
        return records[0] if records else None


def _let_go(chain: _Chain) -> None:
    if chain.reader is not None:
        chain.reader.close()


def _broken(chain: _Chain, why: str) -> ProgressFetched:
    return ProgressFetched(request=chain.request, chunks=(), why=why)
