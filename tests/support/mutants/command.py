"""Search for a seed that detects each planted bug: `python -m tests.support.mutants.command`."""

from __future__ import annotations

import sys
from typing import Final

from dora_pipe.core.system.console import say
from dora_pipe.sim.__main__ import settle
from dora_pipe.sim.seed_runner import run_seed
from tests.support.mutants.rules import BUGS, mutated
from tests.support.mutants.seeds import seeds_of

BUG_SEEDS: Final = 1_000
"""Seeds searched per bug."""


def main() -> int:
    """Plant each bug and print its seed; return 5 if one is not detected."""
    settle()
    missed = []
    for name, bug in BUGS.items():
        with mutated(name):
            tried = (run_seed(seed) for seed in seeds_of(name, BUG_SEEDS))
            result = next((entry for entry in tried if not entry.holds), None)
        missed += [] if result else [name]
        what = "not found" if result is None else f"seed {result.seed}, {result.check}"
        sys.stdout.write(f"{name:24} {what:28} {bug.what}\n")
        sys.stdout.flush()
    say(f"{len(BUGS) - len(missed)} of {len(BUGS)} planted bugs found")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
