"""A task process as the pool sees it: its pipes, the calls it has, and their time limits.

It decides nothing: it says which of its calls are over their limits, and `pool` what then happens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import (
    UP,
    Abandon,
    AgentCall,
    Deferred,
    EndEpisode,
    GroupCall,
    RewardCall,
    Setup,
    TaskCall,
    Up,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.links import Link, SocketLink

WINDOW: Final = 32
"""Calls sent to a process ahead of its answers: enough to keep it busy between two polls."""

DEFERRED_MAX: Final = 8192
"""Calls that a process has at a time, those included that go on beside the others. Calls beyond
that wait in the pool's queue."""

AGENT_S: Final = 3600.0
"""Limit of an agent without `task.episode_seconds`."""

WAITING_S: Final = 600.0
"""How long a call may wait for a thread of its process."""

DEFERRED_DEATHS_MAX: Final = 3
"""Processes that may die while a call is deferred there, before it is taken for the reason."""

ABANDON_S: Final = 5.0
"""How long an abandoned call may take to be cancelled, and a call to be interrupted that holds the
main thread of others' process, before that process counts as stuck."""

READ_BYTES: Final = 1 << 16
"""What a pipe holds: a shorter read has emptied it."""

READS_MAX: Final = 64
"""Reads of one process per poll, so that a chatty one cannot hold the loop."""

CLOSE_S: Final = 2.0
"""How long a process may take to close its episodes before it is killed: what it gives them itself
(`server.CLOSE_S`), and that again to go."""

EPISODE_TIMEOUT: Final = "EpisodeTimeout"
LATE: Final = ("TimedOut", EPISODE_TIMEOUT)
"""What calls end with that are beyond their limits."""

_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 63


@dataclass(slots=True, kw_only=True, eq=False)
class OpenCall:
    """A call that has no event yet."""

    request: str
    number: int
    frame: bytes
    limit_ns: int
    late: str = "TimedOut"
    """What it ends with beyond its limit."""
    episode: int | None = None
    """The episode it is bound to; None for a call that any process can do."""
    agent: bool = False
    """An agent runs: nobody makes the call again but its worker."""
    threaded: bool = False
    """It may run in a thread, and end the process whatever its main thread does."""
    forgotten: bool = False
    tries: int = 0
    """How often it was begun beside the others."""
    until_ns: int = 0
    """Of a deferred call: when its time is up."""
    deaths: int = 0
    """Processes that died while it was deferred there: it may be what kills them."""
    avoid: Child | None = None
    """Where its request's episode failed before."""


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A task process. `sent` are its unanswered calls in order: it works on the first. It works on
    all that are `deferred` at the same time."""

    link: Link
    selector: selectors.BaseSelector
    heard_ns: int
    """When it was started, or said that it is still opening."""
    heard: bool = False
    """It has said something."""
    bad: int = 0
    """Calls in a row that its environments let time out or gave up."""
    ready: bool = False
    head_since_ns: int = 0
    """When it last said something, or got a call while it had none."""
    sent: deque[OpenCall] = field(default_factory=deque)
    pinned: deque[OpenCall] = field(default_factory=deque)
    """Calls of its episodes that wait for room in `sent`."""
    deferred: dict[int, OpenCall] = field(default_factory=dict)
    """By number; one that was forgotten stays until the process says that it is cancelled."""
    exhausted: str = ""
    """Why it gets no calls but those of the episodes that it has, and then ends."""
    left_alone: bool = False
    """Whether that is for calls that failed there: what else fails in it counts no more."""
    episodes: dict[int, str] = field(default_factory=dict)
    """Number of the episode to its request."""
    closing_until_ns: int = 0
    """It was asked to close an episode, which may last until then: it does not say when it has."""
    _up: bytearray = field(default_factory=bytearray)
    _down: bytearray = field(default_factory=bytearray)
    _writing: bool = False
    _late_from_ns: int = _NEVER_NS
    """No deferred call is late before."""

    @classmethod
    def start(
        cls,
        task: model.Task,
        link: Link,
        selector: selectors.BaseSelector,
        now_ns: int,
    ) -> Child:
        """Say what to serve, to what was just started or connected to."""
        child = cls(link=link, selector=selector, heard_ns=now_ns)
        selector.register(link.outbox, selectors.EVENT_READ, child)
        if isinstance(link, SocketLink):
            child._down += link.first
        child._down += pack(Setup(task, os.getpid()))
        return child

    @property
    def load(self) -> tuple[int, int]:
        """Calls that it has, then episodes: for choosing the least loaded."""
        return len(self.sent) + len(self.pinned) + len(self.deferred), len(self.episodes)

    @property
    def roomy(self) -> bool:
        """Whether a call of its episodes can be sent to it."""
        if not self.ready or len(self.sent) >= WINDOW:
            return False
        return len(self.sent) + len(self.deferred) < DEFERRED_MAX

    @property
    def over(self) -> bool:
        """Whether it is exhausted and has nothing to do any more."""
        return bool(self.exhausted) and not (self.sent or self.deferred or self.episodes)

    @property
    def head_limit_ns(self) -> int:
        """How long the call may take that it works on in its main thread. Where others would lose
        by its end, it may first interrupt that call itself."""
        head = self.sent[0]
        others = self.deferred or any(number != head.episode for number in self.episodes)
        return head.limit_ns + (int(ABANDON_S * _NS) if others else 0)

    def closing_s(self, now_ns: int) -> float:
        """How long it may still be closing episodes."""
        return max(0.0, (self.closing_until_ns - now_ns) / _NS)

    def send(self, call: OpenCall, now_ns: int) -> None:
        """Put a call on its way; it leaves with `flush`."""
        if not self.sent:
            self.head_since_ns = now_ns
        self.sent.append(call)
        self._down += call.frame

    def end(self, episode: int, now_ns: int) -> None:
        """Ask to close an episode."""
        if self.episodes.pop(episode, None) is not None:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
            self._down += pack(EndEpisode(episode))

    def defer(self, call: OpenCall, frame: Deferred, now_ns: int) -> None:
        """A call goes on beside the others: after a pause, or when a thread is free. Its time
        begins then."""
        call.tries += -1 if frame.waiting else 1
        wait_s = WAITING_S if frame.waiting else frame.pause_s
        self.deferred[call.number] = call
        self._limit(call, now_ns + int(wait_s * _NS) + call.limit_ns)
        if call.forgotten:
            self.abandon(call, now_ns)

    def abandon(self, call: OpenCall, now_ns: int) -> None:
        """Cancel a deferred call; it is answered when that is done."""
        call.forgotten = True
        self._limit(call, now_ns + int(ABANDON_S * _NS))
        self._down += pack(Abandon(call.number))

    def late(self, now_ns: int) -> list[OpenCall]:
        """Deferred calls whose time is up."""
        if now_ns <= self._late_from_ns:
            return []
        late = [call for call in self.deferred.values() if now_ns > call.until_ns]
        self._late_from_ns = min(
            (call.until_ns for call in self.deferred.values()), default=_NEVER_NS
        )
        return late

    def _limit(self, call: OpenCall, until_ns: int) -> None:
        call.until_ns = until_ns
        self._late_from_ns = min(self._late_from_ns, until_ns)

    def flush(self) -> None:
        """Write what the pipe takes. A process that is gone is found out by `read`."""
        if self._down:
            with contextlib.suppress(BlockingIOError, ConnectionError, TimeoutError):
                del self._down[: os.write(self.link.inbox, self._down)]
        if bool(self._down) != self._writing:
            self._writing = bool(self._down)
            if self._writing:
                self.selector.register(self.link.inbox, selectors.EVENT_WRITE, self)
            else:
                self.selector.unregister(self.link.inbox)

    def read(self, *, to_the_end: bool = False) -> tuple[list[Up], bool]:
        """Frames that have arrived, and whether the pipe has ended.

        Raises ValueError (msgspec's errors are ValueErrors) for what is no frame.
        """
        ended = False
        for _ in range(READS_MAX):
            try:
                data = os.read(self.link.outbox, READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # a connection that was lost
                ended = True
                break
            self._up += data
            ended = not data
            if ended or (len(data) < READ_BYTES and not to_the_end):
                break
        return [UP.decode(body) for body in unpack(self._up)], ended

    def kill(self) -> str:
        """End it with all it started; how it ended. What it wrote is readable."""
        return self.link.kill()

    def release(self) -> None:
        """Close what it was reached by."""
        self._stop_writing()
        self.selector.unregister(self.link.outbox)
        self.link.close()

    def hang_up(self, now_ns: int) -> None:
        """End what goes to it, so that it closes its episodes and goes."""
        if self.episodes:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
        self._stop_writing()
        self.link.hang_up()

    def _stop_writing(self) -> None:
        if self._writing:
            self.selector.unregister(self.link.inbox)
            self._writing = False

    def wait(self, seconds: float) -> None:
        """Give it so long to go by itself; it is not reaped here, so that `kill` stays safe."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.outbox, selectors.EVENT_READ)
            selector.select(seconds)


def limit_s(task: model.Task, call: TaskCall, *, tools: bool) -> float:
    """For a try at a call; `tools`: its episode has some."""
    if isinstance(call, RewardCall | GroupCall):
        return task.reward_timeout_s
    if isinstance(call, AgentCall):
        return task.episode_seconds or AGENT_S
    seconds = task.environment_timeout_s
    return 2 * seconds if tools else seconds


def episode_too_long(task: model.Task) -> str:
    """What is said of an episode that is beyond `task.episode_seconds`."""
    return f"the episode took longer than {task.episode_seconds:g} s"


def late(task: model.Task, call: OpenCall) -> str:
    """What is said of a call that is beyond its limit."""
    if call.late == EPISODE_TIMEOUT:
        return episode_too_long(task)
    return f"timed out after {call.limit_ns / _NS:g} s"
