"""An MCP server that an agent starts, answered by the cassette of its run: decides what the agent
is told, and when the real server is started.

The agent starts this in its place, and talks to it over stdin and stdout. What the server says of
itself and of its tools is of no trajectory; calls of tools, and whatever else it is asked, stand
behind all that the agent has begun before, in the order in which they come. The real server is
started for the first that is on no cassette. It is not told what was answered before, and what it
asks itself (sampling, roots) is not offered; its notifications go nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Final, cast

import msgspec

from dora_pipe.core.errors import DoraError, ResourceError
from dora_pipe.producers.adapters.mcp_wire import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    ProcessWire,
    ServerRefused,
    Wire,
    greeted,
)
from dora_pipe.producers.tasks.cassette import CassetteMiss
from dora_pipe.producers.tasks.tape_client import TapeCall, TapeClient

AT_ONCE: Final = 32
"""Requests that the real server works on; others wait."""

ANSWER_S: Final = 3600.0
"""For one; its agent ends sooner (`task.agent_timeout_s`)."""

_FAILED: Final = -32603
"""JSON-RPC's code of an internal error."""

_NOT_HERE: Final = -32001
"""Of servers: a call that is on no cassette."""

_OF_ITSELF: Final = frozenset(
    {"tools/list", "resources/list", "resources/templates/list", "prompts/list"}
)


class McpProxy:
    """One conversation with an agent.

    Example: ``McpProxy(["python", "notes.py"], tape, write, name="notes").take(message)``
    """

    def __init__(
        self, command: Sequence[str], tape: TapeClient, out: IO[bytes], *, name: str
    ) -> None:
        """`out`: where answers are written, a line each. `name` stands before those of tools."""
        self._command, self._tape, self._out, self._name = tuple(command), tape, out, name
        self.called = f"mcp:{name or ' '.join(command)}"
        """What the server is called on a cassette."""
        self._writing, self._opening = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="mcp")
        self._wire: Wire | None = None
        self._about: dict[str, Any] = {}
        self._protocol = PROTOCOL

    def take(self, message: Mapping[str, Any]) -> None:
        """Answer a request, now or when the real server has; of notifications nobody hears."""
        number, method = message.get("id"), message.get("method")
        if number is None or not isinstance(method, str):
            return
        params = message.get("params") or {}
        if method == "ping":
            self._say(number, {"result": {}})
            return
        if method == "initialize":
            self._protocol = str(params.get("protocolVersion", PROTOCOL))
        try:
            begun = self._begin(method, params)
        except (CassetteMiss, DoraError) as error:
            self._say(number, {"error": {"code": _NOT_HERE, "message": str(error)}})
            return
        if begun.found is not None:
            self._say(number, begun.found["value"])
        else:
            self._threads.submit(self._ask, begun, number, method, params)

    def close(self) -> None:
        """The agent says no more: the server ends, and with it what it was asked."""
        with self._opening:
            if self._wire is not None:
                self._wire.close()
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, method: str, params: Mapping[str, Any]) -> TapeCall:
        asked = {key: value for key, value in params.items() if key != "_meta"}
        if method == "initialize":
            version = {"asked": method, "params": {"protocolVersion": self._protocol}}
            return self._tape.begin(self.called, version, outside=True)
        if method in _OF_ITSELF:
            return self._tape.begin(self.called, {"asked": method, "params": asked}, outside=True)
        if method == "tools/call":
            theirs = str(asked.get("name"))
            name = f"{self._name}_{theirs}" if self._name else theirs
            return self._tape.begin(name, asked.get("arguments") or {})
        return self._tape.begin(f"{self.called} {method}", asked)

    def _ask(self, begun: TapeCall, number: Any, method: str, params: Mapping[str, Any]) -> None:
        """In a thread: what the real server answers, recorded and said."""
        try:
            wire = self._opened()
            if method == "initialize":
                said: dict[str, Any] = {"result": self._about}
            else:
                said = {"result": wire.ask(method, params, ANSWER_S)}
        except ServerRefused as error:
            said = {"error": {"code": _FAILED, "message": error.message}}
        except ResourceError as error:
            begun.close()
            self._say(number, {"error": {"code": _FAILED, "message": error.message}})
            return
        try:
            begun.answered({"value": said})
        except ResourceError as error:
            said = {"error": {"code": _FAILED, "message": error.message}}
        self._say(number, said)

    def _opened(self) -> Wire:
        """Raises ServerAway, ServerRefused."""
        with self._opening:
            if self._wire is None:
                wire = ProcessWire(f"the MCP server {self.called[4:]}", self._command, "")
                try:
                    self._about = greeted(wire, self._protocol)
                except DoraError:
                    wire.close()
                    raise
                self._wire = wire
            return self._wire

    def _say(self, number: Any, said: Mapping[str, Any]) -> None:
        line = msgspec.json.encode({"jsonrpc": "2.0", "id": number, **said}) + b"\n"
        with self._writing:
            self._out.write(line)
            self._out.flush()


def serve(
    command: Sequence[str], tape: TapeClient, lines: IO[bytes], out: IO[bytes], *, name: str
) -> None:
    """Be a server over a pipe until the agent ends it."""
    proxy = McpProxy(command, tape, out, name=name)
    try:
        while (line := lines.readline(MESSAGE_BYTES_MAX)).endswith(b"\n"):
            try:
                message = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # a line that is none of the protocol's
            if isinstance(message, dict):
                proxy.take(cast(dict[str, Any], message))
    finally:
        proxy.close()
