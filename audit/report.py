"""Report of an audit."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from dora_pipe.audit.check_fold import FoldCheck
from dora_pipe.audit.check_records import Seen
from dora_pipe.audit.findings import CHECKS, MIXED, Check, Violation
from dora_pipe.audit.group_ledger import Bucket, Sums
from dora_pipe.audit.ledger import Ledger
from dora_pipe.schemas.rounds import SampleOutcome

OUTCOMES: Final = ("trained", "filtered", "failed", "cancelled", "evaluated", "open")

SAMPLE_OUTCOMES: Final = (*OUTCOMES, *get_args(SampleOutcome))
"""The group's outcome, or a trajectory's own."""

CANNOT_SEE: Final = (
    "whether these weights sampled these tokens, or these trajectories produced these weights: "
    "`replay --random N`, `replay`",
    "whether the task gives these rewards for these texts: `rescore`",
    "a missing or changed progress record, metric, or trajectory that no event names",
    "fields recorded only once: times, hosts, users, reasons, what an engine declares",
    "a log rewritten from end to end, with every digest and the chain recomputed",
)
"""Limits of an audit; also in docs/audit.md."""


class CheckLine(msgspec.Struct, frozen=True, kw_only=True):
    check: Check
    holds: str
    looked: int
    violations: int


class OutcomeLine(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    groups: int
    trajectories: int
    tokens: int


class LengthLine(msgspec.Struct, frozen=True, kw_only=True):
    """Training trajectories of one length bucket.

    Example: sampled tokens 17..32: 210 trajectories, 5,020 tokens, 208 of them trained.
    """

    low: int
    high: int
    """Sampled tokens, inclusive; 0..0: no record."""
    trajectories: int
    tokens: int
    outcomes: dict[str, int]
    trained_share: float | None
    """Among ended groups."""


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with the trajectories that count.

    Example: vllm 0.32.0 on cpu in float32, 2 incarnations of workers, 4,112 trajectories.
    """

    engine: str
    version: str
    device: str
    dtype: str
    workers: int
    trajectories: int
    tokens: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    finished: bool
    rounds: int
    steps: int
    versions: int
    adopted: tuple[int, ...]
    """Steps with adopted weights, not reproducible."""
    records: int
    record_bytes: int
    record_statuses: dict[str, int]
    """Bound, superseded, fenced, pending."""
    one_version_share: float | None
    """C1: share of records with one version and its published digest."""
    partial_rollout: bool
    """C1 is off (partial rollout)."""
    versions_each: dict[int, int]
    outcomes: tuple[OutcomeLine, ...]
    staleness: dict[int, int]
    staleness_max: int | None
    staleness_bound: int | None
    """Largest deadline minus version of a trained group."""
    lengths: tuple[LengthLine, ...]
    engines: tuple[EngineLine, ...]
    """Partition of the trajectories that count."""
    seconds: float
    several_versions_seconds: float
    """Seconds with at least two versions served."""
    state_digests: int
    plans: int
    not_declared: dict[str, tuple[str, ...]]
    unknown_records: dict[str, int]
    checks: tuple[CheckLine, ...]
    violations: tuple[Violation, ...]
    violations_total: int
    notes: tuple[str, ...]
    cannot_see: tuple[str, ...] = CANNOT_SEE

    @property
    def mixed_share(self) -> float | None:
        total = sum(self.versions_each.values())
        mixed = sum(count for versions, count in self.versions_each.items() if versions > 1)
        return mixed / total if total else None

    @property
    def holds(self) -> bool:
        return self.violations_total == 0

    @property
    def dispatched(self) -> int:
        """Dispatched groups: left side of C2's equation."""
        return sum(line.groups for line in self.outcomes)


def report_of(ledger: Ledger, fold: FoldCheck, results: Seen) -> AuditReport:
    findings = ledger.findings
    sums = ledger.accounts.summed()
    staleness = {staleness: count for staleness, count in sorted(sums.staleness.items()) if count}
    order = ["steps", *CHECKS]  # root cause first
    logged = ledger.accounts.records
    return AuditReport(
        run=ledger.run,
        finished=ledger.stopped is not None,
        rounds=ledger.rounds,
        steps=ledger.committed,
        versions=ledger.published,
        adopted=tuple(adoption.step for adoption in ledger.adopted),
        records=results.records,
        record_bytes=results.bytes,
        record_statuses=dict(sorted(results.statuses.items())),
        one_version_share=results.one_version / logged if logged else None,
        partial_rollout=ledger.partial_rollout,
        versions_each=dict(sorted(results.mixed.items())),
        outcomes=outcome_lines(sums),
        staleness=staleness,
        staleness_max=max(staleness, default=None),
        staleness_bound=max((bound for bound, count in sums.bounds.items() if count), default=None),
        lengths=length_lines(sums),
        engines=engine_lines(ledger, sums),
        seconds=ledger.serving.seconds,
        several_versions_seconds=ledger.serving.several_seconds,
        state_digests=fold.digests,
        plans=fold.plans,
        not_declared=not_declared(ledger),
        unknown_records=dict(ledger.unknown),
        checks=check_lines(ledger),
        violations=tuple(
            sorted(findings.violations, key=lambda violation: order.index(violation.check))
        ),
        violations_total=findings.total,
        notes=(*findings.notes, *notes_of(ledger)),
    )


def notes_of(ledger: Ledger) -> list[str]:
    notes = [
        f"step {adoption.step}: its weights were adopted, not reproduced ({adoption.reason})"
        for adoption in ledger.adopted
    ]
    notes += [
        f"step {batch.step}: batch {batch.attempt} was not trained: {batch.why}"
        for batch in ledger.not_trained
    ]
    notes += [
        f"{count} control records of a later kind: {kind}"
        for kind, count in sorted(ledger.unknown.items())
    ]
    if ledger.stopped is None:
        notes.append(f"the run is not finished: {len(ledger.accounts.open)} groups open")
    return notes


def check_lines(ledger: Ledger) -> tuple[CheckLine, ...]:
    findings, statements = ledger.findings, dict(CHECKS)
    if ledger.partial_rollout:
        statements["C1"] = MIXED
    return tuple(
        CheckLine(
            check=check,
            holds=holds,
            looked=findings.looked[check],
            violations=findings.count[check],
        )
        for check, holds in statements.items()
    )


def outcome_lines(sums: Sums) -> tuple[OutcomeLine, ...]:
    """Return totals by outcome; groups add up to the dispatched ones."""
    return tuple(
        OutcomeLine(
            outcome=outcome,
            groups=sums.groups[outcome],
            trajectories=sums.trajectories[outcome],
            tokens=sums.tokens[outcome],
        )
        for outcome in OUTCOMES
        if sums.groups[outcome]
    )


def length_lines(sums: Sums) -> tuple[LengthLine, ...]:
    """Return trained shares by length, to detect length bias."""
    outcomes: dict[Bucket, dict[str, int]] = {}
    for (bucket, outcome), count in sums.lengths.items():
        if count:
            outcomes.setdefault(bucket, {})[outcome] = count
    return tuple(
        LengthLine(
            low=bucket[0],
            high=bucket[1],
            trajectories=sum(by_outcome.values()),
            tokens=sums.length_tokens[bucket],
            outcomes={
                outcome: by_outcome[outcome] for outcome in SAMPLE_OUTCOMES if outcome in by_outcome
            },
            trained_share=_share(by_outcome),
        )
        for bucket, by_outcome in sorted(outcomes.items())
    )


def _share(outcomes: dict[str, int]) -> float | None:
    ended = sum(count for outcome, count in outcomes.items() if outcome != "open")
    return outcomes.get("trained", 0) / ended if ended else None


def engine_lines(ledger: Ledger, sums: Sums) -> tuple[EngineLine, ...]:
    return tuple(
        EngineLine(
            engine=key[0],
            version=key[1],
            device=key[2],
            dtype=key[3],
            workers=engine.workers,
            trajectories=sums.engines[engine.number],
            tokens=sums.engine_tokens[engine.number],
        )
        for key, engine in sorted(ledger.accounts.engines.items())
    )


def not_declared(ledger: Ledger) -> dict[str, tuple[str, ...]]:
    engines = ledger.accounts.engines.items()
    return {f"{key[0]} {key[1]}": engine.missing for key, engine in engines if engine.missing}


def plain(report: AuditReport) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return {"holds": report.holds, "dispatched": report.dispatched, **values}
