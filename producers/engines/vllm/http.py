"""HTTP client of a vLLM server over h11 and non-blocking sockets.

A stream is one connection; the socket's buffer bounds unread data.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import h11
import msgspec

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.producers.engines.vllm.wire import quoted

CONNECT_S: Final = 10.0
"""Timeout of the connection, and of sending the request."""

CALL_S: Final = 120.0
"""Timeout of a call; loading a large model takes long."""

RECEIVE_BYTES: Final = 1 << 16
EVENT_BYTES_MAX: Final = 1 << 25
"""Maximum bytes of an event or response; a token takes about 150."""

NOT_FOUND: Final = 404
"""Status of an unknown path, model or adapter."""

HINTS: Final = {
    401: "check that it is vLLM and the key is right",
    NOT_FOUND: "start the server as docs/engines.md describes",
}

EVENT_END: Final = b"\n\n"
EVENT_DATA: Final = b"data: "
EVENT_LAST: Final = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, key: str) -> Address:
        """Parse http://HOST:PORT. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        plain = host and port and parts.scheme == "http" and parts.path in ("", "/")
        if not plain or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"not an address of a vLLM server: {url!r}", hint="http://HOST:PORT")
        assert host is not None and port is not None
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ConfigError(f"the key of vLLM's server at {url} is not plain text of one line")
        return cls(host=host, port=port, key=key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class HttpStream:
    """A sent request; `status` is 0 before the response. Methods raise ResourceError if the
    connection fails."""

    def __init__(
        self, address: Address, method: Literal["GET", "POST"], path: str, body: object = None
    ) -> None:
        self.status = 0
        self.ended = False
        self._address = address
        self._body = bytearray()
        self._protocol = h11.Connection(h11.CLIENT)
        try:
            self._socket = socket.create_connection((address.host, address.port), CONNECT_S)
        except OSError as error:
            raise self._failed(error) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(self._request(method, path, body))
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise self._failed(error) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        """Read without blocking."""
        while not self.ended:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._failed(error) from None
            try:
                self._protocol.receive_data(received)
                self._parse()
            except h11.RemoteProtocolError as error:
                raise self._failed(error) from None

    def events(self) -> list[bytes]:
        """Return complete events, each once."""
        if EVENT_END not in self._body:
            return []
        *complete, rest = bytes(self._body).split(EVENT_END)
        self._body = bytearray(rest)
        data = (
            event.removeprefix(EVENT_DATA) for event in complete if event.startswith(EVENT_DATA)
        )
        return [event for event in data if event != EVENT_LAST]

    @property
    def heard(self) -> bool:
        """Return whether an unread event or the end has arrived."""
        return self.ended or (EVENT_DATA in self._body and EVENT_END in self._body)

    def wait_heard(self, timeout_s: float) -> None:
        self._wait(time.monotonic() + timeout_s, lambda: self.heard)

    def wait(self, timeout_s: float = CALL_S) -> bytes:
        self._wait(time.monotonic() + timeout_s, lambda: self.ended)
        return bytes(self._body)

    def close(self) -> None:
        """Close the connection; the server aborts the request."""
        self._socket.close()

    def _wait(self, until_s: float, done: Callable[[], bool]) -> None:
        while not done():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise ResourceError(f"vLLM's server at {self._address} sent no data")
            if select.select([self._socket], [], [], left_s)[0]:
                self.read()

    def _request(self, method: str, path: str, body: object) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [
            ("Host", f"{self._address.host}:{self._address.port}"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
            ("Connection", "close"),
        ]
        if self._address.key:
            headers.append(("Authorization", f"Bearer {self._address.key}"))
        head = h11.Request(method=method, target=path, headers=headers)
        parts = [self._protocol.send(head), self._protocol.send(h11.Data(data=content))]
        parts.append(self._protocol.send(h11.EndOfMessage()))
        return b"".join(part for part in parts if part)

    def _parse(self) -> None:
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > EVENT_BYTES_MAX:
                    raise h11.RemoteProtocolError(f"more than {EVENT_BYTES_MAX} bytes at once")
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                self.ended = True
                return

    def _failed(self, error: Exception) -> ResourceError:
        return ResourceError(f"the connection to vLLM's server at {self._address} failed: {error}")


def call(
    address: Address,
    method: Literal["GET", "POST"],
    path: str,
    body: object = None,
    *,
    timeout_s: float = CALL_S,
) -> Any:
    """Return the JSON or None. Raises ResourceError unless the status is 200."""
    stream = HttpStream(address, method, path, body)
    try:
        answer = stream.wait(timeout_s)
    finally:
        stream.close()
    if stream.status != 200:
        raise ResourceError(
            f"vLLM's server at {address} answered {path.partition('?')[0]} with"
            f" {stream.status}: {quoted(answer)}",
            hint=HINTS.get(stream.status),
        )
    try:
        return msgspec.json.decode(answer) if answer else None
    except msgspec.DecodeError as error:
        raise ResourceError(f"vLLM's server at {address} answered {path}: {error}") from None
