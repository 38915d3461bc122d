"""Tests of vLLM's KV layouts, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

HEADS, SIZE, WIDTH, BLOCKS = 3, 32, 32, 7


def beside(cache: Any, block: int, at: int, key: Any, value: Any) -> None:
    """Keys and values of a token adjacent, as in FlashAttention."""
    cache[block, :, at, :WIDTH], cache[block, :, at, WIDTH:] = key, value


def turned(cache: Any, block: int, at: int, key: Any, value: Any) -> None:
    """Keys by dimension, then values by token, as in vLLM's plain CPU kernel."""
    flat = cache[block].view(HEADS, 2 * SIZE * WIDTH)
    flat[:, at : SIZE * WIDTH : SIZE] = key
    flat[:, (SIZE + at) * WIDTH : (SIZE + at + 1) * WIDTH] = value


def tiled(cache: Any, block: int, at: int, key: Any, value: Any) -> None:
    """Tiles of 16 tokens with paired dimensions, values in pairs of tokens."""
    flat = cache[block].view(HEADS, 2, SIZE * WIDTH)
    tile = flat[:, 0].view(HEADS, SIZE // 16, WIDTH // 2, 16, 2)
    tile[:, at // 16, :, at % 16, :] = key.view(HEADS, WIDTH // 2, 2)
    flat[:, 1].view(HEADS, SIZE // 2, WIDTH, 2)[:, at // 2, :, at % 2] = value


def lossy(cache: Any, block: int, at: int, key: Any, value: Any) -> None:
    """Values in two places, keys in none."""
    cache[block, :, at, :WIDTH], cache[block, :, at, WIDTH:] = value, value


Put = Callable[[Any, int, int, Any, Any], None]


@dataclass
class Layer:
    """Minimal attention layer of vLLM; its own `impl`."""

    kv_cache: Any
    put: Put

    @property
    def impl(self) -> Layer:
        return self

    def do_kv_cache_update(
        self, layer: Layer, key: Any, value: Any, cache: Any, slots: Any
    ) -> None:
        for token, slot in enumerate(slots.tolist()):
            self.put(cache, slot // SIZE, slot % SIZE, key[token], value[token])


def layer(put: Put, dtype: Any) -> Layer:
    return Layer(kv_cache=torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=dtype), put=put)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("put", [beside, turned, tiled], ids=lambda put: put.__name__)
def test_order_of_a_block_is_learned_from_who_writes_it(put: Put, dtype: Any) -> None:
    from dora_pipe.producers.engines.vllm.kv import learned_places

    one = layer(put, dtype)
    places = learned_places(one)
    assert places is not None and places.shape == (2, SIZE, HEADS, WIDTH)
    assert not one.kv_cache.any(), "the cache itself is left alone"
    told = torch.randn(2, SIZE, HEADS, WIDTH).to(dtype)
    slots = torch.arange(SIZE) + 4 * SIZE
    one.do_kv_cache_update(one, told[0], told[1], one.kv_cache, slots)
    assert torch.equal(one.kv_cache[4].flatten()[places], told)


def test_order_that_loses_numbers_is_none() -> None:
    from dora_pipe.producers.engines.vllm.kv import learned_places

    assert learned_places(layer(lossy, torch.float32)) is None


@pytest.mark.parametrize("start", [0, SIZE, 2 * SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_is_written_from_where_vllm_has_none_into_the_blocks_it_gives(
    dtype: Any, start: int
) -> None:
    from dora_pipe.producers.engines.vllm.kv import learned_places, write

    layers = {name: layer(tiled, dtype) for name in ("first", "second")}
    told = torch.randn(2, 2, 75, HEADS, WIDTH).to(dtype)
    bits = told.view(torch.int16).numpy().view(np.uint16) if dtype.itemsize == 2 else told.numpy()
    write({**layers, "norm": object()}, bits, [5, 2, 3], start=start)
    places = learned_places(layers["first"])
    for number, one in enumerate(layers.values()):
        read = one.kv_cache[[5, 2, 3]].flatten(1)[:, places].transpose(0, 1).flatten(1, 2)
        assert torch.equal(read[:, start:75], told[number][:, start:])
        assert not read[:, :start].any() and not read[:, 75:].any()
        assert not one.kv_cache[[0, 1, 4, 6]].any()
