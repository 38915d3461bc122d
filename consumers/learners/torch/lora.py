"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): x W^T + scale (x A^T) B^T.

Hooks add A [rank, in] and B [out, rank] to unchanged layers. A starts uniform in +-1/sqrt(in), as
in peft, seeded by base digest and layer name; B starts at zero, so an untrained policy equals its
base, also in digest. A bfloat16 base is held in that type only (`narrow_weights`); its adapters
have float32 masters (`masters`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dora_pipe.consumers.learners.torch.model import (
    DTYPES_OF,
    Passage,
    TorchModel,
    bfloat16_names,
    published_dtype,
    tensor_source,
)
from dora_pipe.consumers.learners.torch.narrow_weights import NarrowWeights
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.adapters import a_name, b_name, base_of, base_tensors, read_adapter
from dora_pipe.store.safetensors_file import TensorSource, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Options of an adapter; see `dora_pipe.config.model.Lora`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def numerics(self) -> dict[str, str]:
        layers = " ".join(sorted(set(self.targets)))
        return {"lora": f"rank {self.rank}, scale {self.scale:g}, {layers}"}


class Pair(torch.nn.Module):
    """A and B of one linear layer."""

    def __init__(self, weight: Tensor, options: LoraOptions) -> None:
        super().__init__()
        out, in_ = weight.shape
        self.a = torch.nn.Parameter(torch.zeros(options.rank, in_, device=weight.device))
        self.b = torch.nn.Parameter(torch.zeros(out, options.rank, device=weight.device))
        self._scale = options.scale

    def forward(self, x: Tensor, other: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return scale (x A^T) B^T, with its own matrices or others."""
        linear = torch.nn.functional.linear
        a, b = (self.a, self.b) if other is None else other
        return linear(linear(x, a), b) * self._scale


class Pairs(torch.nn.Module):
    """Adapter of a network, which it freezes; a separate module, so that ZeRO finds what is
    trained."""

    def __init__(self, network: Any, options: LoraOptions) -> None:
        """Raises PolicyError if the network has none of the layers."""
        super().__init__()
        network.requires_grad_(False)
        self._instead: Mapping[str, Tensor] | None = None
        self._by_layer: dict[str, Pair] = {}
        self.layers: dict[str, tuple[int, int]] = {}
        for name, linear in _adapted(network, options.targets):
            self._by_layer[name] = Pair(linear.weight, options)
            self.layers[name] = tuple(linear.weight.shape)
            linear.register_forward_hook(self._adding(name, self._by_layer[name]))
        self.modules_ = torch.nn.ModuleList(self._by_layer.values())

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every matrix by its name in a file."""
        for layer, pair in self._by_layer.items():
            yield a_name(layer), pair.a
            yield b_name(layer), pair.b

    @contextmanager
    def instead(self, matrices: Mapping[str, Tensor]) -> Iterator[None]:
        """Use another adapter, given by names in a file; empty for the base alone."""
        self._instead = matrices
        try:
            yield
        finally:
            self._instead = None

    def _adding(self, layer: str, pair: Pair) -> Callable[[Any, Any, Tensor], Tensor]:
        a, b = a_name(layer), b_name(layer)

        def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
            instead = self._instead
            if instead is None:
                added: Tensor = output + pair(inputs[0])
                return added
            if not instead:
                return output
            return output + cast("Tensor", pair(inputs[0], (instead[a], instead[b])))

        return add


class AdapterBase:
    """Base of an adapter policy, and whether the adapter was ever updated."""

    def __init__(self, first: Path, options: LoraOptions) -> None:
        self._first = first
        self._options = options
        self._digest = ""
        self.dtype = published_dtype(first)
        self.base = first
        self.updated = False

    def take(
        self, weights: Path, *, layers: Mapping[str, tuple[int, int]], have: Callable[[Path], None]
    ) -> dict[str, Tensor]:
        """Return adapter matrices: initial ones for full weights, else a file's.

        Calls `have` to load another base. Raises PolicyError on a mismatch.
        """
        base = base_of(weights)
        if base is None and published_dtype(weights) != self.dtype:
            raise PolicyError(f"{weights} has weights of another type than version 0")
        path = weights if base is None else self._first
        digest = self._digest if base == self._digest else read_manifest(path).digest
        if base not in (None, digest):
            raise PolicyError(f"the adapter has base weights {base[:12]}, expected {digest[:12]}")
        if base is None:
            matrices = _begun(digest, layers, self._options.rank, DTYPES_OF[self.dtype])
        else:
            matrices = read_matrices(weights, layers, self._options, self.dtype)
        if digest != self._digest:
            self._digest = ""
            have(path)
            self._digest = digest
        self.base, self.updated = path, base is not None
        return matrices

    def other(
        self, weights: Path | None, layers: Mapping[str, tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Return another version's matrices; empty for version 0. Raises PolicyError for another
        base."""
        if weights is None:
            return {}
        base = base_of(weights)
        stands_on = read_manifest(weights).digest if base is None else base
        if stands_on != self._digest:
            raise PolicyError(f"{weights} has base {stands_on[:12]}, expected {self._digest[:12]}")
        return {} if base is None else read_matrices(weights, layers, self._options, self.dtype)

    def base_tensors(self) -> list[TensorSource]:
        """Return the tensors of an adapter file that describe its base."""
        return base_tensors(self._digest, self._options.scale)


class LoraModel(TorchModel):
    """Network on frozen weights with a trained adapter."""

    def __init__(self, assets: Path, *, base: Path, options: LoraOptions, **how: Any) -> None:
        self._adapter_base = AdapterBase(base, options)
        self._narrow = NarrowWeights() if self._adapter_base.dtype == "bfloat16" else None
        super().__init__(assets, bfloat16=bfloat16_names(base), narrow=self._narrow, **how)
        self.pairs = Pairs(self.network, options)
        self._reference: Mapping[str, Tensor] = {}

    def load(self, weights: Path) -> None:
        """Load full weights with a new adapter, or an adapter on version 0. Raises PolicyError."""
        matrices = self._adapter_base.take(weights, layers=self.pairs.layers, have=super().load)
        self.updated = self._adapter_base.updated
        with torch.no_grad():
            for name, matrix in self.parameters():
                matrix.copy_(matrices[name])

    def logprobs(self, passage: Passage) -> Tensor:
        """Return log-probs; autograd keeps narrow base weights instead of widened copies."""
        with nullcontext() if self._narrow is None else self._narrow.kept_narrow():
            return super().logprobs(passage)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.pairs.named()

    @property
    def bfloat16(self) -> frozenset[str]:
        """Return the names of its bfloat16-published matrices: all or none."""
        return frozenset(name for name, _ in self.parameters() if self._narrow is not None)

    def refer_to(self, weights: Path | None) -> None:
        """Load another version's adapter as reference; None is version 0. Raises PolicyError."""
        matrices = self._adapter_base.other(weights, self.pairs.layers)
        self._reference = {name: matrix.to(self.device) for name, matrix in matrices.items()}

    def reference_logprobs(self, passage: Passage) -> Tensor:
        """Return log-probs under the reference, without a second copy of the base."""
        with torch.no_grad(), self.pairs.instead(self._reference):
            return self.logprobs(passage)

    def sources(self) -> list[TensorSource]:
        """Return the adapter; before the first update the base itself."""
        if not self.updated:
            return super().sources()
        kind = DTYPES_OF[self._adapter_base.dtype]
        sources = [tensor_source(name, matrix, kind) for name, matrix in self.parameters()]
        return sources + self._adapter_base.base_tensors()


def _adapted(network: Any, targets: tuple[str, ...]) -> list[tuple[str, Any]]:
    modules = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets
    ]
    if not modules:
        raise PolicyError(f"the model has no layer {' or '.join(targets)}")
    return sorted(modules, key=lambda item: item[0])


def _begun(
    base: str, layers: Mapping[str, tuple[int, int]], rank: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Float32 matrices with values representable in `dtype`."""
    tensors: dict[str, Tensor] = {}
    for layer, (out, in_) in layers.items():
        seed = hashlib.sha256(f"{base} {layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        drawn = torch.rand((rank, in_), generator=generator) * 2 - 1
        tensors[a_name(layer)] = (drawn / math.sqrt(in_)).to(dtype).to(torch.float32)
        tensors[b_name(layer)] = torch.zeros(out, rank)
    return tensors


def read_matrices(
    weights: Path,
    layers: Mapping[str, tuple[int, int]],
    options: LoraOptions,
    dtype: PolicyDtype = "float32",
) -> dict[str, Tensor]:
    """Read an adapter's float32 matrices, which must fit. Raises PolicyError."""
    adapter = read_adapter(weights, digest=read_manifest(weights).digest)
    if odd := sorted(adapter.pairs.keys() ^ layers.keys()):
        raise PolicyError(f"{weights} does not fit the run: {odd[0]!r} is on one side only")
    if adapter.dtype != dtype:
        raise PolicyError(f"{weights} does not fit the run: it is {adapter.dtype}, not {dtype}")
    if adapter.scale != np.float32(options.scale):
        raise PolicyError(f"{weights} does not fit the run: its scale is {adapter.scale:g}")
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in adapter.pairs.items():
        out, in_ = layers[layer]
        if (a.shape, b.shape) != ((options.rank, in_), (out, options.rank)):
            raise PolicyError(f"{weights} does not fit the run: {layer!r} differs")
        tensors[a_name(layer)], tensors[b_name(layer)] = torch.from_numpy(a), torch.from_numpy(b)
    return tensors
