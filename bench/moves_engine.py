"""The engines of the bench of moves, with equal random weights in both processes; decides nothing.

vLLM has no prefix cache here: a worker that takes a request up seldom has its sequence already, and
a prefill that is measured again would find what the last one left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dora_pipe.bench import qwen3
from dora_pipe.bench.engine import MODEL
from dora_pipe.bench.qwen3 import SHAPES
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.producers.engines.torch.rope import Rope

LLAMA_25M: Final = CausalLM(
    family="llama",
    vocabulary=4096,
    hidden=512,
    intermediate=1408,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    norm_eps=1e-6,
    rope=Rope(kind="default", theta=10000.0),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
"""25.7 M parameters, grouped-query attention: 16 KiB of KV cache per token."""

MODELS: Final = {"demo": MODEL, "llama-25m": LLAMA_25M}
TORCH: Final = "torch"
VLLM: Final = "vllm"
ENGINES: Final = (TORCH, VLLM)
VLLM_MODELS: Final = ("llama-25m", *SHAPES)
SLOTS: Final = 2
_SEED: Final = 21


_FLOAT32_ROUNDING: Final = 1e-4
_BFLOAT16_ROUNDING: Final = 0.25


def rounding_of(model: str) -> float:
    """Nats between a log-prob after a move and after a prefill: vLLM's differ in their last bits,
    by more in the type that it runs Qwen3's shapes in."""
    return _BFLOAT16_ROUNDING if model in SHAPES else _FLOAT32_ROUNDING


def vocabulary_of(model: str) -> int:
    """Token ids of a model that is measured."""
    return qwen3.vocabulary_of(model) if model in SHAPES else MODELS[model].vocabulary


def check_known(engine: str, model: str) -> None:
    """Raise UsageError for an engine or a model that is not measured."""
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}", hint=f"there are: {', '.join(ENGINES)}")
    known = VLLM_MODELS if engine == VLLM else tuple(MODELS)
    if model not in known:
        where = f" for {engine}" if model in (*MODELS, *SHAPES) else ""
        raise UsageError(
            f"there is no model {model!r}{where}", hint=f"there are: {', '.join(known)}"
        )


def write_model(directory: Path, name: str) -> None:
    """One of `VLLM_MODELS` with random weights, as a model directory. Needs torch."""
    if name in SHAPES:
        qwen3.write_model(directory, name)
        return
    from safetensors.torch import save_file

    from dora_pipe.producers.engines.torch.weights import random_tensors

    model = MODELS[name]
    write_config(directory, model)
    save_file(dict(random_tensors(model, _SEED)), str(directory / "model.safetensors"))


def write_config(directory: Path, model: CausalLM) -> None:
    """The same without weights."""
    assert model.family == "llama"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": model.family,
        "dtype": "float32",
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": 32_768,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


def open_engine(engine: str, model: str, directory: Path, context_tokens: int) -> Any:
    """One of the engines on one thread; vLLM's reads `directory`."""
    if engine == VLLM:
        from dora_pipe.producers.engines.vllm.core import VllmSettings
        from dora_pipe.producers.engines.vllm.engine import VllmEngine

        return VllmEngine(
            directory,
            slots=SLOTS,
            context_tokens=context_tokens,
            threads=1,
            settings=VllmSettings(
                prefix_cache=False, dtype="bfloat16" if model in SHAPES else "float32"
            ),
        )
    import torch

    from dora_pipe.producers.engines.torch.engine import TorchEngine
    from dora_pipe.producers.engines.torch.model import fuse
    from dora_pipe.producers.engines.torch.weights import random_tensors

    torch.set_num_threads(1)
    shapes = MODELS[model]
    weights = fuse(shapes, random_tensors(shapes, _SEED))
    return TorchEngine(shapes, weights, slots=SLOTS, context_tokens=context_tokens)
