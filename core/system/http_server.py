"""HTTP servers by uvicorn, with bounds on connections, and on size and time of request heads.

`PageServer` serves a tool's pages in a thread. On loopback it checks the Host header, against DNS
rebinding.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from dora_pipe.core.errors import ResourceError

if TYPE_CHECKING:
    import uvicorn
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK: Final = "127.0.0.1"
NAMES: Final = (LOOPBACK, "localhost", "[::1]")
"""Names of this machine; any port, for `ssh -L`."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers."""

HEAD_S: Final = 15.0
"""Timeout of the first head of a connection."""

KEEP_ALIVE_S: Final = 75
"""Timeout of the next head; longer than clients', so that these close first."""


class _Connection:
    """Connection of uvicorn that closes when a head is late; it handles the other calls."""

    def __init__(self, http: Any, opened: dict[tuple[str, int], _Connection]) -> None:
        self._http = http
        self._opened = opened
        self._requests = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._peer = transport.get_extra_info("peername")[:2]
        self._opened[self._peer] = self
        self._expect_head(HEAD_S)
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._opened.pop(self._peer, None)
        self._http.connection_lost(exc)

    def begin(self) -> None:
        """Note a complete head."""
        self._requests += 1
        self._late.cancel()

    def end(self) -> None:
        """Note a complete response."""
        self._requests -= 1
        if not self._requests:
            self._expect_head(KEEP_ALIVE_S)

    def _expect_head(self, limit_s: float) -> None:
        self._late = asyncio.get_running_loop().call_later(limit_s, self._transport.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)


def bounded_server(app: ASGIApp, *, connections_max: int, **options: Any) -> uvicorn.Server:
    """Return a server of an application; others than `connections_max` clients get 503."""
    import uvicorn

    opened: dict[tuple[str, int], _Connection] = {}

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        connection = opened.get(scope["client"])
        if connection is None:
            return  # the client has left
        connection.begin()
        try:
            await app(scope, receive, send)
        finally:
            connection.end()

    config = uvicorn.Config(
        timed,
        http="h11",
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        limit_concurrency=connections_max,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        **options,
    )
    config.load()
    http: Any = config.http_protocol_class
    bounded: Any = lambda **parts: _Connection(http(**parts), opened)  # noqa: E731
    config.http_protocol_class = bounded
    return uvicorn.Server(config)


class PageServer:
    """Server that listens at once and serves within a `with` block. Raises ResourceError."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        *,
        port: int,
        connections_max: int,
        host: str = LOOPBACK,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Router

        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ResourceError(
                f"port {port} of {host} is not available: {error.strerror}",
                hint="choose another one with --port, or 0 for any",
            ) from None
        app: ASGIApp = Router(routes, redirect_slashes=False)
        if host == LOOPBACK:
            app = TrustedHostMiddleware(app, allowed_hosts=NAMES, www_redirect=False)
        self._server = bounded_server(
            app, connections_max=connections_max, headers=list((headers or {}).items())
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    @property
    def origin(self) -> str:
        """Return ``http://HOST:PORT``."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    def wait(self) -> None:
        """Serve until a signal ends the process."""
        self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()
