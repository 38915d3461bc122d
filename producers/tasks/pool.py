"""Pool of processes that run a task, driven from one loop without threads.

A late call fails alone. When a process dies, the call in its main thread is to blame or, with
several candidates, the one under which others die too. Other calls are repeated; episodes are lost.

Bounds: `QUEUE_MAX`, `WINDOW`, `DEATHS_MAX`, and a time limit per try.
"""

from __future__ import annotations

import contextlib
import math
import selectors
from collections import deque
from typing import Final

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, ResourceError, TaskError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    Answered,
    Call,
    CallAnswer,
    EnvStep,
    EpisodeLost,
    Exhausted,
    Forget,
    Hello,
    Progress,
    PromptCall,
    PromptReady,
    Refused,
    Rewarded,
    StillOpening,
    TaskCall,
    TaskEffect,
    TaskEvent,
    TaskFacts,
    TaskFailed,
    Up,
    message_line,
    pack,
)
from dora_pipe.producers.tasks.child import (
    DEATHS_OF_CALL_MAX,
    EPISODE_TIMEOUT,
    Child,
    OpenCall,
    episode_too_long,
    late,
    limit_s,
)
from dora_pipe.producers.tasks.links import KILLED, Interpreter, Link, server_token
from dora_pipe.producers.tasks.servers import BAD_MAX, Deaths, Places, is_working, words_of
from dora_pipe.schemas.metrics import FailingServer

QUEUE_MAX: Final = 8192

START_LIMIT_S: Final = 120.0
"""Limit from the last `StillOpening`."""

DEATHS_MAX: Final = 32
"""Consecutive deaths without an answer before the pool gives up."""

UNREACHED_MAX: Final = 8
"""Failed connections per server: about one minute for a restart."""

CONNECT_S: Final = 10.0

_NS: Final = 1_000_000_000
_WAIT_S: Final = 0.25


class TaskPool:
    """Runs prompts, environments and rewards of a task in processes.

    A port of the runtime. Create and use it in the main thread: on Linux its processes die with
    that thread.
    """

    def __init__(self, task: model.Task, *, clock: Clock | None = None) -> None:
        self._task = task
        self._clock = clock or SystemClock()
        self._interpreter = Interpreter("" if task.url else task.python)
        self._token = server_token() if task.url else b""
        self._places = Places(task.urls, task.name or task.kind, self._clock.wall_ns)
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._queue: deque[OpenCall] = deque()
        self._open: dict[str, OpenCall] = {}
        self._episodes: dict[str, tuple[Child, int, PromptReady]] = {}
        """Process, number and prompt."""
        self._ends_ns: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        """Reasons."""
        self._events: list[TaskEvent] = []
        self._facts: TaskFacts | None = None
        self._number = 0
        self._deaths = Deaths(of_servers=bool(task.urls))
        self._closed = False
        self.deaths = 0
        self._start_missing(self._clock.now_ns())

    # Methods for the loop

    @property
    def facts(self) -> TaskFacts | None:
        """Properties of the task; unknown until a process has opened it."""
        return self._facts

    @property
    def busy(self) -> bool:
        return bool(self._events or (self._queue and self._takers()))

    @property
    def failing(self) -> list[FailingServer]:
        return self._places.failing(self._clock.now_ns())

    @property
    def pending(self) -> int:
        return len(self._open)

    def wait(self) -> TaskFacts:
        """Block until the task is open. Raises ConfigError, TaskError."""
        while self._facts is None:
            self._turn(_WAIT_S)
        return self._facts

    def start(self, effect: TaskEffect) -> None:
        if isinstance(effect, Forget):
            self.forget(effect.request)
        else:
            self.submit(effect)

    def submit(self, call: TaskCall) -> None:
        """Queue a call; a `PromptCall` or `AgentCall` first forgets its request.

        Raises ValueError if the request has an open call, ResourceError above `QUEUE_MAX` calls.
        """
        if isinstance(call, PromptCall | AgentCall):
            self.forget(call.request)
        if call.request in self._open:
            raise ValueError(f"{call.request} already has a call")
        if len(self._open) >= QUEUE_MAX:
            raise ResourceError(f"the task pool has {QUEUE_MAX} calls already")
        if call.request in self._lost:
            message = self._lost[call.request]
            self._events.append(EpisodeLost(request=call.request, message=message))
            return
        if isinstance(call, EnvStep) and self._left_ns(call.request) <= 0:
            self._end_episode(call.request)
            self._fail(call.request, EPISODE_TIMEOUT, episode_too_long(self._task))
            return
        self._enqueue(call)

    def forget(self, request: str) -> None:
        call = self._open.pop(request, None)
        if call is not None:
            call.forgotten = True
            with contextlib.suppress(ValueError):
                self._queue.remove(call)
            for child in self._children:
                if call.number in child.begun:
                    child.abandon(call, self._clock.now_ns())
        self._lost.pop(request, None)
        if any(event.request == request for event in self._events):
            self._events = [event for event in self._events if event.request != request]
        self._end_episode(request)

    def poll(self, wait_s: float = 0.0) -> list[TaskEvent]:
        """Return events since the last call.

        Raises TaskError if processes die in a row, or the task's data or code changed.
        """
        self._turn(wait_s)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in self._children:
            child.hang_up(self._clock.now_ns())
        for child in self._children:
            child.wait(child.closing_s(self._clock.now_ns()))
            child.link.kill()
            child.release()
        self._children.clear()
        self._selector.close()
        self._interpreter.close()

    def __enter__(self) -> TaskPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Calls to processes

    def _enqueue(self, call: TaskCall) -> None:
        self._number += 1
        held = self._episodes.get(call.request)
        try:
            if held is None and isinstance(call, EnvStep):
                raise ValueError("the request has no episode")
            left_s = self._left_ns(call.request) / _NS if isinstance(call, EnvStep) else math.inf
            seconds = min(
                left_s, limit_s(self._task, call, tools=held is not None and bool(held[2].tools))
            )
            frame = pack(Call(self._number, held[1] if held else None, call))
        except ValueError as error:  # too long, or invalid Unicode
            self._fail(call.request, type(error).__name__, str(error))
            return
        opened = OpenCall(
            request=call.request,
            number=self._number,
            frame=frame,
            limit_ns=int(seconds * _NS),
            late="TimedOut" if seconds < left_s else EPISODE_TIMEOUT,
            agent=isinstance(call, AgentCall),
            threaded=isinstance(call, EnvStep | PromptCall | AgentCall),
        )
        self._open[call.request] = opened
        if held is None:
            self._queue.append(opened)
        else:
            opened.episode = held[1]
            held[0].send(opened, self._clock.now_ns())
            held[0].flush()

    def _left_ns(self, request: str) -> float:
        ends_ns = self._ends_ns.get(request)
        return math.inf if ends_ns is None else ends_ns - self._clock.now_ns()

    def _hand_out(self, now_ns: int) -> None:
        while self._queue and (takers := self._takers()):
            call = self._queue.popleft()
            min(takers, key=lambda child: child.load).send(call, now_ns)
        for child in self._children:
            child.flush()

    def _takers(self) -> list[Child]:
        return [child for child in self._children if child.takes_calls]

    # Answers from processes

    def _turn(self, wait_s: float) -> None:
        now_ns = self._clock.now_ns()
        self._start_missing(now_ns)
        self._hand_out(now_ns)
        ready = self._selector.select(0 if self._events else wait_s)
        now_ns = self._clock.now_ns()
        for key, mask in ready:
            if mask & selectors.EVENT_READ and key.data in self._children:
                self._receive(key.data, now_ns)
        for child in list(self._children):
            if child in self._children:
                self._limit(child, now_ns)
        self._hand_out(now_ns)

    def _receive(self, child: Child, now_ns: int) -> None:
        try:
            frames, ended = child.read()
            if frames:
                child.heard, child.heard_ns = True, now_ns
            for frame in frames:
                if child in self._children:
                    self._answered(child, frame, now_ns)
        except ValueError as error:
            self._end_process(child, now_ns, f"its process wrote no answer: {error}", blame=True)
            return
        if ended and child in self._children:
            self._end_process(child, now_ns, "", blame=True)

    def _answered(self, child: Child, frame: Up, now_ns: int) -> None:
        match frame:
            case StillOpening():
                pass
            case Hello():
                self._opened(child, frame.facts)
            case Refused():
                kind = ConfigError if frame.config else TaskError
                raise kind(frame.message, hint=frame.hint)
            case Exhausted():
                self._retire(child, frame.why, now_ns)
            case Progress():
                child.progress(frame.number, frame.state, now_ns)
            case CallAnswer():
                self._end_call(child, frame, now_ns)

    def _end_call(self, child: Child, answer: CallAnswer, now_ns: int) -> None:
        call, event = child.answered(answer.number), answer.event
        if event.request != call.request:
            raise ValueError(f"an answer to {event.request} for {call.request}")
        self._deaths.in_a_row = 0
        self._settle(child, call, event)
        if not call.forgotten:  # may be the end of an abandoned call
            self._judge(child, event, now_ns)

    def _settle(self, child: Child, call: OpenCall, event: Answered | EpisodeLost) -> None:
        if isinstance(event, PromptReady) and event.episode:
            child.episodes[call.number] = call.request
            if call.forgotten:
                child.end(call.number, self._clock.now_ns())
            else:
                self._episodes[call.request] = child, call.number, event
                if self._task.episode_timeout_s:
                    length_ns = int(self._task.episode_timeout_s * _NS)
                    self._ends_ns[call.request] = self._clock.now_ns() + length_ns
        if call.forgotten:
            return
        del self._open[call.request]
        if isinstance(event, TaskFailed | EpisodeLost | Rewarded):
            self._end_episode(call.request)
        if isinstance(event, EpisodeLost):
            self._lost[call.request] = event.message
        self._events.append(event)

    def _judge(self, child: Child, event: Answered | EpisodeLost, now_ns: int) -> None:
        works = is_working(event)
        if works:
            self._places.breakers[child.link.url].worked()
        elif works is False:
            self._went_wrong(child, words_of(event), now_ns)

    def _went_wrong(self, child: Child, what: str, now_ns: int) -> None:
        """Pause a location and retire its processes after `BAD_MAX` failures in a row outside the
        task's code."""
        if child.exhausted:
            return
        location = child.link.url
        breaker = self._places.breakers[location]
        breaker.bad += 1
        if breaker.bad < BAD_MAX:
            return
        why = message_line(f"{BAD_MAX} consecutive calls failed, the last with {what}")
        self._places.failed(location, now_ns, why)
        for other in list(self._children):
            if other.link.url == location and not other.exhausted:
                self._retire(other, f"{location} {why}".strip(), now_ns)

    def _opened(self, child: Child, facts: TaskFacts) -> None:
        if self._facts not in (None, facts):
            raise TaskError(
                "the task's data or code changed since the run started here",
                hint="restore it, or start a new run",
            )
        self._facts = facts
        child.ready = True

    def _retire(self, child: Child, why: str, now_ns: int) -> None:
        """Let the process finish its episodes; above `processes` such, end the oldest."""
        child.exhausted = why
        exhausted = [other for other in self._children if other.exhausted]
        if len(exhausted) > self._task.processes:
            self._end_process(exhausted[0], now_ns, exhausted[0].exhausted)

    # Time limits and deaths

    def _limit(self, child: Child, now_ns: int) -> None:
        if child.link.url and not child.ready:
            limit_s = START_LIMIT_S if child.heard else CONNECT_S
            if now_ns - child.heard_ns > limit_s * _NS:
                self._end_process(child, now_ns, f"{child.link.url} does not answer")
        elif not child.ready:
            if now_ns - child.heard_ns > START_LIMIT_S * _NS:
                raise TaskError(
                    f"the task was not open after {START_LIMIT_S:.0f} s",
                    hint="check the time to import its modules and read its data",
                )
        elif child.over and not child.closing_s(now_ns):
            self._end_process(child, now_ns, child.exhausted)
        elif child.is_stuck(now_ns):
            self._end_process(child, now_ns, "its process begins no call", blame=True)
        else:
            self._limit_calls(child, now_ns)

    def _limit_calls(self, child: Child, now_ns: int) -> None:
        """Abandon late calls; a process that does not cancel them is ended."""
        late_calls = child.late(now_ns)
        for call in late_calls:
            if call.forgotten:
                self._end_process(child, now_ns, "its calls cannot be cancelled")
                return
            self._blame(call, call.late, late(self._task, call))
            child.abandon(call, now_ns)
        for call in late_calls:
            self._went_wrong(child, f"{call.late}: {late(self._task, call)}", now_ns)
        if child.main in late_calls and not child.exhausted:
            self._retire(child, "a call exceeded its limit there", now_ns)

    def _end_process(self, child: Child, now_ns: int, message: str, *, blame: bool = False) -> None:
        """Kill a process and settle its calls; `blame` may fail one of them."""
        self._children.remove(child)
        ended = child.link.kill()
        with contextlib.suppress(ValueError):
            for frame in child.read(to_the_end=True)[0]:
                self._answered(child, frame, now_ns)
        child.release()
        from_outside = ended == KILLED and not message
        message = message or ended
        if child.link.url and not child.exhausted:
            self._places.failed(child.link.url, now_ns, message)
        suspects = list(child.begun.values())
        if blame and not child.link.url and not from_outside:
            has_others = any(call.threaded for call in suspects if call is not child.main)
            if child.main is not None and not has_others:
                self._blame(child.main, "ProcessDied", message)
                child.main.forgotten = True
        for call in suspects:
            self._suspect(call, message)
        self._inherit(child, message)
        self._count_death(now_ns, message)

    def _blame(self, call: OpenCall, error: str, message: str) -> None:
        if call.forgotten:
            return  # its request may have another call by now
        del self._open[call.request]
        self._end_episode(call.request)
        self._fail(call.request, error, message)

    def _suspect(self, call: OpenCall, message: str) -> None:
        """Blame one of several calls after `DEATHS_OF_CALL_MAX`."""
        if call.forgotten:
            return
        call.deaths += 1
        if call.deaths >= DEATHS_OF_CALL_MAX:
            self._blame(call, "ProcessDied", message)
            call.forgotten = True

    def _inherit(self, child: Child, message: str) -> None:
        """Requeue calls without an episode; other episodes are lost."""
        calls = [*child.begun.values(), *child.sent.values()]
        for call in calls:
            if call.agent and not call.forgotten:
                self._lose_agent(call, message)
        free = [call for call in calls if call.episode is None and not call.forgotten]
        self._queue.extendleft(reversed(free))
        why = message_line(f"the process of its environment ended: {message}")
        for request in child.episodes.values():
            del self._episodes[request]
            self._ends_ns.pop(request, None)
            self._open.pop(request, None)
            self._lost[request] = why
            self._events.append(EpisodeLost(request=request, message=why))

    def _lose_agent(self, call: OpenCall, message: str) -> None:
        call.forgotten = True
        del self._open[call.request]
        why = message_line(f"the process of its agent ended: {message}")
        self._lost[call.request] = why
        self._events.append(EpisodeLost(request=call.request, message=why))

    def _count_death(self, now_ns: int, message: str) -> None:
        self.deaths += 1
        most = UNREACHED_MAX if self._task.urls and not self._facts else DEATHS_MAX
        self._deaths.count(now_ns, message, most * len(self._places.breakers))

    def _start_missing(self, now_ns: int) -> None:
        while now_ns >= self._deaths.start_at_ns:
            used = [child.link.url for child in self._children if not child.exhausted]
            full = len(used) >= self._task.processes
            url = None if full else self._places.choose(used, now_ns)
            if url is None:
                break
            link = Link(url, self._interpreter, token=self._token, task=self._task.name)
            self._children.append(Child.start(self._task, link, self._selector, now_ns))

    def _end_episode(self, request: str) -> None:
        self._ends_ns.pop(request, None)
        held = self._episodes.pop(request, None)
        if held is not None:
            held[0].end(held[1], self._clock.now_ns())

    def _fail(self, request: str, error: str, message: str) -> None:
        self._events.append(TaskFailed(request=request, error=error, message=message_line(message)))
