"""Worker's ports to task pools, logged records and KV handover.

Threads move KV caches and read records.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, Final, Never, Protocol, TypeVar, get_args

from msgspec.structs import replace

from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.bus.logged import record_digest
from dora_pipe.core.errors import (
    BusError,
    PolicyError,
    SchemaError,
    reason,
)
from dora_pipe.core.loop.effect_runner import (
    EffectRunner,
    Handler,
    attempt,
    unanswered,
)
from dora_pipe.core.loop.retry import FINAL_ERRORS
from dora_pipe.core.loop.runtime import Meter, Port, PortGroup
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.chat.chat import Chat, Conversation
from dora_pipe.producers.sessions.frames import Addresses
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    EnvObserved,
    EnvStep,
    Forget,
    GroupCall,
    PromptReady,
    RewardCall,
    SampledTurns,
    TaskEffect,
    TaskEvent,
    TaskFailed,
    message_line,
)
from dora_pipe.producers.tasks.task import Completion, Turn
from dora_pipe.producers.worker.effects import (
    DropKv,
    EngineEffect,
    EnginePortEvent,
    FetchGroup,
    FetchKv,
    FetchProgress,
    GroupFetched,
    HandoverEffect,
    HandoverEvent,
    KvFetched,
    KvPut,
    ProgressFetched,
    PutKv,
    RecordEffect,
    RecordEvent,
    SessionEffect,
    SessionEvent,
    WorkerEffect,
    WorkerEvent,
)
from dora_pipe.producers.worker.kv_handover import Handover
from dora_pipe.schemas.control import TakenTrajectory
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import (
    AnyProgress,
    decode_any_progress,
    decode_trajectory,
)
from dora_pipe.store.transfers.transfers import Lost

T = TypeVar("T")


class TextCodec(Protocol):
    """Part of `Tokenizer` that the task port needs."""

    def prompt_ids(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""

    def ids(self, text: str) -> list[int]:
        """Return the token ids of appended text."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens."""

    def check_unrendered(self, text: str) -> None:
        """Raises TaskError for text that is a rendered conversation."""


class TaskPort:
    """Replaces token ids of calls by text or messages, and adds those of events.

    A request with messages has a conversation until its reward call or its end.
    """

    def __init__(
        self,
        tasks: Port[TaskEffect, TaskEvent],
        texts: TextCodec,
        chat: Chat | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self._addresses = addresses
        self._tasks = tasks
        self._texts = texts
        self._chat = chat
        self._conversations: dict[str, Conversation] = {}
        self._failures: list[TaskFailed] = []

    def start(self, effect: TaskEffect) -> None:
        pass_on, failed = partial(self._pass_on, effect), partial(self._failed, effect)
        self._failures += attempt(type(effect).__name__, pass_on, failed)

    def poll(self) -> list[TaskEvent]:
        events: list[TaskEvent] = [*self._failures]
        self._failures.clear()
        for event in self._tasks.poll():
            translated, failed = partial(self._translated, event), partial(self._failed, event)
            events += attempt(type(event).__name__, translated, failed)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._failures) or self._tasks.busy

    def close(self) -> None:
        self._tasks.close()

    def _pass_on(self, effect: TaskEffect) -> Iterable[Never]:
        self._tasks.start(self._with_text(effect))
        return ()

    def _with_text(self, effect: TaskEffect) -> TaskEffect:
        match effect:
            case EnvStep():
                return self._step(effect)
            case RewardCall():
                return self._score(effect)
            case GroupCall():
                completions = tuple(map(self._parsed, effect.sampled))
                return replace(effect, completions=completions, sampled=())
            case AgentCall():
                assert self._addresses is not None, "a source with an agent has an endpoint"
                address = self._addresses.of(effect.request)
                return replace(effect, base_url=address.base_url, api_key=address.api_key)
            case Forget():
                self._conversations.pop(effect.request, None)
        return effect

    def _step(self, effect: EnvStep) -> EnvStep:
        conversation = self._conversations.get(effect.request)
        if conversation is None:
            turn = Turn(text=self._text(effect.token_ids))
        else:
            turn = conversation.say(effect.token_ids)
        return replace(effect, turn=turn, token_ids=())

    def _text(self, token_ids: Sequence[int]) -> str:
        return (self._chat or self._texts).text(token_ids)

    def _score(self, effect: RewardCall) -> RewardCall:
        conversation = self._conversations.pop(effect.request, None)
        sampled = effect.sampled
        assert sampled is not None, "the machine scores token ids"
        completion = self._completion(sampled)
        if effect.agent_answer is not None:
            completion = dataclasses.replace(completion, text=effect.agent_answer)
        elif self._addresses is not None and self._chat is not None:
            turn = self._chat.parse(sampled.answer, sampled.before, ())
            completion = dataclasses.replace(completion, text=turn.text, reasoning=turn.reasoning)
        if conversation is not None:
            if (len(sampled.turns) + 1) // 2 > conversation.turns:  # the last was not answered
                conversation.say(sampled.answer)
            completion = dataclasses.replace(
                completion,
                text=conversation.text,
                reasoning=conversation.reasoning,
                messages=conversation.messages(),
            )
        return replace(effect, completion=completion, sampled=None, agent_answer=None)

    def _completion(self, sampled: SampledTurns) -> Completion:
        text = self._text(sampled.answer)
        single = len(sampled.turns) == 1
        turns = (text,) if single else tuple(map(self._text, sampled.turns))
        return Completion(text=text, turns=turns)

    def _parsed(self, sampled: SampledTurns) -> Completion:
        completion = self._completion(sampled)
        if self._chat is None:
            return completion
        turn = self._chat.parse(sampled.answer, sampled.before, ())
        return Completion(
            text=turn.text,
            turns=completion.turns,
            messages=(turn.message(),),
            reasoning=turn.reasoning,
        )

    def _failed(self, message: TaskEffect | TaskEvent, error: Exception) -> list[TaskFailed]:
        if isinstance(message, Forget):
            return []
        self.start(Forget(request=message.request))
        text = message_line(reason(error))
        return [TaskFailed(request=message.request, error=type(error).__name__, message=text)]

    def _translated(self, event: TaskEvent) -> Iterator[TaskEvent]:
        if isinstance(event, PromptReady):
            yield replace(event, token_ids=self._prompt_ids(event))
        elif isinstance(event, EnvObserved):
            yield replace(event, token_ids=self._observed_ids(event))
        else:
            self._conversations.pop(event.request, None)
            yield event

    def _prompt_ids(self, event: PromptReady) -> Sequence[int]:
        self._conversations.pop(event.request, None)
        prompt = prompt_of(event, self._texts, self._chat)
        if not isinstance(prompt, Conversation):
            return prompt
        self._conversations[event.request] = prompt
        return prompt.prompt_ids

    def _observed_ids(self, event: EnvObserved) -> list[int]:
        conversation = self._conversations.get(event.request)
        if conversation is None:
            return self._texts.ids(event.text)
        messages = [{"role": "user", "content": event.text}] if event.text else []
        return conversation.answered(event.messages or messages, go_on=not event.done)


def prompt_of(
    event: PromptReady, texts: TextCodec, chat: Chat | None
) -> Conversation | Sequence[int]:
    """Return a prompt as a conversation or token ids. Raises TaskError, PolicyError or
    ConfigError."""
    if not event.messages:
        return texts.prompt_ids(event.text)
    if chat is None:
        raise PolicyError("the prompt is messages, but the model has no chat template")
    chat.check(several_turns=event.episode, tools=bool(event.tools))
    for message in event.messages:
        texts.check_unrendered(message["content"])
    return chat.start(event.messages, event.tools)


class TaskPorts(PortGroup[TaskEffect, TaskEvent]):
    """Task ports of a worker, selected by the `source` of a call."""

    def __init__(self, ports: Mapping[str, TaskPort]) -> None:
        super().__init__(ports, key=attrgetter("source"))


class WorkerPorts(PortGroup[WorkerEffect, WorkerEvent]):
    def __init__(
        self,
        *,
        tasks: Port[TaskEffect, TaskEvent],
        sessions: Port[SessionEffect, SessionEvent] | None,
        records: Port[RecordEffect, RecordEvent],
        handover: Port[HandoverEffect, HandoverEvent],
        engine: Port[EngineEffect, EnginePortEvent],
    ) -> None:
        ports: tuple[tuple[Any, Port[Any, WorkerEvent] | None], ...] = (
            (TaskEffect, tasks),
            (SessionEffect, sessions),  # only a source with an agent has an endpoint
            (RecordEffect, records),
            (HandoverEffect, handover),
            (EngineEffect, engine),
        )
        super().__init__(
            {kind: port for kinds, port in ports if port is not None for kind in get_args(kinds)}
        )


class HandoverPort(EffectRunner[HandoverEffect, HandoverEvent]):
    """Runs a `Handover` in a thread, or directly for virtual time. A lost cache costs a prefill."""

    def __init__(self, handover: Handover, *, in_thread: bool = True) -> None:
        handlers: list[Handler[Any, HandoverEvent]] = [
            Handler[PutKv, HandoverEvent](PutKv, partial(_put_kv, handover), _not_put),
            Handler[FetchKv, HandoverEvent](FetchKv, partial(_fetch_kv, handover), _not_fetched),
            Handler[DropKv, HandoverEvent](DropKv, partial(_drop_kv, handover), unanswered),
        ]
        super().__init__("handover", handlers, in_thread=in_thread)


def _put_kv(handover: Handover, effect: PutKv) -> Iterator[KvPut]:
    stored = handover.put(effect.label, effect.kv)
    blob, why = (None, stored.why) if isinstance(stored, Lost) else (stored, "")
    yield KvPut(request=effect.request, blob=blob, why=why)


def _fetch_kv(handover: Handover, effect: FetchKv) -> Iterator[KvFetched]:
    fetched = handover.fetch(effect.label, effect.blob)
    kv, why = (None, fetched.why) if isinstance(fetched, Lost) else (fetched, "")
    yield KvFetched(request=effect.request, kv=kv, why=why)


def _drop_kv(handover: Handover, effect: DropKv) -> Iterable[Never]:
    handover.drop(effect.blob)
    return ()


def _not_put(effect: PutKv, error: Exception) -> list[KvPut]:
    return [KvPut(request=effect.request, blob=None, why=type(error).__name__)]


def _not_fetched(effect: FetchKv, error: Exception) -> list[KvFetched]:
    return [KvFetched(request=effect.request, kv=None, why=type(error).__name__)]


CHAIN_MAX: Final = 4096

READ_TIMEOUT_NS: Final = 10_000_000_000

READ_PAUSE_S: Final = 0.1


class RecordPort(EffectRunner[RecordEffect, RecordEvent]):
    """Reads chains of progress records back to their start, and verifies the records of groups.

    It reads in a thread, or directly for virtual time. Events of unreadable or invalid records have
    the reason in `why`; log errors that a retry cannot fix end the role.
    """

    def __init__(
        self, bus: Bus, topics: Topics, meter: Meter, *, clock: Clock, in_thread: bool = True
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._meter = meter
        self._clock = clock
        handlers: list[Handler[Any, RecordEvent]] = [
            Handler[FetchProgress, RecordEvent](FetchProgress, self._fetch_progress, _no_progress),
            Handler[FetchGroup, RecordEvent](FetchGroup, self._fetch_group, _no_group),
        ]
        super().__init__("records", handlers, in_thread=in_thread, finish=False)

    def _fetch_progress(self, effect: FetchProgress) -> Iterator[ProgressFetched]:
        chunks: deque[AnyProgress] = deque()
        offset = effect.resume.offset
        with self._records(self._topics.progress, effect.resume.partition) as records:
            while offset >= 0:
                record = records.read(offset)
                if len(chunks) == CHAIN_MAX:
                    raise SchemaError(f"the chain has more than {CHAIN_MAX} records")
                chunks.appendleft(self._decoded(record, partial(_chunk_of, record)))
                offset = chunks[0].previous
        yield ProgressFetched(request=effect.request, chunks=chunks)

    def _fetch_group(self, effect: FetchGroup) -> Iterator[GroupFetched]:
        trajectories: list[Trajectory] = []
        partition = effect.trajectories[0].partition
        with self._records(self._topics.trajectories, partition) as records:
            for taken in effect.trajectories:
                record = records.read(taken.offset)
                decode = partial(_trajectory_of, record, taken, self._topics.run)
                trajectories.append(self._decoded(record, decode))
        yield GroupFetched(request=effect.request, trajectories=trajectories)

    def _records(self, topic: str, partition: int) -> closing[_Records]:
        topic_partition = TopicPartition(topic, partition)
        return closing(_Records(self._bus, topic_partition, self._clock, self._meter))

    def _decoded(self, record: Record, decode: Callable[[], T]) -> T:
        try:
            with self._meter.spend("codec"):
                return decode()
        except SchemaError as error:
            where = f"the record at offset {record.offset}"
            raise SchemaError(f"{where}: {error.message}") from None


class _Records:
    """Single records of a partition."""

    def __init__(self, bus: Bus, partition: TopicPartition, clock: Clock, meter: Meter) -> None:
        self._bus = bus
        self._partition = partition
        self._clock = clock
        self._meter = meter
        self._reader: Reader | None = None

    def read(self, offset: int) -> Record:
        """Wait for the record at an offset. Raises SchemaError if there is none, BusError."""
        until_ns = self._clock.now_ns() + READ_TIMEOUT_NS
        while not (records := self._poll(offset)):
            if self._clock.now_ns() >= until_ns:
                raise SchemaError("timed out reading it")
            self._clock.sleep(READ_PAUSE_S)
        if records[0].offset != offset:
            raise SchemaError(f"there is no record at offset {offset}")
        return records[0]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _poll(self, offset: int) -> list[Record]:
        try:
            with self._meter.spend("bus"):
                if self._reader is None:
                    self._reader = self._bus.reader({self._partition: offset})
                self._reader.seek(self._partition, offset)
                return self._reader.poll(timeout_s=READ_PAUSE_S, records_max=1)
        except FINAL_ERRORS:
            raise
        except BusError:
            return []


def _chunk_of(record: Record) -> AnyProgress:
    """Decode a chunk of a chain. Raises SchemaError."""
    chunk = decode_any_progress(record.value)
    if chunk.previous >= record.offset:
        raise SchemaError("it names no earlier one")
    return chunk


def _trajectory_of(record: Record, taken: TakenTrajectory, run: str) -> Trajectory:
    """Decode and verify a trajectory. Raises SchemaError."""
    if record_digest(record) != taken.sha256:
        raise SchemaError(f"{taken.trajectory}: its bytes differ from the logged ones")
    trajectory = decode_trajectory(record.value)
    meta = trajectory.meta
    identity = (trajectory.trajectory, meta.attempt, meta.incarnation, meta.run)
    if identity != (taken.trajectory, taken.attempt, taken.incarnation, run):
        raise SchemaError(
            f"{taken.trajectory}: the record there is {trajectory.trajectory}, attempt"
            f" {meta.attempt}, of {meta.run}"
        )
    if trajectory.reward is None:
        raise SchemaError(f"{taken.trajectory}: it has no valid reward")
    return trajectory


def _no_progress(effect: FetchProgress, error: Exception) -> list[ProgressFetched]:
    return [ProgressFetched(request=effect.request, chunks=(), why=_unreadable(error))]


def _no_group(effect: FetchGroup, error: Exception) -> list[GroupFetched]:
    return [GroupFetched(request=effect.request, trajectories=(), why=_unreadable(error))]


def _unreadable(error: Exception) -> str:
    """Raises BusError: `_Records` retries the others."""
    if isinstance(error, BusError):
        raise error
    return reason(error)
