"""The versions of a LoRA policy in vLLM; decides which are resident, wherever vLLM runs.

Every version has an adapter of vLLM's own, also those whose weights are the base alone: theirs is
of zeros. For on a CPU, vLLM 0.32 computes the rows of a mixed batch that have none with the adapter
in its last place (vllm-project/vllm#48421).

How an adapter gets into vLLM is a Host's: of this process (`adapters`), or of a server
(`remote`). It imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.config.training_sections import LINEAR_LAYERS
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.producers.engines.port import EngineRequest
from dora_pipe.store.adapters import base_of

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of a rank between has zeros beside it."""

CLEARING_SCHEDULER: Final = "dora_pipe.producers.engines.vllm.scheduler.ClearingScheduler"
"""Named and not imported: vLLM imports it in the process of its engine core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A resident version. It has no adapter where versions are whole weights, and while an engine
    warms up."""

    digest: str
    number: int = 0
    """vLLM's id of the adapter; 0 without one. Ids are used once."""
    name: str = ""
    """vLLM's name of the adapter, of version and digest."""
    adapter: Any = None
    """vLLM's LoRARequest, in the process that has it."""


class Host(Protocol):
    """Where vLLM has its adapters."""

    def put(self, path: Path, name: str, *, digest: str, base: str) -> Version:
        """Read, compare and load the adapter in a file, on the weights of digest `base`; one of
        zeros where `digest` is the base's. Raises PolicyError for one that does not belong here."""

    def remove(self, version: Version) -> None:
        """Forget an adapter that no row runs under."""


def refused(said: str) -> PolicyError:
    """What vLLM says of an adapter that it does not take."""
    return PolicyError(f"vLLM cannot load this adapter: {' '.join(said.split())}")


_ALONE: Final = Version(digest="")
"""What requests run under while the engine warms up."""


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


class Residents:
    """Which policy versions vLLM has: one, or with a `host` several adapters on one base.

    Example: ``residents.take(path, version=7, digest=digest)`` after `settle`.
    """

    def __init__(self, host: Host | None = None, *, most: int = 1) -> None:
        self._host, self.most = host, most
        self._base = ""
        self._latest = -1
        self._versions: dict[int, Version] = {}

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters."""
        return self._host is not None

    def is_whole(self, weights: Path, digest: str) -> bool:
        """Whether a file replaces the weights; else it is one more version on them."""
        return not self.adapters or (base_of(weights) is None and digest != self._base)

    def replaces(self, version: int, digest: str) -> bool:
        """Whether a load takes a version away that rows may run under."""
        held = self._versions.get(version)
        return self.most == 1 or (held is not None and held.digest != digest)

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
        if self.adapters:
            self.take(path, version=version, digest=digest)

    def take(self, path: Path, *, version: int, digest: str) -> None:
        """Make an adapter resident, or the base itself as a version.

        Raises PolicyError for one that does not belong here, ValueError when there is no room.
        """
        assert self._host is not None
        held = self._versions.get(version)
        if held is None and len(self._versions) >= self.most > 1:
            raise ValueError(f"{self.most} versions are resident; drop one first")
        if held is None or held.digest != digest:
            name = f"{version}:{digest[:16]}"
            made = self._host.put(path, name, digest=digest, base=self._base)
            for other in list(self._versions) if self.most == 1 else [version]:
                self.drop(other)
            self._versions[version] = made
        self._latest = version

    def drop(self, version: int) -> None:
        """Forget a version; the base stays."""
        gone = self._versions.pop(version, None)
        if gone is not None and gone.number and self._host is not None:
            self._host.remove(gone)

    def knows(self, request: EngineRequest) -> bool:
        """Whether what a request shall run under is here."""
        return not self.adapters or self._wanted(request) in self._versions

    def of(self, request: EngineRequest) -> Version:
        """What a request runs under. Raises ValueError for a version that is not resident."""
        if not self.adapters:
            return Version(digest=self._base)
        if not self.knows(request):
            raise ValueError(f"{request.request}: version {self._wanted(request)} is not resident")
        return self._versions[self._wanted(request)]

    def _wanted(self, request: EngineRequest) -> int:
        return self._latest if request.version < 0 else request.version
