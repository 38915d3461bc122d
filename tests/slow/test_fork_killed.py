"""A `fork` that is killed in the middle: the same command goes on, and comes to the same bits."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.sqlite import SqliteBus
from tests.support.user_run import WAIT_S, call, furnish, start, until

pytestmark = pytest.mark.slow

NAME = "g0000000001-000"
WORDS = ("fork", "tiny", NAME, "--pieces", "4", "--samples", "60")


def _there(place: Path) -> int:
    """Continuations that the log has."""
    log = place / "runs" / "tiny" / "forks" / f"{NAME}-v0" / "log.sqlite"
    if not log.is_file():
        return 0
    with closing(SqliteBus(log)) as bus:
        topic = f"{NAME}-v0.trajectories"
        return len(list(records_of(bus, ends_of(bus, topic)))) if topic in bus.topics() else 0


def test_a_fork_that_is_killed_goes_on_where_it_was_with_the_same_bits(tmp_path: Path) -> None:
    place = furnish(tmp_path)
    assert call(place, "run", "config.toml", "-o", "run.steps=1") == 0, (place / "said").read_text()
    log = (place / "runs" / "tiny" / "log.sqlite").read_bytes()
    killed = start(place, *WORDS)
    until(lambda: _there(place) >= 20)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(WAIT_S)
    there = _there(place)
    assert 20 <= there < 240
    assert call(place, *WORDS) == 0, (place / "said").read_text()
    assert f"{240 - there} continuations now" in (place / "said").read_text()
    broken = json.loads((place / "runs" / "tiny" / "forks" / f"{NAME}-v0.json").read_text())
    assert call(place, *WORDS, "--out", "whole") == 0
    assert json.loads((place / "whole" / f"{NAME}-v0.json").read_text()) == broken
    assert (place / "runs" / "tiny" / "log.sqlite").read_bytes() == log
