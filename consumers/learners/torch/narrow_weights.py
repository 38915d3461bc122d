"""Frozen weights held in bfloat16 for passes in float32.

A module widens its matrices only while it computes; autograd keeps the narrow ones and widens again
in backward. So one module is float32 at a time, with the bits of a float32 base. Norms and biases
are always float32. Under autocast plain linear layers use bfloat16 directly. Recomputation
(`trainer.gradient_checkpointing`, chunks) keeps one layer's copies during its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_parameter_registration_hook

HELD = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Part:
    held: Any
    """The parameter itself: ZeRO 3 gathers its values only while needed."""
    size: torch.Size
    strides: tuple[int, ...]
    offset: int

    def widened(self) -> Tensor:
        part = self.held.detach().as_strided(self.size, self.strides, self.offset)
        wide: Tensor = part.to(torch.float32)
        return wide


class NarrowWeights:
    """Frozen matrices of one network."""

    def __init__(self) -> None:
        self._widened: dict[int, Any] = {}

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Create matrices in bfloat16 at once, avoiding a float32 network; one thread at a time."""
        handle = register_module_parameter_registration_hook(_narrow)
        try:
            yield
        finally:
            handle.remove()

    def widen(self, network: Any) -> None:
        """Make the network's modules compute with widened matrices."""
        for module in network.modules():
            if any(_is_held(parameter) for parameter in module._parameters.values()):
                module.forward = self._widening(module, module.forward)

    def kept_narrow(self) -> AbstractContextManager[Any]:
        """Keep narrow references instead of widened matrices for backward."""
        return saved_tensors_hooks(
            self._pack, lambda kept: kept.widened() if isinstance(kept, _Part) else kept
        )

    def _widening(self, module: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            if type(module) is torch.nn.Embedding:
                return compute(*given, **named).to(torch.float32)
            plain = type(module) is torch.nn.Linear
            if plain and torch.is_autocast_enabled(module.weight.device.type):
                return compute(*given, **named)
            with self._in_place_of(module):
                return compute(*given, **named)

        return forward

    @contextmanager
    def _in_place_of(self, module: Any) -> Iterator[None]:
        """Shadow the module's parameters by widened instance attributes."""
        held = {
            name: parameter for name, parameter in module._parameters.items() if _is_held(parameter)
        }
        wide = {name: parameter.detach().to(torch.float32) for name, parameter in held.items()}
        storages = {_storage(tensor): held[name] for name, tensor in wide.items()}
        self._widened.update(storages)
        module.__dict__.update(wide)
        try:
            yield
        finally:
            for name in wide:
                del module.__dict__[name]
            for storage in storages:
                del self._widened[storage]

    def _pack(self, tensor: Tensor) -> Tensor | _Part:
        held = self._widened.get(_storage(tensor))
        if held is None:
            return tensor.detach()
        return _Part(held, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _narrow(module: Any, name: str, parameter: Any) -> Any:
    if parameter is None or parameter.dim() < 2 or parameter.dtype != torch.float32:
        return None  # keep unchanged
    return torch.nn.Parameter(parameter.detach().to(HELD), requires_grad=False)


def _is_held(parameter: Any) -> bool:
    return parameter is not None and parameter.dtype == HELD


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
