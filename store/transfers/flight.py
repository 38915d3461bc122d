"""Transfers between machines over Arrow Flight, authenticated by the run's token.

Blobs are served from memory maps of `MappedFiles`. Fetches try the local directory first, then the
record's peer, and hash chunks on arrival.

The token is never sent. The client's hello has a nonce; the server replies with its nonce and a
proof; each call carries the client's proof. Proofs are HMAC-SHA256 under the token over role, run
and both nonces. Without TLS the data is readable on the network.

The server is stateless: its nonce is a function of the client's nonce and a startup secret. Hello
is an action, not Flight's handshake stream, so strangers hold no thread.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import flight

from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.transfers import (
    BROKEN_OFF,
    BUSY,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    PLACE_BYTES_MAX,
    REFUSED,
    UNREACHABLE,
    UNREADABLE,
    Array,
    Lost,
    misnamed,
)

NONCE_BYTES: Final = 32

HELLO: Final = "hello"
"""Action that needs no proof."""

GATE: Final = "gate"
"""Middleware key of admitted calls."""

HEADER: Final = "dora-proof"
"""Header of other calls: client nonce and proof in hex."""

WRONG_TOKEN: Final = "wrong token"

CHUNK_BYTES: Final = 4 * 1024 * 1024

STREAMS_MAX: Final = 8
DROP: Final = "drop"

SIZE: Final = "size"

"""Actions: delete a blob; return a file's size."""

NAME: Final = re.compile(r"(kv|weights|deltas)/([0-9a-f]{64}(?:\.safetensors|\.delta)?)")

SCHEMA: Final = pa.schema([("bytes", pa.uint8())])

PathOf = Callable[[str], Path]
"""Maps the last part of a name to a path."""

T = TypeVar("T")

PEERS_MAX: Final = 64
"""Maximum cached connections."""

CALL_S: Final = 3.0
"""Time to connect, and for a call without a stream."""

ADDRESS: Final = re.compile(
    r"grpc(\+tls)?://([A-Za-z0-9_.-]{1,253}|\[[0-9a-fA-F:]{2,45}\]):\d{1,5}"
)

Take = Callable[[Array], bool]
"""Consumer of chunks (uint8); False cancels the stream."""

WAIT_S: Final = 5.0

BYTES_PER_S_MIN: Final = 20_000_000
"""Minimum rate after `WAIT_S`; slower weights come from the store."""

LINGER_S: Final = 5.0
"""Time that an ending process serves its blobs."""

REMEMBERED_MAX: Final = 10_000
LINGER_TURN_S: Final = 0.02


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Middleware that admits hello and callers with a valid proof."""

    def __init__(self, token: bytes, run: str) -> None:
        super().__init__()
        self._token, self._run = token, run
        self._secret = secrets.token_bytes(NONCE_BYTES)

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> Any:
        """Raises FlightUnauthenticatedError before reading the call's body."""
        shown = headers.get(HEADER, ())
        if len(shown) == 1 and self._knows(shown[0]):
            return flight.ServerMiddleware()
        if info.method != flight.FlightMethod.DO_ACTION:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        return None

    def hello(self, theirs: bytes) -> bytes:
        """Return the reply to a client's nonce. Raises FlightUnauthenticatedError if it is
        malformed."""
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
        expected = proof(self._token, self._run, b"client", theirs, self._nonce(theirs))
        return len(theirs) == NONCE_BYTES and hmac.compare_digest(proved, expected)

    def _nonce(self, theirs: bytes) -> bytes:
        return hmac.digest(self._secret, theirs, "sha256")


def introduce(client: Any, token: bytes, run: str, options: Any) -> tuple[bytes, bytes]:
    """Authenticate to a peer and return the header for later calls.

    Raises FlightUnauthenticatedError, and errors of the call.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    results = client.do_action(flight.Action(HELLO, mine), options)
    answer = b"".join(bytes(result.body.to_pybytes()) for result in results)
    theirs, proved = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proved, proof(token, run, b"server", mine, theirs)):
        raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
    shown = mine + proof(token, run, b"client", mine, theirs)
    return HEADER.encode(), shown.hex().encode()


def proof(token: bytes, run: str, who: bytes, client: bytes, server: bytes) -> bytes:
    """Return the 32-byte proof that `who` knows the token, for these nonces."""
    message = b"\0".join((b"dora-pipe transfers 2", who, run.encode(), client + server))
    return hmac.digest(token, message, "sha256")


class TransferServer(flight.FlightServerBase):  # type: ignore[misc]
    """Server with its own threads; `paths` by first part of names.

    `drop` is called for a blob that a peer deletes, `sent` for a received one.
    """

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
        """Stream a file. Raises FlightServerError if missing or busy."""
        data = self._mapped(ticket.ticket)
        return flight.GeneratorStream(SCHEMA, self._batches(*_split(ticket.ticket), data))

    def _batches(self, kind: str, leaf: str, data: mmap.mmap) -> Iterator[Any]:
        if not self._streams.acquire(blocking=False):
            raise flight.FlightServerError(BUSY)
        try:
            buffer, size = pa.py_buffer(data), len(data)
            for start in range(0, size, CHUNK_BYTES):
                yield _batch(buffer.slice(start, min(CHUNK_BYTES, size - start)))
            if kind == "kv":
                self._sent(leaf)
        finally:
            self._streams.release()

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
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
        except (OSError, ValueError):  # missing, or empty
            raise flight.FlightServerError(GONE) from None


def _batch(piece: Any) -> Any:
    column = pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def _split(name: bytes) -> tuple[str, str]:
    match = NAME.fullmatch(name.decode("ascii", "replace"))
    if match is None:
        raise flight.FlightServerError(GONE)
    return match[1], match[2]


class Client:
    """Thread-safe client that returns `Lost` instead of raising."""

    def __init__(self, token: bytes, run: str, **tls: Any) -> None:
        self._token, self._run, self._tls = token, run, tls
        self._open: OrderedDict[str, tuple[Any, list[tuple[bytes, bytes]]]] = OrderedDict()
        self._lock = threading.Lock()

    def receive(self, peer: str, name: str, take: Take, *, timeout_s: float) -> Lost | None:
        """Pass every chunk of a file to `take`; return None on success."""

        def stream(client: Any, options: Any) -> Lost | None:
            reader = client.do_get(flight.Ticket(name.encode()), options)
            for chunk in reader:
                if not take(chunk.data.column(0).to_numpy(zero_copy_only=True)):
                    reader.cancel()
                    return Lost(OTHER_DIGEST)
            return None

        return self._call(peer, stream, timeout_s)

    def size(self, peer: str, name: str) -> int | Lost:
        answer = self._call(peer, lambda client, options: _act(client, SIZE, name, options), CALL_S)
        if isinstance(answer, Lost):
            return answer
        text = b"".join(answer)
        return int(text) if text.isdigit() else Lost(UNREADABLE)

    def drop(self, peer: str, name: str) -> Lost | None:
        answer = self._call(peer, lambda client, options: _act(client, DROP, name, options), CALL_S)
        return answer if isinstance(answer, Lost) else None

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
            is_open = peer in self._open
            try:
                client, headers = self._client(peer, min(left_s, CALL_S))
                left_s = max(0.001, until_s - time.monotonic())
                return call(client, flight.FlightCallOptions(timeout=left_s, headers=headers))
            except (pa.ArrowException, flight.FlightError, OSError) as error:
                self._forget(peer)
                stranger = isinstance(error, flight.FlightUnauthenticatedError)
                if not (stranger and is_open and again):
                    return Lost(_word(error))
        raise AssertionError("the second call answers")

    def _client(self, peer: str, timeout_s: float) -> tuple[Any, list[tuple[bytes, bytes]]]:
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
    return [bytes(result.body.to_pybytes()) for result in results]


def _word(error: Exception) -> str:
    if isinstance(error, flight.FlightUnauthenticatedError):
        return REFUSED
    if isinstance(error, flight.FlightTimedOutError):
        return LATE
    if isinstance(error, flight.FlightUnavailableError):
        return UNREACHABLE
    message = str(error)
    return next((word for word in (GONE, BUSY) if message.startswith(word)), BROKEN_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of this process to peers."""

    token: bytes
    run: str
    host: str
    """Listening address, also advertised to peers."""
    port: int = 0
    """0 selects a free port."""
    server_tls: Mapping[str, Any] = field(default_factory=dict)
    client_tls: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of pyarrow's server and client."""

    @property
    def scheme(self) -> str:
        return "grpc+tls" if self.server_tls else "grpc"


class FlightTransfers(MappedFiles):
    """Blobs also fetched from peers over Flight; `stored` returns the path of a policy store
    file."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        stored: Callable[[str], Path],
        clock: Clock,
        bytes_max: int = PLACE_BYTES_MAX,
        streams_max: int = STREAMS_MAX,
        linger_s: float = LINGER_S,
    ) -> None:
        super().__init__(root, clock=clock, bytes_max=bytes_max)
        self._linger_s = linger_s
        self._offered: set[str] = set()
        self._sent: set[str] = set()
        self._client = Client(identity.token, identity.run, **identity.client_tls)
        self._server = TransferServer(
            f"{identity.scheme}://{identity.host}:{identity.port}",
            token=identity.token,
            run=identity.run,
            paths={
                "kv": lambda leaf: self.path(Blob(sha256=leaf, bytes=0)),
                "deltas": lambda leaf: stored(f"deltas/{leaf}"),
                "weights": lambda leaf: stored(f"weights/{leaf}"),
            },
            drop=lambda leaf: MappedFiles.drop(self, Blob(sha256=leaf, bytes=1)),
            sent=self._sent.add,
            streams_max=streams_max,
            **identity.server_tls,
        )
        self.address = f"{identity.scheme}://{identity.host}:{self._server.port}"

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """Store the blob and add the address."""
        blob = super().offer(chunks)
        if isinstance(blob, Lost):
            return blob
        if len(self._offered) >= REMEMBERED_MAX:
            self._offered.clear()
            self._sent.clear()
        self._offered.add(blob.sha256)
        return msgspec.structs.replace(blob, peer=self.address)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """Fetch locally, else from the peer."""
        data = super().fetch(blob, timeout_s=timeout_s)
        if isinstance(data, Lost) and data.why == GONE and self._is_elsewhere(blob):
            return self._from_peer(blob, timeout_s)
        return data

    def drop(self, blob: Blob) -> None:
        """Delete locally and at the peer."""
        if misnamed(blob) is not None:
            return
        here = self.path(blob).exists()
        super().drop(blob)
        if not here and self._is_elsewhere(blob):
            self._client.drop(blob.peer, f"kv/{blob.sha256}")

    def close(self) -> None:
        """Stop serving once no offered blob is awaited, or after `LINGER_S`; a drained worker's
        caches exist only here."""
        until_s = time.monotonic() + self._linger_s
        while self._awaited() and time.monotonic() < until_s:
            time.sleep(LINGER_TURN_S)
        for sha256 in self._sent:
            super().drop(Blob(sha256=sha256, bytes=1))
        self._client.close()
        self._server.shutdown()
        self._server.wait()

    def copy(self, peer: str, name: str, target: BinaryIO) -> Lost | None:
        """Write a peer's weights or delta to `target`, unverified; return None on success."""
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
        lying = (self.path(Blob(sha256=sha256, bytes=1)) for sha256 in self._offered - self._sent)
        return any(path.exists() for path in lying)

    def _is_elsewhere(self, blob: Blob) -> bool:
        return blob.peer not in ("", self.address)

    def _from_peer(self, blob: Blob, timeout_s: float) -> Array | Lost:
        if timeout_s <= 0:
            return Lost(LATE)
        data = np.empty(blob.bytes, np.uint8)
        digest, position = hashlib.sha256(), 0

        def take(chunk: Array) -> bool:
            nonlocal position
            if position + len(chunk) > blob.bytes:
                return False
            digest.update(chunk.data)
            data[position : position + len(chunk)] = chunk
            position += len(chunk)
            return True

        name = f"kv/{blob.sha256}"
        lost = self._client.receive(blob.peer, name, take, timeout_s=timeout_s)
        if lost is not None:
            return lost
        if position != blob.bytes or digest.hexdigest() != blob.sha256:
            return Lost(OTHER_DIGEST)
        return data
