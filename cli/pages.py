"""Open runs for the web pages of `ui`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dora_pipe.cli.records import run_rows
from dora_pipe.cli.texts import decoder_of
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.observe.web.pages import RunSource
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.view import Query


def page_worker(run: str, root: Path, *, redact: bool) -> closing[QueryWorker]:
    """Open a worker that answers queries about a run."""
    find_run(run, root)
    return closing(QueryWorker(partial(open_source, run, root, redact)))


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
        yield RunSource(
            bus=run.bus,
            topics=run.topics,
            policies=run.policies,
            decode=None if redact else decoder_of(run),
            redact=redact,
            catalogue=run.directory.catalogue,
        )
