"""Commands that look at runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dora_pipe.cli.options import (
    ForceOption,
    JsonOption,
    RunArgument,
    RunsOption,
    may_write_file,
)
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.cli.progress import progress
from dora_pipe.core.console import RUNS, say
from dora_pipe.core.errors import UsageError
from dora_pipe.core.local_http import LOOPBACK

if TYPE_CHECKING:
    from dora_pipe.observe.web.pages import RunSource
    from dora_pipe.observe.web.query_worker import Opener

FRAMES_EVERY_S: Final = 1.0
FRAMES_EVERY_MIN_S: Final = 0.1

UI_PORT: Final = 8765

METRICS_PORT: Final = 9464
"""What OpenTelemetry's exporters for Prometheus use."""


def runs(as_json: JsonOption = False, root: RunsOption = RUNS) -> None:
    """List the runs on this machine."""
    from dora_pipe.cli.records import run_rows

    columns = ("run", "steps", "of", "task", "log", "state")
    emit_rows(columns, run_rows(root), as_json=as_json, drop=("log", "task"))


def show(
    run: RunArgument,
    wanted: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="g0000000042-003, g0000000042, or 7 (a step); else the whole run."
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="All evaluations and changes; of a step all trajectories.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Show how a run goes or went; or where a step, group or trajectory came from and went."""
    from dora_pipe.audit.effective_config import config_drift
    from dora_pipe.cli.show import show_id, show_run
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as open_run:
        if drift := config_drift(open_run.bus, open_run.topics, open_run.config):
            say(f"not what the run has: {drift.line}")
        if wanted:
            show_id(open_run, wanted, everything=everything, as_json=as_json)
        else:
            show_run(open_run, as_json=as_json, everything=everything)


def why(
    run: RunArgument,
    at: Annotated[
        str, typer.Option(metavar="TIME", help="At a moment: seconds after the start, or ISO 8601.")
    ] = "",
    step: Annotated[
        int | None, typer.Option(help="Before this step's batch was taken; how long it took.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Who waited how long for what in total.")
    ] = False,
    slots: Annotated[
        bool, typer.Option("--slots", help="Which share of the slots was empty, and why.")
    ] = False,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Also each wait, role by role, down to who does not move."),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Say what every role waits for, since when, who blocks it in the end, and what to do about it.

    Of a run that is over: who waited how long for what in total.
    """
    if sum((bool(at), step is not None, summary, slots)) > 1:
        raise UsageError("--at, --step, --summary and --slots are four different questions")
    from dora_pipe.cli.why_tables import Asked, answer
    from dora_pipe.launch.run_dir import opened

    asked = Asked(at=at, step=step, summary=summary, slots=slots, tree=tree, as_json=as_json)
    with opened(run, root) as open_run:
        answer(open_run, asked)


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Between two frames.")
    ] = FRAMES_EVERY_S,
    root: RunsOption = RUNS,
) -> None:
    """Show a run while it goes on: workers, queue, staleness, step, reward, decisions, waits.

    In a pipe: plain lines, one per step. It ends with the run, or with Ctrl-C.
    """
    if every < FRAMES_EVERY_MIN_S:
        raise UsageError(f"--every {every:g} is too short", hint=f"at least {FRAMES_EVERY_MIN_S:g}")
    from dora_pipe.cli.top import watch
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as found:
        watch(found, every, once=once)


def ui(
    run: RunArgument,
    beside: Annotated[
        str, typer.Option(metavar="RUN", help="A second run, to be compared with the first.")
    ] = "",
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `replay RUN --json` printed, to be compared."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the pages into one HTML file instead."),
    ] = None,
    force: ForceOption = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Hide texts and token ids, and what tasks said.")
    ] = False,
    port: Annotated[int, typer.Option(help="Of localhost; 0 takes a free one.")] = UI_PORT,
    root: RunsOption = RUNS,
) -> None:
    """Look at a run in a browser, while it goes on or afterwards: http://127.0.0.1:8765."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is none", hint="0 to 65535")
    if export is not None:
        may_write_file(export, force=force)
    from dora_pipe.launch.run_dir import find_run
    from dora_pipe.observe.web.export import export_file
    from dora_pipe.observe.web.query_worker import QueryWorker
    from dora_pipe.observe.web.samples import read_replay
    from dora_pipe.observe.web.server import PageServer

    replayed = None if replay is None else read_replay(replay)
    with ExitStack() as stack:
        workers = []
        for place, name in enumerate(filter(None, (run, beside))):
            find_run(name, root)
            opener = source_opener(name, root, redact=redact)
            workers.append(QueryWorker(opener, None if place else replayed))
            stack.callback(workers[-1].close)
        if export is not None:
            for worker in workers:
                worker.read_all()
            done = export_file(workers, export)
            say(f"{export}: {done.bytes / 1e6:.1f} MB, {done.pages} pages")
            return
        server = PageServer(workers, port=port)
        stack.callback(server.server_close)
        for worker in workers:
            worker.start()
        emit_line(server.address)
        say("open it in a browser; Ctrl-C ends this")
        server.serve_forever()


def source_opener(name: str, root: Path, *, redact: bool = False) -> Opener:
    """Opens a run as the pages of `ui` need it."""
    from dora_pipe.cli.texts import decoder_of
    from dora_pipe.launch.run_dir import opened
    from dora_pipe.observe.web.pages import RunSource

    @contextmanager
    def open_source() -> Iterator[RunSource]:
        with opened(name, root) as run:
            yield RunSource(
                bus=run.bus,
                topics=run.topics,
                policies=run.policies,
                decode=None if redact else decoder_of(run),
                redact=redact,
                catalogue=run.directory.catalogue,
            )

    return open_source


def metrics(
    run: RunArgument,
    port: Annotated[
        int, typer.Option(help="Where /metrics is served; 0 takes a free one.")
    ] = METRICS_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one than localhost is for all.")
    ] = LOOPBACK,
    root: RunsOption = RUNS,
) -> None:
    """Serve the metrics of a run to Prometheus: http://127.0.0.1:9464/metrics."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be 0 to 65535, got {port}")
    from dora_pipe.core.clock import SystemClock
    from dora_pipe.launch.run_dir import opened
    from dora_pipe.observe.metrics.exporter import Exporter, MetricsServer

    with opened(run, root) as found:
        exporter = Exporter(found.topics.run, found.contributions)
        with MetricsServer(exporter, port=port, host=host) as server:
            emit_line(server.address)
            say("Prometheus may scrape it; Ctrl-C ends this")
            exporter.follow(found.bus, found.topics, SystemClock())


def topics(
    run: RunArgument,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """List a run's topics: partitions, positions, records and bytes."""
    from dora_pipe.cli.records import topic_rows
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as open_run:
        rows = topic_rows(open_run)
    emit_rows(("topic", "partition", "begin", "end", "records", "bytes"), rows, as_json=as_json)


def sql(
    run: RunArgument,
    query: Annotated[
        str | None,
        typer.Argument(help="One statement of DuckDB's SQL; without it the tables are listed."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Ask the tables of a run's log in SQL: reference/catalogue.md has them, and questions.

    Of a run that is over the tables are kept beside it, in catalogue.duckdb, for notebooks too.
    """
    from dora_pipe.audit.rescored_run import rescored_rows
    from dora_pipe.bus.logged import Damage
    from dora_pipe.catalogue.calls import LaidTable, ask
    from dora_pipe.catalogue.tables import CALLS, RESCORED, TABLES, columns_of
    from dora_pipe.launch.run_dir import opened

    if query is None:
        names = ["table", "columns", "what a row is"]
        rows: list[tuple[Any, ...]] = [
            (table.name, len(columns_of(table.row)), table.words)
            for table in (*TABLES, CALLS, RESCORED)
        ]
        damage = Damage()
    else:
        phase = "reading the log"
        with (
            opened(run, root) as open_run,
            progress(phase) as report,
            closing(open_run.tables(lambda share: report(phase, share, 1.0))) as tables,
        ):
            directory = open_run.directory.path
            scores = LaidTable(table=RESCORED, rows=lambda: rescored_rows(directory, tables))
            names, rows, damage = ask(tables, open_run.bus, open_run.topics, query, beside=[scores])
    if as_json:
        for row in rows:
            emit_json(dict(zip(names, row, strict=True)))
    else:
        emit_table(names, rows)
    if query is None:
        say("docs/reference/catalogue.md says what is in each column")
    damage.raise_if_any(": their calls are not in the table")


def cat(
    run: RunArgument,
    topic: Annotated[
        str,
        typer.Argument(help="control, metrics, decisions, trajectories, progress or dead-letters."),
    ] = "control",
    kind: Annotated[str, typer.Option(help="Only records of this kind.")] = "",
    key: Annotated[str, typer.Option(help="Only records with this key.")] = "",
    partition: Annotated[int, typer.Option(help="-1 is all.")] = -1,
    offset: Annotated[int, typer.Option("--from", help="From this offset on.")] = 0,
    limit: Annotated[int, typer.Option(help="Stop after so many; 0 does not.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Print the records of a topic, a line each; `--json` has them whole."""
    from dora_pipe.cli.records import Wanted, print_records
    from dora_pipe.launch.run_dir import opened

    wanted = Wanted(
        topic=topic,
        kind=kind,
        key=key,
        partition=partition,
        offset=offset,
        limit=limit,
        follow=follow,
    )
    with opened(run, root) as open_run:
        print_records(open_run, wanted, as_json=as_json)
