"""Audit a run's log without dora-pipe: the standard library, pyarrow, and blake3 for blobs.

    python examples/own_auditor runs/demo

The modules follow reference/records.md: `log`, `digests`, `account` and `bound`, `checks`. Control
records and rounds are kept in memory. Exit code 0: no findings; 1: findings; 2: unreadable log.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from pathlib import Path

from account import Ledger
from checks import check_commits, check_cut, check_store, check_trajectories
from findings import Findings
from log import Record, buried, open_log, records, strays

EXIT_FINDINGS, EXIT_UNREADABLE = 1, 2


def fold(ledger: Ledger, control: list[Record], rounds: list[Record]) -> None:
    """Apply all rounds in log order."""
    position = folded = 0
    for record in rounds:
        folded = json.loads(record.value)["control_next"]
        start = position
        while position < len(control) and control[position].offset < folded:
            position += 1
        ledger.take(record, control[start:position])
    for record in control[position:]:
        ledger.fact(record)
    check_cut(ledger, control, folded)


def audit(directory: Path) -> tuple[Ledger, Counter[str]]:
    """Audit `directory`; return the ledger and records by standing."""
    log = open_log(directory / "log.sqlite")
    topics = [name for (name,) in log.execute("SELECT name FROM topics ORDER BY id")]
    (run,) = {name.rpartition(".")[0] for name in topics}
    ledger = Ledger(Findings(), buried(log, f"{run}.dead-letters"))
    fold(ledger, [*records(log, f"{run}.control")], [*records(log, f"{run}.decisions")])
    ledger.findings.same("control", "the run", "name", run, ledger.started["run"])
    for topic, partition, count in strays(log):
        where = f"topic {topic}, partition {partition}"
        ledger.findings.add("records", where, f"nobody reads what lies there ({count})")
    check_commits(ledger)
    store = directory / "policies"
    standings = check_trajectories(ledger, records(log, f"{run}.trajectories"), store)
    if store.is_dir():
        check_store(ledger, store)
    log.close()
    return ledger, standings


def report(ledger: Ledger, standings: Counter[str]) -> str:
    outcomes = Counter(group.outcome or "open" for group in ledger.groups.values())
    totals = {
        "run": f"{ledger.started['run']} ({'finished' if ledger.stopped else 'not finished'})",
        "steps": len(ledger.commits),
        "rounds": ledger.rounds,
        "groups": ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
        "records": ", ".join(f"{count} {what}" for what, count in sorted(standings.items())),
        "compared": ledger.findings.looked,
        "findings": len(ledger.findings.lines),
    }
    lines = [f"{name:9} {value}" for name, value in totals.items()]
    return "".join(f"{line}\n" for line in [*lines, *ledger.findings.lines])


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python examples/own_auditor RUN_DIRECTORY\n")
        return EXIT_UNREADABLE
    try:
        ledger, standings = audit(Path(sys.argv[1]))
    except (sqlite3.Error, OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"error: {sys.argv[1]} cannot be read as a run: {error}\n")
        return EXIT_UNREADABLE
    sys.stdout.write(report(ledger, standings))
    return EXIT_FINDINGS if ledger.findings.lines else 0


if __name__ == "__main__":
    sys.exit(main())
