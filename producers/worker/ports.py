"""Worker's ports to task pools and KV handover. Only KV caches are moved in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from dora_pipe.core.errors import (
    PolicyError,
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
from dora_pipe.core.loop.runtime import Port, PortGroup
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
    FetchKv,
    HandoverEffect,
    HandoverEvent,
    KvFetched,
    KvPut,
    PutKv,
    RecordEffect,
    RecordEvent,
    SessionEffect,
    SessionEvent,
    WorkerEffect,
    WorkerEvent,
)
from dora_pipe.producers.worker.kv_handover import Handover
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

    def _said(self, one: SampledTurns) -> Said:
        turns = tuple(map(self._text, one.turns))
        if self._chat is None:
            return Said(text=self._text(one.answer), turns=turns)
        turn = self._chat.parse(one.answer, one.before, ())
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
        said = [{"role": "user", "content": event.text}] if event.text else []
        return conversation.answered(event.messages or said, go_on=not event.done)


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
        super().__init__(*{id(port): port for port in ports.values()}.values())
        self._of = ports

    def start(self, effect: TaskEffect) -> None:
        self._of[effect.source].start(effect)


class WorkerPorts(PortGroup[WorkerEvent]):
    """All ports of a worker."""

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
    found = handover.put(effect.label, effect.kv)
    blob, why = (None, found.why) if isinstance(found, Lost) else (found, "")
    yield KvPut(request=effect.request, blob=blob, why=why)


def _fetch_kv(handover: Handover, effect: FetchKv) -> Iterator[KvFetched]:
    found = handover.fetch(effect.label, effect.blob)
    kv, why = (None, found.why) if isinstance(found, Lost) else (found, "")
    yield KvFetched(request=effect.request, kv=kv, why=why)


def _drop_kv(handover: Handover, effect: DropKv) -> Iterator[KvPut]:
    handover.drop(effect.blob)
    yield from ()


def _not_put(effect: PutKv, error: Exception) -> list[KvPut]:
    return [KvPut(request=effect.request, blob=None, why=type(error).__name__)]


def _not_fetched(effect: FetchKv, error: Exception) -> list[KvFetched]:
    return [KvFetched(request=effect.request, kv=None, why=type(error).__name__)]
