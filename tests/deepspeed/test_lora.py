"""Tests of an adapter under ZeRO: steps equal the torch trainer's, and the base is frozen."""

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import NonFinite, PolicyError
from dora_pipe.store.adapters import base_of
from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import (
    DISTANCE_MAX,
    HARD,
    assert_same_steps,
    steps_to_reference,
    three_batches,
)
from tests.support.adapters import publish, random_adapter
from tests.support.batches import SETTINGS, poisoned

STAGES = range(4)


def _options(**more: Any) -> Any:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    return LoraOptions(**{"rank": 4, "alpha": 8.0, "targets": LINEAR_LAYERS, **more})


@pytest.mark.parametrize("settings", [SETTINGS, HARD], ids=["grpo", "hard"])
@pytest.mark.parametrize(
    "options",
    [
        *({"zero_stage": stage} for stage in STAGES),
        {"zero_stage": 2, "offload": "optimizer"},
        {"zero_stage": 3, "offload": "all"},
    ],
    ids=str,
)
def test_steps_are_those_of_the_torch_trainer(
    bench: Bench, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    ours = bench.deepspeed(lora=_options(), **options)
    theirs = bench.torch(lora=_options())
    results = [ours.train(batch, settings) for batch in three_batches()]
    assert_same_steps(results, [theirs.train(batch, settings) for batch in three_batches()])
    expected = bench.tensors(theirs, tmp_path / "theirs")
    tensors = bench.tensors(ours, tmp_path / "ours")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert float((tensor.float() - expected[name].float()).abs().max()) < DISTANCE_MAX, name
    assert base_of(tmp_path / "ours") == bench.policy.digest


@pytest.mark.parametrize("stage", STAGES)
def test_reference_is_version_0_and_no_second_copy_of_it(bench: Bench, stage: int) -> None:
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.minibatches": 1}
    trainer = bench.deepspeed(zero_stage=stage, lora=_options())
    first, second = (trainer.train(batch, settings) for batch in three_batches()[:2])
    assert first.metrics["kl"] == 0.0
    assert second.metrics["kl"] > 0.0
    assert trainer.trainer._rank._reference is None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reference_may_be_another_adapter_on_the_base(
    bench: Bench, stage: int, tmp_path: Path
) -> None:
    ours = bench.deepspeed(zero_stage=stage, lora=_options())
    theirs = bench.torch(lora=_options())
    steps = steps_to_reference(ours, theirs, tmp_path / "first")
    assert steps[1].metrics["kl"] > 0


def test_checkpoint_of_the_torch_trainer_can_be_gone_on_with(bench: Bench, tmp_path: Path) -> None:
    first, second = three_batches()[:2]
    theirs = bench.torch(lora=_options())
    theirs.train(first, SETTINGS)
    manifest = theirs.save_weights(tmp_path / "weights")
    theirs.save_optimizer(tmp_path / "optimizer")
    ours = bench.deepspeed(lora=_options(), zero_stage=3)
    ours.load(tmp_path / "weights", digest=manifest.digest, optimizer=tmp_path / "optimizer")
    assert ours.manifest() == manifest
    ours.save_optimizer(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "optimizer").read_bytes()
    assert_same_steps([ours.train(second, SETTINGS)], [theirs.train(second, SETTINGS)])


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_step_that_is_not_finite_the_adapter_is_loaded_on_the_base_that_is_there(
    bench: Bench, stage: int
) -> None:
    trainer = bench.deepspeed(zero_stage=stage, lora=_options())
    trainer.train(three_batches()[0], HARD)
    with pytest.raises(NonFinite):
        trainer.train(poisoned(three_batches()[1]), SETTINGS)
    trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)
    fresh = bench.deepspeed(zero_stage=stage, lora=_options())
    for entry in (trainer, fresh):
        entry.train(three_batches()[0], HARD)
    assert trainer.manifest() == fresh.manifest()


def test_policy_that_does_not_fit_is_refused_and_the_ranks_stay_in_step(bench: Bench) -> None:
    trainer = bench.deepspeed(lora=_options())
    base = bench.policy.digest
    for odd, why in (
        (random_adapter(bench.weights, "ab" * 32, seed=1), "base weights abab"),
        (random_adapter(bench.weights, base, seed=1, layers=("q_proj",)), "on one side only"),
        (random_adapter(bench.weights, base, seed=1, rank=8), "differs"),
    ):
        publication = publish(bench.store, odd)
        path = bench.store.weights_path(publication.digest)
        with pytest.raises(PolicyError, match=why):
            trainer.load(path, digest=publication.digest, optimizer=None)
    assert trainer.manifest() == bench.policy
    fresh = bench.deepspeed(lora=_options())
    for entry in (trainer, fresh):
        entry.train(three_batches()[0], SETTINGS)
    assert trainer.manifest() == fresh.manifest()
