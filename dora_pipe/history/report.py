"""What an audit says of a run, in figures; it decides only how they are grouped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dora_pipe.history.entries import GroupEntry
from dora_pipe.history.findings import CHECKS, MIXED, Check, Violation
from dora_pipe.history.ledger import Ledger
from dora_pipe.schemas.batch import staleness_of

FATES: Final = ("trained", "filtered", "failed", "cancelled", "evaluated", "open")
"""The fates of groups, and what has none yet."""

CAPABILITIES: Final = ("counter_sampling", "batch_invariant", "prefill_exact", "kv_export")
"""What an engine may declare; what it does not, `replay --trajectory` cannot promise."""


class CheckLine(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what it holds, how much it looked at, how often it does not hold."""

    check: Check
    holds: str
    looked: int
    violations: int


class FateLine(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that ended in one way, with the records that count for them."""

    fate: str
    groups: int
    trajectories: int
    tokens: int


class LengthLine(msgspec.Struct, frozen=True, kw_only=True):
    """Training trajectories of one length bucket: how their groups ended.

    Example: sampled tokens 17..32: 210 trajectories, 5 020 tokens, 208 of them trained.
    """

    low: int
    high: int
    """Sampled tokens, both ends included; 0..0 are siblings without a record."""
    trajectories: int
    tokens: int
    fates: dict[str, int]
    trained_share: float | None
    """Of those whose group has ended."""


class PairLine(msgspec.Struct, frozen=True, kw_only=True):
    """How long two versions were hosted at the same time, by different workers."""

    older: int
    newer: int
    seconds: float


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `audit` has to say of a run."""

    run: str
    finished: bool
    rounds: int
    steps: int
    versions: int
    adopted: tuple[int, ...]
    """Steps whose weights were adopted instead of replayed: a break in what can be reproduced."""
    records: int
    record_bytes: int
    standings: dict[str, int]
    """Trajectory records: bound, superseded, fenced, pending."""
    one_version_share: float | None
    """C1: logged records all of whose evidence names one version and its published digest."""
    interruptible: bool
    """Whether C1 is declared off: trajectories may mix versions."""
    versions_each: dict[int, int]
    """Logged records by the number of versions that sampled them."""
    fates: tuple[FateLine, ...]
    staleness: dict[int, int]
    """C3: trained groups by staleness."""
    staleness_max: int | None
    staleness_bound: int | None
    """Largest deadline minus version of a trained group."""
    lengths: tuple[LengthLine, ...]
    hosted_pairs: tuple[PairLine, ...]
    seconds: float
    several_versions_seconds: float
    """Of `seconds`: with at least two versions hosted."""
    state_digests: int
    """Recorded states that the fold reproduced."""
    plans: int
    """Plans that were made again and were the recorded ones."""
    not_declared: dict[str, tuple[str, ...]]
    """Engine to capabilities that it does not declare: nothing is promised of them."""
    unknown_records: dict[str, int]
    checks: tuple[CheckLine, ...]
    violations: tuple[Violation, ...]
    violations_total: int
    notes: tuple[str, ...]

    @property
    def mixed_share(self) -> float | None:
        """Of the logged records: those that more than one version sampled."""
        total = sum(self.versions_each.values())
        mixed = sum(count for versions, count in self.versions_each.items() if versions > 1)
        return mixed / total if total else None

    @property
    def holds(self) -> bool:
        """Whether every promise holds."""
        return self.violations_total == 0

    @property
    def dispatched(self) -> int:
        """Groups: the left side of C2's equation."""
        return sum(line.groups for line in self.fates)


@dataclass(slots=True)
class _Bucket:
    trajectories: int = 0
    tokens: int = 0
    fates: Counter[str] = field(default_factory=Counter)


def check_lines(ledger: Ledger) -> tuple[CheckLine, ...]:
    """The checks in their order."""
    findings, said = ledger.findings, dict(CHECKS)
    if ledger.interruptible:
        said["C1"] = MIXED
    return tuple(
        CheckLine(
            check=check,
            holds=holds,
            looked=findings.looked[check],
            violations=findings.count[check],
        )
        for check, holds in said.items()
    )


def fate_lines(ledger: Ledger) -> tuple[FateLine, ...]:
    """Groups, trajectories and tokens by fate; the groups add up to what was dispatched."""
    groups: Counter[str] = Counter()
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for group in ledger.accounts.groups.values():
        fate = group.fate or "open"
        groups[fate] += 1
        trajectories[fate] += len(group.results)
        tokens[fate] += group.tokens
    return tuple(
        FateLine(
            fate=fate, groups=groups[fate], trajectories=trajectories[fate], tokens=tokens[fate]
        )
        for fate in FATES
        if groups[fate]
    )


def staleness_of_groups(ledger: Ledger) -> Counter[int]:
    """Trained groups by staleness."""
    found: Counter[int] = Counter()
    for group in ledger.accounts.groups.values():
        if group.step is not None:
            found[staleness_of(group.step, group.spec.version)] += 1
    return found


def bound_of_groups(ledger: Ledger) -> int | None:
    """The largest staleness that any trained group was allowed."""
    trained = [group.spec for group in ledger.accounts.groups.values() if group.step is not None]
    return max((spec.deadline - spec.version for spec in trained), default=None)


def bucket_of(tokens: int) -> tuple[int, int]:
    """The length bucket of so many sampled tokens: powers of two.

    Example: ``bucket_of(20) == (17, 32)``, ``bucket_of(1) == (1, 1)``, ``bucket_of(0) == (0, 0)``
    """
    if tokens == 0:
        return 0, 0
    high = 1 << (tokens - 1).bit_length()
    return high // 2 + 1, high


def length_lines(ledger: Ledger) -> tuple[LengthLine, ...]:
    """The test of bias: were long trajectories trained as often as short ones?"""
    buckets: dict[tuple[int, int], _Bucket] = {}
    for group in ledger.accounts.groups.values():
        if group.spec.purpose == "train":
            _count(buckets, group)
    return tuple(
        LengthLine(
            low=low,
            high=high,
            trajectories=bucket.trajectories,
            tokens=bucket.tokens,
            fates={fate: bucket.fates[fate] for fate in FATES if bucket.fates[fate]},
            trained_share=_share(bucket),
        )
        for (low, high), bucket in sorted(buckets.items())
    )


def _count(buckets: dict[tuple[int, int], _Bucket], group: GroupEntry) -> None:
    for entry in group.requests.values():
        tokens = 0 if entry.bound is None else entry.bound.fact.tokens
        bucket = buckets.setdefault(bucket_of(tokens), _Bucket())
        bucket.trajectories += 1
        bucket.tokens += tokens
        bucket.fates[group.fate or "open"] += 1


def _share(bucket: _Bucket) -> float | None:
    ended = bucket.trajectories - bucket.fates["open"]
    return bucket.fates["trained"] / ended if ended else None


def pair_lines(ledger: Ledger) -> tuple[PairLine, ...]:
    """Seconds per pair of versions."""
    pairs = ledger.hosting.pairs
    return tuple(
        PairLine(older=older, newer=newer, seconds=seconds)
        for (older, newer), seconds in pairs.items()
    )


def not_declared(ledger: Ledger) -> dict[str, tuple[str, ...]]:
    """By engine, what it does not promise."""
    found: dict[str, tuple[str, ...]] = {}
    for worker in ledger.accounts.workers.values():
        joined = worker.joined
        missing = tuple(one for one in CAPABILITIES if one not in joined.declares)
        if missing:
            found[f"{joined.engine} {joined.engine_version}"] = missing
    return found


def plain(report: AuditReport) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    values: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return {"holds": report.holds, "dispatched": report.dispatched, **values}
