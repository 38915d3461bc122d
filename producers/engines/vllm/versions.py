"""The versions of a LoRA policy in a vLLM server: which are resident, and when one can be dropped.

Every version has an adapter of vLLM's own, also those whose weights are the base alone: theirs is
of zeros. For on a CPU, vLLM 0.32 computes the rows of a mixed batch that have none with the adapter
in its last place (vllm-project/vllm#48421).

The server's worker reads the file, compares it and writes the directory that vLLM loads it from
(`dora_write`); the front end has vLLM load it and from then on knows its name (LOAD_ADAPTER); the
directory is removed (`dora_forget`). Nothing is paused meanwhile: vLLM does each between two steps.
Dropping is both halves again, the name at the front end and the adapter at the worker.

A request that comes to vLLM's engine core after its adapter is gone would end the core: vLLM would
load it again, from a directory that is not there. So a request that is let go before any word of it
has come is still listened to: an abort may have been there before it. It is aborted again with its
first word, and no adapter is dropped before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.base import ResidentVersions, Version
from dora_pipe.producers.engines.vllm.client import SHARED, VllmServerClient
from dora_pipe.producers.engines.vllm.http import HttpStream

FIRST_WORD_S: Final = 60.0
"""For the first word of a request that was let go, where its adapter is to be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraVersion(Version):
    """A resident version. It has no adapter where versions are whole weights, and while an engine
    warms up."""

    number: int = 0
    """vLLM's id of the adapter; 0 without one. Ids are used once."""
    name: str = ""
    """vLLM's name of the adapter, of version and digest."""


class LoraVersions(ResidentVersions[LoraVersion]):
    """The policy versions that vLLM has: one, or with a `rank` several adapters on one base. What
    other workers left in the server is gone then."""

    def __init__(self, server: VllmServerClient, *, rank: int = 0, most: int = 1) -> None:
        super().__init__(LoraVersion, most=most, adapters=rank > 0)
        self._server, self._rank = server, rank
        self._unheard: dict[str, tuple[int, HttpStream]] = {}
        """By stay, its adapter and what is listened to; at most what one drop finds."""
        if rank:
            server.pause()
            for name in server.adapters():
                server.unload_adapter(name)
            server.rpc("dora_drop_all")
            server.resume()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Run requests of the latest version under no adapter."""
        self._versions[-1] = LoraVersion(digest="")
        yield
        del self._versions[-1]

    def drop(self, version: int) -> None:
        """Forget a version; the base stays."""
        gone = self._versions.pop(version, None)
        if gone is None or not gone.number:
            return
        for stay, (number, stream) in list(self._unheard.items()):
            if number == gone.number:
                self._wait_heard(stay, stream)
        said = self._server.unload_adapter(gone.name)
        if said:
            raise InvariantBroken(f"vLLM's server has lost an adapter: {said}", hint=SHARED)
        self._server.rpc("dora_drop", str(gone.number))

    def keep(self, stay: str, adapter: int, stream: HttpStream) -> None:
        """Listen to a request that was let go."""
        self._unheard[stay] = (adapter, stream)

    def listen(self) -> None:
        """Let go of those whose first word has come."""
        for stay, (_, stream) in list(self._unheard.items()):
            try:
                stream.read()
            except ResourceError as error:
                raise self._server.gone(error) from None
            if stream.heard:
                self._end(stay, stream)

    def close(self) -> None:
        """Listen no more."""
        for _, stream in self._unheard.values():
            stream.close()
        self._unheard.clear()

    def _made(self, path: Path, version: int, digest: str) -> LoraVersion:
        """Read, compare and load the adapter in a file; one of zeros where `digest` is the base's.
        Raises PolicyError for one that does not belong here."""
        name = f"{version}:{digest[:16]}"
        words = (str(path.resolve()), digest, self.base, str(self._rank))
        folder = self._server.rpc("dora_write", *words)["folder"]
        said = self._server.load_adapter(name, str(folder))
        numbers = self._server.rpc("dora_forget")["numbers"]
        if said:
            raise PolicyError(f"vLLM cannot load this adapter: {' '.join(said.split())}")
        if len(numbers) != 1:
            message = f"vLLM's server has loaded the adapters {numbers} in place of one"
            raise InvariantBroken(message, hint=SHARED)
        return LoraVersion(digest=digest, number=int(numbers[0]), name=name)

    def _wait_heard(self, stay: str, stream: HttpStream) -> None:
        try:
            stream.wait_heard(FIRST_WORD_S)
        except ResourceError as error:
            raise self._server.gone(error) from None
        self._end(stay, stream)

    def _end(self, stay: str, stream: HttpStream) -> None:
        del self._unheard[stay]
        stream.close()
        if not stream.ended:
            self._server.abort([stay])
