"""Tools of MCP servers as tools of a task: `task.mcp`.

A server is connected on first use, once per task process, or per episode with `sessions =
"episode"`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.config.outside import McpServer
from dora_pipe.core.errors import ConfigError, TaskError, install_hint
from dora_pipe.core.system.json_endpoint import variable
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.adapters.episodes import DIGEST_CHARACTERS
from dora_pipe.producers.adapters.mcp_client import (
    CONNECT_S,
    Connection,
    ServerAway,
    ServerLate,
    T,
    plain,
)
from dora_pipe.producers.tasks.task import DescribedTool, Retry, ToolFailed
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S
from dora_pipe.producers.tasks.values import as_text, escaped
from dora_pipe.schemas.wire import canonical

if TYPE_CHECKING:
    from mcp import Client

PAGES_MAX: Final = 32

LATE_S: Final = 1.0
"""Seconds that a call may exceed the time limit, after the model received the timeout."""


class McpSession:
    """Session with a server, opened on first use."""

    def __init__(self, server: Server, *, lasting: bool) -> None:
        """`lasting`: reconnect after a lost connection, else fail."""
        self._server, self._lasting = server, lasting
        self._connection: Connection | None = None
        self._opening, self._lost = threading.Lock(), False
        self.about: dict[str, Any] = {}

    def ask(self, request: Callable[[Client], Awaitable[T]], limit_s: float) -> T:
        """Return the answer to a request. Raises ServerAway, ServerRefused."""
        connection = self._opened()
        try:
            return connection.ask(request, limit_s)
        except ServerLate:
            raise
        except ServerAway:
            self.close()
            self._lost = not self._lasting
            raise

    def close(self) -> None:
        with self._opening:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self) -> Connection:
        with self._opening:
            if self._lost:
                raise ServerAway(f"{self._server.where} closed the connection of the episode")
            if self._connection is None:
                self._connection = self._server.connect()
                self.about = self._connection.about
            return self._connection


class Server:
    """Configured server with its reported tools."""

    def __init__(self, use: McpServer, *, key: str, directory: str) -> None:
        """`key` is the configuration key. Raises ConfigError."""
        if bool(use.command) == bool(use.url):
            raise ConfigError(f"{key}: set command or url")
        self._use, self._key, self._directory = use, key, directory
        self._secret = variable(key, ".key_env", use.key_env) if use.key_env else ""
        called = use.name or (use.url or " ".join(use.command))
        self.where = f"the MCP server {called}"
        self.name = use.name
        self._shared = McpSession(self, lasting=True)
        self._listed: list[dict[str, Any]] | None = None
        self._about: dict[str, Any] | None = None

    def connect(self) -> Connection:
        """Return a new connection. Raises ServerAway, ServerRefused."""
        return Connection(self.where, self._use, secret=self._secret, directory=self._directory)

    def listed(self) -> list[dict[str, Any]]:
        """Return the server's tools, limited to `tools`. Raises TaskError, ConfigError."""
        if self._listed is None:
            tools = {str(tool.get("name")): tool for tool in self._server_info()["tools"]}
            for name in self._use.tools:
                if name not in tools:
                    hint = nearest(name, tools) or f"it has {', '.join(tools)}"
                    raise ConfigError(f"{self._key}.tools: {self.where} has no `{name}`", hint=hint)
            self._listed = [tools[name] for name in self._use.tools or tools]
        return self._listed

    def tools(self) -> list[DescribedTool]:
        if self._use.sessions == "shared":
            return [self._tool(self._shared, tool) for tool in self.listed()]
        session = McpSession(self, lasting=False)
        return [self._tool(session, tool) for tool in self.listed()]

    def stamp(self) -> str:
        listed = self.listed()
        about = self._server_info()["about"]
        digest = hashlib.sha256(canonical(listed)).hexdigest()[:DIGEST_CHARACTERS]
        return f"{about.get('version', '-')} {digest}"

    def called(self) -> str:
        return f"mcp:{self.name or self._server_info()['about'].get('name', '')}"

    def _server_info(self) -> dict[str, Any]:
        if self._about is None:
            self._about = {"tools": self._pages(), "about": self._shared.about}
        return self._about

    def _pages(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(PAGES_MAX):
            try:
                page = self._shared.ask(methodcaller("list_tools", cursor=cursor), CONNECT_S)
            except ServerAway as error:
                raise TaskError(f"{self._key}: {error.message}") from None
            tools += map(plain, page.tools)
            if not (cursor := page.next_cursor):
                return tools
        raise TaskError(f"{self._key}: {self.where} lists its tools on more than {PAGES_MAX} pages")

    def _tool(self, session: McpSession, described: Mapping[str, Any]) -> DescribedTool:
        theirs = str(described["name"])

        def call(arguments: Mapping[str, Any]) -> str:
            request = methodcaller("call_tool", theirs, escaped(arguments))
            try:
                result = plain(session.ask(request, TOOL_LIMIT_S.get() + LATE_S))
            except ServerAway as error:
                raise Retry(error.message) from None
            text = _text(result)
            if result.get("isError"):
                raise ToolFailed(text)
            return text

        return DescribedTool(
            name=f"{self.name}_{theirs}" if self.name else theirs,
            about=str(described.get("description") or ""),
            parameters=described.get("inputSchema") or {"type": "object", "properties": {}},
            call=call,
            close=None if self._use.sessions == "shared" else session.close,
        )


class McpTools:
    """Servers of a task as its `tools`; a custom task receives them as `mcp`."""

    def __init__(self, uses: Sequence[McpServer], *, directory: str = "") -> None:
        """Create without connecting; `directory` is the commands' working directory. Raises
        ConfigError."""
        if uses and find_spec("mcp") is None:
            raise ConfigError("task.mcp: mcp is not installed", hint=install_hint("mcp"))
        self._servers = [
            Server(use, key=f"task.mcp[{index}]", directory=directory)
            for index, use in enumerate(uses)
        ]

    def tools(self) -> list[DescribedTool]:
        """Return the tools of all servers for one episode. Raises TaskError, ConfigError."""
        return [tool for server in self._servers for tool in server.tools()]

    def packages(self) -> dict[str, str]:
        return {server.called(): server.stamp() for server in self._servers}


def _text(result: Mapping[str, Any]) -> str:
    parts = []
    for part in result.get("content") or ():
        kind = part.get("type")
        if kind == "text":
            parts.append(str(part.get("text", "")))
        elif kind == "resource" and "text" in part.get("resource", {}):
            parts.append(str(part["resource"]["text"]))
        else:
            parts.append(f"[{kind}]")
    if not parts and result.get("structuredContent") is not None:
        return as_text(result["structuredContent"])
    return "\n".join(parts)
