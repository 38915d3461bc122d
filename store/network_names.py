"""The tensors of a network of transformers by the names of its files; decides that none is copied.

A network may hold in one tensor what files have apart: the experts of a layer. Files have the names
of checkpoints everywhere, and so has all that is published. Which names those are is transformers'
own conversion, the one by which `save_pretrained` writes. Here it makes views: what is written to
one changes the network, and what is read from one is the network's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import PolicyError

_HINT: Final = "dense models, and mixtures whose files have each expert's matrices apart"


def untied(network: Any) -> dict[str, Any]:
    """The state of a network by its own names, sorted, without second names of the same tensor."""
    seen: set[int] = set()
    kept: dict[str, Any] = {}
    names = {name for name, _ in network.named_parameters()}
    state: dict[str, Any] = network.state_dict(keep_vars=True)
    # Parameters first: their names are the ones that the optimizer uses too.
    for name in sorted(state, key=lambda name: name not in names):
        tensor = state[name]
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor
    return dict(sorted(kept.items()))


def stored(network: Any) -> dict[str, Any]:
    """The same by the names of its files, sorted: each tensor is the network's, or a part of one.

    Raises PolicyError where files have anything else than parts.
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
    """What a tensor of a file is of one of the network's: all of it, or a part."""

    name: str
    """The network's own."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, whole: Any) -> Any:
        """The same of a tensor that lies as the network's does: a view."""
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.start)


def pieces(network: Any) -> dict[str, Piece]:
    """What each of `stored` is, for networks whose tensors are then taken apart."""
    owners = {_storage(one): (name, one) for name, one in untied(network).items()}
    found = {}
    for name, view in stored(network).items():
        own, whole = owners[_storage(view)]
        start = view.storage_offset() - whole.storage_offset()
        found[name] = Piece(own, tuple(view.shape), tuple(view.stride()), start)
    return found


def parameters_in(network: Any, names: Collection[str]) -> frozenset[str]:
    """The network's own names of the parameters that stand in its files under these names."""
    if not names:
        return frozenset()
    held = {_storage(one) for name, one in stored(network).items() if name in names}
    return frozenset(name for name, one in network.named_parameters() if _storage(one) in held)


def _storage(tensor: Any) -> int:
    """Whose memory it is; also where there is none yet (a meta tensor)."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _uncopied() -> Any:
    """While it lasts, parts of tensors stay parts: a conversion lays each out by itself."""
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
