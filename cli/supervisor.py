"""Starts a run's roles on this machine, restarts what dies, and ends them in order.

Order of a stop (Ctrl-C, SIGTERM): workers first, so that they publish how far each request has
come; then the trainer, which ends its step; the orchestrator last, so that it has folded what the
others said. Nothing is cancelled: `--resume` goes on exactly there. A second Ctrl-C kills.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.cli.output import say
from dora_pipe.cli.zygote import Ended, Report, Started, Zygote
from dora_pipe.config.model import Timing
from dora_pipe.errors import DoraError

TICK_S: Final = 0.1
BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
LOG_TAIL_BYTES: Final = 4000

FATAL_CODES: Final = frozenset({3, 5, 6, 8, 9, 10, 11})
"""Exit codes that starting again cannot mend: configuration, a broken promise (or a log that was
cut), a diverged replay, a decision that cannot be read, an unusable policy or task, a step that is
not finite."""


class RunFailed(DoraError):
    """A role ended for good and took the run with it; carries that role's exit code."""

    def __init__(self, message: str, *, code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = code  # type: ignore[misc]


@dataclass(slots=True, kw_only=True)
class _Role:
    zygote: Zygote
    pid: int | None = None
    asked: bool = False
    """The zygote was asked to start it, and has not said yet that it did."""
    told: bool = False
    """It was asked to end."""
    done: bool = False
    starts_s: deque[float] = field(default_factory=deque)
    due_s: float = 0.0
    """When to start it (again)."""


class Supervisor:
    """Keeps roles alive until they end by themselves.

    `stop_order` lists names in the order in which they are asked to stop, those of one entry
    together. A role of `spare` that ends for good takes the run not with it.
    """

    def __init__(
        self,
        roles: Mapping[str, Zygote],
        *,
        stop_order: tuple[tuple[str, ...], ...],
        timing: Timing,
        logs: Path,
        watch: Callable[[], None],
        spare: Collection[str] = (),
    ) -> None:
        self._roles = {name: _Role(zygote=zygote) for name, zygote in roles.items()}
        self._stop_order = stop_order
        self._timing = timing
        self._logs = logs
        self._watch = watch
        self._spare = frozenset(spare)
        self._interrupts = 0

    def run(self) -> bool:
        """Until every role has ended in order; False when the user stopped it. Raises RunFailed."""
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
            for number, handler in previous.items():
                signal.signal(number, handler)

    def pid(self, name: str) -> int | None:
        """The process id of a running role."""
        return self._roles[name].pid

    def _turn(self, *, restart: bool) -> None:
        now_s = time.monotonic()
        for name, role in self._roles.items():
            if restart and not role.done and role.pid is None and role.due_s <= now_s:
                role.due_s = float("inf")
                role.asked = True
                role.starts_s.append(now_s)
                role.zygote.spawn(name)
        pause_s = TICK_S
        reports: list[Report] = []
        for zygote in {id(role.zygote): role.zygote for role in self._roles.values()}.values():
            reports += zygote.reports(pause_s)
            pause_s = 0.0
        for report in reports:  # all, before one of them ends the run: nobody reports twice
            self._note(report)
        for report in reports:
            if isinstance(report, Ended):
                self._take(report, restart=restart)
        self._watch()

    def _note(self, report: Report) -> None:
        role = self._roles[report.name]
        if isinstance(report, Started):
            role.pid, role.asked = report.pid, False
        else:
            role.pid = None

    def _take(self, report: Ended, *, restart: bool) -> None:
        role = self._roles[report.name]
        if report.code == 0 or not restart:
            role.done = True
            return
        if report.code in FATAL_CODES:
            self._fail(report)
        else:
            self._again(report, role)

    def _again(self, report: Ended, role: _Role) -> None:
        now_s = time.monotonic()
        while role.starts_s and role.starts_s[0] < now_s - self._timing.restart_window_s:
            role.starts_s.popleft()
        if len(role.starts_s) > self._timing.restarts_max:
            self._fail(report)
            return
        pause_s = min(BACKOFF_FIRST_S * 2 ** (len(role.starts_s) - 1), BACKOFF_MAX_S)
        role.due_s = now_s + pause_s
        say(f"{report.name} {how(report.code)}; starting it again in {pause_s:.1f} s")

    def _fail(self, report: Ended) -> None:
        said = self._last_error(report.name)
        message = f"{report.name} {how(report.code)}" + (f": {said}" if said else "")
        if report.name in self._spare:
            self._roles[report.name].done = True
            say(f"{message}; the run goes on without it")
            return
        self._interrupts = 1
        self._stop()
        code = report.code if report.code > 0 else 1
        raise RunFailed(message, code=code, hint=f"see {self._logs / report.name}.log")

    def _last_error(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else ""

    def _stop(self) -> None:
        say("stopping: workers, then trainer, then orchestrator (again Ctrl-C to kill)")
        for names in self._stop_order:
            self._end([self._roles[name] for name in names])
        say("stopped")

    def _end(self, roles: list[_Role]) -> None:
        """Ask these roles to end, wait for them, and kill what takes too long."""
        until_s = time.monotonic() + self._timing.stop_timeout_s
        while any(role.pid is not None or role.asked for role in roles):
            _signal([role for role in roles if not role.told], signal.SIGTERM)
            if self._interrupts > 1 or time.monotonic() > until_s:
                _signal(roles, signal.SIGKILL)
            self._turn(restart=False)
        for role in roles:
            role.done = True

    def _interrupt(self, *_: object) -> None:
        self._interrupts += 1


def how(code: int) -> str:
    """An exit code in words. Example: ``how(-9) == "was killed (SIGKILL)"``."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed ({signal.Signals(-code).name})"


def _signal(roles: list[_Role], number: int) -> None:
    for role in roles:
        if role.pid is not None:
            role.told = True
            with suppress(ProcessLookupError):
                os.kill(role.pid, number)
