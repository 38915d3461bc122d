"""HTTP server of tools, with a limit on concurrent requests.

On loopback it checks the Host header, against DNS rebinding.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from dora_pipe.core.errors import ResourceError

LOOPBACK: Final = "127.0.0.1"
NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine; any port, for `ssh -L`."""


class LocalServer(ThreadingHTTPServer):
    """Server that listens at once. Raises ResourceError."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, handler: type[LocalHandler], *, host: str, port: int, requests_max: int
    ) -> None:
        self.own_names_only = host == LOOPBACK
        self.room = threading.BoundedSemaphore(requests_max)
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            raise ResourceError(
                f"port {port} of {host} is not available: {error.strerror}",
                hint="choose another one with --port, or 0 for any",
            ) from None


class LocalHandler(ABC, BaseHTTPRequestHandler):
    """Handler of GET and HEAD; subclasses set `timeout` (seconds) and answer."""

    server: LocalServer
    server_version = "dora-pipe"
    sys_version = ""

    @abstractmethod
    def answer(self) -> None:
        """Respond to an admitted request."""

    @abstractmethod
    def say(self, status: HTTPStatus, text: str) -> None:
        """Respond with one line of text."""

    def do_GET(self) -> None:
        """Respond unless the server is busy."""
        if not self.server.room.acquire(blocking=False):
            self.say(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once")
            return
        try:
            if self.server.own_names_only and not is_own_name(self.headers.get("Host", "")):
                self.say(HTTPStatus.MISDIRECTED_REQUEST, "wrong host")
            else:
                self.answer()
        finally:
            self.server.room.release()

    do_HEAD = do_GET

    def send_whole(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        """Respond; HEAD omits the body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def is_own_name(host: str) -> bool:
    """Return whether a Host header names this machine. Example:
    ``is_own_name("localhost:8765")``."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    return name.lower() in NAMES and (not port or port.isdecimal())
