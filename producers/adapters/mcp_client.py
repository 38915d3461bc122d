"""Connections to MCP servers by the official SDK, with one event loop per process.

Any thread may send requests; a time limit covers the entire answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dora_pipe import __version__
from dora_pipe.config.outside import McpServer
from dora_pipe.core.errors import ResourceError, TaskError, one_line
from dora_pipe.core.system.background import Background
from dora_pipe.core.system.linux import dying

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, StdioServerParameters

MESSAGE_BYTES_MAX: Final = 4 << 20

CONNECT_S: Final = 30.0
"""Seconds for a server to start and list its tools."""

CLOSE_S: Final = 8.0
"""Seconds for a server to stop; the SDK kills it after at most 6.5 s."""

CANCEL_S: Final = 1.0
"""Seconds for the SDK to cancel a late request; its caller does not wait."""

_PASSES: Final = frozenset((404, 408, 409, 425, 429))
"""Retriable HTTP statuses besides 5xx; 404 means a forgotten session."""

_STAND_INS: Final = ("Not Found", "Session terminated", "Server returned an error response")
"""Messages of the SDK for a request rejected by HTTP status."""

_QUOTED: Final = 2048

_LOOP: Final = Background()

T = TypeVar("T")


class ServerAway(ResourceError):
    """Server unavailable; retriable."""


class ServerLate(ServerAway):
    """Answer exceeded the time limit; only this request may be slow."""


class ServerRefused(TaskError):
    """Protocol error reported by the server."""


class Connection:
    """Connection to a server."""

    def __init__(self, where: str, use: McpServer, *, secret: str, directory: str) -> None:
        """`directory` is a command's working directory. Raises ServerAway, ServerRefused."""
        self._where, self._use, self._secret, self._directory = where, use, secret, directory
        self._refusal: tuple[int, str] | None = None
        """Status and text of the last HTTP error."""
        self._closing = asyncio.Event()
        self._opened: Future[Client] = Future()
        self._living = _LOOP.run(self._live())
        either: list[Future[Any]] = [self._opened, self._living]
        wait(either, CONNECT_S + CANCEL_S, FIRST_COMPLETED)
        if not self._opened.done():
            self._living.cancel()
            raise self._error(self._living, CONNECT_S)

    @property
    def about(self) -> dict[str, Any]:
        info = self._opened.result(0.0).server_info
        return {} if info is None else plain(info)

    def ask(self, request: Callable[[Client], Awaitable[T]], limit_s: float) -> T:
        """Return the answer to a request. Raises ServerAway, ServerRefused."""
        asked = _LOOP.run(_within(limit_s, request(self._opened.result(0.0))))
        wait([asked], limit_s + CANCEL_S)
        if not asked.done() or asked.exception() is not None:
            asked.cancel()
            raise self._error(asked, limit_s)
        return asked.result()

    def close(self) -> None:
        """Close the connection and the server started for it; idempotent."""
        _LOOP.run(_set(self._closing))
        if wait([self._living], CLOSE_S).not_done:
            self._living.cancel()

    async def _live(self) -> None:
        """Stay connected until `close`: the SDK must exit in the task that entered it."""
        from mcp import Client
        from mcp.types import Implementation

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # errors are raised in one line
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_S):
                server = await self._server(stack)
                me = Implementation(name="dora-pipe", version=__version__)
                client = await stack.enter_async_context(Client(server, client_info=me))
            self._opened.set_result(client)
            await self._closing.wait()

    async def _server(self, stack: AsyncExitStack) -> Any:
        if not self._use.url:
            return self._command()
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                headers=headers,
                timeout=httpx2.Timeout(CONNECT_S, read=None),  # `ask` limits the time
                event_hooks={"response": [self._note]},
            )
        )
        return streamable_http_client(
            self._use.url, http_client=http, max_sse_event_size=MESSAGE_BYTES_MAX
        )

    def _command(self) -> StdioServerParameters:
        from mcp import StdioServerParameters

        program = self._use.command[0]
        path = Path(self._directory, program) if Path(program).name != program else program
        if shutil.which(path) is None:
            raise ServerAway(f"{self._where} cannot start: program not found: {program}")
        program, *words = dying(self._use.command)
        return StdioServerParameters(
            command=program, args=words, env=dict(os.environ), cwd=self._directory or None
        )

    async def _note(self, response: httpx2.Response) -> None:
        """Keep the text of an HTTP error: the SDK gives only the code. Rejected GETs are common
        and ignored."""
        if response.status_code >= 400 and response.request.method == "POST":
            body = (await response.aread())[:_QUOTED].decode(errors="replace")
            self._refusal = response.status_code, one_line(" ".join(body.split()), _QUOTED)

    def _error(self, asked: Future[Any], limit_s: float) -> ServerAway | ServerRefused:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        error = None if asked.cancelled() else asked.exception(0.0)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ServerAway | ServerRefused):
            return error
        if error is None or isinstance(error, TimeoutError):
            return ServerLate(f"{self._where} did not answer within {limit_s:g} s")
        if isinstance(error, MCPError) and error.message in _STAND_INS and self._refusal:
            status, message = self._refusal
            kind = ServerAway if status in _PASSES or status >= 500 else ServerRefused
            return kind(f"{self._where} says {status}: {message}")
        if isinstance(error, MCPError) and error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            return ServerRefused(f"{self._where} refuses: {error.message}")
        how = "is gone" if isinstance(error, MCPError) else "does not answer"
        return ServerAway(f"{self._where} {how}: {type(error).__name__}: {error}")


async def _within(limit_s: float, answer: Awaitable[T]) -> T:
    async with asyncio.timeout(limit_s):
        return await answer


async def _set(event: asyncio.Event) -> None:
    event.set()


def plain(model: Any) -> dict[str, Any]:
    """Return an SDK tool or result as protocol JSON."""
    written: dict[str, Any] = model.model_dump(by_alias=True, mode="json", exclude_unset=True)
    return written
