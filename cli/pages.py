"""Open runs for the web pages of `ui` and `export html`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dora_pipe.cli.options import may_write_file
from dora_pipe.cli.texts import decoder_of
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.observe.web.export import export_file
from dora_pipe.observe.web.pages import RunSource
from dora_pipe.observe.web.query_worker import Opener, QueryWorker


def export_html(run: str, file: Path, root: Path, *, redact: bool, force: bool) -> None:
    """Write the pages of a run into one HTML file."""
    may_write_file(file, force=force)
    with page_worker(run, root, redact=redact) as worker:
        worker.read_all()
        done = export_file(worker, file)
    say(f"{file}: {done.bytes / 1e6:.1f} MB, {done.pages} pages")


def page_worker(run: str, root: Path, *, redact: bool) -> closing[QueryWorker]:
    """Open a worker that answers queries about a run."""
    find_run(run, root)
    return closing(QueryWorker(source_opener(run, root, redact=redact)))


def source_opener(name: str, root: Path, *, redact: bool = False) -> Opener:
    """Return an opener of a run for its pages."""

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
