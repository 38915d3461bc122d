"""`dora-pipe run` for real: processes, a SQLite log, torch engine and trainer, a tiny model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dora_pipe.schemas.control import Command, RunStarted, StepCommitted
from tests.support.user_run import WAIT_S, assert_clean, call, facts, furnish, start, steps, until

pytest.importorskip("torch")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return furnish(tmp_path)


@pytest.mark.slow
def test_interrupted_run_goes_on_where_it_was_and_may_change_logged_keys_only(
    directory: Path,
) -> None:
    running = start(directory, "run", "config.toml", "-o", "run.steps=40")
    until(lambda: b"step    1 " in (directory / "said").read_bytes())
    running.send_signal(signal.SIGINT)
    assert running.wait(WAIT_S) == 130
    done = steps(directory, "tiny")
    assert done == list(range(len(done)))
    assert 2 <= len(done) < 40
    assert_clean(directory, "tiny")
    assert "--resume" in (directory / "said").read_text()

    inside = "runs/tiny"
    assert call(directory, "run", inside, "--resume", "-o", "rollout.group_size=5") == 3
    assert "cannot change rollout.group_size" in (directory / "said").read_text()

    changes = (f"run.steps={len(done) + 2}", "trainer.learning_rate=5e-5")
    words = [word for change in changes for word in ("-o", change)]
    assert call(directory, "run", inside, "--resume", *words) == 0, (directory / "said").read_text()
    assert steps(directory, "tiny") == list(range(len(done) + 2))
    assert_clean(directory, "tiny")
    (command,) = [fact for fact in facts(directory, "tiny") if isinstance(fact, Command)]
    assert command.args == {"run.steps": len(done) + 2, "trainer.learning_rate": 5e-5}
    last = [fact for fact in facts(directory, "tiny") if isinstance(fact, StepCommitted)][-1]
    assert last.settings["trainer.learning_rate"] == 5e-5
    assert call(directory, "replay", "tiny") == 0, (directory / "said").read_text()


@pytest.mark.slow
def test_a_new_run_starts_from_a_policy_of_another_and_says_so(directory: Path) -> None:
    assert call(directory, "run", "config.toml") == 0
    words = ("-o", 'run.name="child"', "-o", "run.steps=1", "--from", "tiny@2")
    assert call(directory, "run", "config.toml", *words) == 0, (directory / "said").read_text()
    parents = [fact for fact in facts(directory, "tiny") if isinstance(fact, StepCommitted)]
    (child,) = [fact for fact in facts(directory, "child") if isinstance(fact, RunStarted)]
    assert child.lineage is not None
    assert (child.lineage.run, child.lineage.step) == ("tiny", 2)
    assert child.policy == parents[1].policy
    assert_clean(directory, "child")
    missing = ("-o", 'run.name="other"', "--from", "tiny@9")
    assert call(directory, "run", "config.toml", *missing) == 2
    assert "tiny has no version 9" in (directory / "said").read_text()
    assert not (directory / "runs" / "other" / "config.toml").exists()


@pytest.mark.slow
def test_roles_started_one_by_one_make_a_run(directory: Path) -> None:
    running = [start(directory, "orchestrator", "config.toml")]
    until(lambda: (directory / "runs" / "tiny" / "log.sqlite").exists())
    running.append(start(directory, "worker", "config.toml", "--name", "a"))
    running.append(start(directory, "worker", "config.toml", "--name", "b"))
    running.append(start(directory, "trainer", "config.toml"))
    assert [role.wait(WAIT_S) for role in running] == [0, 0, 0, 0], (directory / "said").read_text()
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")
