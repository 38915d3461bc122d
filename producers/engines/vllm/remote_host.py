"""The adapters of a vLLM server; decides when one can be forgotten.

The server's own worker reads the file, compares it and writes the directory that vLLM loads it from
(`dora_write`); the front end has vLLM load it and from then on knows its name (LOAD_ADAPTER); the
directory is removed (`dora_forget`). Nothing is paused meanwhile: vLLM does each between two steps.
Dropping is both halves again, the name at the front end and the adapter at the worker.

A request that comes to vLLM's engine core after its adapter is gone would end the core: vLLM would
load it again, from a directory that is not there. So a request that is let go before any word of it
has come is still listened to: an abort may have been there before it. It is aborted again with its
first word, and no adapter is dropped before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dora_pipe.core.errors import ConfigError, InvariantBroken, ResourceError
from dora_pipe.producers.engines.vllm.http import Exchange
from dora_pipe.producers.engines.vllm.lora import Version, refused
from dora_pipe.producers.engines.vllm.remote import Remote
from dora_pipe.producers.engines.vllm.rows import Row
from dora_pipe.producers.engines.vllm.wire import Facts

FIRST_WORD_S: Final = 60.0
"""For the first word of a request that was let go, where its adapter is to be dropped."""

SHARED: Final = "is another worker using this server?"


class RemoteHost:
    """See Host and the module; what other workers left in the server is gone."""

    def __init__(self, server: Remote, *, rank: int) -> None:
        self._server, self._rank = server, rank
        self._unheard: dict[str, tuple[int, Exchange]] = {}
        """By stay, its adapter and what is listened to; at most what one drop finds."""
        server.pause()
        for name in server.adapters():
            server.unload_adapter(name)
        server.rpc("dora_drop_all")
        server.resume()

    def put(self, path: Path, name: str, *, digest: str, base: str) -> Version:
        """See Host."""
        words = (str(path.resolve()), digest, base, str(self._rank))
        folder = self._server.rpc("dora_write", *words)["folder"]
        said = self._server.load_adapter(name, str(folder))
        numbers = self._server.rpc("dora_forget")["numbers"]
        if said:
            raise refused(said)
        if len(numbers) != 1:
            message = f"vLLM's server has loaded the adapters {numbers} in place of one"
            raise InvariantBroken(message, hint=SHARED)
        return Version(digest=digest, number=int(numbers[0]), name=name)

    def remove(self, version: Version) -> None:
        """See Host."""
        for stay, (number, exchange) in list(self._unheard.items()):
            if number == version.number:
                self._hear(stay, exchange)
        said = self._server.unload_adapter(version.name)
        if said:
            raise InvariantBroken(f"vLLM's server has lost an adapter: {said}", hint=SHARED)
        self._server.rpc("dora_drop", str(version.number))

    def keep(self, row: Row, exchange: Exchange) -> None:
        """Listen to a request that was let go."""
        self._unheard[row.stay] = (row.adapter, exchange)

    def settle(self) -> None:
        """Let go of those whose first word has come."""
        for stay, (_, exchange) in list(self._unheard.items()):
            try:
                exchange.read()
            except ResourceError as error:
                raise self._server.gone(error) from None
            if exchange.heard:
                self._end(stay, exchange)

    def close(self) -> None:
        """Listen no more."""
        for _, exchange in self._unheard.values():
            exchange.close()
        self._unheard.clear()

    def _hear(self, stay: str, exchange: Exchange) -> None:
        try:
            exchange.wait_heard(FIRST_WORD_S)
        except ResourceError as error:
            raise self._server.gone(error) from None
        self._end(stay, exchange)

    def _end(self, stay: str, exchange: Exchange) -> None:
        del self._unheard[stay]
        exchange.close()
        if not exchange.ended:
            self._server.abort([stay])


def check_room(facts: Facts, rank: int, most: int) -> None:
    """Raise ConfigError where a server has no room for `most` adapters of a rank; or has room for
    some where none are asked for: on a CPU it computes rows without one with another's."""
    has = f"adapters of rank {facts.lora_rank}, {facts.versions_resident} at once"
    if facts.lora_rank and not rank:
        raise ConfigError(
            f"vLLM's server hosts {has}, the run has none",
            hint="start it without --lora-rank",
        )
    if facts.lora_rank < rank or facts.versions_resident < most:
        raise ConfigError(
            f"vLLM's server hosts {has if facts.lora_rank else 'no adapters'},"
            f" the worker wants rank {rank}, {most} at once",
            hint=f"start it with --lora-rank {rank} --versions-resident {most}",
        )
