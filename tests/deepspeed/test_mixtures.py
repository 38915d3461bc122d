"""Mixtures of experts on ranks: the torch trainer's steps, by the names of files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.adapters import base_of
from tests.deepspeed.conftest import Bench, steps
from tests.deepspeed.test_arithmetic import DISTANCE_MAX, assert_same_steps, three_batches
from tests.support import deepspeed
from tests.support.batches import SETTINGS, make_batch, routed
from tests.support.contexts import branched_batch
from tests.support.models import make_further, make_qwen3_moe

KINDS: dict[str, tuple[Callable[..., Path], PolicyDtype]] = {
    "qwen3_moe": (make_qwen3_moe, "float32"),
    "glm4_moe": (make_further, "bfloat16"),
}
WAYS: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 3, "offload": "all", "memory": {"gradient_checkpointing": True}},
]
DEALT: list[dict[str, Any]] = [
    *({"zero_stage": stage, "expert_parallel_size": 2} for stage in range(4)),
    {"zero_stage": 2, "offload": "optimizer", "expert_parallel_size": 2},
    {"zero_stage": 3, "expert_parallel_size": 2}
    | {"offload": "all", "memory": {"gradient_checkpointing": True, "packing": True}},
]
"""Experts are dealt among the ranks, where there are as many."""
if deepspeed.RANKS % 2:
    DEALT.clear()
WAYS += DEALT
STAGES: list[dict[str, Any]] = [{"zero_stage": 2}, {"zero_stage": 3}, *DEALT[2:4]]
STEP = {**SETTINGS, "objective.kl_coef": 0.2}


@pytest.fixture(scope="module", params=KINDS)
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    deepspeed.need_deepspeed()
    make, dtype = KINDS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    yield Bench(root, make(root / "model", scale=20.0), dtype=dtype)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_steps_are_those_of_the_torch_trainer_whose_checkpoint_is_gone_on_with(
    mixture: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = mixture.deepspeed(**options), mixture.torch()
    assert ours.manifest() == mixture.policy
    first, second, _ = three_batches()
    assert_same_steps([ours.train(first, STEP)], [theirs.train(first, STEP)])
    expected = mixture.tensors(theirs, tmp_path / "theirs")
    tensors = mixture.tensors(ours, tmp_path / "ours")
    assert tensors.keys() == expected.keys()
    assert any(".experts.7.up_proj" in name for name in tensors)
    rough = 2.0**-7 if mixture.policy.dtype == "bfloat16" else 0.0
    for name, tensor in tensors.items():
        wide = expected[name].float()
        assert bool(((tensor.float() - wide).abs() <= DISTANCE_MAX + rough * wide.abs()).all()), (
            name
        )
    digest = theirs.save_weights(tmp_path / "theirs").digest
    theirs.save_optimizer(tmp_path / "state")
    ours.load(tmp_path / "theirs", digest=digest, optimizer=tmp_path / "state")
    assert ours.manifest().digest == digest
    ours.save_optimizer(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
    assert_same_steps([ours.train(second, STEP)], [theirs.train(second, STEP)])


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_tokens_go_through_the_experts_of_the_log_on_every_rank(
    mixture: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = mixture.torch()
    layers = theirs._model.routed.layers
    batches = [routed(batch, layers=layers) for batch in three_batches()[:2]]
    free, ours = mixture.deepspeed(**options), mixture.deepspeed(routes=True, **options)
    expected = steps(theirs, batches, STEP)
    assert_same_steps(steps(ours, batches, STEP), expected)
    with pytest.raises(AssertionError):
        assert_same_steps(steps(free, [batches[0]], STEP), expected[:1])
    remaining = three_batches()[2]  # Its records say nothing: routers choose again.
    assert_same_steps([ours.train(remaining, STEP)], [theirs.train(remaining, STEP)])


@pytest.mark.parametrize(
    "options", [*WAYS[1:], {"zero_stage": 2, "micro_batch_tokens": 40}], ids=str
)
def test_loss_of_routers_is_that_of_the_torch_trainer_in_parts_and_rows_too(
    mixture: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    if mixture.policy.dtype == "bfloat16":
        pytest.skip("GLM-4 balances its experts by a bias")
    last = "micro_batch_tokens" in options
    full = branched_batch(seed=0) if last else routed(make_batch(seed=3, groups=4), layers=2)
    step = {**STEP, "trainer.minibatches": 1} | ({"objective.kind": "gspo"} if last else {})
    ours = mixture.deepspeed(routes=True, router_aux_loss=0.5, **options)
    assert ours.numerics()["router_aux_loss"] == "0.5"
    plain, theirs = (mixture.torch(router_aux_loss=entry) for entry in (0.0, 0.5))
    result = ours.train(full if last else replace(full, parts=[1, 1]), step)
    expected, _ = theirs.train(full, step), plain.train(full, step)
    assert_same_steps([result], [expected])
    figure = pytest.approx(expected.metrics["router_aux_loss"], rel=1e-5)
    assert result.metrics["router_aux_loss"] == figure
    tensors = [mixture.tensors(entry, tmp_path / "weights") for entry in (ours, theirs, plain)]
    for name, tensor in tensors[0].items():
        assert float((tensor - tensors[1][name]).abs().max()) < DISTANCE_MAX, name
    gates = [tensor["model.layers.0.mlp.gate.weight"] for tensor in tensors]
    assert float((gates[0] - gates[2]).abs().max()) > 5 * DISTANCE_MAX


def test_ranks_whose_tokens_choose_other_experts_do_not_wait_for_each_other(mixture: Bench) -> None:
    for options in STAGES:
        trainer = mixture.deepspeed(**options)
        batch = make_batch(seed=8, groups=1, samples=3)
        digests = set()
        for _ in range(2):
            trainer.load(mixture.weights, digest=mixture.policy.digest, optimizer=None)
            trainer.train(batch, {**STEP, "trainer.minibatches": 1})
            digests.add(trainer.manifest().digest)
        assert len(digests) == 1


@pytest.mark.parametrize("options", [*STAGES[:2], *DEALT], ids=str)
def test_adapter_stands_on_a_mixture_as_it_is_in_the_store(
    mixture: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    lora = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "down_proj"))
    ours, theirs = mixture.deepspeed(lora=lora, **options), mixture.torch(lora=lora)
    assert ours.manifest() == mixture.policy
    result, wished = (steps(trainer, three_batches()[:2], STEP) for trainer in (ours, theirs))
    assert_same_steps(result, wished)
    expected = mixture.tensors(theirs, tmp_path / "theirs")
    for name, tensor in mixture.tensors(ours, tmp_path / "ours").items():
        wide = expected[name].float()
        assert bool(((tensor.float() - wide).abs() <= DISTANCE_MAX + 2.0**-7 * wide.abs()).all())
    assert base_of(tmp_path / "ours") == mixture.policy.digest
