"""Worker's ports to task pools, logged records and KV handover.

Only KV caches are moved in a thread. Records are read one per poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

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
    Handlers,
    attempt,
    run_effect,
    unanswered,
)
from dora_pipe.core.loop.retry import FINAL_ERRORS
from dora_pipe.core.loop.runtime import Meter, Port, PortGroup
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.chat.chat import Chat, Conversation
from dora_pipe.producers.sessions.addresses import Addresses
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    EnvObserved,
    EnvStep,
    Forget,
    GroupCall,
    PromptCall,
    PromptReady,
    RewardCall,
    Said,
    SampledTurns,
    TaskEffect,
    TaskEvent,
    TaskFailed,
    one_line,
)
from dora_pipe.producers.tasks.task import Turn
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
from dora_pipe.schemas.control import Resume, TakenTrajectory
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory
from dora_pipe.store.transfers.transfers import Lost


class Tasks(Protocol):
    """Part of `TaskPool` that the task port needs."""

    @property
    def busy(self) -> bool:
        """Whether there is work for the next poll."""

    def start(self, effect: TaskEffect) -> None:
        """Begin a call."""

    def poll(self) -> Sequence[TaskEvent]:
        """Return events since the last call."""

    def close(self) -> None:
        """Stop the pool."""


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
        tasks: Tasks,
        texts: TextCodec,
        chat: Chat | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self._addresses = addresses
        self._tasks = tasks
        self._texts = texts
        self._chat = chat
        self._conversations: dict[str, Conversation] = {}
        self._failures: list[Any] = []
        self._handlers: Handlers = {
            PromptCall: Handler(do=self._pass_on, failed=self._failed),
            EnvStep: Handler(do=self._step, failed=self._failed),
            RewardCall: Handler(do=self._score, failed=self._failed),
            GroupCall: Handler(do=self._score_group, failed=self._failed),
            AgentCall: Handler(do=self._run_agent, failed=self._failed),
            Forget: Handler(do=self._forget, failed=unanswered),
        }

    def start(self, effect: TaskEffect) -> None:
        self._failures += run_effect(self._handlers, effect)

    def poll(self) -> list[Any]:
        events, self._failures = self._failures, []
        for event in self._tasks.poll():
            translated, failed = partial(self._translated, event), partial(self._failed, event)
            events += attempt(type(event).__name__, translated, failed)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._failures) or self._tasks.busy

    def close(self) -> None:
        self._tasks.close()

    def _pass_on(self, effect: PromptCall) -> Iterator[Any]:
        self._tasks.start(effect)
        yield from ()

    def _forget(self, effect: Forget) -> Iterator[Any]:
        self._conversations.pop(effect.request, None)
        self._tasks.start(effect)
        yield from ()

    def _step(self, effect: EnvStep) -> Iterator[Any]:
        conversation = self._conversations.get(effect.request)
        if conversation is None:
            turn = Turn(text=self._text(effect.token_ids))
        else:
            turn = conversation.say(effect.token_ids)
        self._tasks.start(replace(effect, turn=turn, token_ids=()))
        yield from ()

    def _text(self, token_ids: Sequence[int]) -> str:
        return (self._chat or self._texts).text(token_ids)

    def _run_agent(self, effect: AgentCall) -> Iterator[Any]:
        assert self._addresses is not None, "a source with an agent has an endpoint"
        address = self._addresses.of(effect.request, effect.start)
        self._tasks.start(replace(effect, base_url=address.base_url, api_key=address.api_key))
        yield from ()

    def _score(self, effect: RewardCall) -> Iterator[Any]:
        conversation = self._conversations.pop(effect.request, None)
        sampled = effect.sampled
        assert sampled is not None, "the machine scores token ids"
        messages: tuple[dict[str, Any], ...] = ()
        reasoning = ""
        answer = self._text(sampled.answer)
        single = len(sampled.turns) == 1
        turns = (answer,) if single else tuple(map(self._text, sampled.turns))
        if effect.agent_answer is not None:
            answer = effect.agent_answer
        elif self._addresses is not None and self._chat is not None:
            turn = self._chat.parse(sampled.answer, sampled.before, ())
            answer, reasoning = turn.text, turn.reasoning
        if conversation is not None:
            if (len(sampled.turns) + 1) // 2 > conversation.turns:  # the last was not answered
                conversation.say(sampled.answer)
            answer, reasoning = conversation.text, conversation.reasoning
            messages = conversation.messages()
        call = replace(
            effect,
            text=answer,
            turns=turns,
            messages=messages,
            reasoning=reasoning,
            sampled=None,
            agent_answer=None,
        )
        self._tasks.start(call)
        yield from ()

    def _score_group(self, effect: GroupCall) -> Iterator[Any]:
        completions = tuple(map(self._said, effect.sampled))
        self._tasks.start(replace(effect, completions=completions, sampled=()))
        yield from ()

    def _said(self, sampled: SampledTurns) -> Said:
        turns = tuple(map(self._text, sampled.turns))
        if self._chat is None:
            return Said(text=self._text(sampled.answer), turns=turns)
        turn = self._chat.parse(sampled.answer, sampled.before, ())
        return Said(text=turn.text, turns=turns, turn=turn)

    def _failed(self, effect: Any, error: Exception) -> list[TaskFailed]:
        forgotten = run_effect(self._handlers, Forget(request=effect.request))
        message = one_line(reason(error))
        failed = TaskFailed(request=effect.request, error=type(error).__name__, message=message)
        return [*forgotten, failed]

    def _translated(self, event: TaskEvent) -> Iterator[Any]:
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


class TaskPorts(PortGroup[TaskEvent]):
    """Task ports of a worker, selected by the `source` of a call."""

    def __init__(self, ports: Mapping[str, TaskPort]) -> None:
        super().__init__(*dict.fromkeys(ports.values()))
        self._of = ports

    def start(self, effect: TaskEffect) -> None:
        self._of[effect.source].start(effect)


class WorkerPorts(PortGroup[WorkerEvent]):
    def __init__(
        self,
        *,
        tasks: Port[TaskEffect, TaskEvent],
        sessions: Port[SessionEffect, SessionEvent] | None,
        records: Port[RecordEffect, RecordEvent],
        handover: Port[HandoverEffect, HandoverEvent],
        engine: Port[EngineEffect, EnginePortEvent],
    ) -> None:
        super().__init__(tasks, sessions, records, handover, engine)
        self._tasks, self._sessions, self._records = tasks, sessions, records
        self._handover, self._engine = handover, engine

    def start(self, effect: WorkerEffect) -> None:
        if isinstance(effect, EngineEffect):
            self._engine.start(effect)
        elif isinstance(effect, TaskEffect):
            self._tasks.start(effect)
        elif isinstance(effect, SessionEffect):
            assert self._sessions is not None, "a source with an agent has an endpoint"
            self._sessions.start(effect)
        elif isinstance(effect, RecordEffect):
            self._records.start(effect)
        else:
            self._handover.start(effect)


class HandoverPort(EffectRunner):
    """Runs a `Handover` in a thread, or directly for virtual time. A lost cache costs a prefill."""

    def __init__(self, handover: Handover, *, in_thread: bool = True) -> None:
        handlers: Handlers = {
            PutKv: Handler(do=partial(_put_kv, handover), failed=_not_put),
            FetchKv: Handler(do=partial(_fetch_kv, handover), failed=_not_fetched),
            DropKv: Handler(do=partial(_drop_kv, handover), failed=unanswered),
        }
        super().__init__("handover", handlers, in_thread=in_thread)


def _put_kv(handover: Handover, effect: PutKv) -> Iterator[KvPut]:
    stored = handover.put(effect.label, effect.kv)
    blob, why = (None, stored.why) if isinstance(stored, Lost) else (stored, "")
    yield KvPut(request=effect.request, blob=blob, why=why)


def _fetch_kv(handover: Handover, effect: FetchKv) -> Iterator[KvFetched]:
    fetched = handover.fetch(effect.label, effect.blob)
    kv, why = (None, fetched.why) if isinstance(fetched, Lost) else (fetched, "")
    yield KvFetched(request=effect.request, kv=kv, why=why)


def _drop_kv(handover: Handover, effect: DropKv) -> Iterator[KvPut]:
    handover.drop(effect.blob)
    yield from ()


def _not_put(effect: PutKv, error: Exception) -> list[KvPut]:
    return [KvPut(request=effect.request, blob=None, why=type(error).__name__)]


def _not_fetched(effect: FetchKv, error: Exception) -> list[KvFetched]:
    return [KvFetched(request=effect.request, kv=None, why=type(error).__name__)]


CHAIN_MAX: Final = 4096

READ_TIMEOUT_NS: Final = 10_000_000_000


@dataclass(slots=True, kw_only=True)
class _Fetch:
    effect: RecordEffect
    partition: TopicPartition
    offset: int
    until_ns: int
    decoded: list[Any] = field(default_factory=list)
    reader: Reader | None = None

    def read(self, bus: Bus) -> Record | None:
        """Return the first record from the offset, if available."""
        try:
            if self.reader is None:
                self.reader = bus.reader({self.partition: self.offset})
            self.reader.seek(self.partition, self.offset)
            records = self.reader.poll(timeout_s=0.0, records_max=1)
        except FINAL_ERRORS:
            raise
        except BusError:
            return None
        return records[0] if records else None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


class RecordPort:
    """Reads chains of progress records back to their start, and verifies the records of groups.

    Events of unreadable or invalid records have the reason in `why`.
    """

    def __init__(self, bus: Bus, topics: Topics, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topics = topics
        self._meter = meter
        self._clock = clock
        self._fetches: deque[_Fetch] = deque()

    def start(self, effect: RecordEffect) -> None:
        first: Resume | TakenTrajectory
        if isinstance(effect, FetchProgress):
            topic, first = self._topics.progress, effect.resume
        else:
            topic, first = self._topics.trajectories, effect.trajectories[0]
        self._fetches.append(
            _Fetch(
                effect=effect,
                partition=TopicPartition(topic, first.partition),
                offset=first.offset,
                until_ns=self._clock.now_ns() + READ_TIMEOUT_NS,
            )
        )

    def poll(self) -> list[RecordEvent]:
        if not self._fetches:
            return []
        fetch = self._fetches.popleft()
        name = type(fetch.effect).__name__
        events = list(attempt(name, partial(self._next, fetch), partial(_failed, fetch)))
        if events:
            fetch.close()
        else:
            self._fetches.append(fetch)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def close(self) -> None:
        while self._fetches:
            self._fetches.popleft().close()

    def _next(self, fetch: _Fetch) -> Iterator[RecordEvent]:
        with self._meter.spend("bus"):
            record = fetch.read(self._bus)
        if record is None:
            if self._clock.now_ns() >= fetch.until_ns:
                yield _fetched(fetch, "timed out reading it")
            return
        if record.offset != fetch.offset:
            yield _fetched(fetch, f"there is no record at offset {fetch.offset}")
            return
        try:
            with self._meter.spend("codec"):
                if isinstance(fetch.effect, FetchProgress):
                    complete = _add_progress(fetch, record)
                else:
                    complete = self._add_trajectory(fetch, fetch.effect, record)
        except SchemaError as error:
            yield _fetched(fetch, f"the record at offset {fetch.offset}: {error.message}")
            return
        if complete:
            yield _fetched(fetch)

    def _add_trajectory(self, fetch: _Fetch, effect: FetchGroup, record: Record) -> bool:
        """Verify a record; return whether it was the last. Raises SchemaError."""
        taken = effect.trajectories[len(fetch.decoded)]
        if record_digest(record) != taken.sha256:
            raise SchemaError(f"{taken.trajectory}: its bytes differ from the logged ones")
        trajectory = decode_trajectory(record.value)
        meta = trajectory.meta
        identity = (trajectory.trajectory, meta.attempt, meta.incarnation, meta.run)
        if identity != (taken.trajectory, taken.attempt, taken.incarnation, self._topics.run):
            raise SchemaError(
                f"{taken.trajectory}: the record there is {trajectory.trajectory}, attempt"
                f" {meta.attempt}, of {meta.run}"
            )
        if trajectory.reward is None:
            raise SchemaError(f"{taken.trajectory}: it has no valid reward")
        fetch.decoded.append(trajectory)
        if len(fetch.decoded) == len(effect.trajectories):
            return True
        fetch.offset = effect.trajectories[len(fetch.decoded)].offset
        return False


def _add_progress(fetch: _Fetch, record: Record) -> bool:
    """Add a chunk; return whether it was the chain's first. Raises SchemaError."""
    chunk = decode_any_progress(record.value)
    fetch.decoded.append(chunk)
    if chunk.previous < 0:
        return True
    if chunk.previous >= fetch.offset or len(fetch.decoded) >= CHAIN_MAX:
        raise SchemaError("it names no earlier one")
    fetch.offset = chunk.previous
    return False


def _fetched(fetch: _Fetch, why: str = "") -> RecordEvent:
    request, decoded = fetch.effect.request, () if why else fetch.decoded
    if isinstance(fetch.effect, FetchProgress):
        return ProgressFetched(request=request, chunks=decoded[::-1], why=why)
    return GroupFetched(request=request, trajectories=decoded, why=why)


def _failed(fetch: _Fetch, error: Exception) -> list[RecordEvent]:
    """Raises BusError: those of a read were handled before."""
    if isinstance(error, BusError):
        raise error
    return [_fetched(fetch, reason(error))]
