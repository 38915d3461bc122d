"""What bounds the memory of a step changes no number of it, beyond the order of sums."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dora_pipe.config.training import Trainer
from dora_pipe.consumers.learners.port import TrainBatch
from dora_pipe.consumers.learners.torch.chunked_layers import chunk_layers, mlp_width
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.consumers.learners.torch.memory import (
    HEAD_ELEMENTS,
    MemoryOptions,
    UnassignedRows,
    checkpoint_layers,
    head_logprobs,
    memory_options,
)
from dora_pipe.consumers.learners.torch.model import passage_of
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_qwen2

NEAR = 1e-6
"""Relative: what another order of sums makes of float32."""


def apart(one: Tensor, other: Tensor) -> float:
    """Relative distance of two tensors."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def graded(chunks: int, *, bias: bool, plain: bool, temperature: float) -> list[Tensor]:
    """Log-probs of a head, and the gradients by hidden states and by its parameters."""
    chance = torch.Generator().manual_seed(7)
    head = torch.nn.Linear(24, 50, bias=bias)
    for one in head.parameters():
        one.data.copy_(torch.randn(one.shape, generator=chance))
    if not plain:
        head.register_forward_hook(lambda module, inputs, output: output * 1.0)
    hidden = torch.randn(83, 24, generator=chance).requires_grad_()
    targets = torch.randint(0, 50, (83,), generator=chance)
    found = head_logprobs(head, hidden, targets, temperature=temperature, chunks=chunks)
    wanted = torch.randn(83, generator=chance)
    leaves = [hidden, *head.parameters()]
    return [found.detach(), *torch.autograd.grad(found, leaves, wanted)]


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "with a hook"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@settings(max_examples=12, deadline=None)
@given(chunks=st.integers(2, 90), bias=st.booleans())
def test_head_in_chunks_is_the_head_at_once(
    plain: bool, temperature: float, chunks: int, bias: bool
) -> None:
    shape: dict[str, Any] = {"bias": bias, "plain": plain, "temperature": temperature}
    with deterministic(1):
        whole, cut = graded(1, **shape), graded(chunks, **shape)
    for one, other in zip(cut, whole, strict=True):
        assert apart(one, other) < NEAR


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
    found = head_logprobs(
        head,
        hidden,
        targets,
        temperature=0.7,
        chunks=chunks,
        unassigned=UnassignedRows(range(15, 20), 20),
    )
    kept = torch.log_softmax(head(hidden)[:, :15] / 0.7, -1)
    assert torch.allclose(found, kept.gather(1, targets[:, None])[:, 0], atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), [head.weight])
    assert gradient.isfinite().all() and not gradient[15:].any() and gradient[:15].any()


def test_gradients_of_a_half_precision_head_are_added_up_in_float32() -> None:
    chance = torch.Generator().manual_seed(7)
    head = torch.nn.Linear(16, 40, bias=False).bfloat16()
    hidden = torch.randn(256, 16, generator=chance).bfloat16()
    targets = torch.randint(0, 40, (256,), generator=chance)
    found: list[Tensor] = []
    for chunks in (1, 256):
        logprobs = head_logprobs(head, hidden, targets, temperature=1.0, chunks=chunks)
        found += torch.autograd.grad(logprobs.sum(), [head.weight])
    assert apart(found[1], found[0]) < 2**-7  # Adding 256 of them up in bfloat16 loses 2**-4.


def test_frozen_head_takes_no_gradient() -> None:
    head = torch.nn.Linear(8, 20, bias=False).requires_grad_(False)
    hidden = torch.randn(6, 8, generator=torch.Generator().manual_seed(7)).requires_grad_()
    targets = torch.arange(6)
    logprobs = head_logprobs(head, hidden, targets, temperature=1.0, chunks=3)
    torch.autograd.backward(logprobs.sum())
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_chunk_holds_so_many_logits_unless_its_tokens_are_given() -> None:
    by_default = memory_options(Trainer())
    assert by_default.head_chunk(151_936) == HEAD_ELEMENTS // 151_936 == 110
    assert MemoryOptions(head_chunk_tokens=300).head_chunk(151_936) == 300
    assert MemoryOptions(head_chunk_tokens=300).head_chunks(601, 151_936) == 3
    assert MemoryOptions().head_chunks(601, 151_936) == 1


def test_fingerprint_names_the_chunk_where_a_pass_can_be_longer() -> None:
    options = memory_options(Trainer())
    assert options.numerics(151_936, 1024, 16_384) == {"head_chunk_tokens": "110"}
    assert options.numerics(1_000, 1024, 16_384) == {}
    assert options.numerics(1_000, 4096, 16_384) == {"mlp_chunk_tokens": "1024"}
    assert options.numerics(1_000, 0, 16_384) == {}
    assert MemoryOptions().numerics(151_936, 4096, 16_384) == {}


class Policy:
    """A model in a store, and trainers of it."""

    def __init__(self, root: Path) -> None:
        self.store = PolicyStore(root / "policies")
        self.manifest, assets = import_model(self.store, make_qwen2(root / "model"))
        self.assets = self.store.assets_path(assets)
        self.weights = self.store.weights_path(self.manifest.digest)

    def trainer(
        self, lora: LoraOptions | None = None, micro_batch_tokens: int = 16_384, **memory: Any
    ) -> TorchLearner:
        options = TorchOptions(
            lora=lora, micro_batch_tokens=micro_batch_tokens, memory=MemoryOptions(**memory)
        )
        made = TorchLearner(self.assets, reference=self.weights, options=options)
        made.load(self.weights, digest=self.manifest.digest, optimizer=None)
        return made

    def gradients(self, batch: TrainBatch, **options: Any) -> dict[str, Tensor]:
        """Of one step, by parameter, before they are clipped."""
        trainer = self.trainer(**options)
        step = {**SETTINGS, "objective.kl": 0.2, "trainer.minibatches": 1}
        trainer.train(batch, {**step, "trainer.grad_norm_max": 1e9})
        return {
            name: one.grad.clone()
            for name, one in trainer._model.parameters()
            if one.grad is not None
        }


BATCH = make_batch(seed=3, groups=3, siblings=3)
LORA = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "lm_head"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
def test_step_with_a_head_in_chunks_has_the_gradients_of_one_without(
    policy: Policy, lora: LoraOptions | None
) -> None:
    whole = policy.gradients(BATCH, lora=lora)
    cut = policy.gradients(BATCH, lora=lora, head_chunk_tokens=7)
    assert whole.keys() == cut.keys()
    assert whole
    for name, one in whole.items():
        if float(one.norm()):
            assert apart(cut[name], one) < NEAR, name


def test_step_with_a_head_in_chunks_gives_equal_bits_again(policy: Policy) -> None:
    digests = set()
    for _ in range(2):
        trainer = policy.trainer(head_chunk_tokens=7)
        trainer.train(BATCH, SETTINGS)
        digests.add(trainer.manifest().digest)
    assert len(digests) == 1


MLP_LORA = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize("lora", [None, MLP_LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("packing", [False, True])
def test_step_with_blocks_in_chunks_has_the_gradients_of_one_without(
    policy: Policy, lora: LoraOptions | None, packing: bool
) -> None:
    whole = policy.gradients(BATCH, lora=lora, packing=packing)
    cut = policy.gradients(BATCH, lora=lora, packing=packing, mlp_chunk_tokens=7)
    assert whole.keys() == cut.keys()
    assert whole
    for name, one in whole.items():
        if float(one.norm()):
            assert apart(cut[name], one) < NEAR, name


def test_step_with_blocks_in_chunks_gives_equal_bits_with_and_without_checkpointing(
    policy: Policy,
) -> None:
    digests = set()
    for again in (False, True, True):
        trainer = policy.trainer(mlp_chunk_tokens=7, gradient_checkpointing=again)
        trainer.train(BATCH, SETTINGS)
        digests.add(trainer.manifest().digest)
        assert trainer.numerics()["mlp_chunk_tokens"] == "7"
    assert len(digests) == 1


def test_block_and_norms_see_so_many_tokens_at_once(policy: Policy) -> None:
    trainer = policy.trainer(mlp_chunk_tokens=7)
    seen: list[int] = []
    layer = trainer._model.network.base_model.layers[0]
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    trainer.train(BATCH, SETTINGS)
    assert max(seen) == 7
    assert max(seen) - min(seen) <= 1


def test_chunk_of_a_block_holds_so_many_numbers_where_a_pass_has_many() -> None:
    by_default = memory_options(Trainer())
    assert by_default.mlp_chunks(16_384, 1024) == 1
    assert by_default.mlp_chunks(32_000, 1024) == 8
    assert by_default.mlp_chunks(2_000, 9728) == 5
    assert by_default.mlp_chunks(4_096, 9728, "cuda") == 1  # Kernels of a GPU want many tokens.
    assert by_default.mlp_chunks(32_000, 3072, "cuda:0") == 3
    assert MemoryOptions(mlp_chunk_tokens=300).mlp_chunks(601, 9728) == 3
    assert MemoryOptions().mlp_chunks(10**6, 9728) == 1


def test_blocks_that_see_other_tokens_are_computed_at_once(policy: Policy) -> None:
    network = build(policy.assets)
    for layer in network.base_model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, given, found: found.cumsum(1))
    ids = torch.arange(32).reshape(1, -1)
    before = network(input_ids=ids, use_cache=False).logits
    chunk_layers(network, MemoryOptions(mlp_chunk_tokens=7))
    assert torch.equal(network(input_ids=ids, use_cache=False).logits, before)


def test_experts_get_all_tokens_at_once() -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_attention_heads=2, **sizes
    )
    make: Any = Qwen3MoeForCausalLM
    assert mlp_width(make(config)) == 0


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
def test_step_with_gradient_checkpointing_has_equal_bits_and_computes_layers_twice(
    policy: Policy, lora: LoraOptions | None
) -> None:
    whole, again = policy.trainer(lora), policy.trainer(lora, gradient_checkpointing=True)
    assert [counted(one) for one in (whole, again)] == [1, 2]
    assert whole.manifest().digest == again.manifest().digest
    assert whole.numerics() == again.numerics()


def test_inputs_of_layers_that_are_offloaded_come_back_as_they_were(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[torch.Size] = []

    class Noted(torch.autograd.graph.saved_tensors_hooks):
        """As `save_on_cpu`, which on a CPU has nowhere else to put a tensor."""

        def __init__(self, *, pin_memory: bool) -> None:
            super().__init__(self.keep, torch.clone)

        def keep(self, tensor: Tensor) -> Tensor:
            held.append(tensor.shape)
            return tensor.clone()

    monkeypatch.setattr("dora_pipe.consumers.learners.torch.memory.save_on_cpu", Noted)
    step = {**SETTINGS, "trainer.minibatches": 1}
    here = policy.trainer(gradient_checkpointing=True)
    away = policy.trainer(gradient_checkpointing=True, activation_offload=True)
    for trainer in (here, away):
        trainer.train(BATCH, step)
    assert here.manifest().digest == away.manifest().digest
    assert here.numerics() == away.numerics()
    config = away._model.network.config
    inputs = [shape for shape in held if shape.numel()]
    assert len(inputs) == config.num_hidden_layers
    assert {shape[-1] for shape in inputs} == {config.hidden_size}


@pytest.mark.gpu
def test_offloaded_step_on_a_gpu_has_equal_bits_and_holds_less_of_it(policy: Policy) -> None:
    step = {**SETTINGS, "trainer.minibatches": 1}
    digests, peaks = set(), []
    for away in (False, True):
        memory = MemoryOptions(gradient_checkpointing=True, activation_offload=away)
        options = TorchOptions(device="cuda", memory=memory)
        trainer = TorchLearner(policy.assets, reference=policy.weights, options=options)
        trainer.load(policy.weights, digest=policy.manifest.digest, optimizer=None)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train(BATCH, step)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        digests.add(trainer.manifest().digest)
    assert len(digests) == 1
    assert peaks[1] <= peaks[0]


def counted(trainer: TorchLearner) -> int:
    """How often a step of one pass computes the first layer."""
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


def dropping(module: Any, given: Any, found: Tensor) -> Tensor:
    """A layer that drops out while it is trained."""
    return torch.nn.functional.dropout(found, 0.5, training=module.training)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 9999), longest=st.integers(1, 60), tokens=st.sampled_from([70, 1000]))
def test_step_whose_sequences_share_lines_has_the_gradients_of_one_without(
    policy: Policy, seed: int, longest: int, tokens: int
) -> None:
    batch = make_batch(seed=seed, groups=3, siblings=3, tokens=(1, longest))
    whole = policy.gradients(batch, micro_batch_tokens=tokens)
    packed = policy.gradients(batch, micro_batch_tokens=tokens, packing=True)
    assert whole.keys() == packed.keys()
    for name, one in whole.items():
        assert apart(packed[name], one) < NEAR, name


def test_packed_step_computes_less_and_says_so(policy: Policy) -> None:
    batch = make_batch(seed=1, groups=4, siblings=4, tokens=(1, 40))
    step = {**SETTINGS, "trainer.minibatches": 1}
    plain, packed = policy.trainer(), policy.trainer(packing=True)
    before, after = (one.train(batch, step).figures for one in (plain, packed))
    assert after["padded_tokens"] < 0.7 * before["padded_tokens"]
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)
    assert packed.numerics() == plain.numerics() | {"packing": "on"}


def test_packed_step_gives_equal_bits_again(policy: Policy) -> None:
    digests = set()
    for _ in range(2):
        trainer = policy.trainer(packing=True, gradient_checkpointing=True, head_chunk_tokens=7)
        trainer.train(BATCH, SETTINGS)
        digests.add(trainer.manifest().digest)
    assert len(digests) == 1


def test_lines_of_one_sequence_need_no_mask() -> None:
    row = [5, 6, 7], [0, 1, 1], [0.0] * 3
    assert passage_of([row], width=3, device="cpu", lines=[[0]]).positions is None
    both = passage_of([row, row], width=7, device="cpu", lines=[[0, 1]])
    assert both.positions is not None
    assert both.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert both.places.tolist() == [0, 1, 3, 4]
