"""`metrics`: the numbers of a run for Prometheus, from its log, live or finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from dora_pipe.cli.look import ArchiveOption, RunArgument, RunsOption
from dora_pipe.cli.output import say
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.clock import SystemClock
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.errors import DoraError, UsageError
from dora_pipe.local_http import LOOPBACK
from dora_pipe.telemetry.exporter import Exporter, MetricsServer
from dora_pipe.telemetry.log_feed import LogFeed
from dora_pipe.telemetry.tally import Tally

PORT: Final = 9464
"""What OpenTelemetry's exporters for Prometheus use."""


def metrics(
    run: RunArgument,
    port: Annotated[int, typer.Option(help="Where /metrics is served; 0 takes a free one.")] = PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one than localhost is for all.")
    ] = LOOPBACK,
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics instead, and end.")
    ] = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Serve the metrics of a run to Prometheus: http://127.0.0.1:9464/metrics."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is none", hint="0 to 65535")
    with opened(run, root, archive) as found:
        exporter = Exporter(found.topics.run, contributions_of(found))
        if once:
            exporter.read(LogFeed(found.bus, found.topics, Tally(found.topics.run)))
            assert exporter.page is not None
            typer.echo(exporter.page.decode(), nl=False)
            return
        with MetricsServer(exporter, port=port, host=host) as server:
            server.start()
            typer.echo(server.address)
            say("Prometheus may scrape it; Ctrl-C ends this")
            exporter.follow(found.bus, found.topics, SystemClock())


def contributions_of(run: OpenRun) -> Callable[[str], list[dict[str, Any]]]:
    """Reads contributions files of a run; no rows where there is none that can be read."""

    def rows(sha256: str) -> list[dict[str, Any]]:
        try:
            if not run.has_policies or not run.policies.has_blob("contributions", sha256):
                return []
            return read_contributions(run.policies.blob("contributions", sha256))
        except (DoraError, OSError, ValueError):
            return []

    return rows
