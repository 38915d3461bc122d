"""Runs whose answers are scored together: processes are real, a worker dies while it scores."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.launch.run_dir import opened
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.schemas.control import GroupScored, StepCommitted, TrajectoriesLogged
from dora_pipe.schemas.rounds import ScoreGroup
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.user_run import assert_clean, call, facts, furnish, start, until

pytest.importorskip("torch")

RANK = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent
(HERE / f"worker-{os.getppid()}").touch()


def score(row, text):
    return min(1.0, text.count(row["answer"]) / 3)


def rank(row, completions):
    mark = HERE / "scoring"
    if not mark.exists():
        (HERE / "scoring.new").write_text(str(os.getppid()))
        (HERE / "scoring.new").rename(mark)
        time.sleep(60)
    for _ in range(600):  # until both workers are here, the killed one again
        if len(list(HERE.glob("worker-*"))) > 2:
            break
        time.sleep(0.1)
    order = sorted(len(one.text) for one in completions)
    with (HERE / "seen").open("a") as seen:
        seen.write(f"{len(completions)}\\n")
    return [order.index(len(one.text)) / len(order) for one in completions]
"""
TOGETHER = 'reward = [{use = "judge:score"}, {use = "judge:rank", weight = 0.5, group = true}]'


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    furnish(tmp_path)
    config = (tmp_path / "config.toml").read_text()
    config = config.replace('reward = "judge:score"', f"{TOGETHER}\nreward_timeout_s = 90.0")
    config = config.replace("max_num_seqs = 8", "max_num_seqs = 1")
    (tmp_path / "config.toml").write_text(config)  # a group of four is on both workers
    (tmp_path / "judge.py").write_text(RANK)
    return tmp_path


def records(path: Path) -> dict[str, float | None]:
    with opened(str(path / "runs" / "tiny")) as run:
        records = records_of(run.bus, ends_of(run.bus, run.topics.trajectories))
        return {
            entry.trajectory: entry.reward
            for entry in (decode_trajectory(record.value) for record in records)
        }


def assert_rescored(path: Path) -> None:
    same = rescored(path)
    assert (same["differ"], same["first"], same["left_out"]) == ([], None, 0)
    judge = (path / "judge.py").read_text()
    (path / "judge.py").write_text(judge.replace("/ len(order) for", "/ 7 for"))
    other = rescored(path, code=6)
    assert other["differ"] and other["new"] < other["old"]
    alone = rescored(path, "--reward", '[{use = "judge:score"}]')
    assert alone["new"] < other["new"]


def rescored(path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    (path / "said").write_text("")
    assert call(path, "rescore", "tiny", "--json", *words) == code, (path / "said").read_text()
    lines = (path / "said").read_text().splitlines()
    result: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return result


@pytest.mark.slow
def test_samples_of_two_workers_are_scored_by_one_and_by_another_when_that_is_killed(
    directory: Path,
) -> None:
    running = start(directory, "run", "config.toml")
    until(lambda: (directory / "scoring").exists())
    os.kill(int((directory / "scoring").read_text()), signal.SIGKILL)
    assert running.wait(240) == 0, (directory / "said").read_text()
    assert_clean(directory, "tiny")

    with opened(str(directory / "runs" / "tiny")) as run:
        decided = [
            decision
            for logged_round in read_rounds(run.bus, run.topics)
            for decision in logged_round.round.decisions
        ]
    asked = [group for group in decided if isinstance(group, ScoreGroup)]
    control = list(facts(directory, "tiny"))
    scored = {event.group: event for event in control if isinstance(event, GroupScored)}
    assert any(entry.attempt == 2 for entry in asked), "nobody was asked again"
    assert all(not event.error for event in scored.values())

    by: dict[str, set[str]] = defaultdict(set)
    for event in control:
        if isinstance(event, TrajectoriesLogged):
            for entry in event.trajectories:
                by[entry.trajectory.rpartition("-")[0]].add(event.worker)
    assert any(len(workers) == 2 for workers in by.values()), "no group was spread"

    alone = records(directory)
    steps = [event for event in control if isinstance(event, StepCommitted)]
    assert len(steps) == 3
    for group in (group for step in steps for group in step.groups):
        answer = {sample.trajectory: sample for sample in scored[group.group].samples}
        assert group.rewards == {name: entry.reward for name, entry in answer.items()}
        assert len(answer) == 4
        for name, event in answer.items():
            assert event.reward == (alone[name] or 0.0) + 0.5 * event.parts["rank"]
    assert {line for line in (directory / "seen").read_text().split() if line != "1"} == {"4"}

    assert call(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    (directory / "said").write_text("")
    assert call(directory, "rescore", "tiny") == 0, (directory / "said").read_text()
    assert "trajectories as recorded" in (directory / "said").read_text()
    assert_rescored(directory)
    assert call(directory, "rescore", "tiny") == 6, (directory / "said").read_text()
    assert "its reward within its group is" in (directory / "said").read_text()
    (directory / "said").write_text("")
    name = next(iter(answer))
    assert call(directory, "show", "tiny", name) == 0
    text = (directory / "said").read_text()
    assert "scored together" in text and "rank" in text
    (directory / "said").write_text("")
    query = "select reward, group_parts from trajectories where group_parts is not null"
    assert call(directory, "sql", "tiny", query, "--json") == 0
    rows = [json.loads(line) for line in (directory / "said").read_text().splitlines()]
    assert rows and all("rank" in row["group_parts"] for row in rows)
