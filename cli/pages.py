"""`ui` and `metrics`: serve runs to a browser, a run to Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dora_pipe.cli.options import RUN_HELP, RunArgument, RunsOption
from dora_pipe.cli.output import emit_line
from dora_pipe.cli.show import run_rows
from dora_pipe.cli.texts import source_of
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.observe.metrics.exporter import Exporter, metrics_server
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import page_server
from dora_pipe.observe.web.view import Query, RunSource

UI_PORT: Final = 8765

METRICS_PORT: Final = 9464
"""Default port of OpenTelemetry's Prometheus exporters."""


def ui(
    run: Annotated[str, typer.Argument(help=f"{RUN_HELP} Default: all runs.")] = "",
    redact: Annotated[
        bool, typer.Option("--redact", help="Hide texts, token ids and messages of tasks.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port on localhost; 0: any free port.")
    ] = UI_PORT,
    root: RunsOption = RUNS,
) -> None:
    """Show the runs, or one of them, in a browser: http://127.0.0.1:8765."""
    pages: closing[QueryWorker] | RunsPages = RunsPages(root, redact=redact)
    if run:
        find_run(run, root)  # raises if there is none
        pages = closing(QueryWorker(partial(open_source, run, root, redact)))
    with pages as answers, page_server(answers, port=port) as server:
        if isinstance(answers, QueryWorker):
            answers.start()
        emit_line(f"{server.origin}/")
        say("open it in a browser; Ctrl-C ends this")
        server.wait()


def metrics(
    run: RunArgument,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port; 0: any free port.")
    ] = METRICS_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default serves this machine only.")
    ] = "127.0.0.1",
    root: RunsOption = RUNS,
) -> None:
    """Serve the metrics of a run to Prometheus: http://127.0.0.1:9464/metrics."""
    with opened(run, root) as opened_run:
        exporter = Exporter(opened_run.topics.run, opened_run.contributions)
        with metrics_server(exporter, port=port, host=host) as server:
            emit_line(f"{server.origin}/metrics")
            say("Prometheus may scrape it; Ctrl-C ends this")
            exporter.follow(opened_run.bus, opened_run.topics, SystemClock())


class RunsPages(ExitStack):
    """Pages of all runs in a directory; a run opens at its first query."""

    def __init__(self, root: Path, *, redact: bool) -> None:
        super().__init__()
        self._root, self._redact = root, redact
        self._lock = threading.Lock()
        self._workers: dict[str, QueryWorker] = {}

    def ask(self, asked: Query) -> dict[str, Any]:
        """Return the list of runs, or the answer of the run that the path begins with."""
        name, *path = asked.path or ("runs",)
        if not path:
            return {"runs": run_rows(self._root)}
        return self._worker(name).ask(Query(path=tuple(path), fields=asked.fields))

    def _worker(self, name: str) -> QueryWorker:
        with self._lock:
            if name not in self._workers:
                if name not in {path.parent.name for path in self._root.glob("*/config.toml")}:
                    raise UsageError(f"no run {name!r} in {self._root}")
                worker = QueryWorker(partial(open_source, name, self._root, self._redact))
                self._workers[name] = self.enter_context(closing(worker))
                self._workers[name].start()
            return self._workers[name]


@contextmanager
def open_source(name: str, root: Path, redact: bool) -> Iterator[RunSource]:
    """Open a run for its pages."""
    with opened(name, root) as run:
        yield source_of(run, redact=redact)
