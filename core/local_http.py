"""The HTTP server of a tool; it decides which requests are answered at all.

So many at once; and, where it listens on this machine alone, only who calls it by a name of this
machine: a page of elsewhere whose name was rebound to this address still sends its own name.
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
"""Names of this machine. Any port: it may be forwarded (`ssh -L`)."""


class LocalServer(ThreadingHTTPServer):
    """Listens at once. Raises ResourceError where it cannot."""

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
                f"port {port} of {host} cannot be used: {error.strerror}",
                hint="choose another one with --port, or 0 for any",
            ) from None


class LocalHandler(ABC, BaseHTTPRequestHandler):
    """GET and HEAD of a path; a subclass sets `timeout` (seconds) and answers."""

    server: LocalServer
    server_version = "dora-pipe"
    sys_version = ""

    @abstractmethod
    def answer(self) -> None:
        """The request has room and comes from a caller that is answered."""

    @abstractmethod
    def say(self, status: HTTPStatus, text: str) -> None:
        """Answer with one line of text."""

    def do_GET(self) -> None:
        """Answer, if there is room."""
        if not self.server.room.acquire(blocking=False):
            self.say(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once")
            return
        try:
            if self.server.own_names_only and not is_own_name(self.headers.get("Host", "")):
                self.say(HTTPStatus.MISDIRECTED_REQUEST, "this is not who you think it is")
            else:
                self.answer()
        finally:
            self.server.room.release()

    do_HEAD = do_GET

    def send_whole(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        """An answer of known length; a HEAD gets all but its body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's news."""


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine. Example: ``is_own_name("localhost:8765")``."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    return name.lower() in NAMES and (not port or port.isdecimal())
