"""Tests that memory limits of a step change only summation order."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.consumers.learners.torch.memory import (
    MemoryOptions,
    UnassignedRows,
    checkpoint_layers,
    head_logprobs,
)
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import PolicyError
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_qwen2
from tests.support.torch_policy import Policy, gradients_of

NEAR = 1e-6
"""Relative error of another summation order in float32."""


def apart(tensor: Tensor, other: Tensor) -> float:
    return float((tensor.double() - other.double()).norm() / other.double().norm())


def graded(chunks: int, *, bias: bool, plain: bool, temperature: float) -> list[Tensor]:
    chance = torch.Generator().manual_seed(7)
    head = torch.nn.Linear(24, 50, bias=bias)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=chance))
    if not plain:
        head.register_forward_hook(lambda module, inputs, output: output * 1.0)
    hidden = torch.randn(83, 24, generator=chance).requires_grad_()
    targets = torch.randint(0, 50, (83,), generator=chance)
    logprobs = head_logprobs(head, hidden, targets, temperature=temperature, chunks=chunks)
    values = torch.randn(83, generator=chance)
    leaves = [hidden, *head.parameters()]
    return [logprobs.detach(), *torch.autograd.grad(logprobs, leaves, values)]


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "with a hook"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@settings(max_examples=12, deadline=None)
@given(chunks=st.integers(2, 90), bias=st.booleans())
def test_head_in_chunks_is_the_head_at_once(
    plain: bool, temperature: float, chunks: int, bias: bool
) -> None:
    shape: dict[str, Any] = {"bias": bias, "plain": plain, "temperature": temperature}
    with deterministic(1):
        full, cut = graded(1, **shape), graded(chunks, **shape)
    for entry, other in zip(cut, full, strict=True):
        assert apart(entry, other) < NEAR


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("plain", [True, False], ids=["linear", "with a hook"])
def test_token_ids_without_a_token_have_no_share_of_the_distribution(
    chunks: int, plain: bool
) -> None:
    chance = torch.Generator().manual_seed(7)
    head = torch.nn.Linear(8, 20)
    if not plain:
        head.register_forward_hook(lambda module, inputs, output: output * 1.0)
    hidden = torch.randn(9, 8, generator=chance)
    targets = torch.randint(0, 15, (9,), generator=chance)
    logprobs = head_logprobs(
        head,
        hidden,
        targets,
        temperature=0.7,
        chunks=chunks,
        unassigned=UnassignedRows(range(15, 20), 20),
    )
    kept = torch.log_softmax(head(hidden)[:, :15] / 0.7, -1)
    assert torch.allclose(logprobs, kept.gather(1, targets[:, None])[:, 0], atol=1e-6)
    (gradient,) = torch.autograd.grad(logprobs.sum(), [head.weight])
    assert gradient.isfinite().all() and not gradient[15:].any() and gradient[:15].any()


def gradients(policy: Policy, batch: TrainBatch, **memory: Any) -> dict[str, Tensor]:
    step = {**SETTINGS, "objective.kl_coef": 0.2, "trainer.minibatches": 1}
    step |= {"trainer.max_grad_norm": 1e9}
    return gradients_of(trainer_of(policy, **memory), batch, step)


def trainer_of(
    policy: Policy,
    lora: LoraOptions | None = None,
    micro_batch_tokens: int = 16_384,
    **memory: Any,
) -> TorchLearner:
    options = {"lora": lora, "micro_batch_tokens": micro_batch_tokens}
    return policy.trainer(memory=MemoryOptions(**memory), **options)


BATCH = make_batch(seed=3, groups=3, samples=3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_qwen2)


LORA = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "down_proj", "lm_head"))


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("chunk", ["head_chunk_tokens", "mlp_chunk_tokens"])
def test_step_in_chunks_has_the_gradients_of_one_without(
    policy: Policy, lora: LoraOptions | None, packing: bool, chunk: str
) -> None:
    plain = gradients(policy, BATCH, lora=lora, packing=packing)
    cut = gradients(policy, BATCH, lora=lora, packing=packing, **{chunk: 7})
    assert plain.keys() == cut.keys()
    assert plain
    for name, gradient in plain.items():
        if float(gradient.norm()):
            assert apart(cut[name], gradient) < NEAR, name


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
def test_step_with_gradient_checkpointing_has_equal_bits_and_computes_layers_twice(
    policy: Policy, lora: LoraOptions | None
) -> None:
    trainer = trainer_of(policy, lora)
    again = trainer_of(policy, lora, gradient_checkpointing=True)
    assert [counted(entry) for entry in (trainer, again)] == [1, 2]
    assert trainer.manifest().digest == again.manifest().digest
    assert trainer.numerics() == again.numerics()


@pytest.mark.gpu
def test_offloaded_step_on_a_gpu_has_equal_bits_and_holds_less_of_it(policy: Policy) -> None:
    step = {**SETTINGS, "trainer.minibatches": 1}
    digests, peaks = set(), []
    for away in (False, True):
        memory = MemoryOptions(gradient_checkpointing=True, activation_offload=away)
        trainer = policy.trainer(device="cuda", memory=memory)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train(BATCH, step)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        digests.add(trainer.manifest().digest)
    assert len(digests) == 1
    assert peaks[1] <= peaks[0]


def counted(trainer: TorchLearner) -> int:
    calls: list[Any] = []
    layer = trainer._model.network.base_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *given: calls.append(given))
    trainer.train(BATCH, {**SETTINGS, "trainer.minibatches": 1})
    return len(calls)


def test_gradient_checkpointing_refuses_a_model_that_would_drop_out(policy: Policy) -> None:
    network = build(policy.assets)
    for layer in network.base_model.layers:
        layer.register_forward_hook(dropping)
    with pytest.raises(PolicyError, match="without dropout"):
        checkpoint_layers(network)


def dropping(module: Any, given: Any, tensor: Tensor) -> Tensor:
    return torch.nn.functional.dropout(tensor, 0.5, training=module.training)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 9999), longest=st.integers(1, 60), tokens=st.sampled_from([70, 1000]))
def test_step_whose_sequences_share_lines_has_the_gradients_of_one_without(
    policy: Policy, seed: int, longest: int, tokens: int
) -> None:
    batch = make_batch(seed=seed, groups=3, samples=3, tokens=(1, longest))
    plain = gradients(policy, batch, micro_batch_tokens=tokens)
    packed = gradients(policy, batch, micro_batch_tokens=tokens, packing=True)
    assert plain.keys() == packed.keys()
    for name, gradient in plain.items():
        assert apart(packed[name], gradient) < NEAR, name
