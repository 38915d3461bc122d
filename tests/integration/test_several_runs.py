"""Runs of several tasks and evaluations for real: processes, kills, audit, replay, rewards."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from dora_pipe.launch.run_dir import opened
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.schemas.rounds import Dispatch, GroupSpec
from tests.support.user_run import CONFIG, WAIT_S, assert_clean, call, furnish, start, steps, until

pytest.importorskip("torch")

TASKS = """
[[task]]
name = "letters"
ratio = 3
kind = "dataset"
data = "rows.jsonl"
eval_data = "rows.jsonl"
reward = "judge:score"
[[task]]
name = "other"
kind = "other:Other"
[[evaluation]]
name = "letters"
prompts = 4
[[evaluation]]
name = "few"
task = "letters"
data = "few.jsonl"
group_size = 2
every = 2
sampling = { temperature = 0.5 }
[[evaluation]]
name = "other"
task = "other"
prompts = 3
"""
OTHER = """
from dora_pipe.producers.tasks.task import Task


class Other(Task):
    def rows(self, split):
        return [{"n": n} for n in range(5 if split == "train" else 3)]

    def prompt(self, row):
        return f"say {row['n']}: "

    def reward(self, row, text, turns):
        return -float(len(text) > 3 + row["n"])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    furnish(tmp_path)
    head, _, rest = CONFIG.partition("[task]")
    _, _, rest = rest.partition("[sampling]")
    before, _, after = rest.partition("[evaluation]\nprompts = 4\n")
    (tmp_path / "config.toml").write_text(f"{head}{TASKS}[sampling]{before}{after}")
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "few.jsonl").write_text('{"prompt": "say z: ", "answer": "z"}\n')
    return tmp_path


def specs(path: Path) -> list[GroupSpec]:
    with opened(str(path / "runs" / "tiny")) as run:
        rounds = [logged_round.round for logged_round in read_rounds(run.bus, run.topics)]
    decisions = [decision for round_ in rounds for decision in round_.decisions]
    return [decision.spec for decision in decisions if isinstance(decision, Dispatch)]


@pytest.mark.slow
def test_ratios_hold_across_a_stop_and_everything_is_audited_and_replayed(directory: Path) -> None:
    running = start(
        directory, "run", "config.toml", "-o", "run.steps=30", "-o", "rollout.prompts_per_step=20"
    )
    until(lambda: b"step    2 " in (directory / "said").read_bytes())
    running.send_signal(signal.SIGKILL)
    running.wait(WAIT_S)
    inside = "runs/tiny"
    frozen = call(directory, "run", inside, "--resume", "-o", "task.other.ratio=2")
    assert frozen == 3, (directory / "said").read_text()
    done = len(steps(directory, "tiny")) + 8
    words = ("run", inside, "--resume", "-o", f"run.steps={done}")
    assert call(directory, *words) == 0, (directory / "said").read_text()
    assert_clean(directory, "tiny")
    train = Counter(spec.task for spec in specs(directory) if spec.purpose == "train")
    assert train.total() > 200
    assert abs(train["letters"] - 3 * train.total() / 4) < 1
    evaluated = {
        (spec.evaluation, spec.size, spec.version) for spec in specs(directory) if spec.evaluation
    }
    assert {("letters", 1, 0), ("few", 2, 2), ("other", 1, done)} <= evaluated
    assert ("other", 1, 2) not in evaluated
    assert call(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    assert call(directory, "replay", "tiny", "--random", "12") == 0, (
        directory / "said"
    ).read_text()
    assert call(directory, "rescore", "tiny") == 0, (directory / "said").read_text()
