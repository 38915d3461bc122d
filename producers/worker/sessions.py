"""Sessions: requests of agents, programs that call the model until they return.

    place -> (RESUMING) -> AGENT -> REWARDING -> LOGGING
    a call: WAITING -> RUNNING -> ANSWERING (its record in the progress topic)

A call is an engine request with its session's key and a number (`key#n`).

Rules:

1. An answer is sent when its record is durable. These records form a chain in the order in which
   calls ended; the newest is the session's `Resume`.
2. A call is identified by its prompt and the number of earlier calls with it; its seed derives from
   both. A restarted agent gets the recorded tokens while its calls are the same. Calls that it does
   not repeat are not part of the trajectory.
3. After a rejected call the trajectory ends by length, unless too many calls were open.
4. A session that moves is dropped immediately; its agent restarts elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from dora_pipe.core.pure.machine import Now, Published
from dora_pipe.producers.engines.engine import RequestFinished
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    AgentEnded,
    Forget,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    AnswerCall,
    CallAsked,
    FetchProgress,
    OpenSession,
    ProgressFetched,
    RefuseCall,
)
from dora_pipe.producers.worker.request import (
    Phase,
    ProgressChain,
    RequestState,
    state_of,
)
from dora_pipe.producers.worker.request_records import turn_progress_of
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.sequence import TokenSequence
from dora_pipe.producers.worker.session import CallKey, OpenCall, Session, session_of
from dora_pipe.schemas.contexts import prompt_digest
from dora_pipe.schemas.control import FinishReason, Resume, fault_of
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.rounds import ScheduledRequest

TOO_LONG: Final = "context_length_exceeded"
CALLS_OPEN_MAX: Final = 8

TOO_MANY_CALLS: Final = "max_turns"
TOO_MANY_TOKENS: Final = "max_tokens"
TOO_MANY_OPEN: Final = "too_many_open"
ENGINE_FAILED: Final = "engine_error"


class Refusal(NamedTuple):
    """Fields of `RefuseCall`."""

    status: int
    code: str
    message: str


class Sessions:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._setup = requests.setup

    def takes(self, scheduled: ScheduledRequest) -> bool:
        return scheduled.spec.source in self._setup.agents

    def place(self, scheduled: ScheduledRequest, now: Now) -> None:
        """Take a session and start its agent, which needs no slot."""
        requests = self._requests
        request = requests.new_state(scheduled, now)
        if request is None:
            return
        request.session = Session()
        if request.chain.resume is None:
            request.phase = Phase.AGENT
            requests.insert(request)
            self._ask_agent(request)
        else:
            request.phase = Phase.RESUMING
            requests.insert(request)
            requests.ask(FetchProgress(request=request.key, resume=request.chain.resume))

    # RESUMING, AGENT

    def resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> None:
        assert request.chain.resume is not None
        spec = request.place.spec
        session = event.why or session_of(
            event.chunks,
            trajectory=request.place.trajectory,
            version=spec.version,
            digest=spec.digest,
            tokens=request.chain.resume.tokens,
        )
        if isinstance(session, Session):
            request.session = session
        else:
            self._requests.counts["progress unusable"] += 1
            request.chain.resume = None
        self._requests.enter(request, Phase.AGENT)
        self._ask_agent(request)

    def _ask_agent(self, request: RequestState) -> None:
        key, spec = request.key, request.place.spec
        self._requests.ask(OpenSession(request=key, source=spec.source))
        self._requests.ask(
            AgentCall(request=key, split=spec.purpose, index=spec.index, source=spec.source)
        )

    def agent_failed(self, request: RequestState, event: TaskFailed, now: Now) -> None:
        """After a limit of the run, raising is a normal end of an agent."""
        session = _session(request)
        raised = fault_of(event.error) == "code"
        if session.limited and session.used and raised:
            self._requests.counts["agents that raised behind a limit"] += 1
            self.agent_ended(request, AgentEnded(request=request.key), now)
        else:
            self._broken(request, event.error, event.message, now)

    # A call: asked

    def asked_too_late(self, request: RequestState, event: CallAsked, now: Now) -> None:
        self._requests.counts["calls too late"] += 1

    def asked(self, request: RequestState, event: CallAsked, now: Now) -> None:
        session = _session(request)
        if event.call in session.numbers:
            self._requests.counts["calls asked twice"] += 1
            return
        digest = prompt_digest(event.token_ids)
        name = CallKey(digest, session.asked[digest])
        if name in session.answers:
            self._requests.counts["calls answered from the record"] += 1
            self._answer(request, session.answers[name], event.call)
        else:
            refusal = self._refusal(request, event)
            if refusal is not None:
                self._refuse(request, event.call, refusal)
                return
            self._sample(request, name, event, now)
        session.numbers.add(event.call)
        session.asked[digest] += 1

    def _refusal(self, request: RequestState, event: CallAsked) -> Refusal | None:
        setup, session = self._setup, _session(request)
        tokens, context_tokens = len(event.token_ids), setup.context_tokens
        if not 1 <= tokens < context_tokens:
            message = f"a prompt of {tokens} tokens does not fit a context of {context_tokens}"
            return Refusal(400, TOO_LONG, f"{message}: send a shorter one")
        most = setup.max_turns[request.source]
        if len(session.numbers) >= most:
            message = f"this session has made {most} calls, the limit of a run"
            return Refusal(429, TOO_MANY_CALLS, f"{message}: end the session")
        if session.tokens >= request.params.max_tokens:
            message = f"this session has sampled {session.tokens} tokens, which is all that a run"
            return Refusal(429, TOO_MANY_TOKENS, f"{message} allows: end the session")
        waiting = len(session.open)
        if waiting >= CALLS_OPEN_MAX:
            message = f"this session waits for {waiting} answers, as many as it may"
            return Refusal(429, TOO_MANY_OPEN, f"{message}: wait for one of them")
        return None

    def _refuse(self, request: RequestState, number: int, refusal: Refusal) -> None:
        status, code, message = refusal
        self._requests.counts[f"calls refused: {code}"] += 1
        _session(request).limited |= code in (TOO_LONG, TOO_MANY_CALLS, TOO_MANY_TOKENS)
        self._requests.ask(
            RefuseCall(request=request.key, call=number, status=status, code=code, message=message)
        )

    def _sample(self, request: RequestState, name: CallKey, event: CallAsked, now: Now) -> None:
        session = _session(request)
        remaining = request.params.max_tokens - session.tokens
        asked_max = event.max_tokens
        most = remaining if asked_max is None else max(1, min(remaining, asked_max))
        key = f"{request.key}#{session.calls}"
        call = replace(
            state_of(request.place, self._setup, now),
            key=key,
            phase=Phase.WAITING,
            params=replace(request.params.ended_by(event.stop, event.stop_ids), max_tokens=most),
            seed=call_seed(request.seed, name.prompt, name.occurrence),
            sequence=TokenSequence(event.token_ids, at_ns=now.wall_ns),
            chain=ProgressChain(),
            call=OpenCall(
                session=request.key,
                name=name,
                number=event.call,
                first=not session.answers,
                asked_ns=now.wall_ns,
                asked_max=asked_max,
                api=event.api,
                caller=event.caller,
                asked=event.asked,
                stop=event.stop,
                stop_ids=event.stop_ids,
            ),
        )
        session.calls += 1
        session.open[name] = key
        self._requests.insert(call)
        self._requests.enqueue(call)

    # A call: sampled, durable, answered

    def sampled(self, call: RequestState, event: RequestFinished, now: Now) -> None:
        mine = _call(call)
        request = self._requests.by_key[mine.session]
        if event.reason == "error":
            error = event.error or "the engine gave no reason"
            self._refuse(request, mine.number, Refusal(500, ENGINE_FAILED, error))
            self._broken(request, "EngineError", error, now)
            return
        mine.finish, mine.ended_ns = event.reason, mine.not_before(now.wall_ns)
        request.first_token_ns = request.first_token_ns or call.first_token_ns
        self._requests.enter(call, Phase.ANSWERING)
        _session(request).sampled.append(mine.name)
        self._log(request)

    def _log(self, request: RequestState) -> None:
        session = _session(request)
        if session.logging is None and session.sampled:
            call = self._requests.by_key[session.open[session.sampled[0]]]
            session.logging = turn_progress_of(request, call, self._setup)
            self._requests.append_progress(call, session.logging, request)

    def durable(self, call: RequestState, event: Published, now: Now) -> None:
        mine = _call(call)
        request = self._requests.by_key[mine.session]
        session = _session(request)
        turn, session.logging = session.logging, None
        assert turn is not None
        answered = msgspec.structs.replace(turn.call, answered_ns=mine.not_before(now.wall_ns))
        why = session.tree.add(replace(turn, call=answered))
        assert not why, why
        session.answers[session.sampled.popleft()] = turn.turn
        request.chain.resume = Resume(
            tokens=session.tokens_logged, partition=event.partition, offset=event.offset
        )
        self._requests.remove(call)
        session.limited |= _cut(mine, len(turn.token_ids))
        self._answer(request, turn.turn, mine.number)
        self._log(request)

    def _answer(self, request: RequestState, index: int, number: int) -> None:
        session = _session(request)
        session.used.add(index)
        turn = session.tree.turns[index]
        self._requests.ask(
            AnswerCall(
                request=request.key,
                call=number,
                token_ids=turn.token_ids,
                logprobs=turn.logprobs,
                finish=turn.call.finish,
                prompt_tokens=turn.call.start,
            )
        )

    # Its end

    def agent_ended(self, request: RequestState, event: AgentEnded, now: Now) -> None:
        """The answer is the last one, as `answer_of` finds it in the record."""
        session = _session(request)
        if not session.used:
            message = "the agent has returned without an answer of the model"
            self._requests.give_up(request, now, "NoCall", message, retryable=False)
            return
        last = max(session.used)
        answer, before = session.tree.turns[last].token_ids, session.tree.prompt(last)
        self._close(request)
        finish: FinishReason = "length" if session.limited else "environment"
        self._requests.complete(
            request,
            finish,
            now,
            answer=answer,
            before=before,
            text=event.text,
            rewarded=event.rewarded,
        )

    def _broken(self, request: RequestState, error: str, message: str, now: Now) -> None:
        requests = self._requests
        if not _session(request).used:
            requests.give_up(request, now, error, message, retryable=False)
            return
        self._close(request)
        requests.ask(Forget(request=request.key, source=request.source))
        requests.broken(request, f"{error}: {message}", now)

    def _close(self, request: RequestState) -> None:
        session, counts = _session(request), self._requests.counts
        self._requests.end_session(request)
        unused = len(session.tree.turns) - len(session.used)
        if unused:
            counts["recorded calls not asked again"] += unused
        record = (session.tree.only(session.used) if unused else session.tree).record()
        request.sequence, session.contexts, session.made = record
        request.started_ns = min(session.tree.turns[index].started_ns for index in session.used)
        request.first_token_ns = request.first_token_ns or request.started_ns


def _session(request: RequestState) -> Session:
    assert request.session is not None, request.key
    return request.session


def _call(request: RequestState) -> OpenCall:
    assert request.call is not None, request.key
    return request.call


def _cut(call: OpenCall, tokens: int) -> bool:
    return call.finish == "length" and (call.asked_max is None or tokens < call.asked_max)
