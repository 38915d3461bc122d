"""Blobs and weights between machines over Arrow Flight, for who knows the run's token.

What this process offers lies in this machine's own place (`MappedFiles`) and is served from there,
from memory maps; so many streams at a time, further callers are told that this peer is busy. A blob
is looked for in that place first, so that two processes of one machine never use the network, then
at the peer that its record names. What comes from a peer is hashed chunk by chunk while it comes.

The token never travels. The client says hello with a nonce; the server answers with its own nonce
and a proof over both; the client shows its proof with every call. Proofs are HMAC-SHA256 under the
token, over who speaks, the run, and both nonces. Without TLS whoever can read the network can read
what is transferred, as always; what is received is compared with its digest.

The server keeps nothing of a stranger and waits for none. Its nonce is a function of the client's
and of a secret that it made when it started, so a proof is checked without a table of sessions, and
hello is one call that is complete before a thread begins with it: who connects and is silent holds
a socket and no thread. Flight's own handshake is a stream, which would hold one for each stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import flight

from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.port import (
    BROKEN_OFF,
    BUSY,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    REFUSED,
    UNREACHABLE,
    UNREADABLE,
    Array,
    Lost,
    Sink,
    misnamed,
)

NONCE_BYTES: Final = 32

HELLO: Final = "hello"
"""The one action that is answered without a proof."""

GATE: Final = "gate"
"""What the server's middleware is called by a call that it let in."""

HEADER: Final = "dora-proof"
"""Of every other call: the client's nonce and proof in hex."""

WRONG_TOKEN: Final = "wrong token"

CHUNK_BYTES: Final = 4 * 1024 * 1024

STREAMS_MAX: Final = 8
"""At the same time; more would only share the same wire."""

DROP: Final = "drop"

SIZE: Final = "size"

"""The two actions: forget a blob; how many bytes a name has."""

NAME: Final = re.compile(r"(kv|weights|patches)/([0-9a-f]{64}(?:\.safetensors|\.patch)?)")

SCHEMA: Final = pa.schema([("bytes", pa.uint8())])

PathOf = Callable[[str], Path]
"""From the last part of a name to where that file lies, or would lie."""

T = TypeVar("T")

PEERS_MAX: Final = 64
"""Connections that are kept; the one used longest ago is closed."""

CALL_S: Final = 3.0
"""For a connection, and for a call without a stream."""

ADDRESS: Final = re.compile(
    r"grpc(\+tls)?://([A-Za-z0-9_.-]{1,253}|\[[0-9a-fA-F:]{2,45}\]):\d{1,5}"
)

Take = Callable[[Array], bool]
"""Takes a chunk (uint8); False: it is not what was asked for, stop."""

WAIT_S: Final = 5.0

BYTES_PER_S_MIN: Final = 20_000_000
"""Weights that come more slowly than this, after `WAIT_S`, are read from the store instead."""

LINGER_S: Final = 5.0
"""A process that ends serves what it offered for so long; behind that, requests are prefilled."""

REMEMBERED_MAX: Final = 10_000
"""Blobs that a process remembers for that."""

LINGER_TURN_S: Final = 0.02


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in who knows the token; others may say hello."""

    def __init__(self, token: bytes, run: str) -> None:
        super().__init__()
        self._token, self._run = token, run
        self._secret = secrets.token_bytes(NONCE_BYTES)

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> Any:
        """See Flight. Raises FlightUnauthenticatedError before anything of the call is read."""
        shown = headers.get(HEADER, ())
        if len(shown) == 1 and self._knows(shown[0]):
            return flight.ServerMiddleware()
        if info.method != flight.FlightMethod.DO_ACTION:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        return None

    def hello(self, theirs: bytes) -> bytes:
        """The answer to a client's nonce. Raises FlightUnauthenticatedError for what is none."""
        if len(theirs) != NONCE_BYTES:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        mine = self._nonce(theirs)
        return mine + proof(self._token, self._run, b"server", theirs, mine)

    def _knows(self, shown: str | bytes) -> bool:
        try:
            words = bytes.fromhex(shown if isinstance(shown, str) else shown.decode("ascii"))
        except ValueError:
            return False
        theirs, proved = words[:NONCE_BYTES], words[NONCE_BYTES:]
        wanted = proof(self._token, self._run, b"client", theirs, self._nonce(theirs))
        return len(theirs) == NONCE_BYTES and hmac.compare_digest(proved, wanted)

    def _nonce(self, theirs: bytes) -> bytes:
        return hmac.digest(self._secret, theirs, "sha256")


def introduce(client: Any, token: bytes, run: str, options: Any) -> tuple[bytes, bytes]:
    """Say hello to a peer that proves that it knows the token; the header for all other calls.

    Raises FlightUnauthenticatedError, and what a call raises.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    results = client.do_action(flight.Action(HELLO, mine), options)
    answer = b"".join(bytes(one.body.to_pybytes()) for one in results)
    theirs, proved = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proved, proof(token, run, b"server", mine, theirs)):
        raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
    shown = mine + proof(token, run, b"client", mine, theirs)
    return HEADER.encode(), shown.hex().encode()


def proof(token: bytes, run: str, who: bytes, client: bytes, server: bytes) -> bytes:
    """That `who` knows the token, for these two nonces. Example: 32 bytes"""
    message = b"\0".join((b"dora-pipe transfers 2", who, run.encode(), client + server))
    return hmac.digest(token, message, "sha256")


class TransferServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server of its own thread pool; `paths` by the first part of names. `drop` and `sent` are
    told of a blob that a peer wants forgotten, and of one that a peer has got."""

    def __init__(
        self,
        location: str,
        *,
        token: bytes,
        run: str,
        paths: Mapping[str, PathOf],
        drop: Callable[[str], None],
        sent: Callable[[str], None],
        streams_max: int = STREAMS_MAX,
        **tls: Any,
    ) -> None:
        self._paths = paths
        self._drop = drop
        self._sent = sent
        self._streams = threading.BoundedSemaphore(streams_max)
        self._gate = Gate(token, run)
        super().__init__(location, middleware={GATE: self._gate}, **tls)

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

        whole, size = pa.py_buffer(data), len(data)
        pieces = (
            whole.slice(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)
        )
        return flight.GeneratorStream(SCHEMA, _Chunks(pieces, sent, self._streams.release))

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Say hello to anybody; drop a blob, or say how large a file is."""
        name = action.body.to_pybytes()
        if action.type == HELLO:
            return iter([self._gate.hello(name)])
        if context.get_middleware(GATE) is None:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        if action.type == SIZE:
            with self._mapped(name) as data:
                return iter([str(len(data)).encode()])
        kind, leaf = _split(name)
        if action.type == DROP and kind == "kv":
            self._drop(leaf)
        return iter([])

    def _mapped(self, name: bytes) -> mmap.mmap:
        kind, leaf = _split(name)
        if kind not in self._paths:
            raise flight.FlightServerError(GONE)
        try:
            with self._paths[kind](leaf).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # none of that name, or an empty one
            raise flight.FlightServerError(GONE) from None


class _Chunks:
    """Pieces of a file on their way. `sent` is called behind the last one; `done` once at the end,
    whatever becomes of the stream."""

    def __init__(
        self, pieces: Iterator[Any], sent: Callable[[], None], done: Callable[[], None]
    ) -> None:
        self._pieces = pieces
        self._sent = sent
        self._done: Callable[[], None] | None = done
        self._at = 0

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> Any:
        part = next(self._pieces, None)
        if part is None:
            self._sent()
            self._end()
            raise StopIteration
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
    return (found[1], found[2]) if found[1] else (found[3], found[4])


class Client:
    """Any thread may call. Nothing raises: what goes wrong is `Lost`."""

    def __init__(self, token: bytes, run: str, **tls: Any) -> None:
        self._token, self._run, self._tls = token, run, tls
        self._open: OrderedDict[str, tuple[Any, list[tuple[bytes, bytes]]]] = OrderedDict()
        self._lock = threading.Lock()

    def receive(self, peer: str, name: str, take: Take, *, timeout_s: float) -> Lost | None:
        """Give every chunk of a file to `take`; None when all of them were taken."""

        def stream(client: Any, options: Any) -> Lost | None:
            reader = client.do_get(flight.Ticket(name.encode()), options)
            for chunk in reader:
                if not take(chunk.data.column(0).to_numpy(zero_copy_only=True)):
                    reader.cancel()
                    return Lost(OTHER_DIGEST)
            return None

        return self._call(peer, stream, timeout_s)

    def size(self, peer: str, name: str) -> int | Lost:
        """Bytes of a file of a peer."""
        found = self._call(peer, lambda client, options: _act(client, SIZE, name, options), CALL_S)
        if isinstance(found, Lost):
            return found
        text = b"".join(found)
        return int(text) if text.isdigit() else Lost(UNREADABLE)

    def drop(self, peer: str, name: str) -> Lost | None:
        """Let a peer forget a blob."""
        found = self._call(peer, lambda client, options: _act(client, DROP, name, options), CALL_S)
        return found if isinstance(found, Lost) else None

    def close(self) -> None:
        with self._lock:
            clients = [client for client, _ in self._open.values()]
            self._open.clear()
        for client in clients:
            client.close()

    def _call(self, peer: str, call: Callable[[Any, Any], T], timeout_s: float) -> T | Lost:
        if not ADDRESS.fullmatch(peer):
            return Lost(UNREADABLE)
        until_s = time.monotonic() + timeout_s
        for again in (True, False):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return Lost(LATE)
            known = peer in self._open
            try:
                client, headers = self._client(peer, min(left_s, CALL_S))
                left_s = max(0.001, until_s - time.monotonic())
                return call(client, flight.FlightCallOptions(timeout=left_s, headers=headers))
            except (pa.ArrowException, flight.FlightError, OSError) as error:
                self._forget(peer)
                stranger = isinstance(error, flight.FlightUnauthenticatedError)
                if not (stranger and known and again):
                    return Lost(_word(error))
        raise AssertionError("the second call answers")

    def _client(self, peer: str, timeout_s: float) -> tuple[Any, list[tuple[bytes, bytes]]]:
        """A connection, and what every call on it shows."""
        with self._lock:
            if peer in self._open:
                self._open.move_to_end(peer)
                return self._open[peer]
        client = flight.FlightClient(peer, **self._tls)
        try:
            options = flight.FlightCallOptions(timeout=timeout_s)
            headers = [introduce(client, self._token, self._run, options)]
        except (pa.ArrowException, flight.FlightError, OSError):
            client.close()
            raise
        with self._lock:
            self._open[peer] = client, headers
            while len(self._open) > PEERS_MAX:
                self._open.popitem(last=False)
        return client, headers

    def _forget(self, peer: str) -> None:
        with self._lock:
            self._open.pop(peer, None)


def _act(client: Any, kind: str, name: str, options: Any) -> list[bytes]:
    results = client.do_action(flight.Action(kind, name.encode()), options)
    return [bytes(one.body.to_pybytes()) for one in results]


def _word(error: Exception) -> str:
    """The word for what pyarrow says."""
    if isinstance(error, flight.FlightUnauthenticatedError):
        return REFUSED
    if isinstance(error, flight.FlightTimedOutError):
        return LATE
    if isinstance(error, flight.FlightUnavailableError):
        return UNREACHABLE
    said = str(error)
    return next((word for word in (GONE, BUSY) if said.startswith(word)), BROKEN_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is to its peers.

    Example: ``Identity(token=token, run="demo", host="10.0.0.7", port=0)``
    """

    token: bytes
    run: str
    host: str
    """Where it listens, and what peers connect to."""
    port: int = 0
    """0: any that is free."""
    server_tls: tuple[tuple[str, Any], ...] = ()
    client_tls: tuple[tuple[str, Any], ...] = ()
    """Further arguments for pyarrow's server and clients."""

    @property
    def scheme(self) -> str:
        """How peers connect."""
        return "grpc+tls" if self.server_tls else "grpc"


class FlightTransfers:
    """See the module. `stored` says where a file of the policy store lies on this machine.

    Example: ``FlightTransfers(MappedFiles(...), identity, stored=lambda name: root / name)``
    """

    def __init__(
        self,
        place: MappedFiles,
        identity: Identity,
        *,
        stored: Callable[[str], Path],
        streams_max: int = STREAMS_MAX,
        linger_s: float = LINGER_S,
    ) -> None:
        self._place = place
        self._linger_s = linger_s
        self._offered: set[str] = set()
        self._sent: set[str] = set()
        self._client = Client(identity.token, identity.run, **dict(identity.client_tls))
        self._server = TransferServer(
            f"{identity.scheme}://{identity.host}:{identity.port}",
            token=identity.token,
            run=identity.run,
            paths={
                "kv": lambda leaf: place.path(Blob(sha256=leaf, bytes=0)),
                "patches": lambda leaf: stored(f"patches/{leaf}"),
                "weights": lambda leaf: stored(f"weights/{leaf}"),
            },
            drop=lambda leaf: place.drop(Blob(sha256=leaf, bytes=1)),
            sent=self._sent.add,
            streams_max=streams_max,
            **dict(identity.server_tls),
        )
        self.address = f"{identity.scheme}://{identity.host}:{self._server.port}"

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """See `Transfers`; the blob says where this process serves it."""
        blob = self._place.offer(chunks)
        if isinstance(blob, Lost):
            return blob
        if len(self._offered) >= REMEMBERED_MAX:
            self._offered.clear()
            self._sent.clear()
        self._offered.add(blob.sha256)
        return msgspec.structs.replace(blob, peer=self.address)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """See `Transfers`: from this machine's place, else from the peer."""
        found = self._place.fetch(blob, timeout_s=timeout_s)
        if isinstance(found, Lost) and found.why == GONE and self._is_elsewhere(blob):
            return self._from_peer(blob, timeout_s)
        return found

    def drop(self, blob: Blob) -> None:
        """See `Transfers`. A peer that does not hear it deletes the file when it is old."""
        if misnamed(blob) is not None:
            return
        here = self._place.path(blob).exists()
        self._place.drop(blob)
        if not here and self._is_elsewhere(blob):
            self._client.drop(blob.peer, f"kv/{blob.sha256}")

    def clear(self) -> None:
        self._place.clear()

    def close(self) -> None:
        """Stop serving, as soon as nobody waits for what was offered here, or after `LINGER_S`.

        A worker that was drained has just let go of requests, whose caches lie here alone. Streams
        that run are finished: their clients have deadlines.
        """
        until_s = time.monotonic() + self._linger_s
        while self._awaited() and time.monotonic() < until_s:
            time.sleep(LINGER_TURN_S)
        for sha256 in self._sent:
            self._place.drop(Blob(sha256=sha256, bytes=1))
        self._client.close()
        self._server.shutdown()
        self._server.wait()

    def copy(self, peer: str, name: str, target: Sink) -> Lost | None:
        """Write the bytes of a peer's file of weights, or a patch; they are not compared here.

        None when all of it was written.
        """
        size = self._client.size(peer, name)
        if isinstance(size, Lost):
            return size
        written, full = 0, False

        def take(chunk: Array) -> bool:
            nonlocal written, full
            try:
                written += target.write(chunk.data)
            except OSError:
                full = True
            return written <= size and not full

        timeout_s = WAIT_S + size / BYTES_PER_S_MIN
        lost = self._client.receive(peer, name, take, timeout_s=timeout_s)
        if full:
            return Lost(NO_ROOM)
        return lost or (None if written == size else Lost(BROKEN_OFF))

    def _awaited(self) -> bool:
        """Whether something that was offered here has been neither sent nor dropped."""
        lying = (self._place.path(Blob(sha256=one, bytes=1)) for one in self._offered - self._sent)
        return any(path.exists() for path in lying)

    def _is_elsewhere(self, blob: Blob) -> bool:
        return blob.peer not in ("", self.address)

    def _from_peer(self, blob: Blob, timeout_s: float) -> Array | Lost:
        if timeout_s <= 0:
            return Lost(LATE)
        data = np.empty(blob.bytes, np.uint8)
        digest, at = hashlib.sha256(), 0

        def take(chunk: Array) -> bool:
            nonlocal at
            if at + len(chunk) > blob.bytes:
                return False
            digest.update(chunk.data)
            data[at : at + len(chunk)] = chunk
            at += len(chunk)
            return True

        name = f"kv/{blob.sha256}"
        lost = self._client.receive(blob.peer, name, take, timeout_s=timeout_s)
        if lost is not None:
            return lost
        if at != blob.bytes or digest.hexdigest() != blob.sha256:
            return Lost(OTHER_DIGEST)
        return data
