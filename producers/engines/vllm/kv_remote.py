"""KV caches of requests in a vLLM server, as its worker has them; decides how long a file is kept.

A cache that leaves is copied by the server's processes, each its own heads, into a file that is
made here. One that arrives is written to a file that its request names, and kept until the first
word of the request: then it was read. Of a request that was let go before that nobody tells when
the server looks for the file; vLLM computes what it does not find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from dora_pipe.core.errors import ResourceError, reason
from dora_pipe.producers.engines.port import Kv
from dora_pipe.producers.engines.vllm.client import VllmServerClient
from dora_pipe.producers.engines.vllm.kv_files import KV_ARRAY, KvFolder
from dora_pipe.producers.engines.vllm.wire import KV_COPIED, KV_ENDED

NO_ROOM: Final = "a size for which there is no room on the disk"
"""What a cache is of, besides what `kv_mismatch` says, that cannot be taken."""

ENDED: Final = "ended"
"""A request has ended in the server, and its last tokens are on their way."""

LEFT_MAX: Final = 64
"""Files of requests that were let go without a word; with more the oldest goes."""


class RemoteCaches:
    """The KV cache of a server, by stay. `facts` have no layout where none can leave or arrive.

    Example: ``path = caches.offer("3f-1", kv)``, which the request names; then `heard` or `left`.
    """

    def __init__(self, server: VllmServerClient) -> None:
        """Raises ResourceError where there is no room for temporary files."""
        with _files():
            self._folder = KvFolder()
        self._server = server
        self._offered: dict[str, Kv] = {}
        """By stay, of which no word has come."""
        self._left: deque[str] = deque()
        self._copies = 0
        self.facts = server.caches(str(self._folder.path), self._folder.mark)

    def has_room(self, kv: Kv) -> bool:
        """Whether it could be handed over now."""
        return self._folder.has_room(kv.bytes)

    def offer(self, stay: str, kv: Kv) -> str:
        """Write the file of a stay that begins with this cache. Raises ResourceError."""
        with _files():
            path = self._folder.put(stay, kv.arrays[KV_ARRAY])
        self._offered[stay] = kv
        return str(path)

    def heard(self, stay: str) -> None:
        """A word of a stay has come."""
        if self._offered.pop(stay, None) is not None:
            self._folder.remove(stay)

    def left(self, stay: str) -> None:
        if self._offered.pop(stay, None) is not None:
            self._left.append(stay)
        while len(self._left) > LEFT_MAX:
            self._folder.remove(self._left.popleft())

    def copied(self, stay: str, tokens: int, weights: str) -> Kv | Literal["ended"] | None:
        """A copy of the first so many positions of a stay, made by these weights; None where the
        server has not all of them, or none is known to be there (0); `ended` where the stay has
        ended in the server. Raises ResourceError."""
        if stay in self._offered:
            return self._offered[stay]
        if not self.facts.layout or not tokens:
            return None
        self._copies += 1
        name = f"copy-{self._copies}"
        with _files():
            path = self._folder.empty(name, self.facts, tokens)
        try:
            states = self._server.copy_cache(stay, str(path))
            if KV_ENDED in states:
                return ENDED
            with _files():
                array = self._folder.taken(path) if states == {KV_COPIED} else None
        finally:
            self._folder.remove(name)
        return None if array is None else self.facts.kv(array, weights)

    def close(self) -> None:
        """Forget all files."""
        self._folder.close()


@contextmanager
def _files() -> Iterator[None]:
    """What is said against a file is of this machine."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ResourceError(f"a KV cache for vLLM's server: {reason(error)}") from None
