"""Audit's ledger of a log in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.reading import Buried, Horizon, horizon_of
from dora_pipe.audit.round_reader import FoldedRound, RoundReader
from dora_pipe.bus.bus import Bus
from dora_pipe.schemas.topics import Topics


def folded_rounds(
    bus: Bus,
    topics: Topics,
    findings: Findings,
    *,
    horizon: Horizon | None = None,
    buried: Collection[Buried] = (),
) -> Iterator[FoldedRound]:
    """Yield rounds with their events, then unfolded events.

    An unreadable record is a violation unless it is a dead letter.
    """
    ends = horizon or horizon_of(bus, topics)
    path = RoundReader(bus, topics, findings, horizon=ends, buried=buried)
    yield from path.rounds()
    yield path.rest()


def build_ledger(bus: Bus, topics: Topics) -> Ledger:
    ledger = Ledger(topics.run, Findings())
    for turn in folded_rounds(bus, topics, ledger.findings):
        ledger.apply(turn)
    return ledger
