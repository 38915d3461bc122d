"""Frozen weights that lie in bfloat16 under passes in float32; decides what is widened when.

A base under an adapter is published in bfloat16 and never changes, so its matrices are held as they
are published, two bytes a number. A module widens its own for as long as it computes, which is
exact. What autograd keeps for the way back would be these copies, one of every layer: in their
place it keeps which matrix they came from, and the part that is needed is widened again. So at any
time one module's weights are float32, and a step has the bits that it has on a float32 base of the
same numbers.

Vectors (norms, biases) are float32 all the time. Under autocast a plain linear layer is given its
bfloat16 weights as they are: autocast would make them of the copy again.

Where a layer is computed again on the way back (`trainer.gradient_checkpointing`, chunks), the
checkpoint's own hooks stand before these: then one layer's copies are held while its gradient is
computed.
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
    """A view of a widened matrix, as one of what it was widened from."""

    held: Any
    """The parameter itself: ZeRO 3 has its numbers there only while they are needed."""
    size: torch.Size
    strides: tuple[int, ...]
    offset: int

    def widened(self) -> Tensor:
        part = self.held.detach().as_strided(self.size, self.strides, self.offset)
        wide: Tensor = part.to(torch.float32)
        return wide


class NarrowWeights:
    """The matrices of one network, which nothing trains.

    Example: ``narrow = NarrowWeights(); network = build(assets, narrow=narrow)``, and then
    ``with narrow.kept_narrow(): loss = ...``
    """

    def __init__(self) -> None:
        self._widened: dict[int, Any] = {}
        """What the modules that compute now have widened: by storage, what it was made of."""

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Matrices of modules that are made meanwhile are bfloat16 as soon as they are there, so
        that there never is a float32 network; one thread makes one at a time."""
        handle = register_module_parameter_registration_hook(_narrow)
        try:
            yield
        finally:
            handle.remove()

    def widen(self, network: Any) -> None:
        """Have its modules compute with widened matrices."""
        for module in network.modules():
            if any(_is_held(one) for one in module._parameters.values()):
                module.forward = self._widening(module, module.forward)

    def kept_narrow(self) -> AbstractContextManager[Any]:
        """Of widened matrices that a pass needs on its way back, nothing is kept meanwhile."""
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
        """The module's matrices are found as attributes before they are as parameters."""
        held = {name: one for name, one in module._parameters.items() if _is_held(one)}
        wide = {name: one.detach().to(torch.float32) for name, one in held.items()}
        storages = {_storage(one): held[name] for name, one in wide.items()}
        self._widened.update(storages)
        module.__dict__.update(wide)
        try:
            yield
        finally:
            for name in wide:
                del module.__dict__[name]
            for one in storages:
                del self._widened[one]

    def _pack(self, tensor: Tensor) -> Tensor | _Part:
        held = self._widened.get(_storage(tensor))
        if held is None:
            return tensor.detach()
        return _Part(held, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _narrow(module: Any, name: str, parameter: Any) -> Any:
    if parameter is None or parameter.dim() < 2 or parameter.dtype != torch.float32:
        return None  # It stays what it is.
    return torch.nn.Parameter(parameter.detach().to(HELD), requires_grad=False)


def _is_held(parameter: Any) -> bool:
    return parameter is not None and parameter.dtype == HELD


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
