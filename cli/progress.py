"""Progress of a long command on stderr: a bar, or occasional lines without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dora_pipe.bus.base import WatchedBus
from dora_pipe.core.system.console import covered, say
from dora_pipe.launch.run_dir import OpenRun, opened

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

QUIET_S: Final = 2.0

LINE_S: Final = 10.0

DRAW_S: Final = 0.2


class CommandProgress:
    """Progress of one command. Example: ``report("reading control", 300, 1000)``."""

    def __init__(self) -> None:
        self._now: tuple[str, float, float | None] = ("", 0, None)
        self._lock = threading.Lock()
        self._bars: Bars | None = None

    def __call__(self, phase: str, done: float = 0, total: float | None = None) -> None:
        """Report progress of a phase; without a total it is indeterminate."""
        self._now = (phase, done, total)

    def line(self, seconds: float) -> str:
        phase, done, total = self._now
        far = f", {min(1.0, done / total):.0%}" if total else ""
        return f"{phase}{far} ({seconds:.0f} s)"

    def draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        phase, done, total = self._now
        with self._lock:
            if self._bars is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
                self._bars = Progress(
                    *columns,
                    TimeElapsedColumn(),
                    console=Console(stderr=True),
                    transient=True,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._bars.add_task(phase, total=total)
                self._bars.start()
            self._bars.update(
                self._bars.task_ids[0], description=phase, completed=done, total=total, refresh=True
            )

    def clear(self) -> None:
        """Remove the bar until the next drawing."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars = None


@contextmanager
def opened_watched(name: str, root: Path) -> Iterator[tuple[OpenRun, CommandProgress]]:
    """Open a run so that reading its log reports progress."""
    with opened(name, root) as run, progress("opening the log") as report:
        yield replace(run, bus=WatchedBus(run.bus, report)), report


@contextmanager
def progress(phase: str, report: CommandProgress | None = None) -> Iterator[CommandProgress]:
    """Report progress of the block from another thread."""
    report, over = report or CommandProgress(), threading.Event()
    report(phase)
    thread = threading.Thread(target=_show, args=(report, over), name="progress", daemon=True)
    thread.start()
    try:
        with covered(report.clear):
            yield report
    finally:
        over.set()
        thread.join()
        report.clear()


def _show(report: CommandProgress, over: threading.Event) -> None:
    began_s = time.monotonic()
    terminal = sys.stderr.isatty()
    pause_s = QUIET_S
    while not over.wait(pause_s):
        if terminal:
            report.draw()
        else:
            say(report.line(time.monotonic() - began_s))
        pause_s = DRAW_S if terminal else LINE_S
