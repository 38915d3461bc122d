"""A DeepSpeed step is a torch step: sharded, spread over ranks, offloaded, but the same numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.learner import Reference, StepResult, TrainBatch
from dora_pipe.core.errors import NonFinite
from tests.deepspeed.conftest import Bench
from tests.support.batches import SETTINGS, make_batch, poisoned, with_teacher
from tests.support.deepspeed import ENGINES

DISTANCE_MAX = 2e-4
"""Largest distance of a weight after three steps at a learning rate of 1e-3: sums have another
order, and AdamW divides small gradients by their own size."""

HARD = {
    **SETTINGS,
    "trainer.minibatches": 3,
    "objective.kl_coef": 0.2,
    "objective.kind": "decoupled-ppo",
    "objective.proximal": "recomputed",
    "objective.level": "token",
    "objective.max_weight": 2.0,
    "objective.teacher_weight": 0.5,
}
"""Log-probs of four policies: trained, proximal, reference, teacher."""


def three_batches() -> list[TrainBatch]:
    batches = [make_batch(seed=seed, step=seed, groups=4, valid=0.9) for seed in range(3)]
    return [with_teacher(batch) for batch in batches]


def assert_same_steps(
    ours: list[StepResult], theirs: list[StepResult], *, relative: float = 1e-3
) -> None:
    for our, two in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "ratio_mean", "clipped_share", "kl", "tokens"):
            expected = pytest.approx(two.metrics[name], rel=relative, abs=relative)
            assert our.metrics[name] == expected, name
        for row, other in zip(our.contributions, two.contributions, strict=True):
            assert row["trajectory"] == other["trajectory"]
            assert row["advantage"] == other["advantage"]
            assert row["minibatch"] == other["minibatch"]
            assert (row["loss_share"] is None) == (other["loss_share"] is None)
            if row["loss_share"] is not None:
                expected = pytest.approx(other["loss_share"], rel=0.02, abs=relative)
                assert row["loss_share"] == expected


def steps_to_reference(ours: Any, theirs: Any, first: Path) -> list[StepResult]:
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.reference": 1}
    batch, *later = three_batches()
    for trainer in (ours, theirs):
        trainer.train(batch, SETTINGS)
    digest = theirs.save_weights(first).digest
    named = Reference(version=1, digest=digest, weights=first)
    batches = [replace(entry, reference=named) for entry in later]
    results = [ours.train(batch, settings) for batch in batches]
    assert_same_steps(results, [theirs.train(batch, settings) for batch in batches])
    return results


@pytest.mark.parametrize("settings", [SETTINGS, HARD], ids=["grpo", "hard"])
@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_steps_are_those_of_the_torch_trainer(
    bench: Bench, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = bench.deepspeed(**options), bench.torch()
    results = [ours.train(batch, settings) for batch in three_batches()]
    assert_same_steps(results, [theirs.train(batch, settings) for batch in three_batches()])
    expected = bench.tensors(theirs, tmp_path / "theirs")
    for name, tensor in bench.tensors(ours, tmp_path / "ours").items():
        assert float((tensor - expected[name]).abs().max()) < DISTANCE_MAX, name


@pytest.mark.parametrize("stage", range(4))
def test_weight_decay_leaves_vectors_alone_as_the_torch_trainer_does(
    bench: Bench, stage: int, tmp_path: Path
) -> None:
    decay: dict[str, Any] = {"weight_decay": 0.5}
    ours, theirs = bench.deepspeed(zero_stage=stage, **decay), bench.torch(**decay)
    for batch in three_batches():
        ours.train(batch, SETTINGS)
        theirs.train(batch, SETTINGS)
    theirs.save_optimizer(tmp_path / "optimizer")
    expected = bench.tensors(theirs, tmp_path / "theirs")
    for name, tensor in bench.tensors(ours, tmp_path / "ours").items():
        assert float((tensor - expected[name]).abs().max()) < DISTANCE_MAX, name
    again = bench.deepspeed(zero_stage=stage, **decay)
    digest = theirs.manifest().digest
    again.load(tmp_path / "theirs", digest=digest, optimizer=tmp_path / "optimizer")
    again.save_optimizer(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "optimizer").read_bytes()


@pytest.mark.parametrize("stage", [2, 3])
def test_kl_is_to_the_version_that_the_batch_names(
    bench: Bench, stage: int, tmp_path: Path
) -> None:
    ours, theirs = bench.deepspeed(zero_stage=stage), bench.torch()
    steps = steps_to_reference(ours, theirs, tmp_path / "first")
    assert [step.metrics["reference_version"] for step in steps] == [1.0, 1.0]
    assert steps[1].metrics["kl"] > 0


def test_checkpoint_of_the_torch_trainer_can_be_gone_on_with(bench: Bench, tmp_path: Path) -> None:
    first, theirs = three_batches()[0], bench.torch()
    theirs.train(first, SETTINGS)
    manifest = theirs.save_weights(tmp_path / "weights")
    theirs.save_optimizer(tmp_path / "optimizer")
    ours = bench.deepspeed()
    ours.load(tmp_path / "weights", digest=manifest.digest, optimizer=tmp_path / "optimizer")
    assert ours.manifest() == manifest
    ours.save_optimizer(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "optimizer").read_bytes()
    assert_same_steps(
        [ours.train(three_batches()[1], SETTINGS)], [theirs.train(three_batches()[1], SETTINGS)]
    )


def test_step_that_is_not_finite_ends_alike_on_all_ranks_and_they_can_load_again(
    bench: Bench,
) -> None:
    trainer = bench.deepspeed()
    trainer.train(three_batches()[0], SETTINGS)
    with pytest.raises(NonFinite):
        trainer.train(poisoned(three_batches()[1]), SETTINGS)
    trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)
    fresh = bench.deepspeed()
    for entry in (trainer, fresh):
        entry.train(three_batches()[0], SETTINGS)
    assert trainer.manifest() == fresh.manifest()


def test_batch_without_a_gradient_changes_nothing(bench: Bench) -> None:
    trainer = bench.deepspeed()
    metrics = trainer.train(make_batch(seed=1, groups=2, valid=0.0), SETTINGS).metrics
    assert metrics["updates"] == 0
    assert trainer.manifest() == bench.policy
