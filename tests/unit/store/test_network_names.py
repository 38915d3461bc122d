"""Tests of tensor names of networks and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter

from dora_pipe.consumers.learners.torch.model import load_weights
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.weights import weight_files
from dora_pipe.producers.engines.vllm.weights import expected_tensors
from dora_pipe.store.network_names import pieces, stored, untied
from dora_pipe.store.safetensors_file import read_entries
from tests.support.models import make_deepseek_v3, make_glm4_moe, make_llama_gqa, make_qwen3_moe

FUSED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("make", [make_qwen3_moe, make_glm4_moe, make_deepseek_v3, make_llama_gqa])
def test_what_vllm_is_given_is_what_files_have(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    shapes, tied, _ = expected_tensors(make(tmp_path))
    there = [entry for path in weight_files(tmp_path) for entry in read_entries(path)]
    assert shapes == {entry.name: entry.shape for entry in there}
    head = {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied == (head if make is make_llama_gqa else {})


@pytest.mark.parametrize("make", [make_qwen3_moe, make_glm4_moe])
def test_a_mixture_has_the_names_of_its_files_and_what_is_loaded_by_them_is_in_it(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    weights = make(tmp_path) / "model.safetensors"
    network = build(tmp_path)
    shapes = {name: tuple(entry.shape) for name, entry in stored(network).items()}
    assert shapes == {entry.name: entry.shape for entry in read_entries(weights)}
    assert FUSED in untied(network)
    assert FUSED not in shapes
    load_weights(network, weights)
    read: Any = AutoModelForCausalLM.from_pretrained
    theirs = read(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(24).reshape(2, -1)
    assert torch.equal(network(ids).logits, theirs(ids).logits)


def test_pieces_are_cut_likewise_from_copies_that_lie_anywhere(tmp_path: Path) -> None:
    network = build(make_glm4_moe(tmp_path))
    copies = {}
    for name, entry in untied(network).items():
        copies[name] = torch.cat([torch.ones(3), entry.detach().reshape(-1)])[3:].reshape(
            entry.shape
        )
    expected, actual_pieces = stored(network), pieces(network)
    assert actual_pieces.keys() == expected.keys()
    for name, piece in actual_pieces.items():
        assert torch.equal(piece.of(copies[piece.name]), expected[name])


def test_a_form_that_is_not_made_of_parts_is_refused(tmp_path: Path) -> None:
    network = build(make_llama_gqa(tmp_path))
    name = "self_attn.q_proj.weight"
    network._weight_conversions = [WeightConverter(name, name, [Interleave(dim=0)])]
    with pytest.raises(PolicyError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.weight"):
        stored(network)
