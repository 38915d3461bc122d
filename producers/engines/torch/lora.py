"""LoRA adapters of the torch engine.

For results independent of the batch, a version's rows are gathered for its own products, at least
`ROWS_MIN`, and only those rows change. Adapters of fused layers are fused: A concatenated, B
block-diagonal, scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.base import ResidentVersions, Version
from dora_pipe.producers.engines.engine import EngineRequest
from dora_pipe.producers.engines.slots import Integers
from dora_pipe.producers.engines.torch.causal_lm import TURNED, CausalLM
from dora_pipe.producers.engines.torch.experts import ROWS_MIN
from dora_pipe.producers.engines.torch.model import interleaved, parts_of_qkv
from dora_pipe.store.adapters import Adapter, read_adapter_on

Parts = Mapping[str, tuple[str, ...]]
"""Parts of each fused layer, in the order of their outputs."""

PROBE_ROWS: Final = (ROWS_MIN, ROWS_MIN + 1, 2 * ROWS_MIN + 3, 40)
PROBE_RUNS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Addition to a fused layer: ``(x @ down.T) @ up.T``."""

    down: torch.Tensor  # [parts * rank, in]
    up: torch.Tensor  # [out, parts * rank]


LayerPairs = Mapping[str, Pair]
"""Pairs by fused layer; adapted layers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion(Version):
    layers: tuple[LayerPairs, ...] = ()
    """Pairs by decoder layer; empty for the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Token rows of one version in a step."""

    layers: tuple[LayerPairs, ...]
    places: torch.Tensor  # int64 [count], ascending
    gathered: torch.Tensor  # padded to ROWS_MIN with the last

    def add(self, number: int, fused: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the output for `x` to a fused layer's `y`."""
        pair = self.layers[number].get(fused)
        if pair is None:
            return
        output = F.linear(F.linear(x.index_select(0, self.gathered), pair.down), pair.up)
        y.index_add_(0, self.places, output[: len(self.places)])


class AdapterVersions(ResidentVersions[AdapterVersion]):
    """Versions of an engine, and of each slot."""

    def __init__(self, model: CausalLM, *, slots: int, rank: int, most: int, base: str) -> None:
        super().__init__(AdapterVersion, most=most, adapters=rank > 0, base=base)
        self._model = model
        self._rank = rank
        self._under = np.full(slots, -1, np.int64)  # version of each slot

    def assign(self, slot: int, request: EngineRequest) -> None:
        self._under[slot] = self.number_of(request)

    def digest_in(self, slot: int) -> str:
        under = int(self._under[slot])
        return self._versions[under].digest if self.adapters else self.base

    def rows_of(self, slots: Integers) -> list[Rows]:
        """Return the rows with adapters; `slots` is per token row."""
        under = self._under[slots]
        rows = []
        for version in np.unique(under).tolist() if self.adapters else ():
            layers = self._versions[version].layers
            if not layers:
                continue
            places = np.flatnonzero(under == version)
            gathered = np.pad(places, (0, max(0, ROWS_MIN - len(places))), mode="edge")
            rows.append(
                Rows(
                    layers=layers,
                    places=torch.from_numpy(places),
                    gathered=torch.from_numpy(gathered),
                )
            )
        return rows

    def _made(self, path: Path, version: int, digest: str) -> AdapterVersion:
        if digest == self.base:
            return AdapterVersion(digest=digest)
        adapter = read_adapter_on(path, digest=digest, base=self.base, rank=self._rank)
        return AdapterVersion(digest=digest, layers=fused(self._model, adapter, path))


def fused(model: CausalLM, adapter: Adapter, where: Path) -> tuple[LayerPairs, ...]:
    """Return fused matrices. Raises PolicyError if they do not fit."""
    remaining = set(adapter.pairs)
    layers: list[LayerPairs] = []
    for number in range(model.layers):
        pairs: dict[str, Pair] = {}
        for name, parts in fused_parts(model, number).items():
            there = [f"model.layers.{number}.{part}" for part in parts]
            if remaining.intersection(there):
                pairs[name] = _pair(model, adapter, number, parts, where)
                remaining.difference_update(there)
        layers.append(pairs)
    if remaining:
        raise PolicyError(f"{where}: the engine has no linear layer {min(remaining)!r} to adapt")
    return tuple(layers)


def fused_parts(model: CausalLM, number: int) -> Parts:
    """Return the parts of fused layers; routed experts have none."""
    block, width = model.block(number)
    parts: dict[str, tuple[str, ...]] = {
        "qkv": tuple(parts_of_qkv(model)),
        "out": ("self_attn.o_proj",),
    }
    if width:
        parts |= {
            "gate_up": (f"{block}.gate_proj", f"{block}.up_proj"),
            "down": (f"{block}.down_proj",),
        }
    return parts


def _pair(
    model: CausalLM, adapter: Adapter, number: int, parts: Sequence[str], where: Path
) -> Pair:
    shapes, rank = model.tensors(), adapter.rank
    downs, ups = [], []
    for part in parts:
        layer = f"model.layers.{number}.{part}"
        out, in_ = shapes[f"{layer}.weight"]
        if layer in adapter.pairs:
            a, b = (torch.from_numpy(pair) for pair in adapter.pairs[layer])
        else:
            a, b = torch.zeros(rank, in_), torch.zeros(out, rank)
        if tuple(a.shape) != (rank, in_) or tuple(b.shape) != (out, rank):
            raise PolicyError(f"{where}: the adapter of {layer} is of another model")
        if part in TURNED:
            b = interleaved(model, b)
        downs.append(a)
        ups.append(b * adapter.scale)
    block_diag: Any = torch.block_diag
    return Pair(down=torch.cat(downs), up=block_diag(*ups))


def is_invariant(model: CausalLM, rank: int) -> bool:
    """Measure whether an adapter's results are independent of the batch, bitwise."""
    generator = torch.Generator().manual_seed(0)
    shapes = model.tensors()
    kinds = {
        tuple(shapes[f"model.layers.{number}.{part}.weight"] for part in parts)
        for number in model.kinds()
        for parts in fused_parts(model, number).values()
    }
    for sizes in sorted(kinds):
        parts = len(sizes)
        in_, out = sizes[0][1], sum(size for size, _ in sizes)
        down = torch.randn(parts * rank, in_, generator=generator)
        up = torch.randn(out, parts * rank, generator=generator)
        x = torch.randn(PROBE_RUNS, in_, generator=generator)
        with torch.inference_mode():
            batched = F.linear(F.linear(x, down), up)
            for count in PROBE_ROWS:
                for start in (0, PROBE_RUNS - count):
                    alone = F.linear(F.linear(x[start : start + count], down), up)
                    if not torch.equal(alone, batched[start : start + count]):
                        return False
    return True
