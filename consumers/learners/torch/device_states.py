"""Moves device memory to the host between steps.

Moves storages, so all views (tied weights, ZeRO's flat buffers, moments) stay valid, for every
optimizer and ZeRO stage. DeepSpeed's `offload_states` covers only its own Adam's moments in stage
3.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from dora_pipe.core.errors import ResourceError

PIECE_BYTES: Final = 2**28
"""Pinned buffer size; torch rounds up to a power of two."""

SMALL_BYTES: Final = 4096
"""Smaller storages stay: counters, rotations, biases."""


class DeviceStates:
    """Offloadable storages of a device, found by `tensors` at each offload."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: str) -> None:
        self._tensors = tensors
        self._device = torch.device(device)
        self._away: list[tuple[Any, int, list[Tensor]]] = []
        self._pinned: dict[int, list[Tensor]] = {}
        """Free pinned buffers by size: pinning is slower than copying."""

    def leave(self) -> None:
        """Offload; nothing may compute until `come_back`. Raises ResourceError, moving nothing, if
        the host lacks memory."""
        if self._away:
            return
        leaving = list(self._storages())
        try:
            copies = [self._copied(storage) for storage in leaving]
        except RuntimeError as error:
            raise ResourceError(
                f"the trainer's states do not fit into the host's memory: {error}",
                hint="trainer.offload_between_steps = false",
            ) from error
        self._settle()
        for storage, copy in zip(leaving, copies, strict=True):
            self._away.append((storage, storage.nbytes(), copy))
            storage.resize_(0)
        del leaving
        self._give_back()

    def come_back(self) -> None:
        """Restore everything, bit for bit. Raises ResourceError if the device lacks memory."""
        while self._away:
            storage, size, copy = self._away[-1]
            try:
                storage.resize_(size)
            except RuntimeError as error:
                raise ResourceError(
                    f"no room on {self._device} for the trainer's states: {error}",
                    hint="let its workers sleep during a step (workers.colocated)",
                ) from error
            view = _bytes_of(storage, self._device)
            for start, piece in zip(range(0, size, PIECE_BYTES), copy, strict=True):
                view[start : start + len(piece)].copy_(piece, non_blocking=True)
            self._away.pop()
            if self._device.type == "cuda":
                for piece in copy:
                    self._pinned.setdefault(len(piece), []).append(piece)
        self._settle()

    def _storages(self) -> Iterator[Any]:
        ids: set[int] = set()
        for tensor in self._tensors():
            if tensor.device.type != self._device.type:
                continue
            storage = tensor.untyped_storage()
            new = storage.data_ptr() not in ids
            if new and storage.nbytes() >= SMALL_BYTES and storage.resizable():
                ids.add(storage.data_ptr())
                yield storage

    def _copied(self, storage: Any) -> list[Tensor]:
        view, size = _bytes_of(storage, self._device), storage.nbytes()
        pieces = []
        for start in range(0, size, PIECE_BYTES):
            piece = self._piece(min(PIECE_BYTES, size - start))
            piece.copy_(view[start : start + len(piece)], non_blocking=True)
            pieces.append(piece)
        return pieces

    def _piece(self, size: int) -> Tensor:
        free = self._pinned.get(size)
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _give_back(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _bytes_of(storage: Any, device: torch.device) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=device)
    return view.set_(storage)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors, with gradients, in nested lists, tuples, sets and mappings."""
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
