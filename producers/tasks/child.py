"""A task process as seen by the pool."""

from __future__ import annotations

import contextlib
import os
import selectors
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import (
    UP,
    Abandon,
    AgentCall,
    CallState,
    EndEpisode,
    GroupCall,
    RewardCall,
    Setup,
    TaskCall,
    Up,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.links import Link

WINDOW: Final = 32
"""Calls sent ahead of answers, to keep a process busy."""

AGENT_S: Final = 3600.0

WAITING_S: Final = 600.0
"""Limit of a wait for a thread."""

STUCK_S: Final = 60.0
"""Limit of a process that begins none of its calls."""

DEATHS_OF_CALL_MAX: Final = 3
"""Deaths of processes after which one of several calls is blamed."""

ABANDON_S: Final = 5.0
"""Time to cancel or interrupt a call before its process counts as stuck."""

READ_BYTES: Final = 1 << 16

READS_MAX: Final = 64
"""Reads per poll, so that a process cannot block the loop."""

CLOSE_S: Final = 2.0
"""Time for the process to close episodes and exit."""

EPISODE_TIMEOUT: Final = "EpisodeTimeout"

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
    until_ns: int = 0
    deaths: int = 0
    """Deaths of processes under it that have other suspects."""


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """Task process."""

    link: Link
    selector: selectors.BaseSelector
    heard_ns: int
    """Start, then last frame or first call after idle time."""
    heard: bool = False
    ready: bool = False
    sent: dict[int, OpenCall] = field(default_factory=dict)
    begun: dict[int, OpenCall] = field(default_factory=dict)
    """Includes forgotten calls until they are cancelled."""
    main: OpenCall | None = None
    """Call in the main thread."""
    exhausted: str = ""
    """Reason to finish only its open calls and episodes."""
    episodes: dict[int, str] = field(default_factory=dict)
    closing_until_ns: int = 0
    _up: bytearray = field(default_factory=bytearray)
    _down: bytearray = field(default_factory=bytearray)
    _late_from_ns: int = _NEVER_NS

    @classmethod
    def start(
        cls, task: model.Task, link: Link, selector: selectors.BaseSelector, now_ns: int
    ) -> Child:
        child = cls(link=link, selector=selector, heard_ns=now_ns)
        selector.register(link.socket, selectors.EVENT_READ, child)
        child._down += link.first + pack(Setup(task, os.getpid()))
        return child

    @property
    def load(self) -> tuple[int, int]:
        """Calls and episodes; the pool picks the smallest."""
        return len(self.sent) + len(self.begun), len(self.episodes)

    @property
    def takes_calls(self) -> bool:
        return self.ready and not self.exhausted and len(self.sent) < WINDOW

    @property
    def over(self) -> bool:
        return bool(self.exhausted) and not (self.sent or self.begun or self.episodes)

    def closing_s(self, now_ns: int) -> float:
        return max(0.0, (self.closing_until_ns - now_ns) / _NS)

    def send(self, call: OpenCall, now_ns: int) -> None:
        if not self.sent:
            self.heard_ns = now_ns
        self.sent[call.number] = call
        self._down += call.frame

    def end(self, episode: int, now_ns: int) -> None:
        if self.episodes.pop(episode, None) is not None:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
            self._down += pack(EndEpisode(episode))

    def progress(self, number: int, state: CallState, now_ns: int) -> None:
        """Enter a call's new state. Raises ValueError for an unknown call."""
        call = self.sent.get(number) or self.begun.get(number)
        if call is None:
            raise ValueError(f"call {number} is not open")
        self.sent.pop(number, None)
        self.begun[number] = call
        if state == "main":
            self.main = call
        elif self.main is call:
            self.main = None
        limit_ns = call.limit_ns + (int(WAITING_S * _NS) if state == "waiting" else 0)
        if call.forgotten:
            self.abandon(call, now_ns)
        else:
            self._limit(call, now_ns + limit_ns)

    def answered(self, number: int) -> OpenCall:
        """Remove an answered call. Raises ValueError for an unknown one."""
        call = self.sent.pop(number, None) or self.begun.pop(number, None)
        if call is None:
            raise ValueError(f"an answer to call {number}, which is not open")
        self.main = None if self.main is call else self.main
        return call

    def abandon(self, call: OpenCall, now_ns: int) -> None:
        call.forgotten = True
        self._limit(call, now_ns + int(ABANDON_S * _NS))
        self._down += pack(Abandon(call.number))

    def late(self, now_ns: int) -> list[OpenCall]:
        if now_ns <= self._late_from_ns:
            return []
        late = [call for call in self.begun.values() if now_ns > call.until_ns]
        self._late_from_ns = min((call.until_ns for call in self.begun.values()), default=_NEVER_NS)
        return late

    def is_stuck(self, now_ns: int) -> bool:
        return bool(self.sent) and not self.begun and now_ns - self.heard_ns > STUCK_S * _NS

    def _limit(self, call: OpenCall, until_ns: int) -> None:
        call.until_ns = until_ns
        self._late_from_ns = min(self._late_from_ns, until_ns)

    def flush(self) -> None:
        """Write what the socket takes; `read` detects a dead process."""
        if self._down:
            with contextlib.suppress(OSError):
                del self._down[: self.link.socket.send(self._down)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._down else 0)
        if self.selector.get_key(self.link.socket).events != events:
            self.selector.modify(self.link.socket, events, self)

    def read(self, *, to_the_end: bool = False) -> tuple[list[Up], bool]:
        """Return frames and whether the connection has ended. Raises ValueError."""
        ended = False
        for _ in range(READS_MAX):
            try:
                data = self.link.socket.recv(READ_BYTES)
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

    def release(self) -> None:
        self.selector.unregister(self.link.socket)
        self.link.socket.close()

    def hang_up(self, now_ns: int) -> None:
        if self.episodes:
            self.closing_until_ns = now_ns + int(CLOSE_S * _NS)
        self.link.hang_up()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the connection without reaping, so that `kill` stays safe."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.socket, selectors.EVENT_READ)
            selector.select(seconds)


def limit_s(task: model.Task, call: TaskCall, *, tools: bool) -> float:
    if isinstance(call, RewardCall | GroupCall):
        return task.reward_timeout_s
    if isinstance(call, AgentCall):
        return task.episode_timeout_s or AGENT_S
    seconds = task.environment_timeout_s
    return 2 * seconds if tools else seconds


def episode_too_long(task: model.Task) -> str:
    return f"the episode took longer than {task.episode_timeout_s:g} s"


def late(task: model.Task, call: OpenCall) -> str:
    if call.late == EPISODE_TIMEOUT:
        return episode_too_long(task)
    return f"timed out after {call.limit_ns / _NS:g} s"
