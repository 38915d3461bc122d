"""Opens the catalogue of a run: the one that was saved, or one that is made from the log now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.core.errors import DoraError, SchemaError
from dora_pipe.ledger.builder import CatalogueBuilder
from dora_pipe.ledger.database import Catalogue, CatalogueSource, fresh_catalogue, source_of
from dora_pipe.ledger.follower import POLLS_MAX, WAIT_S, LogFollower
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics

FILE: Final = "catalogue.duckdb"
"""Beside a finished run; it may be deleted, and is made again."""

TAIL: Final = 64
"""Offsets at the end of a topic among which its last record lies: offsets are not dense."""

BATCH_ROWS: Final = 4096
"""Rows that are appended at once."""


class LivingCatalogue:
    """A catalogue that follows its log. Example: ``while living.advance(): ...``, then ask
    ``living.catalogue``; it has what was read by the last `refresh`."""

    def __init__(self, bus: Bus, topics: Topics) -> None:
        self.catalogue = Catalogue()
        self.builder = CatalogueBuilder()
        self.follower = LogFollower(bus, topics, self.builder)

    def advance(self) -> bool:
        """Read one piece of the log; whether there is more. Raises BusError, LogTruncated."""
        more = self.follower.advance()
        if self.builder.made >= BATCH_ROWS:
            self.catalogue.append(self.builder.drain())
        return more

    def refresh(self) -> None:
        """Bring the tables to where the log was read to."""
        self.catalogue.append(self.builder.drain())
        self.catalogue.refresh(self.builder.live())

    def close(self) -> None:
        """Let go of the log; the catalogue stays."""
        self.follower.close()


def read_catalogue(
    bus: Bus,
    topics: Topics,
    path: Path | None = None,
    *,
    on_share: Callable[[float], None] = lambda share: None,
) -> Catalogue:
    """The catalogue of a run up to its present end; close it.

    With a path, one that was saved there is taken where it fits the log, and that of a run that is
    over is saved there. `on_share` gets the share that was read. Raises BusError, LogTruncated.
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


def saved_catalogue(bus: Bus, topics: Topics, path: Path) -> Catalogue | None:
    """The one that was saved, where it fits the log; close it. Raises BusError."""
    source = log_source(bus, topics)
    return None if source is None else fresh_catalogue(path, source)


def save_finished(living: LivingCatalogue, path: Path, source: CatalogueSource) -> None:
    """Save a catalogue that was read and refreshed, if the run is over and ends at `source`.

    It is a cache: where it cannot be written, or the log has grown meanwhile, there is none.
    """
    control, decisions = living.follower.places
    grown = control > source.control_next or decisions > source.decisions_next
    if not living.follower.over or grown or living.follower.chain != source.chain:
        return
    try:
        living.catalogue.save(path, source)
    except DoraError:
        return


def log_source(bus: Bus, topics: Topics) -> CatalogueSource | None:
    """How far the log goes at present; None while it has no round."""
    control = bus.end(TopicPartition(topics.control, 0))
    decisions = bus.end(TopicPartition(topics.decisions, 0))
    last = last_round(bus, topics, decisions)
    if last is None or not last.chain:
        return None
    return source_of(topics.run, control_next=control, decisions_next=decisions, chain=last.chain)


def last_round(bus: Bus, topics: Topics, end: int) -> Round | None:
    """The last round before this end of decisions. Raises BusError."""
    at = TopicPartition(topics.decisions, 0)
    last: Round | None = None
    with closing(bus.reader({at: max(bus.begin(at), end - TAIL)})) as reader:
        for _ in range(POLLS_MAX):
            if reader.position(at) >= end:
                break
            for record in reader.poll(timeout_s=WAIT_S, records_max=TAIL):
                with suppress(SchemaError):
                    last = decode_round(record.value)
    return last
