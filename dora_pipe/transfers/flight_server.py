"""Serves files of this machine to those who know the token; decides which names lead to files.

`kv/<sha256>` is a blob of this machine's place, `weights/<digest>.safetensors` a file of its policy
store. A file is sent from a memory map in chunks, so that a stream costs no memory of its own; so
many streams at a time, further callers are told that this peer is busy.
"""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from dora_pipe.transfers.flight_auth import ServerAuth
from dora_pipe.transfers.port import BUSY, GONE

CHUNK_BYTES: Final = 4 * 1024 * 1024
STREAMS_MAX: Final = 8
"""At the same time; more would only share the same wire."""

DROP: Final = "drop"
SIZE: Final = "size"
"""The two actions: forget a blob; how many bytes a name has."""

NAME: Final = re.compile(r"(kv|weights)/([0-9a-f]{64}(?:\.safetensors)?)")
SCHEMA: Final = pa.schema([("bytes", pa.uint8())])

Shelf = Callable[[str], Path]
"""From the last part of a name to where that file lies, or would lie."""


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """A server of its own thread pool; `shelves` by the first part of names. `drop` and `sent` are
    told of a blob that a peer wants forgotten, and of one that a peer has got."""

    def __init__(
        self,
        location: str,
        *,
        token: bytes,
        run: str,
        shelves: Mapping[str, Shelf],
        drop: Callable[[str], None],
        sent: Callable[[str], None],
        streams_max: int = STREAMS_MAX,
        **tls: Any,
    ) -> None:
        self._shelves = shelves
        self._drop = drop
        self._sent = sent
        self._streams = threading.BoundedSemaphore(streams_max)
        super().__init__(location, auth_handler=ServerAuth(token, run), **tls)

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Stream a file. Raises FlightServerError: it is not here, or there are too many."""
        name = ticket.ticket
        data = self._mapped(name)
        if not self._streams.acquire(blocking=False):
            data.close()
            raise flight.FlightServerError(BUSY)
        kind, leaf = _split(name)

        def sent() -> None:
            if kind == "kv":
                self._sent(leaf)

        return flight.GeneratorStream(SCHEMA, _Chunks(data, sent, self._streams.release))

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Drop a blob, or say how large a file is."""
        name = action.body.to_pybytes()
        if action.type == SIZE:
            with self._mapped(name) as data:
                return iter([str(len(data)).encode()])
        kind, leaf = _split(name)
        if action.type == DROP and kind == "kv":
            self._drop(leaf)
        return iter([])

    def _mapped(self, name: bytes) -> mmap.mmap:
        kind, leaf = _split(name)
        if kind not in self._shelves:
            raise flight.FlightServerError(GONE)
        try:
            with self._shelves[kind](leaf).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # none of that name, or an empty one
            raise flight.FlightServerError(GONE) from None


class _Chunks:
    """The chunks of a file. `sent` is called behind the last one; `done` once at the end, whatever
    becomes of the stream."""

    def __init__(self, data: mmap.mmap, sent: Callable[[], None], done: Callable[[], None]) -> None:
        self._data = pa.py_buffer(data)
        self._sent = sent
        self._done: Callable[[], None] | None = done
        self._at = 0

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> Any:
        if self._at >= self._data.size:
            self._sent()
            self._end()
            raise StopIteration
        part = self._data.slice(self._at, min(CHUNK_BYTES, self._data.size - self._at))
        self._at += part.size
        column = pa.Array.from_buffers(pa.uint8(), part.size, [None, part])
        return pa.RecordBatch.from_arrays([column], schema=SCHEMA)

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()


def _split(name: bytes) -> tuple[str, str]:
    """A name's two parts. Raises FlightServerError for what is no name."""
    found = NAME.fullmatch(name.decode("ascii", "replace"))
    if found is None:
        raise flight.FlightServerError(GONE)
    return found[1], found[2]
