"""The network that a config.json describes: built, and probed for what passes make of it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from dora_pipe.consumers.learners.torch.chunked_layers import chunk_layers
from dora_pipe.consumers.learners.torch.memory import AT_ONCE, MemoryOptions, checkpoint_layers
from dora_pipe.consumers.learners.torch.narrow_weights import NarrowWeights
from dora_pipe.core.errors import PolicyError

_PROBE_TOKENS: Final = 4


def build(
    assets: Path, memory: MemoryOptions = AT_ONCE, narrow: NarrowWeights | None = None
) -> Any:
    """The network that a config.json describes, with arbitrary weights. Raises PolicyError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    try:
        config = AutoConfig.from_pretrained(assets, local_files_only=True)
        with nullcontext() if narrow is None else narrow.registered():
            network = make(config, dtype=torch.float32, attn_implementation="sdpa")
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise PolicyError(f"no causal LM can be built from {assets}: {_line(error)}") from error
    network.eval()
    if narrow is not None:
        narrow.widen(network)
    chunk_layers(network, memory)
    if memory.gradient_checkpointing:
        checkpoint_layers(network, offload=memory.activation_offload)
    return network


def head_is_all(network: Any, device: str) -> bool:
    """Whether logits are exactly the head on the last hidden states."""
    head = network.get_output_embeddings()
    if head is None or network.base_model is network:
        return False
    ids = torch.arange(_PROBE_TOKENS, device=device).reshape(1, -1) % network.config.vocab_size
    with torch.no_grad():
        whole = network(input_ids=ids, use_cache=False).logits
        lean = head(network.base_model(input_ids=ids, use_cache=False)[0])
    return torch.equal(whole, lean)


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
