"""A task process as the pool sees it: its pipes, the calls it has, and their time limits.

It decides nothing: it says which of its calls are over their limits, and `pool` what then happens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.config import model
from dora_pipe.core.console import own_name
from dora_pipe.producers.tasks.calls import (
    UP,
    Abandon,
    EndEpisode,
    Setup,
    Up,
    pack,
    unpack,
)

WINDOW: Final = 32
"""Calls sent to a process ahead of its answers: enough to keep it busy between two polls."""

DEFERRED_MAX: Final = 256
"""Calls that a process has at a time, those included that go on beside the others. Calls beyond
that wait in the pool's queue."""

DEFERRED_DEATHS_MAX: Final = 3
"""Processes that may die while a call is deferred there, before it is taken for the reason."""

ABANDON_S: Final = 5.0
"""How long an abandoned call may take to be cancelled, before its process counts as stuck."""

READ_BYTES: Final = 1 << 16
"""What a pipe holds: a shorter read has emptied it."""

READS_MAX: Final = 64
"""Reads of one process per poll, so that a chatty one cannot hold the loop."""

_NS: Final = 1_000_000_000

_COMMAND = (sys.executable, "-P", "-m", "dora_pipe.producers.tasks.server")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""One thread, and the same order of sets in every process: rewards do not depend on it."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenCall:
    """A call that has no event yet."""

    request: str
    number: int
    frame: bytes
    limit_ns: int
    episode: int | None = None
    """The episode it is bound to; None for a call that any process can do."""
    forgotten: bool = False
    tries: int = 0
    """How often it was begun beside the others."""
    until_ns: int = 0
    """Of a deferred call: when its time is up."""
    deaths: int = 0
    """Processes that died while it was deferred there: it may be what kills them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A task process. `sent` are its unanswered calls in order: it works on the first. It works on
    all that are `deferred` at the same time."""

    process: subprocess.Popen[bytes]
    selector: selectors.BaseSelector
    heard_ns: int
    """When it was started, or said that it is still opening."""
    inbox: int
    outbox: int
    ready: bool = False
    head_since_ns: int = 0
    sent: deque[OpenCall] = field(default_factory=deque)
    pinned: deque[OpenCall] = field(default_factory=deque)
    """Calls of its episodes that wait for room in `sent`."""
    deferred: dict[int, OpenCall] = field(default_factory=dict)
    """By number; one that was forgotten stays until the process says that it is cancelled."""
    exhausted: str = ""
    """Why it gets no calls but those of the episodes that it has, and then ends."""
    episodes: dict[int, str] = field(default_factory=dict)
    """Number of the episode to its request."""
    _up: bytearray = field(default_factory=bytearray)
    _down: bytearray = field(default_factory=bytearray)
    _writing: bool = False

    @classmethod
    def start(cls, task: model.Task, selector: selectors.BaseSelector, now_ns: int) -> Child:
        """Start a process of its own session, so that it can be killed with all it started."""
        process = subprocess.Popen(
            [*_COMMAND, f"task of {own_name()}".strip()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        inbox, outbox = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(inbox, False)
        os.set_blocking(outbox, False)
        child = cls(process=process, selector=selector, heard_ns=now_ns, inbox=inbox, outbox=outbox)
        selector.register(outbox, selectors.EVENT_READ, child)
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

    def send(self, call: OpenCall, now_ns: int) -> None:
        """Put a call on its way; it leaves with `flush`."""
        if not self.sent:
            self.head_since_ns = now_ns
        self.sent.append(call)
        self._down += call.frame

    def end(self, episode: int) -> None:
        """Ask to close an episode."""
        if self.episodes.pop(episode, None) is not None:
            self._down += pack(EndEpisode(episode))

    def defer(self, call: OpenCall, pause_s: float, now_ns: int) -> None:
        """A call goes on beside the others, after a pause: its time begins then."""
        call.tries += 1
        call.until_ns = now_ns + int(pause_s * _NS) + call.limit_ns
        self.deferred[call.number] = call
        if call.forgotten:
            self.abandon(call, now_ns)

    def abandon(self, call: OpenCall, now_ns: int) -> None:
        """Cancel a deferred call; it is answered when that is done."""
        call.forgotten = True
        call.until_ns = now_ns + int(ABANDON_S * _NS)
        self._down += pack(Abandon(call.number))

    def late(self, now_ns: int) -> Iterator[OpenCall]:
        """Deferred calls whose time is up."""
        if self.deferred:
            yield from [call for call in self.deferred.values() if now_ns > call.until_ns]

    def flush(self) -> None:
        """Write what the pipe takes. A process that is gone is found out by `read`."""
        if self._down:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                del self._down[: os.write(self.inbox, self._down)]
        if bool(self._down) != self._writing:
            self._writing = bool(self._down)
            if self._writing:
                self.selector.register(self.inbox, selectors.EVENT_WRITE, self)
            else:
                self.selector.unregister(self.inbox)

    def read(self, *, to_the_end: bool = False) -> tuple[list[Up], bool]:
        """Frames that have arrived, and whether the pipe has ended.

        Raises ValueError (msgspec's errors are ValueErrors) for what is no frame.
        """
        ended = False
        for _ in range(READS_MAX):
            try:
                data = os.read(self.outbox, READ_BYTES)
            except BlockingIOError:
                break
            self._up += data
            ended = not data
            if ended or (len(data) < READ_BYTES and not to_the_end):
                break
        return [UP.decode(body) for body in unpack(self._up)], ended

    def kill(self) -> int:
        """SIGKILL to the process and all it started; its exit status. What it wrote is readable."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def release(self) -> None:
        """Close the pipes."""
        if self._writing:
            self.selector.unregister(self.inbox)
            self._writing = False
        self.selector.unregister(self.outbox)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def hang_up(self) -> None:
        """End the pipe to it, so that it closes its episodes and goes."""
        if self._writing:
            self.selector.unregister(self.inbox)
            self._writing = False
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Give it so long to go by itself; it is not reaped here, so that `kill` stays safe."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.outbox, selectors.EVENT_READ)
            selector.select(seconds)
