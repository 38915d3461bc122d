"""Terminal output of an audit report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dora_pipe.audit.report import SAMPLE_OUTCOMES, AuditReport, LengthLine
from dora_pipe.cli.output import emit_line, emit_pairs, emit_table
from dora_pipe.observe.text import counted

VIOLATIONS_SHOWN_MAX: Final = 200


class Section(NamedTuple):
    """A table of the report."""

    title: str | None
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def print_report(report: AuditReport) -> None:
    """Print every table, the verdict last."""
    emit_line(f"audit of {report.run}")
    emit_pairs(_head(report))
    for section in _sections(report):
        emit_line()
        emit_table(section.columns, section.rows, title=section.title)
    emit_table(("outside the scope of audit",), [(line,) for line in report.cannot_see])
    emit_line()
    emit_line(verdict(report))


def _head(report: AuditReport) -> dict[str, Any]:
    statuses = ", ".join(f"{count} {name}" for name, count in report.record_statuses.items())
    share = report.one_version_share
    served = f"{report.several_versions_seconds:.1f} s of {report.seconds:.1f} s"
    pairs = {
        "run": f"{report.run} ({'finished' if report.finished else 'open'})",
        "steps": report.steps,
        "policy versions": f"{report.versions}, several served at once for {served}",
        "trajectory records": f"{report.records} ({statuses}), {report.record_bytes / 1e6:.1f} MB",
        "rounds": f"{report.rounds}, {report.state_digests} recorded states reproduced",
        "plans": f"{report.plans} recomputed from the log, all as recorded",
        "C1: one version, digest as published": "-" if share is None else f"{share:.2%}",
    }
    if report.partial_rollout:
        mixed = report.mixed_share
        pairs["C1"] = "off (staleness.partial_rollout)"
        pairs["mixed trajectories"] = "-" if mixed is None else f"{mixed:.2%}"
    return pairs


def _sections(report: AuditReport) -> Iterator[Section]:
    if report.partial_rollout:
        title = "C1 is off (partial rollout): versions per trajectory"
        heads = ("versions", "trajectories", "share")
        yield Section(title, heads, _shares(report.versions_each))
    columns: Sequence[str] = ("outcome", "groups", "trajectories", "sampled tokens")
    ended = [
        (line.outcome, line.groups, line.trajectories, line.tokens) for line in report.outcomes
    ]
    sums = [sum(line.trajectories for line in report.outcomes)]
    sums.append(sum(line.tokens for line in report.outcomes))
    rows = [*ended, ("dispatched", report.dispatched, *sums)]
    yield Section("C2: outcome of every dispatched group", columns, rows)
    bounds = f"maximum {report.staleness_max}, bound {report.staleness_bound}"
    title = f"C3: staleness of trained groups ({bounds})"
    yield Section(title, ("staleness", "groups", "share"), _shares(report.staleness))
    yield _lengths(report)
    total = max(sum(engine.trajectories for engine in report.engines), 1)
    rows = [
        (
            *(f"{engine.engine} {engine.version}", engine.device, engine.dtype, engine.workers),
            *(engine.trajectories, f"{engine.trajectories / total:.1%}", engine.tokens),
        )
        for engine in report.engines
    ]
    columns = ("engine", "device", "type", "workers", "trajectories", "share", "sampled tokens")
    yield Section("tokens by engine (a worker counts once per join)", columns, rows)
    notes = list(report.notes)
    for name, missing in report.not_declared.items():
        notes.append(f"not guaranteed by engine {name}: {', '.join(missing)}")
    if notes:
        yield Section(None, ("notes",), [(note,) for note in notes])
    if not report.holds:
        yield _violations(report)
    checks = [
        (
            *(line.check, line.holds, line.looked),
            f"BROKEN {line.violations}x" if line.violations else "ok",
        )
        for line in report.checks
    ]
    yield Section(None, ("check", "invariant", "compared", ""), checks)


def _shares(counts: Mapping[int, int]) -> Sequence[Sequence[Any]]:
    total = sum(counts.values())
    return [(value, count, f"{count / total:.1%}") for value, count in counts.items()]


def _lengths(report: AuditReport) -> Section:
    outcomes = [
        name for name in SAMPLE_OUTCOMES if any(name in line.outcomes for line in report.lengths)
    ]
    rows = [
        (
            *(_bucket(line), line.trajectories, line.tokens),
            *(line.outcomes.get(outcome, 0) for outcome in outcomes),
            "-" if line.trained_share is None else f"{line.trained_share:.1%}",
        )
        for line in report.lengths
    ]
    columns = ("sampled tokens", "trajectories", "tokens", *outcomes, "share trained")
    return Section("training trajectories by length", columns, rows)


def _bucket(line: LengthLine) -> str:
    if line.high == 0:
        return "no record"
    return f"{line.low}-{line.high}" if line.low < line.high else str(line.high)


def _violations(report: AuditReport) -> Section:
    rows: list[Sequence[Any]] = [
        (violation.check, violation.subject, violation.message, violation.expected, violation.found)
        for violation in report.violations[:VIOLATIONS_SHOWN_MAX]
    ]
    if more := report.violations_total - len(rows):
        rows.append(("", "", f"and {more} more (--json names up to 10 000)", "", ""))
    columns = ("check", "what", "does not hold", "expected", "found")
    return Section(f"{report.violations_total} violations", columns, rows)


def verdict(report: AuditReport) -> str:
    """Return the verdict. Example: ``holds: 0 violations in 1,280 records``"""
    word = "holds" if report.holds else "violated"
    violations = counted(report.violations_total, "violation")
    return f"{word}: {violations} in {report.records:,} records"
