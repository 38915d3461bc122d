"""`make test-full`: slow tests that only compute run in the time that the other slow tests leave.

python -m tests.support.slow_tier [WORDS FOR PYTEST ...]

The others start processes and brokers, and wait half of the time: they run two at a time, a file in
one process. Behind them comes, one at a time, what measures time, rates or memory, or has to meet a
moment that a busy machine would shift (`alone`). What is `pure` runs beside both, two at a time,
with a processor only where nobody else wants it.
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
PURE = ("-n", "2", "--dist", "worksteal", "-m", "slow and pure")
SLOWEST = "--durations=25"
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
"""The priority of who waits for everybody else."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux shares processors between sessions first, by this; priorities count within one alone."""


def main(words: Sequence[str]) -> int:
    """Run all parts, and show the pure one's words after the others'; the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryFile("w+") as said:
        pure = subprocess.Popen(
            [*PYTEST, *PURE, *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=stand_back,
        )
        try:
            parts = [[*PYTEST, *part, *words] for part in (PAIRED, ALONE)]
            codes = [subprocess.run(part, check=False).returncode for part in parts]
            codes.append(pure.wait())
        finally:
            with suppress(ProcessLookupError):  # it has ended, unless this was interrupted
                os.killpg(pure.pid, signal.SIGTERM)
            pure.wait()
            said.seek(0)
            sys.stdout.write(said.read())
            sys.stdout.flush()
    return exit_code(codes)


def stand_back() -> None:
    """Let every other session have the processors first."""
    os.nice(LAST)
    with suppress(OSError):  # not Linux, or without such groups
        AUTOGROUP.write_text(str(LAST))


def exit_code(codes: Sequence[int]) -> int:
    """Of all parts together: WORDS may leave some of them without a test, but not all."""
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED
    wrong = [code for code in codes if code not in (0, nothing)]
    return wrong[0] if wrong else nothing if set(codes) == {nothing} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
