"""Terminal output of an audit report."""

from __future__ import annotations

from typing import Final

from dora_pipe.audit.report import SAMPLE_OUTCOMES, AuditReport, LengthLine
from dora_pipe.cli.output import emit_line, emit_pairs, emit_table
from dora_pipe.observe.text import counted

VIOLATIONS_SHOWN_MAX: Final = 200


def print_report(report: AuditReport) -> None:
    """Print every table, the verdict last."""
    _head(report)
    _mixed(report)
    _outcomes(report)
    _staleness(report)
    _lengths(report)
    _engines(report)
    _notes(report)
    _violations(report)
    _checks(report)
    _unseen(report)
    emit_line()
    emit_line(verdict(report))


def _head(report: AuditReport) -> None:
    standings = ", ".join(f"{count} {name}" for name, count in report.standings.items())
    share = report.one_version_share
    served = f"{report.several_versions_seconds:.1f} s of {report.seconds:.1f} s"
    pairs = {
        "run": f"{report.run} ({'finished' if report.finished else 'open'})",
        "steps": report.steps,
        "policy versions": f"{report.versions}, several served at once for {served}",
        "trajectory records": f"{report.records} ({standings}), {report.record_bytes / 1e6:.1f} MB",
        "rounds": f"{report.rounds}, {report.state_digests} recorded states reproduced",
        "plans": f"{report.plans} recomputed from the log, all as recorded",
        "C1: one version, digest as published": "-" if share is None else f"{share:.2%}",
    }
    if report.partial_rollout:
        mixed = report.mixed_share
        pairs["C1"] = "off (staleness.partial_rollout)"
        pairs["mixed trajectories"] = "-" if mixed is None else f"{mixed:.2%}"
    emit_line(f"audit of {report.run}")
    emit_pairs(pairs)
    emit_line()


def _mixed(report: AuditReport) -> None:
    if not report.partial_rollout:
        return
    total = sum(report.versions_each.values())
    rows = [(many, count, f"{count / total:.1%}") for many, count in report.versions_each.items()]
    title = "C1 is off (partial rollout): versions per trajectory"
    emit_table(("versions", "trajectories", "share"), rows, title=title)
    emit_line()


def _outcomes(report: AuditReport) -> None:
    rows = [(line.outcome, line.groups, line.trajectories, line.tokens) for line in report.outcomes]
    rows.append(
        (
            "dispatched",
            report.dispatched,
            sum(line.trajectories for line in report.outcomes),
            sum(line.tokens for line in report.outcomes),
        )
    )
    columns = ("outcome", "groups", "trajectories", "sampled tokens")
    emit_table(columns, rows, title="C2: outcome of every dispatched group")
    emit_line()


def _staleness(report: AuditReport) -> None:
    total = sum(report.staleness.values())
    rows = [
        (staleness, groups, f"{groups / total:.1%}")
        for staleness, groups in report.staleness.items()
    ]
    bounds = f"maximum {report.staleness_max}, bound {report.staleness_bound}"
    title = f"C3: staleness of trained groups ({bounds})"
    emit_table(("staleness", "groups", "share"), rows, title=title)
    emit_line()


def _lengths(report: AuditReport) -> None:
    outcomes = [
        name for name in SAMPLE_OUTCOMES if any(name in line.outcomes for line in report.lengths)
    ]
    rows = [
        (
            _bucket(line),
            line.trajectories,
            line.tokens,
            *(line.outcomes.get(outcome, 0) for outcome in outcomes),
            "-" if line.trained_share is None else f"{line.trained_share:.1%}",
        )
        for line in report.lengths
    ]
    columns = ("sampled tokens", "trajectories", "tokens", *outcomes, "share trained")
    emit_table(columns, rows, title="training trajectories by length")
    emit_line()


def _bucket(line: LengthLine) -> str:
    if line.high == 0:
        return "no record"
    return f"{line.low}-{line.high}" if line.low < line.high else str(line.high)


def _engines(report: AuditReport) -> None:
    total = max(sum(engine.trajectories for engine in report.engines), 1)
    rows = [
        (
            f"{engine.engine} {engine.version}",
            engine.device,
            engine.dtype,
            engine.workers,
            engine.trajectories,
            f"{engine.trajectories / total:.1%}",
            engine.tokens,
        )
        for engine in report.engines
    ]
    columns = ("engine", "device", "type", "workers", "trajectories", "share", "sampled tokens")
    emit_table(columns, rows, title="tokens by engine (a worker counts once per join)")
    emit_line()


def _notes(report: AuditReport) -> None:
    notes = list(report.notes)
    for engine, missing in report.not_declared.items():
        notes.append(f"not guaranteed by engine {engine}: {', '.join(missing)}")
    if notes:
        emit_table(("notes",), [(note,) for note in notes])
        emit_line()


def _violations(report: AuditReport) -> None:
    if report.holds:
        return
    shown = report.violations[:VIOLATIONS_SHOWN_MAX]
    rows: list[tuple[object, ...]] = [
        (violation.check, violation.subject, violation.message, violation.expected, violation.found)
        for violation in shown
    ]
    if report.violations_total > len(shown):
        more = report.violations_total - len(shown)
        rows.append(("", "", f"and {more} more (--json names up to 10 000)", "", ""))
    columns = ("check", "what", "does not hold", "expected", "found")
    emit_table(columns, rows, title=f"{report.violations_total} violations")
    emit_line()


def verdict(report: AuditReport) -> str:
    """Return the verdict. Example: ``holds: 0 violations in 1,280 records``"""
    word = "holds" if report.holds else "violated"
    violations = counted(report.violations_total, "violation")
    return f"{word}: {violations} in {report.records:,} records"


def _checks(report: AuditReport) -> None:
    rows = [
        (
            line.check,
            line.holds,
            line.looked,
            "ok" if not line.violations else f"BROKEN {line.violations}x",
        )
        for line in report.checks
    ]
    emit_table(("check", "invariant", "compared", ""), rows)


def _unseen(report: AuditReport) -> None:
    emit_table(("outside the scope of audit",), [(line,) for line in report.cannot_see])
