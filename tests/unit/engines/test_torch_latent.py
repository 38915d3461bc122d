"""Tests of latent attention in the torch engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.producers.engines.torch.causal_lm import CausalLM, read_causal_lm
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.engines.torch.experts import ROWS_MIN
from dora_pipe.producers.engines.torch.model import (
    LatentWeights,
    empty_latent,
    into_latent,
    out_of_latent,
    parts_of_qkv,
    rotations,
)
from dora_pipe.producers.engines.torch.rope import read_rope
from dora_pipe.store.adapters import read_adapter, write_merged
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.adapters import make_lora
from tests.support.engine_contract import request, run
from tests.support.engine_routes import routed_run
from tests.support.models import make_deepseek_v2, make_deepseek_v3, make_qwen2
from tests.support.torch_engines import logprob_distance, make

ROWS = 90
NEAR = 1e-4
PROMPT = [5, 6, 7, 80] * 11
VARIANTS: dict[str, dict[str, Any]] = {
    "no latent of queries": {"q_lora_rank": None},
    "halves": {"rope_interleave": False, "attention_bias": True},
    "halves without a latent of queries": {"rope_interleave": False, "q_lora_rank": None},
    "odd sizes": {"kv_lora_rank": 13, "qk_nope_head_dim": 7, "v_head_dim": 9},
    "dense alone": {"first_k_dense_replace": 2},
}


def opened(directory: Path, **changes: Any) -> TorchEngine:
    settings = {"slots": 4, "context_tokens": 128, "threads": 1} | changes
    return TorchEngine.open(directory, **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_its_shape_it_computes_what_transformers_does(
    variant: str, tmp_path: Path
) -> None:
    directory = make("deepseek_v3", tmp_path, **VARIANTS[variant])
    result = run(opened(directory), [request("r", PROMPT, max_tokens=40)])["r"]
    assert len(result.tokens) == 40
    assert logprob_distance(directory, PROMPT, result) < NEAR


@pytest.mark.parametrize("build", [make_deepseek_v2, make_deepseek_v3])
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(build: Any, tmp_path: Path) -> None:
    model = read_causal_lm(build(tmp_path), context_tokens=ROWS)
    weights = empty_latent(model)
    assert weights is not None
    generator = torch.Generator().manual_seed(1)
    for entry in weights.places().values():
        entry.copy_(torch.randn(entry.shape, generator=generator) / 4)
    values = torch.randn(ROWS, sum(parts_of_qkv(model).values()), generator=generator)
    attended = torch.randn(ROWS, model.heads * model.value_dim, generator=generator)
    with deterministic(threads=1):
        full = both(model, weights, values, attended, 0)
        for count in range(ROWS_MIN, ROWS):
            for start in {0, min(3, ROWS - count), ROWS - count}:
                part = slice(start, start + count)
                subset = both(model, weights, values[part], attended[part], start)
                for result, all_of_it in zip(subset, full, strict=True):
                    assert torch.equal(result, all_of_it[part])


def both(
    model: CausalLM,
    weights: LatentWeights,
    tensor: torch.Tensor,
    attended: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    turns = rotations(model, ROWS)[start : start + len(tensor), None]
    return into_latent(model, weights, tensor, turns), out_of_latent(model, weights, attended)


def test_a_token_costs_the_cache_its_latent_and_its_turned_key(tmp_path: Path) -> None:
    source = opened(make("deepseek_v3", tmp_path))
    source.add(request("r", PROMPT, max_tokens=30))
    source.step()
    exported = source.export("r")
    assert exported is not None and exported.kv is not None
    assert exported.kv.bytes == 2 * (24 + 8) * 4 * len(PROMPT)  # 2 layers of 24 + 8 float32


def test_more_experts_than_a_byte_can_name_have_two_in_the_record(tmp_path: Path) -> None:
    many = {"n_routed_experts": 300, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    directory = make("deepseek_v3", tmp_path, **many)
    asked = request("r", PROMPT, max_tokens=30, routes=True)
    tokens, routes = routed_run(opened(directory, routes=True), [asked])["r"]
    assert (routes.experts, routes.layers, routes.per_token) == (300, 1, 2)
    assert routes.choices.dtype == "uint16" and routes.choices[1:].max() < 300
    assert routes.choices[1:].max() > 255, "one that a byte cannot name is among them"
    assert (routes.choices[0] == 65535).all()
    result = run(opened(directory), [request("r", PROMPT, max_tokens=30)])["r"]
    assert result.tokens == tokens
    assert logprob_distance(directory, PROMPT, result) < NEAR


@pytest.mark.parametrize("paired", [True, False])
def test_an_adapter_stands_beside_queries_that_are_made_of_no_latent(
    paired: bool, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"q_lora_rank": None}
    shape |= {"rope_interleave": paired, "first_k_dense_replace": 2}
    directory = make("deepseek_v3", tmp_path / "model", **shape)
    lora = make_lora(directory, tmp_path / "store", adapters=1)
    engine = opened(lora.store.assets_path(lora.assets), lora_rank=4, max_resident_versions=2)
    for version, (path, digest) in enumerate(lora.policies):
        engine.load(path, version=version, digest=digest)
    asked = request("r", PROMPT, max_tokens=20)
    adapted = run(engine, [asked])["r"]
    merged = tmp_path / "merged"
    merged_digest = merge(lora.policies[0][0], lora.policies[1][0], merged)
    full = opened(directory)
    full.load(merged / "model.safetensors", version=1, digest=merged_digest)
    result = run(full, [asked])["r"]
    assert result.tokens == adapted.tokens
    assert result.logprobs == pytest.approx(adapted.logprobs, abs=NEAR)
    assert result.logprobs != run(opened(directory), [asked])["r"].logprobs


def merge(base: Path, adapter: Path, into: Path) -> str:
    into.mkdir()
    file, digest = into / "model.safetensors", read_manifest(adapter).digest
    adapted = read_adapter(adapter, digest=digest)
    return write_merged(base, adapted, file).digest


def test_yarn_turns_as_transformers_does(tmp_path: Path) -> None:
    fields = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    for more in ({}, {"truncate": False}, {"beta_fast": 2.0, "beta_slow": 1.9}):
        where = make_deepseek_v2(tmp_path / str(len(more)), rope_parameters=fields | more)
        model = read_causal_lm(where, context_tokens=64)
        make_config: Any = DeepseekV3Config
        shape = make_config(
            qk_rope_head_dim=8, rope_parameters=fields | more, max_position_embeddings=512
        )
        embedding: Any = DeepseekV3RotaryEmbedding(shape)
        cos, sin = embedding(torch.zeros(1), torch.arange(64)[None])
        actual_rotations = rotations(model, 64)
        torch.testing.assert_close(actual_rotations.real, cos[0, :, :4], rtol=0, atol=1e-6)
        torch.testing.assert_close(actual_rotations.imag, sin[0, :, :4], rtol=0, atol=1e-6)


def test_a_dense_model_of_heads_may_be_turned_by_yarn_too(tmp_path: Path) -> None:
    fields = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    directory = make("qwen2", tmp_path, rope_parameters=fields)
    assert read_rope({"rope_parameters": fields}).stretch > 1
    result = run(opened(directory), [request("r", PROMPT, max_tokens=40)])["r"]
    assert logprob_distance(directory, PROMPT, result) < NEAR
    assert logprob_distance(make_qwen2(tmp_path / "plain", scale=8.0), PROMPT, result) > NEAR
