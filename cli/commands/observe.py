"""Commands that show runs."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any, Final

import typer

from dora_pipe.cli.options import RUN_HELP, JsonOption, RedactOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.cli.progress import progress
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS, say

FRAMES_EVERY_S: Final = 1.0
FRAMES_EVERY_MIN_S: Final = 0.1

UI_PORT: Final = 8765

METRICS_PORT: Final = 9464
"""Default port of OpenTelemetry's Prometheus exporters."""


def show(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{RUN_HELP} Default: list all runs.")
    ] = "",
    identifier: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Trajectory (g0000000042-003), group or step; default: the run."
        ),
    ] = "",
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Show all evaluations and changes, or all trajectories of a step."
        ),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Show the progress of a run, or the lineage of a step, group or trajectory.

    Without a run: list the runs on this machine.
    """
    if not run:
        from dora_pipe.cli.records import run_rows

        columns = ("run", "state", "steps", "of", "task", "log")
        emit_rows(columns, run_rows(root), as_json=as_json)
        return
    from dora_pipe.audit.effective_config import config_drift
    from dora_pipe.cli.show import show_id, show_run
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as open_run:
        if drift := config_drift(open_run.bus, open_run.topics, open_run.config):
            say(f"differs from the run's configuration: {drift.line}")
        if identifier:
            show_id(open_run, identifier, everything=everything, as_json=as_json)
        else:
            show_run(open_run, as_json=as_json, everything=everything)


def why(
    run: RunArgument,
    at: Annotated[
        str,
        typer.Option(metavar="TIME", help="Point in time: seconds after the start, or ISO 8601."),
    ] = "",
    step: Annotated[int | None, typer.Option(help="Time of this step's batch decision.")] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print totals of an unfinished run.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Explain what each role waits for, since when, which role blocks it, and what to do about it.

    For a finished run: how long each role waited in total, and for what.
    """
    if sum((bool(at), step is not None, summary)) > 1:
        raise UsageError("--at, --step and --summary exclude each other")
    from dora_pipe.cli.why import Asked, answer
    from dora_pipe.launch.run_dir import opened

    asked = Asked(at=at, step=step, summary=summary, as_json=as_json)
    with opened(run, root) as open_run:
        answer(open_run, asked)


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and exit.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Seconds between frames.")
    ] = FRAMES_EVERY_S,
    root: RunsOption = RUNS,
) -> None:
    """Show a live run: workers, queue, staleness, step, reward, decisions, waits.

    In a pipe: plain lines, one per step. It ends with the run, or with Ctrl-C.
    """
    if every < FRAMES_EVERY_MIN_S:
        raise UsageError(f"--every {every:g} is too short", hint=f"at least {FRAMES_EVERY_MIN_S:g}")
    from dora_pipe.cli.top import watch
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run:
        watch(opened_run, every, once=once)


def ui(
    run: Annotated[str, typer.Argument(help=f"{RUN_HELP} Default: all runs.")] = "",
    redact: RedactOption = False,
    port: Annotated[int, typer.Option(help="TCP port on localhost; 0: any free port.")] = UI_PORT,
    root: RunsOption = RUNS,
) -> None:
    """Show the runs, or one of them, in a browser: http://127.0.0.1:8765."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be 0 to 65535, got {port}")
    from dora_pipe.cli.pages import RunsPages, page_worker
    from dora_pipe.observe.web.query_worker import QueryWorker
    from dora_pipe.observe.web.server import page_server

    pages = page_worker(run, root, redact=redact) if run else RunsPages(root, redact=redact)
    with pages as answers, page_server(answers, port=port) as server:
        if isinstance(answers, QueryWorker):
            answers.start()
        emit_line(f"{server.origin}/")
        say("open it in a browser; Ctrl-C ends this")
        server.wait()


def metrics(
    run: RunArgument,
    port: Annotated[int, typer.Option(help="TCP port; 0: any free port.")] = METRICS_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default serves this machine only.")
    ] = "127.0.0.1",
    root: RunsOption = RUNS,
) -> None:
    """Serve the metrics of a run to Prometheus: http://127.0.0.1:9464/metrics."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be 0 to 65535, got {port}")
    from dora_pipe.core.system.clock import SystemClock
    from dora_pipe.launch.run_dir import opened
    from dora_pipe.observe.metrics.exporter import Exporter, metrics_server

    with opened(run, root) as opened_run:
        exporter = Exporter(opened_run.topics.run, opened_run.contributions)
        with metrics_server(exporter, port=port, host=host) as server:
            emit_line(f"{server.origin}/metrics")
            say("Prometheus may scrape it; Ctrl-C ends this")
            exporter.follow(opened_run.bus, opened_run.topics, SystemClock())


def sql(
    run: RunArgument,
    query: Annotated[
        str | None,
        typer.Argument(help="A DuckDB statement; default: list the tables."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Query the tables of a run's log in SQL; docs/reference/sql.md lists them.

    The tables of a finished run are kept in its directory, in catalogue.duckdb.
    """
    from dora_pipe.bus.logged import Damage
    from dora_pipe.launch.run_dir import opened
    from dora_pipe.ledger.calls import ask
    from dora_pipe.ledger.tables import CALLS, TABLES, columns_of

    if query is None:
        names = ["table", "columns", "row"]
        rows: list[tuple[Any, ...]] = [
            (table.name, len(columns_of(table.row)), table.description)
            for table in (*TABLES, CALLS)
        ]
        damage = Damage()
    else:
        phase = "reading the log"
        with (
            opened(run, root) as open_run,
            progress(phase) as report,
            closing(open_run.tables(lambda share: report(phase, share, 1.0))) as tables,
        ):
            names, rows, damage = ask(tables, open_run.bus, open_run.topics, query)
    if as_json:
        for row in rows:
            emit_json(dict(zip(names, row, strict=True)))
    else:
        emit_table(names, rows)
    if query is None:
        say("docs/reference/sql.md describes each column")
    damage.raise_if_any(": their calls are not in the table")
