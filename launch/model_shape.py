"""Sizes of a causal language model, counted on its network without weights."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_pipe.core.errors import PolicyError, install_hint
from dora_pipe.producers.engines.torch.causal_lm import EXPERTS
from dora_pipe.producers.engines.vllm.core import token_kv_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Example: ``model_shape(Path("models/qwen3-4b")).parameters``"""

    family: str
    dtype: str
    """Dtype of the weights in config.json; empty if missing."""
    quantized: bool
    parameters: int
    experts: int
    embedding: int
    tied: bool
    largest: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    grouped: bool
    """Attention heads share keys and values."""
    attention: int
    """Elements of queries, keys, values and their result, per token and layer."""
    width: int
    """Intermediate size per token and layer."""
    mixture: bool
    linears: Mapping[str, int]
    """Rows plus columns of all linear layers by name, for adapters."""
    kv_values: int
    """Elements in the KV cache per token."""

    @property
    def ends(self) -> int:
        return self.embedding * (1 if self.tied else 2)


def model_shape(folder: Path) -> ModelShape:
    """Return the sizes of a model directory from config.json.

    Raises PolicyError for an architecture that transformers lacks.
    """
    network = _network(folder)
    config = network.config.to_dict()
    sizes = {name: tensor.numel() for name, tensor in network.named_parameters()}
    linears: Counter[str] = Counter()
    for name, module in network.named_modules():
        if hasattr(module, "out_features"):
            linears[name.rpartition(".")[2]] += module.in_features + module.out_features
    heads = int(config["num_attention_heads"])
    shared = int(config.get("num_key_value_heads") or heads)
    return ModelShape(
        family=str(config.get("model_type") or ""),
        dtype=str(config.get("dtype") or "").removeprefix("torch."),
        quantized=bool(config.get("quantization_config")),
        parameters=sum(sizes.values()),
        experts=sum(size for name, size in sizes.items() if ".experts." in name),
        embedding=network.get_input_embeddings().weight.numel(),
        tied=network.get_output_embeddings().weight is network.get_input_embeddings().weight,
        largest=max(sizes.values()),
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        vocabulary=int(config["vocab_size"]),
        heads=heads,
        grouped=shared < heads,
        attention=_attention(config, heads, shared),
        width=_width(config),
        mixture=any(config.get(key) for key in EXPERTS),
        linears=linears,
        kv_values=token_kv_values(config),
    )


def _network(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise PolicyError(f"{folder} has no config.json", hint="name a model directory")
    if importlib.util.find_spec("transformers") is None:
        raise PolicyError("reading model sizes needs transformers", hint=install_hint("torch"))
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return build(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (
        StrictDataclassError,
        AttributeError,
        KeyError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise PolicyError(
            f"{folder}: transformers cannot build a causal LM from config.json: {reason}"
        ) from error


def _attention(config: Mapping[str, Any], heads: int, shared: int) -> int:
    if config.get("kv_lora_rank"):
        keys = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        return 2 * heads * (keys + int(config["v_head_dim"]))
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return 2 * (heads + shared) * size


def _width(config: Mapping[str, Any]) -> int:
    dense = int(config.get("intermediate_size") or 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    if not chosen:
        return dense
    width = int(config.get("moe_intermediate_size") or dense)
    alone = int(config.get("shared_expert_intermediate_size") or 0)
    return chosen * width + (alone or width * int(config.get("n_shared_experts") or 0))
