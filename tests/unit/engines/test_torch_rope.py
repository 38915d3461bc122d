"""Tests of rotary positions in the torch engine that yarn scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from dora_pipe.producers.engines.torch.causal_lm import read_causal_lm
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.engines.torch.model import rotations
from dora_pipe.producers.engines.torch.rope import read_rope
from tests.support.engine_contract import request, run
from tests.support.models import make_qwen2
from tests.support.torch_engines import logprob_distance, make

NEAR = 1e-4
PROMPT = [5, 6, 7, 80] * 11
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"truncate": False},
    {"beta_fast": 2.0, "beta_slow": 1.9},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
)


def test_yarn_turns_as_transformers_does(tmp_path: Path) -> None:
    for number, more in enumerate(MORE):
        fields = YARN | {"original_max_position_embeddings": 256} | more
        where = make("qwen2", tmp_path / str(number), rope_parameters=fields)
        model = read_causal_lm(where, context_tokens=64)
        embedding: Any = Qwen2RotaryEmbedding(AutoConfig.from_pretrained(where))
        cos, sin = embedding(torch.zeros(1), torch.arange(64)[None])
        turns, half = rotations(model, 64), model.head_dim // 2
        torch.testing.assert_close(turns.real, cos[0, :, :half], rtol=0, atol=1e-6)
        torch.testing.assert_close(turns.imag, sin[0, :, :half], rtol=0, atol=1e-6)


def test_yarn_scaled_model_computes_what_transformers_does(tmp_path: Path) -> None:
    fields = YARN | {"factor": 4.0, "original_max_position_embeddings": 32}
    directory = make("qwen2", tmp_path, rope_parameters=fields)
    assert read_rope({"rope_parameters": fields}).stretch > 1
    engine = TorchEngine.open(directory, slots=4, context_tokens=128, threads=1)
    result = run(engine, [request("r", PROMPT, max_tokens=40)])["r"]
    assert logprob_distance(directory, PROMPT, result) < NEAR
    assert logprob_distance(make_qwen2(tmp_path / "plain", scale=8.0), PROMPT, result) > NEAR
