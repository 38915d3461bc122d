"""Tests of float32 masters of bfloat16 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.masters import Masters
from dora_pipe.consumers.learners.torch.model import read_tensor
from dora_pipe.consumers.learners.torch.optimizer import Optimizer
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import write_as
from dora_pipe.store.safetensors_file import mapped, read_entries, read_manifest
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_llama_gqa
from tests.support.torch_policy import Policy

finite = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 3e38)


def published(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).to(torch.float32)


def held(parameter: Tensor, masters: Masters) -> Tensor:
    with masters.present():
        return parameter.clone()


@given(st.lists(finite, min_size=1, max_size=8))
def test_value_is_the_rounded_master_and_the_master_comes_back(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    parameter = torch.zeros(len(numbers))
    masters = Masters({"x": parameter})
    with masters.present():
        parameter.copy_(tensor)
    assert torch.equal(parameter, published(tensor))
    master = held(parameter, masters)
    # A tie rounded down loses float32's last bit, once.
    assert int((master.view(torch.int32) - tensor.view(torch.int32)).abs().max()) <= 1
    assert torch.equal(held(parameter, masters), master)
    assert torch.equal(parameter, published(master))


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_remainder_of_other_weights_never_makes_a_master_of_another_value(
    pairs: list[tuple[float, float]],
) -> None:
    here, elsewhere = (
        torch.tensor(entry, dtype=torch.float32) for entry in zip(*pairs, strict=True)
    )
    other, parameter = elsewhere.clone(), published(here)
    of_other, masters = Masters({"x": other}), Masters({"x": parameter})
    with of_other.present():
        pass
    masters.remainders["x"].copy_(of_other.remainders["x"])
    masters.fit()
    assert torch.equal(published(held(parameter, masters)), parameter)
    assert torch.equal(parameter, published(here))


def test_updates_too_small_for_bfloat16_add_up_as_in_float32() -> None:
    start = published(torch.linspace(-2.0, 2.0, 33))
    plain, rounded = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [
        Optimizer([("x", entry)], betas=(0.9, 0.95), weight_decay=0.0, bfloat16=names)
        for entry, names in ((plain, ()), (rounded, ("x",)))
    ]
    for _ in range(200):
        for parameter, optimizer in zip((plain, rounded), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.update(1e-5)
    assert torch.equal(rounded.detach(), published(rounded.detach()))
    master = held(rounded.detach(), optimizers[1]._masters)
    assert torch.allclose(master, plain.detach(), atol=1e-7, rtol=0)
    assert float((master - start).abs().min()) > 1e-3
    assert 0 < int((rounded.detach() != start).sum()) < len(start)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    root = tmp_path_factory.mktemp("policy")
    return Policy(root, make_llama_gqa, "bfloat16", micro_batch_tokens=128)


def test_small_steps_move_few_weights_and_the_checkpoint_says_what_lies_between(
    policy: Policy, tmp_path: Path
) -> None:
    trainer = policy.trainer()
    settings = {**SETTINGS, "trainer.learning_rate": 1e-6}
    trainer.train(make_batch(seed=1, step=0, groups=2, samples=3), settings)
    trainer.save_weights(tmp_path / "weights")
    trainer.save_optimizer(tmp_path / "state")
    changed = total = 0
    with mapped(policy.weights) as before, mapped(tmp_path / "weights") as after:
        for entry in read_entries(policy.weights):
            total += (entry.end - entry.start) // 2
            changed += int((read_tensor(before, entry) != read_tensor(after, entry)).sum())
    assert 0 < changed < total / 20
    beyond = [
        entry for entry in read_entries(tmp_path / "state") if entry.name.startswith("remainder/")
    ]
    assert sum(entry.end - entry.start for entry in beyond) == 2 * total
    assert {entry.dtype for entry in beyond} == {"I16"}


def test_weights_and_checkpoints_of_a_run_in_the_other_type_are_refused(
    policy: Policy, tmp_path: Path
) -> None:
    wide = tmp_path / "wide"
    digest = write_as(policy.weights, "float32", wide).digest
    with pytest.raises(PolicyError, match="another type than version 0"):
        policy.trainer().load(wide, digest=digest, optimizer=None)
    plain = TorchLearner(policy.assets, reference=wide)
    plain.load(wide, digest=digest, optimizer=None)
    plain.train(make_batch(seed=1, step=0, groups=2, samples=3), SETTINGS)
    plain.save_optimizer(tmp_path / "state")
    with pytest.raises(PolicyError, match="not the optimizer state of this model"):
        policy.trainer().load(
            policy.weights, digest=policy.manifest.digest, optimizer=tmp_path / "state"
        )
    assert read_manifest(wide).dtype == "float32"
