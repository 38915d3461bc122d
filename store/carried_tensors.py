"""Tensors that training does not use, published unchanged.

Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437 section 2.2; GLM-4.5) only serve
speculative decoding. Versions keep them so that exports are complete.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.safetensors_file import Entry, TensorSource

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,6})\.")


def further_layers(config: Mapping[str, Any]) -> range:
    """Return the indices of the layers (`num_nextn_predict_layers` after `num_hidden_layers`)."""
    first, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not (isinstance(first, int) and isinstance(more, int)):
        return range(0)
    return range(first, first + more)


def carried_names(names: Iterable[str], layers: range) -> frozenset[str]:
    """Return the names of tensors in these layers."""
    matches = ((name, _LAYER.match(name)) for name in names)
    return frozenset(name for name, layer in matches if layer and int(layer[1]) in layers)


class CarriedTensors:
    """Tensors to publish unchanged; their file may be deleted meanwhile, not modified.

    Example: ``write_tensors(path, [*trained, *carried.sources()])``
    """

    def __init__(self, weights: Path | None = None, entries: Sequence[Entry] = ()) -> None:
        """Raises PolicyError if the file is unreadable."""
        self._weights, self._entries = weights, tuple(entries)
        self._file = -1
        if weights is None or not entries:
            return
        try:
            self._file = os.open(weights, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PolicyError(f"{weights} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)

    def sources(self) -> list[TensorSource]:
        """Return sources that read lazily."""
        return [TensorSource.of(entry, partial(self._read, entry)) for entry in self._entries]

    def _read(self, entry: Entry) -> memoryview:
        buffer = memoryview(bytearray(entry.end - entry.start))
        rest, offset = buffer, entry.start
        while rest:  # A call returns at most 2 GiB.
            count = os.preadv(self._file, [rest], offset)
            if not count:
                raise PolicyError(f"{self._weights} was truncated: {entry.name!r} is not in it")
            rest, offset = rest[count:], offset + count
        return buffer
