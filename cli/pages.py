"""Open runs for the web pages: served by `ui`, written by `export html`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dora_pipe.cli.options import may_write_file
from dora_pipe.cli.texts import decoder_of
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.observe.web.export import export_file
from dora_pipe.observe.web.pages import RunSource
from dora_pipe.observe.web.query_worker import Opener, QueryWorker
from dora_pipe.observe.web.samples import read_replay


@contextmanager
def page_workers(
    run: str, beside: str, root: Path, *, replay: Path | None, redact: bool
) -> Iterator[list[QueryWorker]]:
    """Workers that answer the queries of a run's pages, and of the run `beside` it."""
    replayed = None if replay is None else read_replay(replay)
    with ExitStack() as stack:
        workers = []
        for place, name in enumerate(filter(None, (run, beside))):
            find_run(name, root)
            opener = source_opener(name, root, redact=redact)
            workers.append(QueryWorker(opener, None if place else replayed))
            stack.callback(workers[-1].close)
        yield workers


def export_html(
    run: str, file: Path, beside: str, root: Path, *, replay: Path | None, redact: bool, force: bool
) -> None:
    """Write the pages of a run into one HTML file."""
    may_write_file(file, force=force)
    with page_workers(run, beside, root, replay=replay, redact=redact) as workers:
        for worker in workers:
            worker.read_all()
        done = export_file(workers, file)
    say(f"{file}: {done.bytes / 1e6:.1f} MB, {done.pages} pages")


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
