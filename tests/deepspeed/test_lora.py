"""An adapter's steps under ZeRO are the torch trainer's; its base is frozen, held once, let go."""

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import NonFinite, PolicyError
from dora_pipe.store.adapters import base_of, stands_on
from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import (
    DISTANCE_MAX,
    HARD,
    assert_same_steps,
    steps_to_reference,
    three_batches,
)
from tests.support import deepspeed
from tests.support.adapters import publish, random_adapter
from tests.support.batches import SETTINGS, make_batch, poisoned

STAGES = range(4)


def _options(**more: Any) -> Any:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    return LoraOptions(**{"rank": 4, "alpha": 8.0, "targets": LINEAR_LAYERS, **more})


def _engine(trainer: Any) -> Any:
    return trainer.trainer._rank.engine


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
    found = [ours.train(batch, settings) for batch in three_batches()]
    assert_same_steps(found, [theirs.train(batch, settings) for batch in three_batches()])
    expected = bench.tensors(theirs, tmp_path / "theirs")
    tensors = bench.tensors(ours, tmp_path / "ours")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert float((tensor.float() - expected[name].float()).abs().max()) < DISTANCE_MAX, name
    assert base_of(tmp_path / "ours") == bench.policy.digest


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [*((stage, "float32") for stage in STAGES), (2, "bfloat16"), (3, "bfloat16")],
)
def test_adapter_alone_has_an_optimizer_and_the_base_stays(
    bench: Bench, stage: int, dtype: str
) -> None:
    trainer = bench.deepspeed(zero_stage=stage, dtype=dtype, lora=_options())
    engine = _engine(trainer)
    before = {name: _held(engine, name) for name in engine.base_names}
    for batch in three_batches():
        trainer.train(batch, HARD)
    assert all("lora_" in name for _, name in engine.moments)
    assert len(engine.moments) == 2 * len(engine.names)
    for name, tensor in before.items():
        assert tensor.equal(_held(engine, name)), name


def _held(engine: Any, name: str) -> Any:
    """What this rank has of a tensor of the base."""
    tensor = engine._base[name]
    return getattr(tensor, "ds_tensor", tensor).detach().clone()


def test_under_zero_3_nothing_is_held_whole_between_steps(bench: Bench) -> None:
    """The first layer's input has no gradient, so nothing there tells ZeRO that its backward pass
    is over; had its matrices stayed whole, the next pass would have those of before the update."""
    trainer = bench.deepspeed(zero_stage=3, lora=_options())
    module = _engine(trainer)._engine.module
    for batch in three_batches()[:2]:
        trainer.train(batch, HARD)
        assert {one.ds_status.name for one in module.parameters()} == {"NOT_AVAILABLE"}
        assert all(one.numel() == 0 for one in module.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_reference_is_version_0_and_no_second_copy_of_it(bench: Bench, stage: int) -> None:
    settings = {**SETTINGS, "objective.kl": 0.5, "trainer.minibatches": 1}
    trainer = bench.deepspeed(zero_stage=stage, lora=_options())
    first, second = (trainer.train(batch, settings) for batch in three_batches()[:2])
    assert first.figures["kl"] == 0.0
    assert second.figures["kl"] > 0.0
    assert trainer.trainer._rank._reference is None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reference_may_be_another_adapter_on_the_base(
    bench: Bench, stage: int, tmp_path: Path
) -> None:
    ours = bench.deepspeed(zero_stage=stage, lora=_options())
    theirs = bench.torch(lora=_options())
    found = steps_to_reference(ours, theirs, tmp_path / "first")
    assert found[1].figures["kl"] > 0


def test_before_its_first_update_it_publishes_the_base_itself(bench: Bench, tmp_path: Path) -> None:
    for options in ({"zero_stage": 3}, {"zero_stage": 2, "dtype": "bfloat16"}):
        trainer = bench.deepspeed(lora=_options(), **options)
        trainer.train(make_batch(seed=1, groups=2, valid=0.0), SETTINGS)
        assert trainer.manifest() == bench.policy
        assert trainer.save_weights(tmp_path / "weights") == bench.policy
        trainer.train(three_batches()[0], SETTINGS)
        assert stands_on(trainer.manifest(), bench.policy.digest)


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
    for one in (trainer, fresh):
        one.train(three_batches()[0], HARD)
    assert trainer.manifest() == fresh.manifest()


def test_base_crosses_to_the_ranks_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bench.deepspeed(lora=_options())
    made = publish(bench.store, random_adapter(bench.weights, bench.policy.digest, seed=1))
    loads: list[Path] = []
    monkeypatch.setattr(trainer.trainer, "_have_base", loads.append)
    path = bench.store.weights_path(made.digest)
    trainer.load(path, digest=made.digest, optimizer=None)
    assert trainer.manifest() == made
    trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)
    assert trainer.manifest() == bench.policy
    assert loads == []


def test_policy_that_does_not_fit_is_refused_and_the_ranks_stay_in_step(bench: Bench) -> None:
    trainer = bench.deepspeed(lora=_options())
    base = bench.policy.digest
    for odd, why in (
        (random_adapter(bench.weights, "ab" * 32, seed=1), "stands on weights abab"),
        (random_adapter(bench.weights, base, seed=1, layers=("q_proj",)), "on one side only"),
        (random_adapter(bench.weights, base, seed=1, rank=8), "is another"),
    ):
        made = publish(bench.store, odd)
        path = bench.store.weights_path(made.digest)
        with pytest.raises(PolicyError, match=why):
            trainer.load(path, digest=made.digest, optimizer=None)
    assert trainer.manifest() == bench.policy
    fresh = bench.deepspeed(lora=_options())
    for one in (trainer, fresh):
        one.train(three_batches()[0], SETTINGS)
    assert trainer.manifest() == fresh.manifest()


def test_layers_that_the_model_does_not_have_are_refused(bench: Bench) -> None:
    deepspeed.need_deepspeed(ranks=1)  # the other ranks would end with the trainer
    with pytest.raises(PolicyError, match="has no layer nothing"):
        bench.deepspeed(lora=_options(targets=("nothing",)))


def test_fingerprint_names_the_adapter(bench: Bench) -> None:
    few = bench.deepspeed(lora=_options(targets=("v_proj", "q_proj")))
    assert few.numerics()["lora"] == "rank 4, scale 2, q_proj v_proj"
    assert "lora" not in bench.deepspeed().numerics()
