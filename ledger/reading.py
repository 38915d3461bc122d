"""Open a run's catalogue: saved, or built from the log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import DoraError, SchemaError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.builder import CatalogueBuilder
from dora_pipe.ledger.database import Catalogue, CatalogueSource, fresh_catalogue
from dora_pipe.ledger.follower import LogFollower, LogReader
from dora_pipe.schemas.metrics import AnyMetrics
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics

FILE: Final = "catalogue.duckdb"
"""Cache in the directory of a finished run; may be deleted."""

TAIL: Final = 64
"""Last offsets to search for a record; offsets have gaps."""

BATCH_ROWS: Final = 4096


class LivingCatalogue:
    """Catalogue that follows its log, read by `readers` too. Example: ``while living.advance():
    ...``, then `refresh` and query ``living.catalogue``."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        *readers: LogReader,
        statuses: Callable[[AnyMetrics], None] | None = None,
    ) -> None:
        self.catalogue = Catalogue()
        self.builder = CatalogueBuilder()
        self.follower = LogFollower(bus, topics, self.builder, *readers, statuses=statuses)

    def advance(self) -> bool:
        """Read one piece; return whether there is more. Raises BusError, LogTruncated."""
        more = self.follower.advance()
        if self.builder.made >= BATCH_ROWS:
            self.catalogue.append(self.builder.drain())
        return more

    def refresh(self) -> None:
        """Update the tables to the read position."""
        self.catalogue.append(self.builder.drain())
        self.catalogue.refresh(self.builder.live())

    def close(self) -> None:
        self.follower.close()


def read_catalogue(
    bus: Bus,
    topics: Topics,
    path: Path | None = None,
    *,
    on_share: Callable[[float], None] = lambda share: None,
) -> Catalogue:
    """Return the catalogue up to the log's end; the caller closes it.

    `path` is a cache for finished runs; `on_share` gets the read share. Raises BusError,
    LogTruncated.
    """
    source = log_source(bus, topics) if path is not None else None
    saved = None if path is None or source is None else fresh_catalogue(path, source)
    if saved is not None:
        return saved
    with closing(LivingCatalogue(bus, topics)) as living:
        while living.advance():
            on_share(living.follower.share)
        living.refresh()
        if path is not None and source is not None:
            save_finished(living, path, source)
    return living.catalogue


def save_finished(living: LivingCatalogue, path: Path, source: CatalogueSource) -> None:
    """Save a finished run's catalogue if it ends at `source`; errors are ignored."""
    control, decisions = living.follower.places
    grown = control > source.control_next or decisions > source.decisions_next
    if not living.follower.over or grown or living.follower.chain != source.chain:
        return
    try:
        living.catalogue.save(path, source)
    except DoraError:
        return


def log_source(bus: Bus, topics: Topics) -> CatalogueSource | None:
    """Return the log's position; None without a round."""
    control = bus.end(TopicPartition(topics.control, 0))
    decisions = bus.end(TopicPartition(topics.decisions, 0))
    last = last_round(bus, topics, decisions)
    if last is None or not last.chain:
        return None
    return CatalogueSource(
        run=topics.run, control_next=control, decisions_next=decisions, chain=last.chain
    )


def last_round(bus: Bus, topics: Topics, end: int) -> Round | None:
    """Return the last round before `end`. Raises BusError."""
    partition = TopicPartition(topics.decisions, 0)
    last: Round | None = None
    start = max(bus.begin(partition), end - TAIL)
    for record in records_of(bus, {partition: end}, start=start):
        with suppress(SchemaError):
            last = decode_round(record.value)
    return last
