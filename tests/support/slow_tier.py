"""`make test-full`: slow tests that only compute run in the time that the other slow tests leave.

python -m tests.support.slow_tier [WORDS FOR PYTEST ...]

The others start processes and brokers, wait with limits, measure time or memory: they run one at a
time, and wait half of it. What is `pure` runs beside them, two at a time, with a processor only
where nobody else wants it.
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
OTHERS = ("--durations=25", "-m", "slow and not pure")

LAST = 19
"""The priority of who waits for everybody else."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux shares processors between sessions first, by this; priorities count within one alone."""


def main(words: Sequence[str]) -> int:
    """Run both parts, and show the pure one's words after the other's; the exit code."""
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
            others = subprocess.run([*PYTEST, *OTHERS, *words], check=False).returncode
            codes = (others, pure.wait())
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


def exit_code(codes: tuple[int, int]) -> int:
    """Of both parts together: WORDS may leave one of them without a test, but not both."""
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED
    wrong = [code for code in codes if code not in (0, nothing)]
    return wrong[0] if wrong else nothing if set(codes) == {nothing} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
