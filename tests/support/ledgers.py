"""Audit's ledger of a log in one pass."""

from __future__ import annotations

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.round_reader import folded_rounds
from dora_pipe.bus.bus import Bus
from dora_pipe.schemas.topics import Topics


def build_ledger(bus: Bus, topics: Topics) -> Ledger:
    ledger = Ledger(topics.run, Findings())
    for turn in folded_rounds(bus, topics, ledger.findings):
        ledger.apply(turn)
    return ledger
