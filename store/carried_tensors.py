"""Tensors of a model's files that nothing here computes with; decides that they stay as they are.

Models that were trained to predict further tokens have layers for that behind their last one (of
DeepSeek-V3 and GLM-4.5: multi-token prediction, arXiv 2412.19437, section 2.2). They serve
speculative decoding; no log-prob depends on them. transformers leaves them out, and so do engines
here, and no step changes them. Every version has them with the bytes of version 0, so an export
serves as what was imported did.
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
    """The layers for further tokens of a model of this config.json, or of what transformers makes
    of it: as many as `num_nextn_predict_layers` says, behind `num_hidden_layers`."""
    first, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not (isinstance(first, int) and isinstance(more, int)):
        return range(0)
    return range(first, first + more)


def carried_names(names: Iterable[str], layers: range) -> frozenset[str]:
    """Those of tensors in these layers."""
    found = ((name, _LAYER.match(name)) for name in names)
    return frozenset(name for name, layer in found if layer and int(layer[1]) in layers)


class CarriedTensors:
    """Tensors of a file that are published again as they are. The file may be deleted meanwhile,
    not changed. Example: ``write_tensors(path, [*trained, *carried.sources()])``"""

    def __init__(self, weights: Path | None = None, entries: Sequence[Entry] = ()) -> None:
        """Raises PolicyError where the file cannot be read."""
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
        """To be written; each is read when its bytes are asked for."""
        return [
            TensorSource(
                name=one.name, dtype=one.dtype, shape=one.shape, data=partial(self._read, one)
            )
            for one in self._entries
        ]

    def _read(self, entry: Entry) -> memoryview:
        found = memoryview(bytearray(entry.end - entry.start))
        left, at = found, entry.start
        while left:  # One call gives 2 GiB at most.
            count = os.preadv(self._file, [left], at)
            if not count:
                raise PolicyError(
                    f"{self._weights} has become shorter: {entry.name!r} is not in it"
                )
            left, at = left[count:], at + count
        return found
