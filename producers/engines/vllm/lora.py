"""The versions of a LoRA policy in vLLM: which are resident, wherever vLLM runs, which adapter it
gets to see, and how it reads that.

Every version has an adapter of vLLM's own, also those whose weights are the base alone: theirs is
of zeros. For on a CPU, vLLM 0.32 computes the rows of a mixed batch that have none with the adapter
in its last place (vllm-project/vllm#48421).

An adapter is read from the store and compared with its digest, its base, its rank and the model's
shapes, and written as the directory that vLLM reads. It is loaded at once, and the directory is
removed: vLLM keeps what it has read, so nothing is left behind by a process that is killed, and
nothing can be read again that was changed in between. vLLM caches prompts apart by name and
directory of an adapter. The process that has vLLM does this, a `LocalHost` here, or the worker of a
vLLM server (`client`, `extension`). Nothing here imports vLLM before it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

import numpy as np

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.producers.engines.base import ResidentVersions, Version
from dora_pipe.producers.engines.vllm.core import REFUSALS, is_of_here
from dora_pipe.store.adapters import Adapter, read_adapter_on, write_peft

FOLDER_PREFIX: Final = "dora-pipe-adapter-"
"""Of the directories that vLLM reads."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of the model's tensors, by name."""

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of a rank between has zeros beside it."""

CLEARING_SCHEDULER: Final = "dora_pipe.producers.engines.vllm.plugins.ClearingScheduler"
"""Named and not imported: vLLM imports it in the process of its engine core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraVersion(Version):
    """A resident version. It has no adapter where versions are whole weights, and while an engine
    warms up."""

    number: int = 0
    """vLLM's id of the adapter; 0 without one. Ids are used once."""
    name: str = ""
    """vLLM's name of the adapter, of version and digest."""
    adapter: Any = None
    """vLLM's LoRARequest, in the process that has it."""


class Host(Protocol):
    """Where vLLM has its adapters."""

    def put(self, path: Path, name: str, *, digest: str, base: str) -> LoraVersion:
        """Read, compare and load the adapter in a file, on the weights of digest `base`; one of
        zeros where `digest` is the base's. Raises PolicyError for one that does not belong here."""

    def remove(self, version: LoraVersion) -> None:
        """Forget an adapter that no row runs under."""


def refused(said: str) -> PolicyError:
    """What vLLM says of an adapter that it does not take."""
    return PolicyError(f"vLLM cannot load this adapter: {' '.join(said.split())}")


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


class LoraVersions(ResidentVersions[LoraVersion]):
    """Which policy versions vLLM has: one, or with a `host` several adapters on one base."""

    def __init__(self, host: Host | None = None, *, most: int = 1) -> None:
        super().__init__(LoraVersion, most=most, adapters=host is not None)
        self._host = host

    @contextmanager
    def without(self) -> Iterator[None]:
        """While this lasts, requests of the latest version run under no adapter; nobody runs."""
        self._versions[-1] = LoraVersion(digest="")
        yield
        del self._versions[-1]

    def drop(self, version: int) -> None:
        """Forget a version; the base stays."""
        gone = self._versions.pop(version, None)
        if gone is not None and gone.number and self._host is not None:
            self._host.remove(gone)

    def _made(self, path: Path, version: int, digest: str) -> LoraVersion:
        assert self._host is not None
        return self._host.put(path, f"{version}:{digest[:16]}", digest=digest, base=self.base)


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

    def put(self, path: Path, name: str, *, digest: str, base: str) -> LoraVersion:
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
        return LoraVersion(digest=digest, number=number, name=name, adapter=wanted)

    def remove(self, version: LoraVersion) -> None:
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
