"""Proves a run from its log: C1, C2, C3, steps, batches, rounds, decisions, records, policies.

One pass in the order of the fold: rounds with their facts (the ledger, the chain, the recorded
states), and beside them the trajectories topic as far as facts name its records. What holds is
counted, what does not is named; a broken chain hides nothing, and a mended one neither: every other
check reads the log by itself. `Auditor` may be asked again and again while a run goes on.

What this cannot see: a run whose every record was rewritten consistently. Whether the weights came
from these trajectories is for `replay` to show.
"""

from __future__ import annotations

from pathlib import Path

from dora_pipe.audit.auditor import Auditor
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.report import AuditReport
from dora_pipe.audit.round_reader import folded_rounds
from dora_pipe.bus.port import Bus
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore


def build_ledger(bus: Bus, topics: Topics, findings: Findings | None = None) -> Ledger:
    """The ledger alone: one pass over control and decisions."""
    ledger = Ledger(topics.run, Findings() if findings is None else findings)
    for turn in folded_rounds(bus, topics, ledger.findings):
        ledger.apply(turn)
    return ledger


def audit(bus: Bus, topics: Topics, store: PolicyStore | Path | None) -> AuditReport:
    """Look at everything once; raises nothing for what is wrong (see `AuditReport.holds`).

    Without `store` the policy files are not looked at. Raises BusError when the log cannot
    be read.
    """
    auditor = Auditor(bus, topics, store)
    try:
        auditor.advance()
        return auditor.finish()
    finally:
        auditor.close()


def raise_if_broken(found: AuditReport) -> None:
    """Raise InvariantBroken, naming the first violation, unless everything holds."""
    if found.holds:
        return
    first = found.violations[0]
    more = f" (and {found.violations_total - 1} more)" if found.violations_total > 1 else ""
    raise InvariantBroken(f"{first.line}{more}")
