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
    seen: set[int] = set()
    kept: dict[str, Any] = {}
    names = {name for name, _ in network.named_parameters()}
    state: dict[str, Any] = network.state_dict(keep_vars=True)
    # Parameters first: the optimizer uses their names.
    for name in sorted(state, key=lambda name: name not in names):
        tensor = state[name]
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor
    return dict(sorted(kept.items()))


def stored(network: Any) -> dict[str, Any]:
    """Return views of the network's tensors by checkpoint names, sorted.

    Raises PolicyError if a checkpoint tensor is not a slice.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    whole = untied(network)
    revert: Any = revert_weight_conversion
    with torch.no_grad(), _uncopied():
        found: dict[str, Any] = revert(network, whole)
    held = {_storage(one) for one in whole.values()}
    odd = sorted(name for name, one in found.items() if _storage(one) not in held)
    sizes = [sum(one.numel() for one in tensors.values()) for tensors in (whole, found)]
    if odd or sizes[0] != sizes[1]:
        what = odd[0] if odd else network.config.model_type
        raise PolicyError(f"the network holds {what} in another form than its files", hint=_HINT)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Piece:
    """Checkpoint tensor as a whole network tensor or a part of it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, whole: Any) -> Any:
        """Return the same view of another tensor of that layout."""
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.start)


def pieces(network: Any) -> dict[str, Piece]:
    """Return a `Piece` per checkpoint tensor, before sharding."""
    owners = {_storage(one): (name, one) for name, one in untied(network).items()}
    found = {}
    for name, view in stored(network).items():
        own, whole = owners[_storage(view)]
        start = view.storage_offset() - whole.storage_offset()
        found[name] = Piece(own, tuple(view.shape), tuple(view.stride()), start)
    return found


def parameters_in(network: Any, names: Collection[str]) -> frozenset[str]:
    """Return the network names of these checkpoint parameters."""
    if not names:
        return frozenset()
    held = {_storage(one) for name, one in stored(network).items() if name in names}
    return frozenset(name for name, one in network.named_parameters() if _storage(one) in held)


def _storage(tensor: Any) -> int:
    """Return an id of the memory, also for meta tensors."""
    found: int = tensor.untyped_storage()._cdata
    return found


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

    made: Any = Uncopied
    return made()
