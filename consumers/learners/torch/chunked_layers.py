"""Dense blocks and norms computed on chunks of tokens.

A gated block holds several times its hidden state, norms float32 copies. Chunks, recomputed in
backward (tiled MLP, arXiv 2506.13996, section 3.1), reduce that to the input plus one chunk's
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dora_pipe.consumers.learners.torch.memory import MemoryOptions, chunk_slices, decoder_layers

_PROBE_TOKENS: Final = 8

NEAR: Final = 1e-4
"""Relative probe tolerance: summation order only."""


def mlp_width(network: Any) -> int:
    """Return the widest size of the dense blocks; 0 without any."""
    sizes = [
        size for block in _blocks(network) for held in block.parameters() for size in held.shape
    ]
    return max(sizes, default=0)


def chunk_layers(network: Any, memory: MemoryOptions) -> None:
    """Chunk blocks and norms, unless a probe shows that they do not act per token."""
    width = mlp_width(network)
    if not memory.mlp_chunk_tokens or not width:
        return
    halves = MemoryOptions(mlp_chunk_tokens=_PROBE_TOKENS // 2)
    ids = torch.arange(_PROBE_TOKENS).reshape(1, -1) % network.config.vocab_size
    with torch.no_grad():
        before = network(input_ids=ids, use_cache=False).logits
        plain = {module: module.forward for module in _token_wise(network)}
        for module, compute in plain.items():
            module.forward = _in_chunks(compute, halves, width)
        after = network(input_ids=ids, use_cache=False).logits
    equal = torch.allclose(before, after, rtol=NEAR, atol=NEAR * float(before.abs().max()))
    for module, compute in plain.items():
        module.forward = _in_chunks(compute, memory, width) if equal else compute


def _blocks(network: Any) -> Iterator[Any]:
    """Blocks with experts need all tokens at once."""
    for layer in decoder_layers(network):
        block = getattr(layer, "mlp", None)
        if block is not None and not any("expert" in name for name, _ in block.named_modules()):
            yield block


def _token_wise(network: Any) -> Iterator[Any]:
    yield from _blocks(network)
    holders = [*decoder_layers(network), network.base_model]
    for child_module in (child for holder in holders for child in holder.children()):
        if type(child_module).__name__.endswith("Norm"):
            yield child_module


def _in_chunks(
    compute: Callable[[Tensor], Tensor], memory: MemoryOptions, width: int
) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        rows, tokens = hidden.shape[:2]
        count = memory.mlp_chunks(rows * tokens, width, hidden.device.type)
        if count <= 1:
            return compute(hidden)
        sizes = [part.stop - part.start for part in chunk_slices(rows * tokens, count)]
        outputs = [
            checkpoint(compute, part, use_reentrant=False, preserve_rng_state=False)
            for part in torch.split(hidden.flatten(0, 1).unsqueeze(0), sizes, dim=1)
        ]
        return torch.cat(outputs, dim=1).reshape(hidden.shape)

    return forward
