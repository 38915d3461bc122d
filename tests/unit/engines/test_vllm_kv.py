"""Tests of vLLM's KV layouts, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

HEADS, SIZE, WIDTH, BLOCKS = 3, 32, 32, 7


def beside(cache: Any, block: int, position: int, key: Any, value: Any) -> None:
    cache[block, :, position, :WIDTH], cache[block, :, position, WIDTH:] = key, value


def turned(cache: Any, block: int, position: int, key: Any, value: Any) -> None:
    flat = cache[block].view(HEADS, 2 * SIZE * WIDTH)
    flat[:, position : SIZE * WIDTH : SIZE] = key
    flat[:, (SIZE + position) * WIDTH : (SIZE + position + 1) * WIDTH] = value


def tiled(cache: Any, block: int, position: int, key: Any, value: Any) -> None:
    flat = cache[block].view(HEADS, 2, SIZE * WIDTH)
    tile = flat[:, 0].view(HEADS, SIZE // 16, WIDTH // 2, 16, 2)
    tile[:, position // 16, :, position % 16, :] = key.view(HEADS, WIDTH // 2, 2)
    flat[:, 1].view(HEADS, SIZE // 2, WIDTH, 2)[:, position // 2, :, position % 2] = value


def lossy(cache: Any, block: int, position: int, key: Any, value: Any) -> None:
    cache[block, :, position, :WIDTH], cache[block, :, position, WIDTH:] = value, value


Put = Callable[[Any, int, int, Any, Any], None]


@dataclass
class Layer:
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

    first_layer = layer(put, dtype)
    places = learned_places(first_layer)
    assert places is not None and places.shape == (2, SIZE, HEADS, WIDTH)
    assert not first_layer.kv_cache.any(), "the cache itself is left alone"
    values = torch.randn(2, SIZE, HEADS, WIDTH).to(dtype)
    slots = torch.arange(SIZE) + 4 * SIZE
    first_layer.do_kv_cache_update(first_layer, values[0], values[1], first_layer.kv_cache, slots)
    assert torch.equal(first_layer.kv_cache[4].flatten()[places], values)


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
    values = torch.randn(2, 2, 75, HEADS, WIDTH).to(dtype)
    bits = (
        values.view(torch.int16).numpy().view(np.uint16) if dtype.itemsize == 2 else values.numpy()
    )
    write({**layers, "norm": object()}, bits, [5, 2, 3], start=start)
    places = learned_places(layers["first"])
    for number, entry in enumerate(layers.values()):
        read = entry.kv_cache[[5, 2, 3]].flatten(1)[:, places].transpose(0, 1).flatten(1, 2)
        assert torch.equal(read[:, start:75], values[number][:, start:])
        assert not read[:, :start].any() and not read[:, 75:].any()
        assert not entry.kv_cache[[0, 1, 4, 6]].any()
