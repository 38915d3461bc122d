"""Adapters as vLLM takes them: its options for them, and the directory that it reads one from.

An adapter is read from the store and compared with its digest, its base, its rank and the model's
shapes, and written as the directory that vLLM reads. It is loaded at once, and the directory is
removed: vLLM keeps what it has read, so nothing is left behind by a process that is killed, and
nothing can be read again that was changed in between. vLLM caches prompts apart by name and
directory of an adapter. The worker of the vLLM server does this (`extension`). It imports no vLLM.
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
"""Of the directories that vLLM reads."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of the model's tensors, by name."""

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of a rank between has zeros beside it."""

CLEARING_SCHEDULER: Final = "dora_pipe.producers.engines.vllm.plugins.ClearingScheduler"
"""Named and not imported: vLLM imports it in the process of its engine core."""


def arguments(rank: int, most: int, *, device: str) -> dict[str, Any]:
    """What vLLM is told of `most` adapters of a rank at once; nothing without any.

    It may hold one more than that, so that one is replaced only by one that was loaded. On a CPU
    its attention multiplies what lies in a block behind the end of a sequence by zero, which a
    number that is not finite survives: blocks are cleared there (`scheduler`).
    """
    if not rank:
        return {}
    found = {
        "enable_lora": True,
        "max_loras": most,
        "max_cpu_loras": most + 1,
        "max_lora_rank": next(one for one in RANKS if one >= rank),
        "lora_target_modules": list(LINEAR_LAYERS),
    }
    return found | ({"scheduler_cls": CLEARING_SCHEDULER} if device == "cpu" else {})


def check_kernels(rank: int, device: str, dtype: str) -> None:
    """Raise ConfigError for adapters in a type that vLLM has no kernels for: on a GPU it would fail
    in its first step."""
    if rank and device != "cpu" and dtype == "float32":
        raise ConfigError(
            "vLLM has no kernels for adapters in float32 on a GPU",
            hint="-o workers.vllm.dtype=bfloat16",
        )


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
