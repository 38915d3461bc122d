"""Tests of adapters on a bfloat16 base."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.consumers.learners.torch.memory import MemoryOptions
from dora_pipe.consumers.learners.torch.model import read_tensor
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.adapters import FOLDER, WEIGHTS, a_name, b_name, base_of, stands_on
from dora_pipe.store.model_dir import export_model, write_as
from dora_pipe.store.safetensors_file import mapped, read_entries
from tests.support.adapters import LAYERS, publish, random_adapter
from tests.support.batches import SETTINGS, make_batch, states_with_a_part_ahead
from tests.support.models import make_further, make_llama_gqa, make_qwen2, make_qwen3_moe
from tests.support.torch_policy import Policy, gradients_of

LORA = LoraOptions(rank=4, alpha=8.0, targets=LAYERS)
PLAIN: dict[str, Any] = {"micro_batch_tokens": 128, "lora": LORA}
SMALL = {**SETTINGS, "trainer.learning_rate": 1e-5}
HALF = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
CHUNKED = MemoryOptions(head_chunk_tokens=7, mlp_chunk_tokens=16)
MODELS = {
    "llama-gqa": make_llama_gqa,
    "qwen2": make_qwen2,
    "qwen3-moe": make_qwen3_moe,
    "glm4-moe": make_further,
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Policy]:
    policies: dict[str, Policy] = {}

    def policy(name: str) -> Policy:
        if name not in policies:
            root = tmp_path_factory.mktemp(name)
            policies[name] = Policy(root, MODELS[name], "bfloat16", **PLAIN)
        return policies[name]

    return policy


@pytest.fixture
def policy(policies: Callable[[str], Policy]) -> Policy:
    return policies("llama-gqa")


def steps(trainer: TorchLearner, count: int = 1, settings: Mapping[str, Any] = SETTINGS) -> None:
    for seed in range(count):
        trainer.train(make_batch(seed=seed, step=seed, groups=2, samples=3), settings)


def gradients(trainer: TorchLearner) -> dict[str, torch.Tensor]:
    settings = {**SETTINGS, "trainer.minibatches": 1}
    return gradients_of(trainer, make_batch(seed=0, step=0, groups=2, samples=3), settings)


AGAIN = replace(CHUNKED, gradient_checkpointing=True, packing=True)


@pytest.mark.parametrize(
    ("name", "memory", "dtype"),
    [
        *((name, MemoryOptions(), "float32") for name in MODELS),
        ("llama-gqa", AGAIN, "float32"),
        ("qwen3-moe", MemoryOptions(), "bfloat16"),
        ("qwen2", replace(CHUNKED, gradient_checkpointing=True), "bfloat16"),
    ],
)
def test_a_base_that_is_held_narrow_gives_the_bits_of_one_in_float32(
    policies: Callable[[str], Policy],
    name: str,
    memory: MemoryOptions,
    dtype: ComputeDtype,
    tmp_path: Path,
) -> None:
    policy, wide_path = policies(name), tmp_path / "wide"
    digest = write_as(policy.weights, "float32", wide_path).digest
    narrow = policy.trainer(memory=memory, dtype=dtype)
    options = TorchOptions(**PLAIN, memory=memory, dtype=dtype)
    wide = TorchLearner(policy.assets, reference=wide_path, options=options)
    wide.load(wide_path, digest=digest, optimizer=None)
    begun = dict(narrow._model.parameters())
    with torch.no_grad():
        for matrix, other in wide._model.parameters():
            other.copy_(begun[matrix])
    actual_gradients, expected_gradients = gradients(narrow), gradients(wide)
    assert actual_gradients.keys() == expected_gradients.keys() and len(actual_gradients) > 0
    assert all(
        torch.equal(gradient, expected_gradients[matrix])
        for matrix, gradient in actual_gradients.items()
    )


def test_before_its_first_update_a_policy_is_its_base_and_then_an_adapter_in_its_type(
    policy: Policy, tmp_path: Path
) -> None:
    trainer = policy.trainer()
    assert trainer.manifest() == policy.manifest
    assert trainer.save_weights(tmp_path / "base") == policy.manifest
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.minibatches": 1}
    metrics = [trainer.train(make_batch(seed=seed), settings).metrics["kl"] for seed in (1, 2)]
    assert metrics[0] == 0.0 < metrics[1]
    published = trainer.save_weights(tmp_path / "weights")
    assert published.dtype == "bfloat16" and stands_on(published, policy.manifest.digest)
    assert base_of(tmp_path / "weights") == policy.manifest.digest
    kinds = {entry.dtype for entry in read_entries(tmp_path / "weights") if "lora_" in entry.name}
    assert kinds == {"BF16"}
    assert trainer.numerics()["policies"] == "bfloat16"


def test_what_a_small_step_does_not_show_is_in_the_masters_and_what_it_shows_is_a_delta(
    policy: Policy, tmp_path: Path
) -> None:
    trainer, store = policy.trainer(), policy.store
    steps(trainer, settings=SETTINGS)
    first = store.publish_weights(trainer.save_weights)
    steps(trainer, settings=SMALL)
    version = store.publish_version(trainer.save_weights, before=first.digest, whole=False)
    assert version.change is not None and version.delta is not None and not version.whole
    assert 0 < version.change.changed < version.change.elements
    assert store.verify(version.manifest.digest) == version.manifest
    trainer.save_optimizer(tmp_path / "state")
    beyond = [
        entry for entry in read_entries(tmp_path / "state") if entry.name.startswith("remainder/")
    ]
    assert {entry.dtype for entry in beyond} == {"I16"}
    with mapped(tmp_path / "state") as data:
        assert any(bool(read_tensor(data, entry).any()) for entry in beyond)


def test_updates_ahead_are_taken_back_with_their_masters(policy: Policy, tmp_path: Path) -> None:
    plain, ahead = states_with_a_part_ahead(policy.trainer, tmp_path / "state")
    assert plain == ahead


def test_weights_and_adapters_of_a_run_in_the_other_type_are_refused(
    policy: Policy, tmp_path: Path
) -> None:
    trainer = policy.trainer()
    wide = publish(policy.store, random_adapter(policy.weights, policy.manifest.digest, seed=1))
    with pytest.raises(PolicyError, match="it is float32, not bfloat16"):
        weights = policy.store.weights_path(wide.digest)
        trainer.load(weights, digest=wide.digest, optimizer=None)
    full = write_as(policy.weights, "float32", tmp_path / "wide")
    with pytest.raises(PolicyError, match="another type than version 0"):
        trainer.load(tmp_path / "wide", digest=full.digest, optimizer=None)
    steps(trainer)
    assert stands_on(trainer.manifest(), policy.manifest.digest)


def test_exported_adapter_says_what_the_run_said_and_merged_weights_round_it(
    policy: Policy, tmp_path: Path
) -> None:
    trainer = policy.trainer()
    steps(trainer, 2, {**SETTINGS, "trainer.learning_rate": 1e-2})
    weights = policy.store.publish_weights(trainer.save_weights)
    export_model(policy.store, weights.digest, policy.assets.name, tmp_path / "out")
    rows = [([3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 1, 1]), ([9, 8, 7], [0, 1, 1])]
    score = trainer.score(rows)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    base: Any = AutoModelForCausalLM.from_pretrained(_exported(policy, tmp_path), dtype="float32")
    with safe_open(tmp_path / "out" / FOLDER / WEIGHTS, "pt") as file:
        matrices = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {matrix.dtype for matrix in matrices.values()} == {torch.bfloat16}
    for layer in trainer._model.pairs.layers:  # type: ignore[attr-defined]
        a, b = (matrices[name(layer)].double() for name in (a_name, b_name))
        linear = base.get_submodule(layer)
        linear.weight.data = linear.weight.double() + LORA.scale * b @ a
    base.double()
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    assert merged.config.dtype == torch.float32
    for (ids, mask), mine in zip(rows, score, strict=True):
        assert mine == pytest.approx(_logprobs(base, ids, mask), abs=1e-5)
        assert mine == pytest.approx(_logprobs(merged, ids, mask), abs=0.05)
    parameters = dict(base.named_parameters())
    for name, parameter in merged.named_parameters():
        exact = parameters[name].detach()
        assert bool(((parameter.double() - exact).abs() <= HALF * exact.abs()).all()), name


def _exported(policy: Policy, folder: Path) -> Path:
    export_model(policy.store, policy.manifest.digest, policy.assets.name, folder / "base")
    return folder / "base"


def _logprobs(model: Any, ids: list[int], mask: list[int]) -> list[float]:
    logits = torch.log_softmax(model(torch.tensor([ids])).logits[0].detach().double(), -1)
    return [float(logits[index - 1, ids[index]]) for index in range(1, len(ids)) if mask[index]]
