"""Open sessions and their pending calls; without IO."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dora_pipe.config import model
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.sessions.calls import (
    CallRequest,
    Refused,
    Sampled,
    asked_of,
    check_template,
)
from dora_pipe.producers.sessions.conversations import Conversations, Prompt
from dora_pipe.producers.sessions.frames import Up, check_key, session_name
from dora_pipe.producers.worker.effects import (
    AnswerCall,
    CallAsked,
    CloseSession,
    OpenSession,
    RefuseCall,
    SessionEffect,
)

ENDED_MAX: Final = 65_536
"""Remembered ended sessions; calls of forgotten ones wait."""

OPENING_S: Final = 2.0
"""Wait for a session to open."""


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """State shared by a source's sessions."""

    chat: Chat | None
    """Chat template of the model, if any."""
    open_chat: Callable[[], Chat]
    tokenizer: Tokenizer
    task: model.Task
    sampling: model.Sampling
    _thread_chat: Chat | None = None

    def chat_in_thread(self) -> Chat:
        """Return a chat for a thread: chats are not thread-safe."""
        if self._thread_chat is None:
            self._thread_chat = self.open_chat()
        return self._thread_chat


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    request: str
    name: str
    source: Source
    conversations: Conversations | None
    calls: set[int] = field(default_factory=set)
    """Unanswered."""


class Sessions:
    """All open sessions."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        secret: bytes,
        context_tokens: int,
        first_call: int,
        send: Callable[[Up], None],
    ) -> None:
        self._sources = sources
        self._secret = secret
        self._send = send
        self._next_call = first_call
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Event] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[int, asyncio.Future[AnswerCall]] = {}
        self.context_tokens = context_tokens

    def take(self, frame: SessionEffect) -> None:
        match frame:
            case OpenSession():
                self._begin(frame)
            case CloseSession():
                self._end(frame.request)
            case AnswerCall():
                waiting = self._waiting.get(frame.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            case RefuseCall():
                refused = Refused(frame.status, frame.code, frame.message)
                waiting = self._waiting.get(frame.call)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(refused)

    async def session(self, name: str, key: str) -> Session:
        """Return a session. Raises Refused."""
        match check_key(self._secret, name, key):
            case "wrong":
                raise Refused(401, "invalid_api_key", "unknown key")
            case "other":
                raise Refused(404, "not_found", "the key belongs to another session")
        if name not in self._open and name not in self._ended:
            opening = self._opening.setdefault(name, asyncio.Event())
            try:
                async with asyncio.timeout(OPENING_S):
                    await opening.wait()
            except TimeoutError:
                self._opening.pop(name, None)
        if name not in self._open:
            raise ended()
        return self._open[name]

    async def ask(
        self, session: Session, request: CallRequest, prompt_ids: list[int]
    ) -> list[AnswerCall]:
        """Return samples in order of choices. Raises Refused."""
        if self._open.get(session.name) is not session:
            raise ended()
        sampling = session.source.sampling
        check_template(request.template, session.source.task.chat_template_kwargs)
        asked = asked_of(request.settings, sampling)
        if asked and session.source.task.unsupported_sampling == "refuse":
            names = ", ".join(asked)
            raise Refused(
                400,
                "sampling_is_the_runs",
                f"{names}: sampling follows the run (task.unsupported_sampling is `refuse`)",
            )
        calls = [self._call(session) for _ in range(request.choices)]
        for call, _ in calls:
            self._send(
                CallAsked(
                    request=session.request,
                    call=call,
                    # The worker rejects by length: one extra token suffices.
                    token_ids=prompt_ids[: self.context_tokens + 1],
                    max_tokens=request.max_tokens,
                    api=request.api,
                    caller=request.caller,
                    asked=asked,
                    stop=tuple(stop for stop in request.stop if stop not in sampling.stop),
                    stop_ids=request.stop_ids,
                )
            )
        try:
            return await asyncio.gather(*(future for _, future in calls))
        finally:
            for call, future in calls:
                future.cancel()
                if future.done() and not future.cancelled():
                    future.exception()  # mark as retrieved
                self._waiting.pop(call, None)
                session.calls.discard(call)

    def _call(self, session: Session) -> tuple[int, asyncio.Future[AnswerCall]]:
        call, self._next_call = self._next_call, self._next_call + 1
        session.calls.add(call)
        self._waiting[call] = asyncio.get_running_loop().create_future()
        return call, self._waiting[call]

    def _begin(self, frame: OpenSession) -> None:
        name = session_name(frame.request)
        source = self._sources[frame.source]
        conversations = None if source.chat is None else Conversations(source.chat)
        self._open[name] = Session(
            request=frame.request, name=name, source=source, conversations=conversations
        )
        opening = self._opening.pop(name, None)
        if opening is not None:
            opening.set()

    def _end(self, request: str) -> None:
        name = session_name(request)
        session = self._open.pop(name)
        for call in session.calls:
            waiting = self._waiting.get(call)
            if waiting is not None and not waiting.done():
                waiting.set_exception(ended())
        self._ended[name] = None
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


def ended() -> Refused:
    return Refused(410, "session_ended", "the session has ended")


def prompt_of(session: Session, request: CallRequest, *, in_thread: bool = False) -> Prompt | None:
    """Return the prompt, None for token ids. Raises Refused, TaskError."""
    if not request.messages:
        return None
    if session.conversations is None:
        raise Refused(
            400,
            "no_chat_template",
            "the model has no chat template: POST /inference/v1/generate takes token ids",
        )
    chat = session.source.chat_in_thread() if in_thread else None
    return session.conversations.prompt(request.messages, request.tools, chat)


def sampled_of(
    session: Session, request: CallRequest, prompt: Prompt | None, answers: list[AnswerCall]
) -> list[Sampled]:
    """Return the choices, which later calls may extend."""
    sampled_answers: list[Sampled] = []
    for answer in answers:
        ids = answer.token_ids
        sampled = Sampled(
            token_ids=ids,
            logprobs=answer.logprobs,
            finish=answer.finish,
            prompt_tokens=answer.prompt_tokens,
        )
        if prompt is not None and session.conversations is not None:
            turn, stop = session.conversations.answer(prompt, ids, request.stop)
            sampled = replace(sampled, turn=turn, stop=stop)
        sampled_answers.append(sampled)
    return sampled_answers
