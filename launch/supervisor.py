"""Start a run's roles on this machine, restart those that die, and stop them in order.

Workers publish their progress first; then the trainer ends its step; the orchestrator stops last
and folds their records. A second Ctrl-C kills.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.config.model import Timing
from dora_pipe.core.errors import DoraError
from dora_pipe.core.system.console import say

TICK_S: Final = 0.1
BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
RESTART_WINDOW_S: Final = 60.0
LOG_TAIL_BYTES: Final = 4000

FATAL_CODES: Final = frozenset({3, 5, 6, 8, 9, 10, 11, 12})
"""Errors that a restart cannot fix: configuration, broken invariant (or truncated log), diverged
replay, unreadable decision, unusable policy or task, non-finite step."""


WAITED_OUT: Final = 64
"""Added to the exit code after a timeout of `core.loop.retry`; a restart would repeat the wait."""

PATIENT_CODES: Final = frozenset({4, 7})

BROKEN_CODES: Final = frozenset({5, 6, 8})
"""Fatal exit codes caused by the log rather than the role."""


class RunFailed(DoraError):
    """Fatal end of a role and so of the run; carries the role's exit code."""

    def __init__(self, message: str, *, code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = code  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Worker roles; the run continues until the last one ends."""

    names: Collection[str] = ()
    elsewhere: Callable[[], int] = lambda: 0
    served: Callable[[str], int] = lambda name: 0


Start = Callable[[str], subprocess.Popen[bytes]]


@dataclass(slots=True, kw_only=True)
class _Role:
    process: subprocess.Popen[bytes] | None = None
    asked_to_end: bool = False
    done: bool = False
    starts_s: deque[float] = field(default_factory=deque)
    due_s: float = 0.0
    served: int = 0
    fruitless: int = 0
    """Consecutive starts of a worker without a loaded version, and its earlier loads."""


class Supervisor:
    """Keep roles running until they end by themselves.

    `stop_order` has the roles that stop together, by a name for all; they start in reverse. The run
    survives the end of a `spare` role, and of all but one of `workers`. Starts do not count while
    an external cause holds the run up. `logs` has a log per role.
    """

    def __init__(
        self,
        start: Start,
        *,
        stop_order: dict[str, tuple[str, ...]],
        timing: Timing,
        logs: Path | None = None,
        watch: Callable[[], None] = lambda: None,
        spare: Collection[str] = (),
        workers: Workers | None = None,
        held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._roles = {name: _Role() for names in reversed(stop_order.values()) for name in names}
        self._start = start
        self._stop_order = stop_order
        self._timing = timing
        self._logs = logs
        self._watch = watch
        self._spare = frozenset(spare)
        self._workers = workers or Workers()
        self._held_up = held_up
        self._interrupts = 0

    def run(self) -> bool:
        """Run until every role has ended; return False if the user stopped it. Raises RunFailed."""
        previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while not all(role.done for role in self._roles.values()):
                self._turn(restart=True)
                if self._interrupts:
                    self._stop()
                    return False
            return True
        finally:
            for role in self._roles.values():
                if role.process is not None:
                    role.process.kill()
                    role.process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def stopping(self) -> bool:
        """Return whether the user or a failed role is ending the run."""
        return self._interrupts > 0

    def pid(self, name: str) -> int | None:
        process = self._roles[name].process
        return None if process is None else process.pid

    def _turn(self, *, restart: bool) -> None:
        now_s = time.monotonic()
        for name, role in self._roles.items():
            if restart and not role.done and role.process is None and role.due_s <= now_s:
                role.due_s = float("inf")
                role.starts_s.append(now_s)
                role.process = self._start(name)
        ended = self._ends()
        if not ended:
            time.sleep(TICK_S)
        for name, code in ended:
            self._role_ended(name, code, restart=restart)
        self._watch()

    def _ends(self) -> list[tuple[str, int]]:
        """Return the roles that ended with their exit codes; negative: killed by that signal."""
        ended = []
        for name, role in self._roles.items():
            if role.process is not None and (code := role.process.poll()) is not None:
                role.process = None
                ended.append((name, code))
        return ended

    def _role_ended(self, name: str, code: int, *, restart: bool) -> None:
        if code == 0 or not restart:
            self._roles[name].done = True
            return
        waited_out = code - WAITED_OUT in PATIENT_CODES
        if waited_out:
            code -= WAITED_OUT
        may_be_lost = name in self._workers.names or name in self._spare
        if (waited_out and not may_be_lost and not self._held_up()) or code in BROKEN_CODES:
            self._fail(name, code)
        elif code in FATAL_CODES:
            self._give_up(name, code)
        else:
            self._restart(name, code)

    def _restart(self, name: str, code: int) -> None:
        role, now_s = self._roles[name], time.monotonic()
        if self._held_up():
            role.starts_s.clear()
            role.due_s = now_s + BACKOFF_MAX_S
            return
        while role.starts_s and role.starts_s[0] < now_s - RESTART_WINDOW_S:
            role.starts_s.popleft()
        if max(len(role.starts_s), self._fruitless(name)) > self._timing.max_restarts:
            self._give_up(name, code)
            return
        pause_s = min(BACKOFF_FIRST_S * 2 ** (len(role.starts_s) - 1), BACKOFF_MAX_S)
        role.due_s = now_s + pause_s
        say(f"{self._ended(name, code)[0]}; restarting it in {pause_s:.1f} s")

    def _fruitless(self, name: str) -> int:
        """Return consecutive starts without a loaded version; loading may outlast the window."""
        role = self._roles[name]
        if name in self._workers.names:
            served = self._workers.served(name)
            role.fruitless = 1 if served > role.served else role.fruitless + 1
            role.served = served
        return role.fruitless

    def _give_up(self, name: str, code: int) -> None:
        workers = self._workers.names
        running = any(not self._roles[worker].done for worker in workers if worker != name)
        if name in workers and not running and not self._workers.elsewhere():
            self._fail(name, code, "no worker is left to serve a version: ")
        elif name in workers or name in self._spare:
            self._roles[name].done = True
            say(f"{self._ended(name, code)[0]}; the run continues without it")
        else:
            self._fail(name, code)

    def _ended(self, name: str, code: int) -> tuple[str, str]:
        message, hint = self._last_error(name) if code > 0 else ("", "")
        return f"{name} {how(code)}" + (f": {message}" if message else ""), hint

    def _fail(self, name: str, code: int, why: str = "") -> None:
        message, hint = self._ended(name, code)
        self._interrupts = 1
        self._stop()
        see = "" if self._logs is None else f"see {self._logs / name}.log"
        hint = "; ".join(filter(None, (hint, see)))
        raise RunFailed(why + message, code=code if code > 0 else 1, hint=hint or None)

    def _last_error(self, name: str) -> tuple[str, str]:
        path = Path() if self._logs is None else self._logs / f"{name}.log"
        if not path.is_file():
            return "", ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        places = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        if not places:
            return "", ""
        message, after = lines[places[-1]], "".join(lines[places[-1] + 1 : places[-1] + 2])
        hint = after.removeprefix("hint: ") if after.startswith("hint: ") else ""
        return message.removeprefix("error: "), hint

    def _stop(self) -> None:
        say(f"stopping: {', then '.join(self._stop_order)} (press Ctrl-C again to kill)")
        for names in self._stop_order.values():
            self._end([self._roles[name] for name in names])
        say("stopped")

    def _end(self, roles: list[_Role]) -> None:
        until_s = time.monotonic() + self._timing.stop_timeout_s
        while any(role.process is not None for role in roles):
            _signal([role for role in roles if not role.asked_to_end], signal.SIGTERM)
            if self._interrupts > 1 or time.monotonic() > until_s:
                _signal(roles, signal.SIGKILL)
            self._turn(restart=False)
        for role in roles:
            role.done = True

    def _interrupt(self, *_: object) -> None:
        self._interrupts += 1


def how(code: int) -> str:
    """Describe an exit code. Example: ``how(-9) == "was killed (SIGKILL)"``."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed ({signal.Signals(-code).name})"


def _signal(roles: list[_Role], number: int) -> None:
    for role in roles:
        if role.process is not None:
            role.asked_to_end = True
            role.process.send_signal(number)
