"""Tests of a cell of the off-policy study."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

from dora_pipe.bench.studies.offpolicy import Cell, Measured, sampled_by
from dora_pipe.bench.studies.offpolicy_cell import Bench
from dora_pipe.config.load import load_config
from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.core.errors import NonFinite
from dora_pipe.launch.examples import example_config, make_model
from dora_pipe.schemas.trajectory_codec import encode_trajectory

STEPS, GROUPS, SIZE = 4, 2, 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("study")
    make_model(directory / "random", "arithmetic")
    (directory / "demo.toml").write_text(example_config("arithmetic"))
    sizes = [
        "task.kind=tests.support.offpolicy:Wordy",
        f"run.steps={STEPS}",
        f"rollout.prompts_per_step={GROUPS}",
        f"rollout.group_size={SIZE}",
        "sampling.max_tokens=8",
        "evaluation.sampling.max_tokens=8",
        "evaluation.every=2",
        "evaluation.prompts=4",
        "workers.max_num_seqs=8",
        "workers.max_model_len=64",
    ]
    config = load_config(directory / "demo.toml", [f'model.path="{directory / "random"}"', *sizes])
    (directory / "scratch").mkdir()
    return Bench(config, directory / "random", directory / "scratch")


class Spy:
    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.batches: list[TrainBatch] = []
        self._train = bench.trainer.train
        self._fail_at = fail_at
        monkeypatch.setattr(bench.trainer, "train", self)

    def __call__(self, batch: TrainBatch, settings: Settings) -> StepResult:
        if batch.step == self._fail_at:
            raise NonFinite("planted")
        self.batches.append(batch)
        return self._train(batch, settings)


def trained(bench: Bench, eta: int) -> tuple[Measured, Sequence[TrainBatch]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy = Spy(bench, monkeypatch)
        cell = Cell(objective="grpo", eta=eta, seed=0)
        return bench.run(cell, setting="s"), spy.batches


@pytest.mark.parametrize("eta", [0, 2, 8])
def test_every_trained_group_is_of_the_version_that_is_eta_behind(bench: Bench, eta: int) -> None:
    measured, batches = trained(bench, eta)
    assert [batch.step for batch in batches] == list(range(STEPS))
    for batch in batches:
        version = sampled_by(batch.step, eta)
        assert {group.version for group in batch.groups} == {version}
        for group in batch.groups:
            assert len(group.trajectories) == SIZE
            for trajectory in group.trajectories:
                encode_trajectory(trajectory)
                assert trajectory.versions == [version]
    digests = {batch.groups[0].trajectories[0].digest for batch in batches}
    assert len(digests) == len({sampled_by(step, eta) for step in range(STEPS)})
    assert measured.samples == STEPS * GROUPS * SIZE and measured.steps == STEPS
    assert [version for version, _ in measured.rewards] == [0, 2, 4]


def test_a_cell_that_is_measured_twice_has_the_same_bits(bench: Bench) -> None:
    (first, entry), (second, other) = trained(bench, 1), trained(bench, 1)
    assert replace(first, cpu_s=0.0) == replace(second, cpu_s=0.0)
    assert [batch.groups[0].trajectories[0].digest for batch in entry] == [
        batch.groups[0].trajectories[0].digest for batch in other
    ]


def test_a_cell_that_diverges_counts_as_nothing_from_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spy(bench, monkeypatch, fail_at=2)
    result = bench.run(Cell(objective="tis", eta=1, seed=0), setting="s")
    assert result.diverged_at == 2 and result.steps == 2
    assert [version for version, _ in result.rewards] == [0, 2, 4]
    assert result.rewards[-1] == (4, 0.0)
