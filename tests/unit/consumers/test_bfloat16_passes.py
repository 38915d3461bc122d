"""Tests of bfloat16 passes (`trainer.dtype`) with float32 updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.memory import MemoryOptions, head_logprobs
from dora_pipe.consumers.learners.torch.model import computing
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_llama_gqa, make_qwen3_moe
from tests.support.torch_policy import Policy, gradients_of

CHUNKED = MemoryOptions(head_chunk_tokens=7, mlp_chunk_tokens=16)
NARROW = 2.0**-8
"""Relative step of bfloat16."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_llama_gqa, micro_batch_tokens=128)


def gradients(trainer: TorchLearner) -> dict[str, torch.Tensor]:
    return gradients_of(trainer, make_batch(seed=1, step=0, groups=2, samples=3), SETTINGS)


def test_logprobs_are_those_of_float32_to_the_type_and_no_nearer(policy: Policy) -> None:
    rows = [([1, 7, 9, 30, 4], [0, 0, 1, 1, 1]), ([3, 5, 8], [0, 1, 1])]
    narrow, wide = (policy.trainer(dtype=entry) for entry in ("bfloat16", "float32"))
    apart = np.abs(np.concatenate(narrow.score(rows)) - np.concatenate(wide.score(rows)))
    assert 0 < apart.max() < 8 * NARROW
    assert narrow.numerics() == wide.numerics() | {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "memory",
    [MemoryOptions(), CHUNKED, replace(CHUNKED, gradient_checkpointing=True, packing=True)],
    ids=["at once", "in chunks", "in chunks, computed again, packed"],
)
def test_gradients_point_where_those_of_float32_do(policy: Policy, memory: MemoryOptions) -> None:
    narrow, wide = (
        gradients(policy.trainer(dtype=dtype, memory=memory)) for dtype in ("bfloat16", "float32")
    )
    assert narrow.keys() == wide.keys()
    for name, entry in narrow.items():
        assert entry.dtype == torch.float32
        apart = float((entry - wide[name]).norm() / wide[name].norm())
        assert 0 < apart < 0.05, name


@pytest.mark.parametrize("again", [False, True], ids=["held", "computed again"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_computed_in_it(
    dtype: ComputeDtype, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands: set[torch.dtype] = set()
    plain = torch.nn.functional.grouped_mm

    def spy(tensor: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor:
        operands.update((tensor.dtype, other.dtype))
        return plain(tensor, other, **named)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    memory = MemoryOptions(gradient_checkpointing=again)
    policy = Policy(tmp_path, make_qwen3_moe, micro_batch_tokens=128)
    trainer = policy.trainer(dtype=dtype, memory=memory)
    operands.clear()
    actual_gradients = gradients(trainer)
    assert operands == {getattr(torch, dtype)}
    experts = [gradient for name, gradient in actual_gradients.items() if "experts" in name]
    assert experts and all(expert.dtype == torch.float32 and expert.any() for expert in experts)


def test_head_in_chunks_computes_in_the_type_that_autocast_says_also_on_the_way_back() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=True)
    hidden, targets = torch.randn(24, 16), torch.randint(50, (24,))
    results = []
    for chunks in (1, 4):
        given = hidden.clone().requires_grad_()
        with computing("bfloat16", "cpu"):
            logprobs = head_logprobs(head, given, targets, temperature=0.7, chunks=chunks)
        (of_hidden, *of_head) = torch.autograd.grad(logprobs.sum(), [given, *head.parameters()])
        results.append((logprobs.detach(), of_hidden, *of_head))
    for once, cut in zip(*results, strict=True):
        assert cut.dtype == torch.float32
        assert float((cut - once).norm() / once.norm()) < 2 * NARROW
    assert torch.equal(results[0][0], results[1][0])
