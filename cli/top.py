"""`top`: a run in a terminal while it goes on; it decides what goes where on the screen."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Final

import typer
from rich.console import Console, Group
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.text import Text

from dora_pipe.cli.look import ArchiveOption, RunArgument, RunsOption
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.errors import UsageError
from dora_pipe.telemetry.log_feed import LogFeed
from dora_pipe.telemetry.tally import Tally
from dora_pipe.views.top import Frame, Line, Panel, Style, frame, step_line

EVERY_S: Final = 1.0
EVERY_MIN_S: Final = 0.1

WIDE: Final = 140
"""From so many columns on there are two panels beside each other below, too."""

HEAD_ROWS: Final = 2
_INTERRUPT: Final = (signal.SIGINT,)

PROMPT_ROWS: Final = 1
"""Left for the shell behind a frame that stays."""

EDGES: Final = 2
"""Rows of a panel that are its frame."""

STYLES: Final[dict[Style, str]] = {
    "": "",
    "dim": "dim",
    "good": "green",
    "busy": "yellow",
    "alarm": "bold red",
}


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Between two frames.")
    ] = EVERY_S,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Show a run while it goes on: workers, queue, staleness, step, reward, decisions, waits.

    In a pipe: plain lines, one per step. It ends with the run, or with Ctrl-C.
    """
    if every < EVERY_MIN_S:
        raise UsageError(f"--every {every:g} is too short", hint=f"at least {EVERY_MIN_S:g}")
    console = Console(highlight=False)
    screen = console.is_terminal and not console.is_dumb_terminal
    with opened(run, root, archive) as found, closing(_feed(found)) as feed:
        _catch_up(feed)
        plain = not _has_blocks()
        if once:
            _show_once(console, feed.tally, screen=screen, plain=plain)
        elif screen:
            _follow(console, feed, every, plain=plain)
        else:
            _tell(feed, every)


def _feed(run: OpenRun) -> LogFeed:
    return LogFeed(run.bus, run.topics, Tally(run.topics.run))


def _catch_up(feed: LogFeed) -> None:
    while feed.advance():
        pass


def _show_once(console: Console, tally: Tally, *, screen: bool, plain: bool) -> None:
    shown = frame(tally, time.time_ns(), plain=plain)
    if screen:
        width, height = console.size
        rows = height - PROMPT_ROWS
        console.print(layout(shown, width, rows), height=rows)
        return
    for line in shown.lines():
        typer.echo(line)


def _follow(console: Console, feed: LogFeed, every_s: float, *, plain: bool) -> None:
    """A screen of its own, until the run is over; what it showed last stays."""
    tally = feed.tally
    with Live(console=console, screen=True, auto_refresh=False) as live, _interrupts_wait():
        while not tally.over:
            _catch_up(feed)
            shown = frame(tally, time.time_ns(), plain=plain)
            live.update(layout(shown, *console.size), refresh=True)
            if not tally.over and signal.sigtimedwait(_INTERRUPT, every_s) is not None:
                raise KeyboardInterrupt
    _show_once(console, tally, screen=True, plain=plain)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits until a frame is drawn: raised in the middle of one, it can be lost, in whatever
    was being cleaned up, and half a frame stays."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(feed: LogFeed, every_s: float) -> None:
    """Lines for a pipe: each step, and at the end how it ended."""
    tally, told = feed.tally, -1
    while True:
        for step in tally.steps:
            if step.step > told:
                typer.echo(step_line(step))
                told = step.step
        sys.stdout.flush()
        if tally.over:
            break
        time.sleep(every_s)
        _catch_up(feed)
    typer.echo(frame(tally, time.time_ns()).head)


def _has_blocks() -> bool:
    """Whether the terminal can be trusted with more than ASCII."""
    encoding = os.environ.get("PYTHONIOENCODING") or sys.stdout.encoding or "ascii"
    return encoding.lower().startswith("utf")


def layout(shown: Frame, width: int, height: int) -> Layout:
    """A frame on a screen of this size."""
    whole = Layout()
    rows = height - HEAD_ROWS
    upper = max(4, min(rows * 2 // 5 + 1, EDGES + _longest(shown.workers, shown.numbers)))
    if width >= WIDE:
        below = Layout(name="below", size=rows - upper)
        below.split_row(_box(shown.waits, rows - upper), _box(shown.decisions, rows - upper))
        parts = [below]
    else:
        waits = max(3, min((rows - upper) // 2, EDGES + len(shown.waits.lines)))
        parts = [
            Layout(_box(shown.waits, waits), size=waits),
            Layout(_box(shown.decisions, rows - upper - waits), size=rows - upper - waits),
        ]
    above = Layout(name="above", size=upper)
    above.split_row(_box(shown.workers, upper), _box(shown.numbers, upper))
    whole.split_column(Layout(_head(shown, width), size=HEAD_ROWS), above, *parts)
    return whole


def _longest(*panels: Panel) -> int:
    return max(len(panel.lines) for panel in panels)


def _head(shown: Frame, width: int) -> Group:
    bar = ProgressBar(total=1.0, completed=shown.done, width=width)
    return Group(Text(shown.head, style="bold", no_wrap=True, overflow="ellipsis"), bar)


def _box(panel: Panel, rows: int) -> Box:
    lines = [_text(line) for line in panel.fit(rows - EDGES)]
    return Box(Group(*lines), title=panel.title, title_align="left", padding=(0, 1))


def _text(line: Line) -> Text:
    return Text(line.text, style=STYLES[line.style], no_wrap=True, overflow="ellipsis")
