"""The resident versions of a LoRA policy in a vLLM server.

The base, too, has an adapter, of zeros: on a CPU, vLLM 0.32 computes rows without one with the last
adapter of a mixed batch (vllm-project/vllm#48421).

The worker writes a directory (`dora_write`), the front end loads it (LOAD_ADAPTER), and it is
removed (`dora_forget`). Dropping removes the name at the front end and the adapter at the worker.

A request that reaches the engine core after its adapter is gone would end the core. So a request
that left before its first event is read until then and aborted again; its adapter is not dropped
before.
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
"""Timeout of a left request's first event when its adapter is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraVersion(Version):
    """A version; without an adapter for full weights and during warm-up."""

    number: int = 0
    """vLLM's id, never reused; 0 without an adapter."""
    name: str = ""
    """Version and digest."""


class LoraVersions(ResidentVersions[LoraVersion]):
    """Policy versions in vLLM; removes adapters of earlier workers."""

    def __init__(self, server: VllmServerClient, *, rank: int = 0, most: int = 1) -> None:
        super().__init__(LoraVersion, most=most, adapters=rank > 0)
        self._server, self._rank = server, rank
        self._unstarted: dict[str, tuple[int, HttpStream]] = {}
        """Adapter and stream of left requests, by attempt."""
        if rank:
            server.pause()
            for name in server.adapters():
                server.unload_adapter(name)
            server.rpc("dora_drop_all")
            server.resume()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Run requests without an adapter."""
        self._versions[-1] = LoraVersion(digest="")
        yield
        del self._versions[-1]

    def drop(self, version: int) -> None:
        dropped = self._versions.pop(version, None)
        if dropped is None or not dropped.number:
            return
        for attempt, (number, stream) in list(self._unstarted.items()):
            if number == dropped.number:
                self._wait_started(attempt, stream)
        refusal = self._server.unload_adapter(dropped.name)
        if refusal:
            raise InvariantBroken(f"vLLM's server lost an adapter: {refusal}", hint=SHARED)
        self._server.rpc("dora_drop", str(dropped.number))

    def keep(self, attempt: str, adapter: int, stream: HttpStream) -> None:
        """Keep reading a request that left before its first event."""
        self._unstarted[attempt] = (adapter, stream)

    def listen(self) -> None:
        """Abort left requests after their first event."""
        for attempt, (_, stream) in list(self._unstarted.items()):
            try:
                stream.read()
            except ResourceError as error:
                raise self._server.failure(error) from None
            if stream.heard:
                self._end(attempt, stream)

    def close(self) -> None:
        for _, stream in self._unstarted.values():
            stream.close()
        self._unstarted.clear()

    def _made(self, path: Path, version: int, digest: str) -> LoraVersion:
        """Load an adapter, or zeros for the base's digest. Raises PolicyError."""
        name = f"{version}:{digest[:16]}"
        words = (str(path.resolve()), digest, self.base, str(self._rank))
        folder = self._server.rpc("dora_write", *words)["folder"]
        refusal = self._server.load_adapter(name, str(folder))
        numbers = self._server.rpc("dora_forget")["numbers"]
        if refusal:
            raise PolicyError(f"vLLM cannot load this adapter: {' '.join(refusal.split())}")
        if len(numbers) != 1:
            message = f"vLLM's server has loaded the adapters {numbers} in place of one"
            raise InvariantBroken(message, hint=SHARED)
        return LoraVersion(digest=digest, number=int(numbers[0]), name=name)

    def _wait_started(self, attempt: str, stream: HttpStream) -> None:
        try:
            stream.wait_heard(FIRST_WORD_S)
        except ResourceError as error:
            raise self._server.failure(error) from None
        self._end(attempt, stream)

    def _end(self, attempt: str, stream: HttpStream) -> None:
        del self._unstarted[attempt]
        stream.close()
        if not stream.ended:
            self._server.abort([attempt])
