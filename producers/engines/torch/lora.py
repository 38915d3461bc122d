"""The adapters of a LoRA policy in the torch engine; decides which rows meet which matrices.

Rules that keep the bits of a row independent of its company, as in `model`:

1. The rows of one version are gathered and go through that version's two products by themselves,
   never fewer than `ROWS_MIN` of them: what other versions there are changes no shape.
2. What comes out is added to those rows and no others. Rows of version 0, whose policy is the base
   alone, meet no adapter at all.

The matrices of layers that are fused in the model are fused here: their A side by side, their B as
blocks on a diagonal. So an adapter costs two small products per fused layer. The scale is in B.
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
from dora_pipe.producers.engines.port import EngineRequest
from dora_pipe.producers.engines.slots import Integers
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.producers.engines.torch.experts import ROWS_MIN
from dora_pipe.producers.engines.torch.model import interleaved, parts_of_qkv
from dora_pipe.store.adapters import Adapter, read_adapter_on

Parts = Mapping[str, tuple[str, ...]]
"""The fused layers of a decoder layer, each with its parts in the order of its outputs."""

PROBE_ROWS: Final = (ROWS_MIN, ROWS_MIN + 1, 2 * ROWS_MIN + 3, 40)
PROBE_RUNS: Final = 80
"""Rows of the largest product that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is added to the outputs of a fused layer: ``(x @ down.T) @ up.T``."""

    down: torch.Tensor  # [parts * rank, in]
    up: torch.Tensor  # [out, parts * rank]


LayerPairs = Mapping[str, Pair]
"""By fused layer; one that is not adapted is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion(Version):
    """A resident version."""

    layers: tuple[LayerPairs, ...] = ()
    """Per decoder layer; empty for the base itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Token rows of one version in a step."""

    layers: tuple[LayerPairs, ...]
    places: torch.Tensor  # int64 [count]: rows of the step, ascending
    gathered: torch.Tensor  # the same, at least ROWS_MIN of them: the last again and again

    def add(self, number: int, fused: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add what the adapter makes of inputs `x` to the outputs `y` of a fused layer."""
        pair = self.layers[number].get(fused)
        if pair is None:
            return
        made = F.linear(F.linear(x.index_select(0, self.gathered), pair.down), pair.up)
        y.index_add_(0, self.places, made[: len(self.places)])


class AdapterVersions(ResidentVersions[AdapterVersion]):
    """The versions of an engine, and which of them each slot is under."""

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
        """The rows that meet adapters, by version; `slots` is the slot of every token row."""
        under = self._under[slots]
        found = []
        for version in np.unique(under).tolist() if self.adapters else ():
            layers = self._versions[version].layers
            if not layers:
                continue
            places = np.flatnonzero(under == version)
            gathered = np.pad(places, (0, max(0, ROWS_MIN - len(places))), mode="edge")
            found.append(
                Rows(
                    layers=layers,
                    places=torch.from_numpy(places),
                    gathered=torch.from_numpy(gathered),
                )
            )
        return found

    def _made(self, path: Path, version: int, digest: str) -> AdapterVersion:
        if digest == self.base:
            return AdapterVersion(digest=digest)
        adapter = read_adapter_on(path, digest=digest, base=self.base, rank=self._rank)
        return AdapterVersion(digest=digest, layers=fused(self._model, adapter, path))


def fused(model: CausalLM, adapter: Adapter, where: Path) -> tuple[LayerPairs, ...]:
    """The adapter's matrices as the engine needs them. Raises PolicyError if they do not fit."""
    left = set(adapter.pairs)
    layers: list[LayerPairs] = []
    for number in range(model.layers):
        pairs: dict[str, Pair] = {}
        for name, parts in fused_parts(model, number).items():
            there = [f"model.layers.{number}.{part}" for part in parts]
            if left.intersection(there):
                pairs[name] = _pair(model, adapter, number, parts, where)
                left.difference_update(there)
        layers.append(pairs)
    if left:
        raise PolicyError(f"{where}: the engine has no linear layer {min(left)!r} to adapt")
    return tuple(layers)


def fused_parts(model: CausalLM, number: int) -> Parts:
    """Of a decoder layer; experts of a mixture have no adapter, what every token passes has."""
    block, width = model.block(number)
    found: dict[str, tuple[str, ...]] = {
        "qkv": tuple(parts_of_qkv(model)),
        "out": ("self_attn.o_proj",),
    }
    if width:
        found |= {
            "gate_up": (f"{block}.gate_proj", f"{block}.up_proj"),
            "down": (f"{block}.down_proj",),
        }
    return found


def _pair(
    model: CausalLM, adapter: Adapter, number: int, parts: Sequence[str], where: Path
) -> Pair:
    shapes, rank = model.tensors(), adapter.rank
    downs, ups = [], []
    for part in parts:
        layer = f"model.layers.{number}.{part}"
        out, in_ = shapes[f"{layer}.weight"]
        if layer in adapter.pairs:
            a, b = (torch.from_numpy(one) for one in adapter.pairs[layer])
        else:
            a, b = torch.zeros(rank, in_), torch.zeros(out, rank)
        if tuple(a.shape) != (rank, in_) or tuple(b.shape) != (out, rank):
            raise PolicyError(f"{where}: the adapter of {layer} is of another model")
        if part in model.turned_rows:
            b = interleaved(b, model.turned_rows[part])
        downs.append(a)
        ups.append(b * adapter.scale)
    block_diag: Any = torch.block_diag
    return Pair(down=torch.cat(downs), up=block_diag(*ups))


def is_invariant(model: CausalLM, rank: int) -> bool:
    """Whether the products of an adapter of this rank give a row the same bits in any company.

    Measured, for the shapes of this model on this machine, as `probe` does for the others.
    """
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
            whole = F.linear(F.linear(x, down), up)
            for count in PROBE_ROWS:
                for start in (0, PROBE_RUNS - count):
                    some = F.linear(F.linear(x[start : start + count], down), up)
                    if not torch.equal(some, whole[start : start + count]):
                        return False
    return True
