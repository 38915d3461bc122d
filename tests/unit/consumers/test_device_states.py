"""Tests of offloading device memory, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dora_pipe.consumers.learners.torch.device_states import SMALL_BYTES, DeviceStates
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.core.errors import ResourceError
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_llama_gqa

NUMBERS = 4 * SMALL_BYTES


def _states(*tensors: Tensor) -> DeviceStates:
    return DeviceStates(lambda: tensors, "cpu")


def test_views_of_a_storage_leave_once_and_still_see_it_when_it_is_back() -> None:
    flat = torch.randn(NUMBERS)
    half, tied = flat[NUMBERS // 2 :].view(2, -1), torch.nn.Parameter(flat)
    states = _states(flat, half, tied)
    states.leave()
    states.come_back()
    flat[-1] = 7.0
    assert float(half[1, -1]) == float(tied.detach()[-1]) == 7.0


def test_a_host_without_room_is_named_and_nothing_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(NUMBERS)
    before, states = values.clone(), _states(values)

    def none_left(*given: Any, **more: Any) -> Tensor:
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(DeviceStates, "_piece", none_left)
        with pytest.raises(ResourceError, match="do not fit into the host's memory"):
            states.leave()
    assert torch.equal(values, before)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> TorchLearner:
    root = tmp_path_factory.mktemp("leaving")
    store = PolicyStore(root / "policies")
    policy, assets = import_model(store, make_llama_gqa(root / "model"), "bfloat16")
    weights: Path = store.weights_path(policy.digest)
    options = TorchOptions(micro_batch_tokens=256)
    learner = TorchLearner(store.assets_path(assets), reference=weights, options=options)
    learner.load(weights, digest=policy.digest, optimizer=None)
    return learner


def test_nothing_of_a_torch_trainer_but_small_change_is_left_on_its_device(
    learner: TorchLearner,
) -> None:
    learner.train(make_batch(seed=0), {**SETTINGS, "objective.kl_coef": 0.1})
    gradients = {id(parameter.grad) for _, parameter in learner._model.parameters()}
    held = [
        storage.untyped_storage() for storage in learner._held() if id(storage) not in gradients
    ]
    large = [storage for storage in held if storage.nbytes() >= SMALL_BYTES]
    weights, moments, remainders, reference = 1, 2, 1, 1
    parameters = len(list(learner._model.parameters()))
    assert len(large) > parameters * (weights + moments + remainders + reference) / 2
    learner.leave_device()
    assert {storage.nbytes() for storage in large} == {0}
    assert all(parameter.grad is None for _, parameter in learner._model.parameters())
