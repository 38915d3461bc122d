"""Tests of packed attention: per-sequence computation equals a mask."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.consumers.learners.settings import PACKING
from dora_pipe.consumers.learners.torch import model, packed_attention
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.memory import MemoryOptions, checkpoint_layers
from dora_pipe.consumers.learners.torch.model import Passage, passage_of, score
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.consumers.learners.torch.packed_attention import (
    cuts_of,
    goes_by_sequences,
    plain,
    set_attention,
)
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import (
    make_deepseek_v2,
    make_deepseek_v3,
    make_glm4_moe,
    make_llama_gqa,
    make_qwen2,
    make_qwen3_moe,
)
from tests.support.torch_policy import Policy

NEAR = 1e-6
"""Relative error of another summation order in float32."""

STEP = {**SETTINGS, "trainer.minibatches": 1}
BATCH = make_batch(seed=3, groups=3, samples=3, tokens=(1, 40))


def make_sliding(directory: Path) -> Path:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return make_qwen2(directory, num_key_value_heads=2, **window)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2": make_qwen2,
    "qwen2 with windows": make_sliding,
    "llama": make_llama_gqa,
    "qwen3-moe": make_qwen3_moe,
    "glm4-moe": make_glm4_moe,
    "deepseek-v2": make_deepseek_v2,
    "deepseek-v3": make_deepseek_v3,
}


def apart(tensor: Tensor, other: Tensor) -> float:
    return float((tensor.double() - other.double()).norm() / other.double().norm())


def passage(lines: list[list[int]], device: str = "cpu", **more: Any) -> Passage:
    chance = torch.Generator().manual_seed(7)
    sizes = [size for line in lines for size in line]
    rows = [
        (torch.randint(0, 95, (size,), generator=chance).tolist(), [1] * size, [0.0] * size)
        for size in sizes
    ]
    numbers = iter(range(len(sizes)))
    places = [[next(numbers) for _ in line] for line in lines]
    width = max(map(sum, lines))
    return passage_of(rows, width=width, device=device, lines=places, **more)


LINES = [[17, 2, 9], [1, 25], [20, 3]]


def graded(network: Any, given: Passage, **more: Any) -> dict[str, Tensor]:
    network.zero_grad()
    actual_score = score(
        network,
        given.ids,
        given.places,
        given.targets,
        lean=False,
        temperature=1.0,
        positions=given.positions,
        **more,
    )
    weights = torch.linspace(-1, 1, len(actual_score), device=actual_score.device)
    torch.autograd.backward((actual_score * weights).sum())
    grads = {
        name: parameter.grad.clone()
        for name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return grads | {"log-probs": actual_score.detach()}


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    window=st.sampled_from([-1, 0, 3]),
)
def test_plain_kernel_is_attention_under_a_block_mask(
    sizes: list[int], groups: int, window: int
) -> None:
    chance = torch.Generator().manual_seed(1)
    tokens = sum(sizes)
    query = torch.randn(tokens, 2 * groups, 8, generator=chance)
    key, value = (torch.randn(tokens, 2, 8, generator=chance) for _ in range(2))
    cuts = cuts_of(torch.cat([torch.arange(size) for size in sizes]))
    result = plain(query, key, value, cuts, 0.3, window)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    observed = (owner[:, None] == owner) & (back >= 0) & ((back <= window) | (window < 0))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * 0.3
    shares = scores.masked_fill(~observed, -torch.inf).softmax(-1)
    product = torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(groups, 1))
    assert apart(result, product) < NEAR


@pytest.mark.parametrize("again", [False, True], ids=["held", "computed again"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_by_sequences_are_those_under_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, again: bool
) -> None:
    calls: list[tuple[int, ...]] = []

    def kernel(query: Tensor, *given: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return plain(query, *given)

    monkeypatch.setattr(packed_attention, "varlen", kernel)
    network = build(FAMILIES[family](tmp_path / "model"))
    if again:
        checkpoint_layers(network)
    given_pass = passage(LINES)
    with deterministic(1):
        masked = graded(network, given_pass)
        assert set_attention(network)
        still = graded(network, given_pass)
        assert not calls
        result = graded(network, given_pass, cuts=given_pass.cuts)
    assert len(calls) == network.config.num_hidden_layers * (2 if again else 1)
    assert {shape[0] for shape in calls} == {given_pass.ids.numel()}
    assert result.keys() == masked.keys() == still.keys()
    for name, entry in masked.items():
        assert torch.equal(still[name], entry), name
        if float(entry.norm()):  # Those of key biases almost cancel out.
            assert apart(result[name], entry) < 10 * NEAR, name
    assert apart(joined(result), joined(masked)) < NEAR


@pytest.mark.parametrize(
    ("capability", "heads", "taken"),
    [((9, 0), 256, True), ((8, 9), 256, False), ((8, 9), 192, True), ((7, 5), 64, False)],
)
def test_half_precision_on_a_gpu_goes_by_sequences_where_its_kernel_takes_the_heads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    heads: int,
    taken: bool,
) -> None:
    def says(device: str) -> tuple[int, int]:
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", says)
    network = build(make_qwen3_moe(tmp_path / "model", head_dim=heads))
    assert goes_by_sequences(network, "bfloat16", "cuda") is taken
    assert (network.config._attn_implementation == packed_attention.NAME) is taken


@pytest.mark.parametrize("key", ["softcap", "s_aux", "position_bias"])
def test_attention_that_the_kernel_has_not_goes_by_a_mask(tmp_path: Path, key: str) -> None:
    network = build(make_qwen2(tmp_path / "model"))
    layer = network.base_model.layers[1].self_attn
    layer.register_forward_pre_hook(
        lambda module, given, more: (given, {**more, key: torch.zeros(1)}), with_kwargs=True
    )
    assert not set_attention(network)
    assert network.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    make = partial(make_qwen2, num_key_value_heads=2, context_tokens=32_000)
    memory = MemoryOptions(packing=True, gradient_checkpointing=True, head_chunk_tokens=64)
    return Policy(tmp_path_factory.mktemp("policy"), make, memory=memory)


def test_step_names_its_way_and_goes_the_way_of_an_older_log(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = policy.trainer()
    monkeypatch.setattr(model, "goes_by_sequences", lambda network, *given: set_attention(network))
    calls: list[int] = []

    def kernel(query: Tensor, *given: Any) -> Tensor:
        calls.append(len(query))
        return plain(query, *given)

    monkeypatch.setattr(packed_attention, "varlen", kernel)
    after, older = policy.trainer(), policy.trainer()
    assert before.numerics()["packing"] == "on"
    assert after.numerics() == before.numerics() | {"packing": "varlen"}
    masked = before.train(BATCH, STEP).metrics
    older.train(BATCH, {**STEP, PACKING: before.numerics()["packing"]})
    assert older.manifest().digest == before.manifest().digest
    assert not calls
    assert after.train(BATCH, STEP).metrics["loss"] == pytest.approx(masked["loss"], abs=1e-6)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_in_bfloat16_on_a_gpu_are_as_near_to_float32_as_a_mask_in_bfloat16(
    tmp_path: Path, family: str
) -> None:
    model_dir = FAMILIES[family](tmp_path / "model")
    given_pass = passage(LINES, "cuda")
    exact_network, network = build(model_dir).to("cuda"), build(model_dir).to("cuda")
    network.load_state_dict(exact_network.state_dict())
    with deterministic(1):
        exact = graded(exact_network, given_pass)
        assert goes_by_sequences(network, "bfloat16", "cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            masked = graded(network, given_pass)
            result, again = (graded(network, given_pass, cuts=given_pass.cuts) for _ in range(2))
    for name, entry in result.items():
        assert torch.equal(again[name], entry), name
    # One tensor may be close by chance, all are not.
    assert apart(joined(result), joined(exact)) < 2 * apart(joined(masked), joined(exact)) + NEAR


@pytest.mark.gpu
def test_packed_steps_on_a_gpu_have_equal_bits(policy: Policy) -> None:
    digests = set()
    for _ in range(2):
        trainer = policy.trainer(device="cuda", dtype="bfloat16")
        assert trainer.numerics()["packing"] == "varlen"
        trainer.train(BATCH, STEP)
        digests.add(trainer.manifest().digest)
    assert len(digests) == 1
