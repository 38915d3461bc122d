"""Tests of experts in the torch engine: results depend on the row only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.producers.engines.torch.causal_lm import CausalLM, read_causal_lm
from dora_pipe.producers.engines.torch.experts import (
    ROWS_MIN,
    ExpertWeights,
    empty_experts,
    mixed,
    routed,
)
from tests.support.models import make_glm4_moe, make_grouped, make_qwen3_moe

ROWS = 120
COUNTS = range(ROWS_MIN, ROWS)


def drawn(
    make: Callable[[Path], Path], folder: Path
) -> tuple[CausalLM, ExpertWeights, torch.Tensor]:
    model = read_causal_lm(make(folder), context_tokens=64)
    weights = empty_experts(model, 1)
    assert weights is not None
    generator = torch.Generator().manual_seed(1)
    for entry in weights.places().values():
        entry.copy_(torch.randn(entry.shape, generator=generator) / 4)
    return model, weights, torch.randn(ROWS, model.hidden, generator=generator)


MIXTURES = (make_qwen3_moe, make_glm4_moe, make_grouped)


@pytest.fixture(params=MIXTURES)
def layer(request: Any, tmp_path: Path) -> tuple[CausalLM, ExpertWeights, torch.Tensor]:
    return drawn(request.param, tmp_path)


def test_no_bit_of_a_row_depends_on_the_rows_beside_it(
    layer: tuple[CausalLM, ExpertWeights, torch.Tensor],
) -> None:
    model, weights, x = layer
    assert model.experts is not None
    with deterministic(threads=1):
        full = mixed(model.experts, weights, x, [])
        counts = routed(model.experts, weights, x)[1]
        for count in COUNTS:
            for start in {0, min(3, ROWS - count), ROWS - count}:
                subset, end = x[start : start + count], start + count
                assert torch.equal(mixed(model.experts, weights, subset, []), full[start:end])
                assert torch.equal(routed(model.experts, weights, subset)[1], counts[start:end])


def test_it_is_what_transformers_computes(tmp_path: Path) -> None:
    for make in MIXTURES:
        model, weights, x = drawn(make, tmp_path / make.__name__)
        assert model.experts is not None
        network = build(tmp_path / make.__name__)
        block = network.model.layers[1].mlp
        with torch.no_grad():
            block.gate.weight.copy_(weights.router)
            block.experts.gate_up_proj.copy_(weights.gate_up)
            block.experts.down_proj.copy_(weights.down)
            if weights.choice_bias is not None:
                block.gate.e_score_correction_bias.copy_(weights.choice_bias)
            _, shares, chosen = block.gate(x)
            ours, counts = routed(model.experts, weights, x)
            order, their_order = ours.argsort(-1), chosen.argsort(-1)
            assert torch.equal(ours.gather(1, order), chosen.gather(1, their_order))
            pairs = counts.gather(1, order), shares.gather(1, their_order)
            torch.testing.assert_close(*pairs, rtol=1e-6, atol=1e-7)
            theirs = block.experts(x, chosen, shares)
        chosen_too = list[torch.Tensor]()
        output = mixed(model.experts, weights, x, chosen_too)
        assert torch.equal(chosen_too[0], ours)
        torch.testing.assert_close(output, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_without_experts_has_none(tmp_path: Path) -> None:
    model = read_causal_lm(make_glm4_moe(tmp_path), context_tokens=64)
    assert empty_experts(model, 0) is None
    assert [model.sparse(layer) for layer in range(2)] == [False, True]
    assert model.only([1]).sparse(0)
    assert not any("experts" in name for name in model.only([0]).tensors())


def test_experts_are_from_the_groups_that_are_chosen(tmp_path: Path) -> None:
    model, weights, x = drawn(make_grouped, tmp_path)
    assert model.experts is not None
    chosen = routed(model.experts, weights, x)[0]
    assert (chosen // 4 == chosen[:, :1] // 4).all(), "both are of one group of four"
    free = routed(replace(model.experts, groups=1), weights, x)[0]
    assert (free // 4 != free[:, :1] // 4).any(), "which they are not by themselves"
