"""Adapters in vLLM's form; without vLLM.

An adapter is checked, written as a directory, loaded, and the directory removed: no file remains or
is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.store.adapters import Adapter, read_adapter_on, write_peft

FOLDER_PREFIX: Final = "dora-pipe-adapter-"

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name."""

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM; others are padded with zeros."""

CLEARING_SCHEDULER: Final = "dora_pipe.producers.engines.vllm.plugins.ClearingScheduler"
"""Name of a class that only vLLM imports."""


def arguments(rank: int, most: int, *, device: str) -> dict[str, Any]:
    """Return vLLM's options for `most` adapters and a spare one, which loads before a swap."""
    if not rank:
        return {}
    options = {
        "enable_lora": True,
        "max_loras": most,
        "max_cpu_loras": most + 1,
        "max_lora_rank": next(supported for supported in RANKS if supported >= rank),
        "lora_target_modules": list(LINEAR_LAYERS),
    }
    return options | ({"scheduler_cls": CLEARING_SCHEDULER} if device == "cpu" else {})


def check_kernels(rank: int, device: str, dtype: str) -> None:
    """Raise ConfigError for a type without kernels; a GPU would fail in its first step."""
    if rank and device != "cpu" and dtype == "float32":
        raise ConfigError(
            "vLLM has no kernels for adapters in float32 on a GPU",
            hint="-o workers.vllm.dtype=bfloat16",
        )


def written(
    path: Path, *, digest: str, base: str, rank: int, shapes: Shapes
) -> TemporaryDirectory[str]:
    """Write an adapter, or zeros for the base's digest. Raises PolicyError."""
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


def _zeros(base: str, rank: int, shapes: Shapes) -> Adapter:
    """Return zeros for one layer; vLLM fills the others."""
    ends = tuple(f".{layer}.weight" for layer in LINEAR_LAYERS)
    name = next((tensor for tensor in shapes if tensor.endswith(ends)), None)
    if name is None:
        raise PolicyError("the model has no linear layer to adapt")
    out, in_ = shapes[name]
    pair = np.zeros((rank, in_), np.float32), np.zeros((out, rank), np.float32)
    return Adapter(base=base, scale=1.0, pairs={name.removesuffix(".weight"): pair})


def _check_layers(path: Path, adapter: Adapter, shapes: Shapes) -> None:
    """Raise PolicyError for unknown layers, which vLLM ignores."""
    for layer, (a, b) in adapter.pairs.items():
        shape = shapes.get(f"{layer}.weight", ())
        if layer.rpartition(".")[2] not in LINEAR_LAYERS or len(shape) != 2:
            raise PolicyError(f"{path}: the engine has no linear layer {layer!r} to adapt")
        if (b.shape[0], a.shape[1]) != shape:
            raise PolicyError(f"{path}: the adapter of {layer} is of another model")
