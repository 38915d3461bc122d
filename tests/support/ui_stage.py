"""Handwritten and recorded runs for tests of the web pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.view import Decode, RunSource, RunView, parse_query, view_of
from dora_pipe.store.store import PolicyStore
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import CatalogueStage
from tests.support.recorded_run import RecordedRun


def view_of_stage(stage: CatalogueStage) -> RunView:
    return view_of(stage.catalogue, records.RUN)


@contextmanager
def source_of(
    recorded: RecordedRun,
    *,
    redact: bool = False,
    decode: Decode | None = None,
    catalogue: Path | None = None,
) -> Iterator[RunSource]:
    with closing(recorded.open()) as bus:
        yield RunSource(
            bus=bus,
            topics=recorded.topics,
            policies=PolicyStore(recorded.store),
            decode=decode,
            redact=redact,
            catalogue=catalogue,
        )


def read_all(worker: QueryWorker) -> None:
    """Start to read, and return at the present end of the log."""
    worker.start()
    while worker.ask(parse_query("/run"))["read"] < 1:
        pass


@contextmanager
def view_of_log(source: RunSource) -> Iterator[RunView]:
    with closing(read_catalogue(source.bus, source.topics)) as catalogue:
        yield view_of(catalogue, source.topics.run)
