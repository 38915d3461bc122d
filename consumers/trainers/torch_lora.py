"""A network whose adapter alone is trained; decides where it stands and how it begins.

LoRA (Hu et al. 2021, arXiv 2106.09685): a linear layer computes x W^T + scale (x A^T) B^T, of which
only A [rank, in] and B [out, rank] learn. The layers of the network stay what they are, with their
names; the adapter is added to what they give out.

A begins uniform in +-1/sqrt(in), as peft's does, drawn for each layer from the base's digest and
the layer's name alone; B begins as zero. So before its first update a policy is its base, and has
the base's digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_pipe.consumers.trainers.torch_model import TorchModel, tensor_source
from dora_pipe.errors import PolicyError
from dora_pipe.policies.adapters import a_name, b_name, base_of, marks, read_adapter
from dora_pipe.policies.digest import read_manifest
from dora_pipe.policies.safetensors_file import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """What an adapter is; see `dora_pipe.config.model.Lora`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What an adapter makes counts so many times."""
        return self.alpha / self.rank


class LoraModel(TorchModel):
    """The network of a model directory on frozen weights, with an adapter.

    Example: ``LoraModel(assets, base=version_0, options=options, device="cpu").load(weights)``
    """

    def __init__(self, assets: Path, *, base: Path, options: LoraOptions, device: str) -> None:
        super().__init__(assets, device=device)
        self.network.requires_grad_(False)
        self._base = base
        self._options = options
        self._digest = ""
        self._updated = False
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in self._adapted():
            out, in_ = module.weight.shape
            self._pairs[name] = (
                torch.zeros(options.rank, in_, device=device).requires_grad_(),
                torch.zeros(out, options.rank, device=device).requires_grad_(),
            )
            module.register_forward_hook(self._adding(name))

    def load(self, weights: Path) -> None:
        """Take whole weights, on which an adapter begins, or an adapter on version 0.

        Raises PolicyError if they do not fit.
        """
        base = base_of(weights)
        self._load_base(weights if base is None else self._base, base)
        self._updated = base is not None
        if base is None:
            self._begin()
        else:
            self._take(weights)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and matrix of the adapter."""
        for name, (a, b) in self._pairs.items():
            yield a_name(name), a
            yield b_name(name), b

    def sources(self) -> list[Source]:
        """The adapter and what it stands on; before the first update the base itself."""
        if not self._updated:
            return super().sources()
        found = [tensor_source(name, matrix) for name, matrix in self.parameters()]
        return found + marks(self._digest, self._options.scale)

    def updated(self) -> None:
        """The optimizer has changed the adapter."""
        self._updated = True

    def _adapted(self) -> list[tuple[str, Any]]:
        found = [
            (name, module)
            for name, module in self.network.named_modules()
            if isinstance(module, torch.nn.Linear)
            and name.rpartition(".")[2] in self._options.targets
        ]
        if not found:
            raise PolicyError(f"the model has no layer {' or '.join(self._options.targets)}")
        return sorted(found, key=lambda one: one[0])

    def _adding(self, name: str) -> Callable[[Any, Any, Tensor], Tensor]:
        a, b = self._pairs[name]
        linear = torch.nn.functional.linear

        def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
            return output + linear(linear(inputs[0], a), b) * self._options.scale

        return add

    def _load_base(self, weights: Path, wanted: str | None) -> None:
        """Have these weights in the network, if it has not."""
        if wanted is not None and wanted == self._digest:
            return
        found = read_manifest(weights).digest
        if wanted is not None and wanted != found:
            raise PolicyError(f"the adapter stands on weights {wanted[:12]}, not on {found[:12]}")
        self._digest = ""
        super().load(weights)
        self._digest = found

    def _begin(self) -> None:
        with torch.no_grad():
            for name, (a, b) in self._pairs.items():
                seed = hashlib.sha256(f"{self._digest} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
                drawn = torch.rand(a.shape, generator=generator) * 2 - 1
                a.copy_(drawn / math.sqrt(a.shape[1]))
                b.zero_()

    def _take(self, weights: Path) -> None:
        adapter = read_adapter(weights, digest=read_manifest(weights).digest)
        if odd := sorted(adapter.pairs.keys() ^ self._pairs.keys()):
            raise PolicyError(f"{weights} does not fit the run: {odd[0]!r} is on one side only")
        with torch.no_grad():
            for name, matrices in adapter.pairs.items():
                for mine, theirs in zip(self._pairs[name], matrices, strict=True):
                    if tuple(mine.shape) != theirs.shape:
                        raise PolicyError(f"{weights} does not fit the run: {name!r} is another")
                    mine.copy_(torch.from_numpy(theirs))
