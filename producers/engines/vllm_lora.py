"""The versions of a LoRA policy in vLLM; decides what vLLM is given of each, and by which name.

Every version has an adapter of vLLM's own (`LoRARequest`), also those whose weights are the base
alone: theirs is of zeros. For on a CPU, vLLM 0.32 computes the rows of a mixed batch that have none
with the adapter in its last place (vllm-project/vllm#48421).

An adapter is read from the store and compared with its digest, written as the directory that vLLM
reads, loaded at once, and the directory is removed: vLLM keeps what it has read, so nothing is left
behind by a worker that is killed, and nothing can be read again that was changed in between. Ids
are used once. vLLM caches prompts apart by name and directory of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from dora_pipe.config.training_sections import LINEAR_LAYERS
from dora_pipe.errors import PolicyError
from dora_pipe.policies.adapters import Adapter, base_of, read_adapter_on, write_peft
from dora_pipe.producers.engines.port import EngineRequest
from dora_pipe.producers.engines.vllm_core import REFUSALS

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of a rank between has zeros beside it."""

FOLDER_PREFIX: Final = "dora-pipe-adapter-"
"""Of the directories that vLLM reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A resident version. `adapter` is vLLM's LoRARequest; None while the engine warms up."""

    digest: str
    adapter: Any = None

    @property
    def number(self) -> int:
        """vLLM's id of the adapter; 0 without one."""
        return 0 if self.adapter is None else int(self.adapter.lora_int_id)


_ALONE: Final = Version(digest="")
"""What requests run under where there is but one version."""


def arguments(rank: int, most: int) -> dict[str, Any]:
    """What vLLM is told of `most` adapters of a rank at once; nothing without any.

    It may hold one more than that, so that one is replaced only by one that was loaded.
    """
    if not rank:
        return {}
    return {
        "enable_lora": True,
        "max_loras": most,
        "max_cpu_loras": most + 1,
        "max_lora_rank": next(one for one in RANKS if one >= rank),
        "lora_target_modules": list(LINEAR_LAYERS),
    }


def zero_new_blocks(core: Any) -> None:
    """Make vLLM clear every block of its KV cache before a request gets it, as it does for some
    models by itself.

    Its attention on a CPU multiplies what lies behind the end of a sequence by zero, which a number
    that is not finite survives: rows of a broken version would spoil those that get their blocks.
    """
    scheduler = core.engine_core.engine_core.scheduler
    scheduler.needs_kv_cache_zeroing = True
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        manager._record_new_block_ids = True


class Residents:
    """Which policy versions vLLM has: one, or with a `rank` several adapters on one base.

    `shapes` are those of the model's tensors. Example: ``residents.take(path, version=7,
    digest=digest)`` after `settle`.
    """

    def __init__(
        self, core: Any, shapes: Mapping[str, tuple[int, ...]], *, rank: int, most: int
    ) -> None:
        self._core, self._shapes = core, shapes
        self._rank, self._most = rank, most
        self._base = ""
        self._latest = -1
        self._loads = 0
        self._versions: dict[int, Version] = {}

    def is_whole(self, weights: Path, digest: str) -> bool:
        """Whether a file replaces the weights; else it is one more version on them."""
        return not self._rank or (base_of(weights) is None and digest != self._base)

    def replaces(self, version: int, digest: str) -> bool:
        """Whether a load takes a version away that rows may run under."""
        held = self._versions.get(version)
        return self._most == 1 or (held is not None and held.digest != digest)

    @contextmanager
    def without(self) -> Iterator[None]:
        """While this lasts, requests of the latest version run under no adapter; nobody runs."""
        self._versions[-1] = _ALONE
        yield
        del self._versions[-1]

    def rest_on(self, digest: str) -> None:
        """The engine has these weights now; whatever stood on others is gone."""
        for version in list(self._versions):
            self.drop(version)
        self._base = digest

    def settle(self, path: Path, *, version: int, digest: str) -> None:
        """The same, and they are a version."""
        self.rest_on(digest)
        if self._rank:
            self.take(path, version=version, digest=digest)

    def take(self, path: Path, *, version: int, digest: str) -> None:
        """Make an adapter resident, or the base itself as a version.

        Raises PolicyError for one that does not belong here, ValueError when there is no room.
        """
        held = self._versions.get(version)
        if held is None and len(self._versions) >= self._most > 1:
            raise ValueError(f"{self._most} versions are resident; drop one first")
        if held is None or held.digest != digest:
            made = self._made(path, version, digest)
            for other in list(self._versions) if self._most == 1 else [version]:
                self.drop(other)
            self._versions[version] = made
        self._latest = version

    def drop(self, version: int) -> None:
        """Forget a version; the base stays."""
        gone = self._versions.pop(version, None)
        if gone is not None and gone.number:
            self._core.remove_lora(gone.number)

    def of(self, request: EngineRequest) -> Version:
        """What a request runs under. Raises ValueError for a version that is not resident."""
        if not self._rank:
            return _ALONE
        wanted = self._latest if request.version < 0 else request.version
        found = self._versions.get(wanted)
        if found is None:
            raise ValueError(f"{request.request}: version {wanted} is not resident")
        return found

    def _made(self, path: Path, version: int, digest: str) -> Version:
        adapter = self._zeros() if digest == self._base else self._fitting(path, digest)
        return Version(digest=digest, adapter=self._load(adapter, f"{version}:{digest[:16]}"))

    def _zeros(self) -> Adapter:
        """What leaves the base as it is: one layer's is enough, vLLM has zeros for the others."""
        ends = tuple(f".{layer}.weight" for layer in LINEAR_LAYERS)
        name = next((one for one in self._shapes if one.endswith(ends)), None)
        if name is None:
            raise PolicyError("the model has no linear layer to adapt")
        out, in_ = self._shapes[name]
        pair = np.zeros((self._rank, in_), np.float32), np.zeros((out, self._rank), np.float32)
        return Adapter(base=self._base, scale=1.0, pairs={name.removesuffix(".weight"): pair})

    def _fitting(self, path: Path, digest: str) -> Adapter:
        """The adapter in a file. Raises PolicyError for one that vLLM must not be given: it leaves
        out what it has no layer for."""
        adapter = read_adapter_on(path, digest=digest, base=self._base, rank=self._rank)
        for layer, (a, b) in adapter.pairs.items():
            shape = self._shapes.get(f"{layer}.weight", ())
            if layer.rpartition(".")[2] not in LINEAR_LAYERS or len(shape) != 2:
                raise PolicyError(f"{path}: the engine has no linear layer {layer!r} to adapt")
            if (b.shape[0], a.shape[1]) != shape:
                raise PolicyError(f"{path}: the adapter of {layer} is of another model")
        return adapter

    def _load(self, adapter: Adapter, name: str) -> Any:
        """vLLM's request for it, loaded. Raises PolicyError where vLLM refuses it."""
        from vllm.exceptions import LoRAAdapterNotFoundError
        from vllm.lora.request import LoRARequest

        self._loads += 1
        with TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
            write_peft(Path(folder), adapter)
            wanted = LoRARequest(lora_name=name, lora_int_id=self._loads, lora_path=folder)
            try:
                self._core.add_lora(wanted)
            except (*REFUSALS, LoRAAdapterNotFoundError) as error:
                said = " ".join(str(error).split()) or type(error).__name__
                raise PolicyError(f"vLLM cannot load this adapter: {said}") from error
        return wanted
