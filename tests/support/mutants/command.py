"""Find a seed that detects each planted bug, and write them to the table that tests begin with.

python -m tests.support.mutants.command
"""

from __future__ import annotations

import csv
import sys
from typing import Final

from dora_pipe.core.system.console import say
from dora_pipe.sim.__main__ import settle
from tests.support.mutants.rules import BUGS, finding
from tests.support.mutants.seeds import TABLE

BUG_SEEDS: Final = 1_000
"""Seeds searched per bug."""


def main() -> int:
    """Plant each bug and record its seed; return 5 if one is not detected."""
    settle()
    rows, missed = [], []
    for name, bug in BUGS.items():
        result = finding(name, BUG_SEEDS)
        if result is None:
            missed.append(name)
            say(f"{name}: not found")
            continue
        rows.append((name, result.seed, result.check, bug.what))
        say(f"{name}: seed {result.seed}, {result.check}")
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("bug", "seed", "check", "what is wrong"), *rows])
    say(f"{len(rows)} of {len(BUGS)} planted bugs found, written to {TABLE.name}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
