"""Read and write KV caches of running requests in vLLM's processes.

Each kernel orders a block's numbers differently; `learned_places` finds the order with vLLM's own
writer. Exported caches are ordered by token, kv head and dimension, independent of block size,
kernel and tensor parallelism. Only plain blocks of keys and values are supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from dora_pipe.producers.engines.engine import Array
from dora_pipe.producers.engines.vllm.kv_files import CacheFacts

CONNECTORS: Final = "dora_pipe.producers.engines.vllm.plugins"

_DIGIT: Final = 128
"""Integers below it are exact in every KV cache type."""

_STORED: Final = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2"}
"""numpy types of KV caches; bfloat16 as bits."""


def arguments() -> dict[str, Any]:
    """Return vLLM's options for the connector; a missing cache is recomputed."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="ServerConnector",
        kv_connector_module_path=CONNECTORS,
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
    )
    return {"kv_transfer_config": config}


class RankCache:
    """KV cache of one process.

    Example: ``cache.read_into(blocks, array)`` between two steps.
    """

    def __init__(self, runner: Any, version: str) -> None:
        model = runner.vllm_config.model_config
        self._layers = _with_cache(runner.compilation_config.static_forward_context)
        self._places = self._learned(runner.kv_cache_config)
        self._own = own_heads(int(model.get_total_num_kv_heads()))
        self.facts: CacheFacts = CacheFacts()
        if self._places is not None:
            _, _, _, width = self._places.shape
            heads, kind = int(model.get_total_num_kv_heads()), model.hf_config.model_type
            sizes = f"{len(self._layers)}x{heads}x{width}"
            self.facts = CacheFacts(
                layout=f"vllm-{version} {kind} {sizes} {str(self._dtype).removeprefix('torch.')}",
                dtype=_STORED[self._dtype],
                layers=len(self._layers),
                heads=heads,
                width=width,
            )

    def read_into(self, blocks: Sequence[int], array: Array) -> None:
        """Copy this process's heads into `array` [layers, 2, tokens, kv_heads, head_dim]."""
        assert self._places is not None
        _, size, heads, width = self._places.shape
        tokens = array.shape[2]
        count = -(-tokens // size)
        for number, layer in enumerate(self._layers.values()):
            cache = layer.kv_cache
            chosen = cache[torch.tensor(blocks[:count], device=cache.device)].flatten(1)
            ordered = chosen.index_select(1, self._places.flatten())
            ordered = ordered.view(count, 2, size, heads, width).transpose(0, 1).flatten(1, 2)
            values = _bits(ordered[:, :tokens]).cpu().numpy().view(array.dtype)
            array[number, :, :, self._own] = values

    @property
    def _dtype(self) -> Any:
        first: Any = next(iter(self._layers.values()))
        return first.kv_cache.dtype

    def _learned(self, config: Any) -> torch.Tensor | None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            return None
        spec, blocks = groups[0].kv_cache_spec, config.num_blocks
        shape = (blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        caches = [layer.kv_cache for layer in self._layers.values()]
        if any(tuple(cache.shape) != shape or cache.dtype not in _STORED for cache in caches):
            return None
        return learned_places(next(iter(self._layers.values())))


def own_heads(heads: int) -> slice:
    """Return this process's kv heads; processes share one if there are fewer heads."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * heads // ranks
    return slice(first, first + max(1, heads // ranks))


def learned_places(layer: Any) -> torch.Tensor | None:
    """Return a block's places [keys and values, token, head, dimension], None if a number has not
    exactly one."""
    cache = torch.zeros_like(layer.kv_cache[:1])
    _, heads, size, twice = cache.shape
    numbers = torch.arange(cache.numel(), device=cache.device)
    learned = torch.zeros_like(numbers)
    slots, unit = torch.arange(size, device=cache.device), 1
    with torch.inference_mode():
        while unit < len(numbers):
            digits = (numbers // unit % _DIGIT).to(cache.dtype)
            key, value = digits.view(2, size, heads, twice // 2)
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
            learned += cache.flatten().long() * unit
            unit *= _DIGIT
        places = learned.argsort()
        if not torch.equal(learned[places], numbers):
            return None
    return places.view(2, size, heads, twice // 2)


def write(layers: Mapping[str, Any], array: Array, blocks: Sequence[int], *, start: int) -> None:
    """Write positions from `start` on into blocks; `array` has this process's heads."""
    attention = _with_cache(layers)
    cache = next(iter(attention.values())).kv_cache
    positions = torch.arange(start, array.shape[2], device=cache.device)
    size = cache.shape[2]
    slots = torch.tensor(blocks, device=cache.device)[positions // size] * size + positions % size
    for layer, values in zip(attention.values(), array, strict=True):
        own = values[:, start:]
        given = torch.from_numpy(own.view("<i2") if cache.dtype == torch.bfloat16 else own)
        key, value = given.view(cache.dtype).to(cache.device)
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int16) if numbers.dtype == torch.bfloat16 else numbers


def _with_cache(layers: Mapping[str, Any]) -> dict[str, Any]:
    held = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    return {name: layers[name] for name, cache in held.items() if isinstance(cache, torch.Tensor)}
