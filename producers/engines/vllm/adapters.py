"""Which adapter vLLM gets to see, and how it reads it; decides what fits a model.

An adapter is read from the store and compared with its digest, its base, its rank and the model's
shapes, and written as the directory that vLLM reads. It is loaded at once, and the directory is
removed: vLLM keeps what it has read, so nothing is left behind by a process that is killed, and
nothing can be read again that was changed in between. vLLM caches prompts apart by name and
directory of an adapter.

The process that has vLLM does this: a worker with vLLM, or the worker of a vLLM server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from dora_pipe.config.training_sections import LINEAR_LAYERS
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.core import REFUSALS, is_of_here
from dora_pipe.producers.engines.vllm.lora import Version, refused
from dora_pipe.store.adapters import Adapter, read_adapter_on, write_peft

FOLDER_PREFIX: Final = "dora-pipe-adapter-"
"""Of the directories that vLLM reads."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of the model's tensors, by name."""


def written(
    path: Path, *, digest: str, base: str, rank: int, shapes: Shapes
) -> TemporaryDirectory[str]:
    """The adapter in a file as vLLM reads it; one of zeros where `digest` is the base's.

    Raises PolicyError for one that vLLM must not be given.
    """
    if digest == base:
        adapter = _zeros(base, rank, shapes)
    else:
        adapter = read_adapter_on(path, digest=digest, base=base, rank=rank)
        _check_layers(path, adapter, shapes)
    folder = TemporaryDirectory(prefix=FOLDER_PREFIX)
    try:
        write_peft(Path(folder.name), adapter)
    except OSError:
        folder.cleanup()
        raise
    return folder


class LocalHost:
    """The adapters of vLLM in this process."""

    def __init__(self, core: Any, shapes: Shapes, *, rank: int) -> None:
        self._core, self._shapes, self._rank = core, shapes, rank
        self._loads = 0

    def put(self, path: Path, name: str, *, digest: str, base: str) -> Version:
        """See Host."""
        from vllm.exceptions import LoRAAdapterNotFoundError
        from vllm.lora.request import LoRARequest

        self._loads += 1
        number = self._loads
        with written(
            path, digest=digest, base=base, rank=self._rank, shapes=self._shapes
        ) as folder:
            wanted = LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)
            try:
                self._core.add_lora(wanted)
            except (*REFUSALS, LoRAAdapterNotFoundError) as error:
                if is_of_here(error):
                    raise
                raise refused(str(error) or type(error).__name__) from error
        return Version(digest=digest, number=number, name=name, adapter=wanted)

    def remove(self, version: Version) -> None:
        """See Host."""
        self._core.remove_lora(version.number)


def _zeros(base: str, rank: int, shapes: Shapes) -> Adapter:
    """What leaves the base as it is: one layer's is enough, vLLM has zeros for the others."""
    ends = tuple(f".{layer}.weight" for layer in LINEAR_LAYERS)
    name = next((one for one in shapes if one.endswith(ends)), None)
    if name is None:
        raise PolicyError("the model has no linear layer to adapt")
    out, in_ = shapes[name]
    pair = np.zeros((rank, in_), np.float32), np.zeros((out, rank), np.float32)
    return Adapter(base=base, scale=1.0, pairs={name.removesuffix(".weight"): pair})


def _check_layers(path: Path, adapter: Adapter, shapes: Shapes) -> None:
    """Raise PolicyError for an adapter of other layers: vLLM leaves out what it has none for."""
    for layer, (a, b) in adapter.pairs.items():
        shape = shapes.get(f"{layer}.weight", ())
        if layer.rpartition(".")[2] not in LINEAR_LAYERS or len(shape) != 2:
            raise PolicyError(f"{path}: the engine has no linear layer {layer!r} to adapt")
        if (b.shape[0], a.shape[1]) != shape:
            raise PolicyError(f"{path}: the adapter of {layer} is of another model")
