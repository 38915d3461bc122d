"""Takes the screenshots of docs/observe.md: `make ui-shots RUN=runs/demo`; of a run of agents, that
of docs/agents.md: `make ui-shots RUN=runs/own-agent`.

Each page is drawn by the server on that run, in Chromium, at the width that its name says.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from dora_pipe.cli.pages import source_opener
from dora_pipe.core.console import RUNS
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import PageServer
from dora_pipe.observe.web.view import parse_query
from tests.support.chromium import Page, browser
from tests.support.tidy import ROOT

FOLDER = ROOT / "docs" / "images"
WIDTH, NARROW = 1280, 400
HEIGHT_MAX = 1250

TREE = "svg[aria-label^='Calls over time'], fieldset.modes, :has(> ul.contexts)"
"""Calls over time, and the tokens as the tree of their contexts."""


@contextmanager
def served(run: str) -> Iterator[tuple[QueryWorker, str]]:
    """The pages of a run, and where they are."""
    with closing(QueryWorker(source_opener(run, RUNS))) as worker:
        worker.read_all()
        with PageServer(worker, port=0) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield worker, server.address
            finally:
                server.shutdown()
                thread.join()


def shots(run: str, folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with served(run) as (worker, address), tempfile.TemporaryDirectory() as own:
        row = _first(worker, "/trajectories?fate=trained&sort=-contexts&limit=1")
        if row["contexts"] > 1:
            _tree(own, f"{address}#/trajectory/{row['trajectory']}", folder)
            return
        row = _first(worker, "/trajectories?fate=trained&sort=-tokens&limit=1")
        pages = {
            "ui-overview": ("overview", WIDTH),
            "ui-trajectory": (f"trajectory/{row['trajectory']}", WIDTH),
            "ui-narrow": ("overview", NARROW),
        }
        with browser(Path(own)) as page:
            for name, (place, width) in pages.items():
                _shot(page, f"{address}#/{place}", width, folder / f"{name}.webp")
            page.leave()


def _first(worker: QueryWorker, query: str) -> dict[str, Any]:
    listed = worker.ask(parse_query(query))
    return dict(zip(listed["columns"], listed["rows"][0], strict=True))


def _tree(own: str, address: str, folder: Path) -> None:
    """The contexts of an agent's trajectory."""
    with browser(Path(own)) as page:
        page.size(WIDTH, HEIGHT_MAX)
        page.open(address)
        page.settle()
        page.run("new Promise((done) => setTimeout(done, 1000))")
        page.screenshot(folder / "ui-contexts.webp", TREE)
        page.leave()


def _shot(page: Page, address: str, width: int, path: Path) -> None:
    page.size(width, 900)
    page.open(address)
    page.settle()
    page.run("new Promise((done) => setTimeout(done, 1000))")
    page.shot_whole(path, width, HEIGHT_MAX)


if __name__ == "__main__":
    shots(sys.argv[1], FOLDER)
