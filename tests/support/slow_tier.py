"""Runner of `make test-full`: CPU-bound slow tests use the time that others leave.

    python -m tests.support.slow_tier [WORDS FOR PYTEST ...]

Tests with processes and brokers run two files at a time. Tests of time, rates, memory or exact
moments (`alone`) follow one at a time. `pure` tests run in parallel at the lowest priority.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

PYTEST = (sys.executable, "-m", "pytest", "-q")
SLOWEST = "--durations=20"
PURE = ("-n", "2", "--dist", "worksteal", SLOWEST, "-m", "slow and pure")
PAIRED = (
    "-n",
    "2",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    SLOWEST,
    "-m",
    "slow and not pure and not alone",
)
ALONE = (SLOWEST, "-m", "slow and alone")

LAST = 19
"""Lowest priority."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux schedules sessions by this first; nice values apply within a session."""


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryFile("w+") as file:
        pure = subprocess.Popen(
            [*PYTEST, *PURE, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=stand_back,
        )
        try:
            parts = [[*PYTEST, *part, *words] for part in (PAIRED, ALONE)]
            codes = [subprocess.run(part, check=False).returncode for part in parts]
            codes.append(pure.wait())
        finally:
            with suppress(ProcessLookupError):  # it ended, unless interrupted
                os.killpg(pure.pid, signal.SIGTERM)
            pure.wait()
            file.seek(0)
            sys.stdout.write(file.read())
            sys.stdout.flush()
    return exit_code(codes)


def stand_back() -> None:
    os.nice(LAST)
    with suppress(OSError):  # not Linux, or no autogroups
        AUTOGROUP.write_text(str(LAST))


def exit_code(codes: Sequence[int]) -> int:
    """Combine exit codes: some parts may have no tests, but not all."""
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED
    wrong = [code for code in codes if code not in (0, nothing)]
    return wrong[0] if wrong else nothing if set(codes) == {nothing} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
