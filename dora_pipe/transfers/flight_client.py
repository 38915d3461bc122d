"""Fetches from peers over Arrow Flight; decides which word a failure becomes.

One connection per peer is kept, and made again once when the peer does not know it any more (it was
started anew). A call has a deadline and never outlives it.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import flight

from dora_pipe.transfers.flight_auth import ClientAuth
from dora_pipe.transfers.flight_server import DROP, SIZE
from dora_pipe.transfers.port import (
    BROKEN_OFF,
    BUSY,
    GONE,
    LATE,
    OTHER_DIGEST,
    REFUSED,
    UNREACHABLE,
    UNREADABLE,
    Array,
    Lost,
)

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


class Client:
    """Any thread may call. Nothing raises: what goes wrong is `Lost`."""

    def __init__(self, token: bytes, run: str, **tls: Any) -> None:
        self._token, self._run, self._tls = token, run, tls
        self._open: OrderedDict[str, Any] = OrderedDict()
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
        """Close every connection."""
        with self._lock:
            clients = list(self._open.values())
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
                client = self._client(peer, min(left_s, CALL_S))
                left_s = max(0.001, until_s - time.monotonic())
                return call(client, flight.FlightCallOptions(timeout=left_s))
            except (pa.ArrowException, flight.FlightError, OSError) as error:
                self._forget(peer)
                stranger = isinstance(error, flight.FlightUnauthenticatedError)
                if not (stranger and known and again):
                    return Lost(_word(error))
        raise AssertionError("the second call answers")

    def _client(self, peer: str, timeout_s: float) -> Any:
        with self._lock:
            if peer in self._open:
                self._open.move_to_end(peer)
                return self._open[peer]
        client = flight.FlightClient(peer, **self._tls)
        try:
            auth = ClientAuth(self._token, self._run)
            client.authenticate(auth, flight.FlightCallOptions(timeout=timeout_s))
        except (pa.ArrowException, flight.FlightError, OSError):
            client.close()
            raise
        with self._lock:
            self._open[peer] = client
            while len(self._open) > PEERS_MAX:
                self._open.popitem(last=False)
        return client

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
