"""Runs that learn from a teacher, a directory or an endpoint: they come near it, hold, and their
steps come out bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis.replay import raise_if_diverged
from dora_pipe.consumers.contributions import TEACHER, read_contributions
from dora_pipe.core.errors import PolicyError, ReplayDiverged
from dora_pipe.schemas.control import Command, StepCommitted
from tests.integration.test_objective_runs import again
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2
from tests.support.teachers import teacher_endpoint
from tests.support.tiers import more

STEPS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_qwen2(folder / "student"), make_qwen2(folder / "teacher", seed=1, scale=4.0)


def config_of(**keys: Any) -> Any:
    given: dict[str, Any] = {
        "run__name": "distil",
        "run__steps": STEPS,
        "sampling__max_tokens": 16,
        "rollout__prompts_per_step": 2,
        "rollout__group_size": 4,
        "trainer__learning_rate": 1e-3,
        "trainer__checkpoint_every": 4,
        "objective__kind": "distill",
    }
    return make_config(**{**given, **keys})


def finished(running: Cluster, kill_at: int) -> list[StepCommitted]:
    running.until(lambda: running.version >= kill_at)
    trainer = running.roles["trainer"].machine
    running.until(lambda: trainer.phase == "publishing")
    running.restart("trainer")
    running.run()
    running.clean_report()
    return running.facts(StepCommitted)


def mean(commits: list[StepCommitted]) -> float:
    return sum(commit.metrics["teacher_kl"] for commit in commits) / len(commits)


@pytest.fixture(scope="module")
def by_directory(
    tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path]
) -> Iterator[Cluster]:
    config = config_of(teacher__path=str(models[1]))
    folder = tmp_path_factory.mktemp("directory")
    with Cluster(folder / "run", config, parts=TorchParts(models[0]), workers=("w0",)) as running:
        finished(running, 5)
        yield running


def test_student_comes_near_its_teacher(by_directory: Cluster) -> None:
    commits = by_directory.facts(StepCommitted)
    assert len(commits) == STEPS
    assert mean(commits[:2]) > 0.3
    assert mean(commits[-4:]) < mean(commits[:2]) / 2
    for commit in commits:
        assert commit.settings["objective.teacher_weight"] == 1.0
        assert commit.metrics["without_gradient"] == commit.metrics["masked"]


def test_steps_of_a_directory_come_out_bit_for_bit_and_the_teacher_is_computed_again(
    by_directory: Cluster,
) -> None:
    lines = again(by_directory, 0, STEPS)
    for line in lines:
        raise_if_diverged(line)
    assert [line.equal for line in lines] == [True] * STEPS
    row = lines[0].replayed.contributions_committed
    rows = read_contributions(by_directory.store.blob("contributions", row))
    assert all(len(row[TEACHER]) == row["tokens"] for row in rows)


def test_another_directory_is_named_by_replay(
    by_directory: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_qwen2(tmp_path / "other", seed=2)
    monkeypatch.setattr(by_directory, "config", config_of(teacher__path=str(other)))
    (line,) = again(by_directory, 0, 1)
    with pytest.raises(ReplayDiverged, match="numerics differ in teacher"):
        raise_if_diverged(line)


@pytest.mark.parametrize("lora", [{}, *more([{"lora__rank": 4}])], ids=["whole", "adapter"])
def test_steps_of_an_endpoint_come_out_bit_for_bit_when_it_is_gone(
    tmp_path: Path, models: tuple[Path, Path], lora: dict[str, int]
) -> None:
    student, teacher = models
    with teacher_endpoint(teacher) as there:
        config = config_of(
            run__steps=3,
            teacher__url=there.url,
            teacher__model="big",
            objective__kind="grpo",
            objective__teacher_weight=0.5,
            objective__kl_coef=0.01,
            trainer__minibatches=2,
            **lora,
        )
        running = Cluster(tmp_path / "run", config, parts=TorchParts(student), workers=("w0",))
        commits = finished(running, 1)
        asked = len(there.asked)
    with running:
        assert {commit.numerics["teacher"] for commit in commits} == {"endpoint big"}
        lines = again(running, 0, 3)
        assert [line.equal for line in lines] == [True] * 3, [line.metrics for line in lines]
        assert asked == len(there.asked) > 0
        (other,) = again(running, 0, 1, teacher_weight=0.1)  # with what was said then
        assert not other.replayed.equal
        running.store.blob("contributions", commits[0].contributions.sha256).unlink()
        with pytest.raises(PolicyError, match="step 0: the log-probs of its teacher"):
            again(running, 0, 1)


def test_run_without_a_teacher_does_not_take_a_weight_for_one(tmp_path: Path) -> None:
    config = config_of(run__steps=2, objective__kind="grpo")
    with Cluster(tmp_path / "run", config, workers=("w0",)) as running:
        for args in ({"objective.teacher_weight": 0.5}, {"objective.kind": "distill"}):
            running.tell(Command(at_ns=1, user="u", verb="set", args=args))
        running.run()
        running.clean_report()
        for event in running.facts(StepCommitted):
            assert event.settings["objective.kind"] == "grpo"
            assert "teacher" not in event.numerics
