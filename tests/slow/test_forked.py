"""Commands that tests have forked (`support.forked`) are processes as the program's own are."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.forked import PROGRAM, may_fork
from tests.support.user_run import WAIT_S, answer, start

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

WORDS = (["show"], ["config", "none.toml"], ["audit", "nothing"], ["--no-such-option"])


@pytest.fixture(autouse=True)
def _forks() -> None:
    if not may_fork():
        pytest.skip("commands are not forked in this environment")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_forked_command_says_and_ends_with_what_the_program_does(
    tmp_path: Path, words: list[str]
) -> None:
    program = subprocess.run(
        [PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    forked = answer(tmp_path, *words)
    said = (forked.returncode, forked.stdout, forked.stderr)
    assert said == (program.returncode, program.stdout, program.stderr)


def test_a_forked_command_has_the_environment_of_its_test_and_dies_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(tmp_path, "up", "none.toml")
    os.kill(process.pid, signal.SIGSTOP)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(WAIT_S) == process.returncode == -signal.SIGKILL
    process.kill()
    assert process.poll() == -signal.SIGKILL, "who has ended stays so"
    monkeypatch.setenv("DORA_PIPE_RUNS", "none/of/these")
    assert "none/of/these" in answer(tmp_path, "audit", "nothing").stderr
