"""Views of a transformers network's tensors by checkpoint names.

A network may hold several checkpoint tensors in one, such as a layer's experts. Names come from
`save_pretrained`'s conversion.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import PolicyError

_HINT: Final = "dense models, and mixtures whose files have each expert's matrices apart"


def untied(network: Any) -> dict[str, Any]:
    """Return the state by network names, sorted, without aliases of tied tensors."""
    ids: set[int] = set()
    kept: dict[str, Any] = {}
    names = {name for name, _ in network.named_parameters()}
    state: dict[str, Any] = network.state_dict(keep_vars=True)
    # Parameters first: the optimizer uses their names.
    for name in sorted(state, key=lambda name: name not in names):
        tensor = state[name]
        if id(tensor) not in ids:
            ids.add(id(tensor))
            kept[name] = tensor
    return dict(sorted(kept.items()))


def stored(network: Any) -> dict[str, Any]:
    """Return views of the network's tensors by checkpoint names, sorted.

    Raises PolicyError if a checkpoint tensor is not a slice.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    own = untied(network)
    revert: Any = revert_weight_conversion
    with torch.no_grad(), _uncopied():
        reverted: dict[str, Any] = revert(network, own)
    held = {_storage(tensor) for tensor in own.values()}
    odd = sorted(name for name, tensor in reverted.items() if _storage(tensor) not in held)
    sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (own, reverted)]
    if odd or sizes[0] != sizes[1]:
        what = odd[0] if odd else network.config.model_type
        raise PolicyError(f"the network holds {what} in another form than its files", hint=_HINT)
    return dict(sorted(reverted.items()))


@dataclass(frozen=True, slots=True)
class Piece:
    """Checkpoint tensor as a whole network tensor or a part of it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, tensor: Any) -> Any:
        """Return the same view of another tensor of that layout."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.start)


def pieces(network: Any) -> dict[str, Piece]:
    """Return a `Piece` per checkpoint tensor, before sharding."""
    owners = {_storage(tensor): (name, tensor) for name, tensor in untied(network).items()}
    views = {}
    for name, view in stored(network).items():
        own, tensor = owners[_storage(view)]
        start = view.storage_offset() - tensor.storage_offset()
        views[name] = Piece(own, tuple(view.shape), tuple(view.stride()), start)
    return views


def parameters_in(network: Any, names: Collection[str]) -> frozenset[str]:
    """Return the network names of these checkpoint parameters."""
    if not names:
        return frozenset()
    held = {_storage(tensor) for name, tensor in stored(network).items() if name in names}
    return frozenset(
        name for name, parameter in network.named_parameters() if _storage(parameter) in held
    )


def _storage(tensor: Any) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _uncopied() -> Any:
    """Make transformers' conversion return views instead of contiguous copies."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Uncopied(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.contiguous:
                return args[0]
            return func(*args, **(kwargs or {}))

    uncopied: Any = Uncopied
    return uncopied()
