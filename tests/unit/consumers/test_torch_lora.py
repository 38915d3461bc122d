"""Tests of the adapter trainer: trained parameters and determinism."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners.learner import Reference
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.lora import LoraModel, LoraOptions
from dora_pipe.consumers.learners.torch.model import passage_of
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.adapters import a_name, b_name, read_adapter, stands_on
from dora_pipe.store.model_dir import export_model
from tests.support.adapters import publish, random_adapter
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_llama_gqa, make_qwen2
from tests.support.torch_policy import Policy

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = LoraOptions(rank=4, alpha=8.0, targets=ALL)


@pytest.fixture(scope="module", params=["qwen2", "llama-gqa"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    make = {"qwen2": make_qwen2, "llama-gqa": make_llama_gqa}[request.param]
    return Policy(tmp_path_factory.mktemp(request.param), make, lora=OPTIONS)


def _matrices(model: Any) -> dict[str, tuple[Any, Any]]:
    named = dict(model.parameters())
    return {layer: (named[a_name(layer)], named[b_name(layer)]) for layer in model.pairs.layers}


ROWS = [([3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 1, 1]), ([9, 8, 7], [0, 1, 1])]


def test_step_trains_the_adapter_alone_and_names_its_base(policy: Policy) -> None:
    trainer = policy.trainer()
    result = trainer.train(make_batch(seed=1), SETTINGS)
    assert result.metrics["grad_norm"] > 0
    manifest = policy.store.publish_weights(trainer.save_weights)
    assert stands_on(manifest, policy.manifest.digest)
    assert manifest.bytes < policy.manifest.bytes
    adapter = read_adapter(policy.store.weights_path(manifest.digest), digest=manifest.digest)
    assert (adapter.rank, adapter.scale) == (4, 2.0)
    assert {layer.rpartition(".")[2] for layer in adapter.pairs} == set(ALL)
    assert all(abs(b).max() > 0 for _, b in adapter.pairs.values())
    network: Any = trainer._model.network
    plain: Any = AutoModelForCausalLM.from_pretrained(policy.directory)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name


def test_reference_is_the_network_without_its_adapter(policy: Policy) -> None:
    trainer = policy.trainer()
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.minibatches": 1}
    assert trainer.train(make_batch(seed=1), settings).metrics["kl"] == 0.0
    assert trainer.train(make_batch(seed=2), settings).metrics["kl"] > 0.0
    assert trainer._reference is None
    ids, mask = ROWS[0]
    passage = passage_of([(ids, mask, [0.0] * len(ids))], width=len(ids), device="cpu")
    full_trainer = policy.trainer(lora=None)
    model: Any = trainer._model
    model.refer_to(None)
    logprobs = model.reference_logprobs(passage)
    assert logprobs.equal(full_trainer._model.logprobs(passage).detach())
    assert not logprobs.equal(model.logprobs(passage).detach()), "and it is on again"


def test_reference_may_be_another_adapter_on_the_base(policy: Policy) -> None:
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.minibatches": 1}
    trainer = policy.trainer()
    trainer.train(make_batch(seed=1), settings)
    first = policy.store.publish_weights(trainer.save_weights)
    results = []
    for seed, digest in ((2, first.digest), (3, first.digest), (4, policy.manifest.digest)):
        weights = policy.store.weights_path(digest)
        reference = Reference(version=int(seed < 4), digest=digest, weights=weights)
        batch = dataclasses.replace(make_batch(seed=seed), reference=reference)
        named = {**settings, "trainer.reference": reference.version}
        results.append(trainer.train(batch, named).metrics["kl"])
    assert results[0] == 0.0 < results[1] < results[2]


def test_reference_on_another_base_is_refused(policy: Policy) -> None:
    stray = publish(policy.store, random_adapter(policy.weights, "f" * 64, seed=1))
    model: Any = policy.trainer()._model
    with pytest.raises(PolicyError, match="has base ffffffffffff"):
        model.refer_to(policy.store.weights_path(stray.digest))


def test_exported_policy_says_what_the_trainer_says(policy: Policy, tmp_path: Path) -> None:
    publication = publish(
        policy.store, random_adapter(policy.weights, policy.manifest.digest, seed=5, size=0.1)
    )
    path = policy.store.weights_path(publication.digest)
    trainer = policy.trainer()
    trainer.load(path, digest=publication.digest, optimizer=None)
    export_model(policy.store, publication.digest, policy.assets.name, tmp_path / "out")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (ids, mask), mine in zip(ROWS, trainer.score(ROWS), strict=True):
        logits = torch.log_softmax(merged(torch.tensor([ids])).logits[0].detach().double(), -1)
        expected = [
            float(logits[index - 1, ids[index]]) for index in range(1, len(ids)) if mask[index]
        ]
        assert mine == pytest.approx(expected, abs=1e-4)


def test_gradient_is_that_of_the_merged_layer(policy: Policy) -> None:
    publication = publish(
        policy.store, random_adapter(policy.weights, policy.manifest.digest, seed=6, size=0.1)
    )
    path = policy.store.weights_path(publication.digest)
    model = LoraModel(policy.assets, base=policy.weights, options=OPTIONS, device="cpu")
    model.load(path)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    model.network(input_ids=ids).logits.square().mean().backward()
    merged = TorchLearner(policy.assets, reference=policy.weights)._model.network
    state = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    for layer, (a, b) in _matrices(model).items():
        state[f"{layer}.weight"] = state[f"{layer}.weight"] + OPTIONS.scale * (b @ a).detach()
    merged.load_state_dict(state)
    merged(input_ids=ids).logits.square().mean().backward()
    weights = dict(merged.named_parameters())
    for layer, (a, b) in _matrices(model).items():
        grad = weights[f"{layer}.weight"].grad
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(b.grad, OPTIONS.scale * grad @ a.T, atol=1e-6, rtol=1e-3), layer
        assert torch.allclose(a.grad, OPTIONS.scale * b.T @ grad, atol=1e-6, rtol=1e-3), layer


def test_adapter_of_another_base_or_of_other_layers_is_refused(
    policy: Policy, tmp_path: Path
) -> None:
    trainer = policy.trainer()
    other = publish(policy.store, random_adapter(policy.weights, "ab" * 32, seed=1))
    with pytest.raises(PolicyError, match="has base weights abab"):
        trainer.load(policy.store.weights_path(other.digest), digest=other.digest, optimizer=None)
    odd = random_adapter(policy.weights, policy.manifest.digest, seed=1, layers=("q_proj",))
    publication = publish(policy.store, odd)
    with pytest.raises(PolicyError, match="on one side only"):
        trainer.load(
            policy.store.weights_path(publication.digest), digest=publication.digest, optimizer=None
        )
    far = dataclasses.replace(
        random_adapter(policy.weights, policy.manifest.digest, seed=1), scale=0.5
    )
    with pytest.raises(PolicyError, match=r"its scale is 0\.5"):
        new_publication = publish(policy.store, far)
        trainer.load(
            policy.store.weights_path(new_publication.digest),
            digest=new_publication.digest,
            optimizer=None,
        )
    wide = random_adapter(policy.weights, policy.manifest.digest, seed=1, rank=8)
    with pytest.raises(PolicyError, match="differs"):
        new_publication = publish(policy.store, wide)
        trainer.load(
            policy.store.weights_path(new_publication.digest),
            digest=new_publication.digest,
            optimizer=None,
        )


def test_layers_that_the_model_does_not_have_are_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="has no layer nothing"):
        policy.trainer(lora=LoraOptions(rank=2, alpha=2.0, targets=("nothing",)))
