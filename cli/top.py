"""`top`: show a live run in a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Annotated, Final

import typer
from rich.console import Console, Group
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.text import Text

from dora_pipe.cli.options import RunArgument, RunsOption
from dora_pipe.cli.output import emit_line, takes_unicode
from dora_pipe.core.errors import printable
from dora_pipe.core.system.console import RUNS
from dora_pipe.launch.disk_watch import broker_words, full_disk
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.top import Line, Panel, Screen, Style, frame

ASK_S: Final = 5.0

WIDE: Final = 140

HEAD_ROWS: Final = 2
_INTERRUPT: Final = (signal.SIGINT,)

PROMPT_ROWS: Final = 1

EDGES: Final = 2

STYLES: Final[dict[Style, str]] = {
    "": "",
    "dim": "dim",
    "good": "green",
    "busy": "yellow",
    "alarm": "bold red",
}


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and exit.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between frames.")
    ] = 1.0,
    root: RunsOption = RUNS,
) -> None:
    """Show a live run: workers, queue, staleness, step, reward, decisions, waits.

    In a pipe: plain lines, one per step. It ends with the run, or with Ctrl-C.
    """
    with opened(run, root) as open_run:
        _watch(open_run, every, once=once)


def _watch(run: OpenRun, every_s: float, *, once: bool) -> None:
    console = Console(highlight=False)
    screen = console.is_terminal and not console.is_dumb_terminal
    stats = RunStats(run.topics.run)
    with closing(stats.follow(run.bus, run.topics)) as follower:
        _catch_up(follower)
        plain = not takes_unicode()
        full = _looking(run)
        if once:
            _show_once(console, stats, full, screen=screen, plain=plain)
        elif screen:
            _follow(console, follower, stats, every_s, full, plain=plain)
        else:
            _print_steps(follower, stats, every_s)


def _catch_up(follower: LogFollower) -> None:
    while follower.advance():
        pass


Full = Callable[[], str]


def _looking(run: OpenRun) -> Full:
    asked_s, broker_text = 0.0, ""

    def full() -> str:
        nonlocal asked_s, broker_text
        if time.monotonic() - asked_s >= ASK_S:
            asked_s, broker_text = time.monotonic(), broker_words(run.config, run.bus, run.topics)
        return full_disk(run.directory.path, run.store) or broker_text

    return full


def _frame(stats: RunStats, full: Full, *, plain: bool) -> Screen:
    shown = frame(stats, time.time_ns(), plain=plain)
    warning = "" if stats.over else full()
    return replace(shown, head=f"{warning}; {shown.head}") if warning else shown


def _show_once(console: Console, stats: RunStats, full: Full, *, screen: bool, plain: bool) -> None:
    shown = _frame(stats, full, plain=plain)
    if screen:
        width, height = console.size
        rows = height - PROMPT_ROWS
        console.print(layout(shown, width, rows), height=rows)
        return
    for line in shown.lines():
        emit_line(line)


def _follow(
    console: Console,
    follower: LogFollower,
    stats: RunStats,
    every_s: float,
    full: Full,
    *,
    plain: bool,
) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live, _interrupts_wait():
        while not stats.over:
            _catch_up(follower)
            shown = _frame(stats, full, plain=plain)
            live.update(layout(shown, *console.size), refresh=True)
            if not stats.over and signal.sigtimedwait(_INTERRUPT, every_s) is not None:
                raise KeyboardInterrupt
    _show_once(console, stats, full, screen=True, plain=plain)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C until a frame is drawn: in mid-frame it can be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _print_steps(follower: LogFollower, stats: RunStats, every_s: float) -> None:
    last = -1
    while True:
        for step in stats.steps:
            if step.step > last:
                emit_line(step.line)
                last = step.step
        sys.stdout.flush()
        if stats.over:
            break
        time.sleep(every_s)
        _catch_up(follower)
    emit_line(frame(stats, time.time_ns()).head)


def layout(shown: Screen, width: int, height: int) -> Layout:
    """Arrange a frame for a screen of this size."""
    layout = Layout()
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
    layout.split_column(Layout(_head(shown, width), size=HEAD_ROWS), above, *parts)
    return layout


def _longest(*panels: Panel) -> int:
    return max(len(panel.lines) for panel in panels)


def _head(shown: Screen, width: int) -> Group:
    bar = ProgressBar(total=1.0, completed=shown.done, width=width)
    return Group(Text(printable(shown.head), style="bold", no_wrap=True, overflow="ellipsis"), bar)


def _box(panel: Panel, rows: int) -> Box:
    lines = [_text(line) for line in panel.fit(rows - EDGES)]
    return Box(Group(*lines), title=panel.title, title_align="left", padding=(0, 1))


def _text(line: Line) -> Text:
    return Text(printable(line.text), style=STYLES[line.style], no_wrap=True, overflow="ellipsis")
