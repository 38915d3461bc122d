"""`bisect` of runs of episodes and of agents: the probe samples here what the run's own evaluation
sampled, a poisoned reward is named, and a kill -9 loses nothing.

Method: the calculator's example, warmed up, and a script of the package `openai`.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.launch.run_dir import opened
from tests.support.agent_run import furnish_agent
from tests.support.user_run import (
    WAIT_S,
    WARM_S,
    bench,
    call,
    furnish,
    start,
    until,
    warm_calculator,
)

pytestmark = pytest.mark.slow

STEPS = 24
SMALL = (
    *(f"run.steps={STEPS}", "groups.per_step=16", "workers.count=1", "evaluation.prompts=64"),
    *("evaluation.every=12", "staleness.max_staleness=1", "model.path=mine/warm", "run.name=one"),
)
LENGTHS = """
def score(row, text):
    return len(text) % 5 / 4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run of the calculator."""
    place = tmp_path_factory.mktemp("episodes")
    warm_calculator(tmp_path_factory.getbasetemp(), place)
    options = [word for one in SMALL for word in ("-o", one)]
    run = start(place, "run", "mine/config.toml", *options)
    assert run.wait(WARM_S) == 0, (place / "said").read_text()
    return place


def evaluated(place: Path, run: str, version: int) -> list[float | None]:
    """The rewards of the run's own evaluation of a version, by draw."""
    query = (
        "select t.reward from groups g join trajectories t using (group_id)"
        " where g.fate = 'evaluated' and g.version = ? order by g.row, t.sibling"
    )
    with opened(str(place / "runs" / run)) as found, closing(found.tables()) as tables:
        return [one for (one,) in tables.query(query, [version])]


def values(place: Path, run: str) -> dict[str, list[float | None]]:
    """What is remembered of every version."""
    found: dict[str, list[float | None]] = {}
    for file in (place / "runs" / run / "bisect").glob("*/values.jsonl"):
        for line in file.read_text().splitlines():
            one: dict[str, Any] = json.loads(line)
            found.setdefault(one["of"], []).extend(one["values"])
    return found


def sampled(place: Path) -> int:
    """Episodes that lie in the logs of what is asked now."""
    count = 0
    for log in (place / "runs" / "one" / "bisect").glob("*/scratch/sampled/*/log.sqlite"):
        with closing(SqliteBus(log)) as bus:
            topic = "bisect.trajectories"
            there = topic in bus.topics()
            count += sum(1 for _ in records_of(bus, ends_of(bus, topic))) if there else 0
    return count


def test_episodes_have_the_rewards_that_the_run_gave_them_also_after_a_kill(place: Path) -> None:
    words = ("bisect", "one", "--good", "0", "--bad", str(STEPS), "--draws-max", "128")
    log = (place / "runs" / "one" / "log.sqlite").read_bytes()
    killed = start(place, *words)
    until(lambda: sampled(place) >= 32)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(WAIT_S)
    assert sampled(place) >= 32
    assert call(place, *words) == 0, (place / "said").read_text()
    found = values(place, "one")
    for version in (0, STEPS):
        own = evaluated(place, "one", version)
        assert len(own) == 64
        assert found[f"version {version}"][:64] == own
    assert len(found["version 0"]) == 128
    assert sampled(place) == 0, "what was sampled for it has gone"
    assert (place / "runs" / "one" / "log.sqlite").read_bytes() == log


def test_a_poisoned_reward_of_an_episode_is_named(place: Path) -> None:
    done = bench(place, "bisect", "one", "--seeds", "1", "--learning-rate", "3e-4")
    assert done.returncode == 0, done.stderr
    assert "seed 1: without g0000" in done.stderr
    assert "rewards -1000 to 0" in done.stdout + done.stderr


def test_an_agent_is_asked_as_the_run_has_asked_it(tmp_path: Path) -> None:
    place = furnish_agent(furnish(tmp_path))
    (place / "judge.py").write_text(LENGTHS)
    assert call(place, "run", "config.toml") == 0, (place / "said").read_text()
    words = ("bisect", "tiny", "--good", "0", "--bad", "2", "--draws", "4", "--draws-max", "16")
    assert call(place, *words) == 0, (place / "said").read_text()
    found = values(place, "tiny")
    for version in (0, 2):
        own = evaluated(place, "tiny", version)
        assert found[f"version {version}"][: len(own)] == own
    assert len(set(found["version 0"])) > 1
