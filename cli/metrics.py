"""`metrics`: serve the metrics of a run to Prometheus."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from dora_pipe.cli.options import RunArgument, RunsOption
from dora_pipe.cli.output import emit_line
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.metrics.exporter import Exporter, metrics_server

METRICS_PORT: Final = 9464
"""Default port of OpenTelemetry's Prometheus exporters."""


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
    with opened(run, root) as opened_run:
        exporter = Exporter(opened_run.topics.run, opened_run.contributions)
        with metrics_server(exporter, port=port, host=host) as server:
            emit_line(f"{server.origin}/metrics")
            say("Prometheus may scrape it; Ctrl-C ends this")
            exporter.follow(opened_run.bus, opened_run.topics, SystemClock())
