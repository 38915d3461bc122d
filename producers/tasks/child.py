"""A task process as seen by the pool."""

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
"""Calls sent ahead of answers, to keep a process busy."""

DEFERRED_MAX: Final = 8192
"""Most calls of a process, including deferred ones."""

AGENT_S: Final = 3600.0

WAITING_S: Final = 600.0

DEFERRED_DEATHS_MAX: Final = 3
"""Deaths of processes after which a deferred call is blamed."""

ABANDON_S: Final = 5.0
"""Time to cancel or interrupt a call before its process counts as stuck."""

READ_BYTES: Final = 1 << 16
"""Capacity of a pipe: a shorter read has emptied it."""

READS_MAX: Final = 64
"""Reads per poll, so that a process cannot block the loop."""

CLOSE_S: Final = 2.0
"""Time for the process to close episodes and exit."""

EPISODE_TIMEOUT: Final = "EpisodeTimeout"
LATE: Final = ("TimedOut", EPISODE_TIMEOUT)

_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 63


@dataclass(slots=True, kw_only=True, eq=False)
class OpenCall:
    """Call without an event."""

    request: str
    number: int
    frame: bytes
    limit_ns: int
    late: str = "TimedOut"
    episode: int | None = None
    """Required episode; None if any process can run the call."""
    agent: bool = False
    threaded: bool = False
    """May run in a thread and end the process from there."""
    forgotten: bool = False
    tries: int = 0
    until_ns: int = 0
    deaths: int = 0
    """Deaths of processes while it was deferred there."""
    avoid: Child | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """Task process; works on the first of `sent` and on all of `deferred`."""

    link: Link
    selector: selectors.BaseSelector
    heard_ns: int
    heard: bool = False
    bad: int = 0
    ready: bool = False
    head_since_ns: int = 0
    """Last frame, or first call after idle time."""
    sent: deque[OpenCall] = field(default_factory=deque)
    pinned: deque[OpenCall] = field(default_factory=deque)
    deferred: dict[int, OpenCall] = field(default_factory=dict)
    """Includes forgotten calls until they are cancelled."""
    exhausted: str = ""
    """Reason to finish only its open episodes."""
    suspended: bool = False
    """Exhausted by failed calls; further ones do not count."""
    episodes: dict[int, str] = field(default_factory=dict)
    closing_until_ns: int = 0
    _up: bytearray = field(default_factory=bytearray)
    _down: bytearray = field(default_factory=bytearray)
    _writing: bool = False
    _late_from_ns: int = _NEVER_NS

    @classmethod
    def start(
        cls, task: model.Task, link: Link, selector: selectors.BaseSelector, now_ns: int
    ) -> Child:
        child = cls(link=link, selector=selector, heard_ns=now_ns)
        selector.register(link.outbox, selectors.EVENT_READ, child)
        if isinstance(link, SocketLink):
            child._down += link.first
        child._down += pack(Setup(task, os.getpid()))
        return child

    @property
    def load(self) -> tuple[int, int]:
        """Calls and episodes; the pool picks the smallest."""
        return len(self.sent) + len(self.pinned) + len(self.deferred), len(self.episodes)

    @property
    def roomy(self) -> bool:
        if not self.ready or len(self.sent) >= WINDOW:
            return False
        return len(self.sent) + len(self.deferred) < DEFERRED_MAX

    @property
    def over(self) -> bool:
        return bool(self.exhausted) and not (self.sent or self.deferred or self.episodes)

    @property
    def head_limit_ns(self) -> int:
        """Limit of the current call, with time to interrupt it if others would be lost."""
        head = self.sent[0]
        others = self.deferred or any(number != head.episode for number in self.episodes)
        return head.limit_ns + (int(ABANDON_S * _NS) if others else 0)

    def closing_s(self, now_ns: int) -> float:
        return max(0.0, (self.closing_until_ns - now_ns) / _NS)

    def send(self, call: OpenCall, now_ns: int) -> None:
        if not self.sent:
            self.head_since_ns = now_ns
        self.sent.append(call)
        self._down += call.frame

    def end(self, episode: int, now_ns: int) -> None:
        if self.episodes.pop(episode, None) is not None:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
            self._down += pack(EndEpisode(episode))

    def defer(self, call: OpenCall, frame: Deferred, now_ns: int) -> None:
        """Move a call to the background."""
        call.tries += -1 if frame.waiting else 1
        wait_s = WAITING_S if frame.waiting else frame.pause_s
        self.deferred[call.number] = call
        self._limit(call, now_ns + int(wait_s * _NS) + call.limit_ns)
        if call.forgotten:
            self.abandon(call, now_ns)

    def abandon(self, call: OpenCall, now_ns: int) -> None:
        call.forgotten = True
        self._limit(call, now_ns + int(ABANDON_S * _NS))
        self._down += pack(Abandon(call.number))

    def late(self, now_ns: int) -> list[OpenCall]:
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
        """Write what the pipe takes; `read` detects a dead process."""
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
        """Return frames and whether the pipe has ended. Raises ValueError."""
        ended = False
        for _ in range(READS_MAX):
            try:
                data = os.read(self.link.outbox, READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # lost connection
                ended = True
                break
            self._up += data
            ended = not data
            if ended or (len(data) < READ_BYTES and not to_the_end):
                break
        return [UP.decode(body) for body in unpack(self._up)], ended

    def kill(self) -> str:
        """Kill it and its children; its output stays readable."""
        return self.link.kill()

    def release(self) -> None:
        self._stop_writing()
        self.selector.unregister(self.link.outbox)
        self.link.close()

    def hang_up(self, now_ns: int) -> None:
        if self.episodes:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
        self._stop_writing()
        self.link.hang_up()

    def _stop_writing(self) -> None:
        if self._writing:
            self.selector.unregister(self.link.inbox)
            self._writing = False

    def wait(self, seconds: float) -> None:
        """Wait for the exit without reaping, so that `kill` stays safe."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.outbox, selectors.EVENT_READ)
            selector.select(seconds)


def limit_s(task: model.Task, call: TaskCall, *, tools: bool) -> float:
    """Return the limit of a try."""
    if isinstance(call, RewardCall | GroupCall):
        return task.reward_timeout_s
    if isinstance(call, AgentCall):
        return task.episode_timeout_s or AGENT_S
    seconds = task.environment_timeout_s
    return 2 * seconds if tools else seconds


def episode_too_long(task: model.Task) -> str:
    """Return the message of an episode beyond `task.episode_timeout_s`."""
    return f"the episode took longer than {task.episode_timeout_s:g} s"


def late(task: model.Task, call: OpenCall) -> str:
    """Return the message of a call beyond its limit."""
    if call.late == EPISODE_TIMEOUT:
        return episode_too_long(task)
    return f"timed out after {call.limit_ns / _NS:g} s"
