"""A retrained run goes on with live rollouts, and after a SIGKILL so does the same command.

Method: a small run for real, by the command as processes of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dora_pipe.core.errors import DoraError
from dora_pipe.schemas.control import RunStarted, StepCommitted
from tests.support.user_run import assert_clean, call, facts, furnish, start, steps, until

pytestmark = [pytest.mark.slow]

WORDS = ("retrain", "tiny", "--name", "again", "--from", "1", "--then-live", "--live-steps", "3")


def done(place: Path, run: str) -> int:
    """Steps that a run has by now; 0 while it is being made."""
    if not (place / "runs" / run / "log.sqlite").is_file():
        return 0
    with suppress(DoraError):
        return len(steps(place, run))
    return 0


def killed_when(place: Path, reached: Callable[[], bool]) -> None:
    """Begin the command, or go on with it, and kill it there."""
    process = start(place, *WORDS)
    until(lambda: reached() or process.poll() is not None)
    assert process.poll() is None, (place / "said").read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_retrained_run_goes_on_live_with_its_optimizer_and_so_it_does_after_every_kill(
    place: Path,
) -> None:
    live = place / "runs/again-live/config.toml"
    killed_when(place, lambda: done(place, "again") == 1)
    killed_when(place, live.is_file)  # Its first record may not be there yet.
    killed_when(place, lambda: done(place, "again-live") >= 1)
    assert call(place, *WORDS) == 0, (place / "said").read_text()
    assert steps(place, "again") == [1, 2]
    assert steps(place, "again-live") == [0, 1, 2]
    (begun,) = [fact for fact in facts(place, "again-live") if isinstance(fact, RunStarted)]
    last = [fact for fact in facts(place, "again") if isinstance(fact, StepCommitted)][-1]
    assert begun.lineage is not None
    assert (begun.lineage.run, begun.lineage.step) == ("again", 3)
    assert begun.policy.digest == last.digest_after
    assert begun.optimizer == last.checkpoint is not None
    assert_clean(place, "again-live")
    assert call(place, "replay", "again-live") == 0, (place / "said").read_text()
    (place / "runs/tiny/config.toml").rename(place / "kept.toml")
    said = (place / "said").stat().st_size
    assert call(place, *WORDS[:3], "other", *WORDS[4:]) != 0
    assert not (place / "runs/other").exists()
    assert len((place / "said").read_text()[said:].splitlines()) <= 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a finished run."""
    found = furnish(tmp_path_factory.mktemp("live"))
    assert call(found, "run", "config.toml") == 0, (found / "said").read_text()
    return found
