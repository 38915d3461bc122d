"""Proves a run from its log: C1, C2, C3, steps, batches, rounds, decisions, records, policies.

Two passes: control and decisions in fold order (the ledger, the chain, the recorded states), then
the trajectories topic, one record at a time. What holds is counted, what does not is named; a
broken chain hides nothing, and a mended one neither: every other check reads the log by itself.

What this cannot see: a run whose every record was rewritten consistently. Whether the weights came
from these trajectories is for `replay` to show.
"""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bus.port import Bus
from dora_pipe.errors import InvariantBroken
from dora_pipe.history import report
from dora_pipe.history.check_fold import FoldCheck
from dora_pipe.history.check_policies import check_policies
from dora_pipe.history.check_records import check_records
from dora_pipe.history.check_steps import check_steps
from dora_pipe.history.findings import CHECKS, Findings
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.reading import horizon_of, read_buried
from dora_pipe.history.report import AuditReport
from dora_pipe.history.walk import walk
from dora_pipe.schemas.topics import Topics


def build_ledger(bus: Bus, topics: Topics, findings: Findings | None = None) -> Ledger:
    """The ledger alone: one pass over control and decisions."""
    ledger = Ledger(topics.run, Findings() if findings is None else findings)
    for turn in walk(bus, topics, ledger.findings):
        ledger.take(turn)
    return ledger


def audit(bus: Bus, topics: Topics, store_root: Path | None) -> AuditReport:
    """Look at everything; raises nothing for what is wrong (see `AuditReport.holds`).

    Without `store_root` the policy files are not looked at. Raises BusError when the log cannot
    be read.
    """
    ledger = Ledger(topics.run, Findings())
    findings, fold = ledger.findings, FoldCheck(ledger.findings)
    horizon = horizon_of(bus, topics)
    buried = read_buried(bus, topics)
    for turn in walk(bus, topics, findings, horizon=horizon, buried=buried):
        ledger.take(turn)
        fold.take(turn)
    if ledger.started is None:
        findings.add("control", topics.control, "there is no `run started`")
    seen = check_records(bus, topics, ledger, horizon=horizon, buried=buried)
    check_steps(ledger, seen)
    if store_root is None:
        findings.notes.append("policy files were not looked at: no store was given")
    else:
        check_policies(ledger, store_root)
    _notes(ledger, findings)
    staleness = report.staleness_of_groups(ledger)
    order = ["steps", *CHECKS]  # A missing step has many consequences: it goes first.
    logged = len(ledger.accounts.logged)
    return AuditReport(
        run=topics.run,
        finished=ledger.stopped is not None,
        rounds=ledger.rounds,
        steps=len({entry.step for entry in ledger.steps}),
        versions=len(ledger.versions),
        adopted=tuple(one.step for one in ledger.adopted),
        records=seen.records,
        record_bytes=seen.bytes,
        standings=dict(sorted(seen.standings.items())),
        one_version_share=seen.one_version / logged if logged else None,
        interruptible=ledger.interruptible,
        versions_each=dict(sorted(seen.mixed.items())),
        fates=report.fate_lines(ledger),
        staleness=dict(sorted(staleness.items())),
        staleness_max=max(staleness, default=None),
        staleness_bound=report.bound_of_groups(ledger),
        lengths=report.length_lines(ledger),
        hosted_pairs=report.pair_lines(ledger),
        seconds=ledger.hosting.seconds,
        several_versions_seconds=ledger.hosting.several_seconds,
        state_digests=fold.digests,
        plans=fold.plans,
        not_declared=report.not_declared(ledger),
        unknown_records=dict(ledger.unknown),
        checks=report.check_lines(ledger),
        violations=tuple(sorted(findings.violations, key=lambda one: order.index(one.check))),
        violations_total=findings.total,
        notes=tuple(findings.notes),
    )


def raise_if_broken(found: AuditReport) -> None:
    """Raise InvariantBroken, naming the first violation, unless everything holds."""
    if found.holds:
        return
    first = found.violations[0]
    more = f" (and {found.violations_total - 1} more)" if found.violations_total > 1 else ""
    raise InvariantBroken(f"{first.line}{more}")


def _notes(ledger: Ledger, findings: Findings) -> None:
    for one in ledger.adopted:
        findings.notes.append(
            f"step {one.step}: its weights were adopted, not reproduced ({one.why})"
        )
    for attempted in ledger.not_trained:
        findings.notes.append(
            f"step {attempted.step}: batch {attempted.attempt} was not trained: {attempted.why}"
        )
    for kind, count in sorted(ledger.unknown.items()):
        findings.notes.append(f"{count} control records of a later kind: {kind}")
    if ledger.stopped is None:
        findings.notes.append(f"the run is not finished: {len(ledger.accounts.open)} groups open")
