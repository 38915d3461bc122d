"""How two ends of a Flight connection prove that they know the run's token; it never travels.

The client sends a nonce; the server answers with its own and a proof over both; the client sends
its proof; the server gives it a session key for this connection. Proofs are HMAC-SHA256 under the
token, over who speaks, the run, and both nonces. Without TLS whoever can read the network can read
what is transferred, as always; what is received is compared with its digest.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import OrderedDict
from typing import Final, Protocol

from pyarrow import flight

NONCE_BYTES: Final = 32

SESSIONS_MAX: Final = 4096
"""Of one server; the oldest is forgotten, and its client proves itself again."""

WRONG_TOKEN: Final = "wrong token"


class _Sender(Protocol):
    def write(self, message: bytes) -> None: ...


class _Receiver(Protocol):
    def read(self) -> bytes: ...


class ServerAuth(flight.ServerAuthHandler):  # type: ignore[misc]
    """Lets in who knows the token."""

    def __init__(self, token: bytes, run: str) -> None:
        super().__init__()
        self._token, self._run = token, run
        self._sessions: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def authenticate(self, outgoing: _Sender, incoming: _Receiver) -> None:
        """See the module. Raises FlightUnauthenticatedError, whatever happened."""
        try:
            self._admit(outgoing, incoming)
        except OSError:  # It would tell a stranger where this program lies.
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN) from None

    def _admit(self, outgoing: _Sender, incoming: _Receiver) -> None:
        theirs, mine = incoming.read(), secrets.token_bytes(NONCE_BYTES)
        if len(theirs) != NONCE_BYTES:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        outgoing.write(mine + proof(self._token, self._run, b"server", theirs, mine))
        wanted = proof(self._token, self._run, b"client", theirs, mine)
        if not hmac.compare_digest(incoming.read(), wanted):
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        session = secrets.token_bytes(NONCE_BYTES)
        with self._lock:
            self._sessions[session] = None
            while len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        outgoing.write(session)

    def is_valid(self, token: bytes) -> bytes:
        """Raises FlightUnauthenticatedError for a session that is not one."""
        with self._lock:
            known = token in self._sessions
        if not known:
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        return b"peer"


class ClientAuth(flight.ClientAuthHandler):  # type: ignore[misc]
    """Proves that this end knows the token, to a peer that proves the same first."""

    def __init__(self, token: bytes, run: str) -> None:
        super().__init__()
        self._token, self._run = token, run
        self._session = b""

    def authenticate(self, outgoing: _Sender, incoming: _Receiver) -> None:
        """See the module. Raises FlightUnauthenticatedError."""
        mine = secrets.token_bytes(NONCE_BYTES)
        outgoing.write(mine)
        answer = incoming.read()
        theirs, proved = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proved, proof(self._token, self._run, b"server", mine, theirs)):
            raise flight.FlightUnauthenticatedError(WRONG_TOKEN)
        outgoing.write(proof(self._token, self._run, b"client", mine, theirs))
        self._session = incoming.read()

    def get_token(self) -> bytes:
        """The session key, which goes with every call."""
        return self._session


def proof(token: bytes, run: str, who: bytes, client: bytes, server: bytes) -> bytes:
    """That `who` knows the token, for these two nonces. Example: 32 bytes"""
    message = b"\0".join((b"dora-pipe transfers 1", who, run.encode(), client + server))
    return hmac.digest(token, message, "sha256")
