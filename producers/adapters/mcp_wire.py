"""The wire of the Model Context Protocol, as far as tools need it: JSON-RPC with a server that was
started here (a line per message), or behind an address (streamable HTTP). Decides which failures
may pass: what is not there may be another time (`ServerAway`).

Revision 2025-11-25 of the protocol, whose handshake servers of all revisions from 2024 on take.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, Any, Final, Protocol

import msgspec

from dora_pipe import __version__
from dora_pipe.core.errors import ResourceError, TaskError

PROTOCOL: Final = "2025-11-25"
MESSAGE_BYTES_MAX: Final = 4 << 20
"""Of one message of a server."""

CONNECT_S: Final = 30.0
"""For a server to start and say what it has."""

CLOSE_S: Final = 2.0
"""For a server that was started here to go when its input ends; then it is killed."""

_NO_METHOD: Final = {"code": -32601, "message": "not offered here"}


class ServerAway(ResourceError):
    """The server does not answer, or not now; another time it may."""


class ServerLate(ServerAway):
    """It has not answered in time; it may be busy with this request alone."""


class ServerRefused(TaskError):
    """The server answers with an error of the protocol."""


class Wire(Protocol):
    """A connection to a server; any thread may ask."""

    def ask(self, method: str, params: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The result of a request. Raises ServerAway, ServerRefused."""

    def tell(self, method: str, limit_s: float) -> None:
        """A notification. Raises ServerAway."""

    def close(self) -> None:
        """Idempotent."""


def greeted(wire: Wire, protocol: str = PROTOCOL) -> dict[str, Any]:
    """Shake hands; what the server says of itself. Raises ServerAway, ServerRefused."""
    me = {"name": "dora-pipe", "version": __version__}
    params = {"protocolVersion": protocol, "capabilities": {}, "clientInfo": me}
    about = wire.ask("initialize", params, CONNECT_S)
    wire.tell("notifications/initialized", CONNECT_S)
    return about


def _message(method: str, params: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    numbered = {} if number is None else {"id": number}
    return {"jsonrpc": "2.0", **numbered, "method": method, "params": dict(params)}


def _result(where: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        error = answer["error"]
        said = error.get("message") if isinstance(error, Mapping) else error
        raise ServerRefused(f"{where} refuses: {said}")
    result = answer.get("result")
    if not isinstance(result, dict):
        raise ServerRefused(f"{where} gave no result")
    return result


def _decoded(where: str, data: bytes | str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerAway(f"{where} says what is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


class ProcessWire:
    """A server that is started here and dies with this process: it is in its process group, and its
    input ends.

    Example: ``ProcessWire("the server notes", ["python", "notes.py"], directory="")``
    """

    def __init__(self, where: str, command: tuple[str, ...], directory: str) -> None:
        """`directory`: where it is started; empty: here. Raises ServerAway."""
        self._where = where
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._writing, self._gone = threading.Lock(), False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=directory or None,
            )
        except OSError as error:
            raise ServerAway(f"{where} cannot be started: {error}") from None
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()

    def ask(self, method: str, params: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        self._waiting[number] = answer
        try:
            self._write(_message(method, params, number))
            return _result(self._where, answer.result(limit_s))
        except FutureTimeout:
            self._write(_message("notifications/cancelled", {"requestId": number}, None))
            raise ServerLate(f"{self._where} did not answer within {limit_s:g} s") from None
        finally:
            self._waiting.pop(number, None)

    def tell(self, method: str, limit_s: float) -> None:
        self._write(_message(method, {}, None))

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._writing:
                stdin.write(msgspec.json.encode(message) + b"\n")
                stdin.flush()
        except (OSError, ValueError):
            raise ServerAway(f"{self._where} is gone") from None
        if self._gone:
            raise ServerAway(f"{self._where} is gone")

    def _read(self, stdout: IO[bytes]) -> None:
        """In a thread of its own, until the server closes its output or says too much at once."""
        with stdout:
            while (line := stdout.readline(MESSAGE_BYTES_MAX)).endswith(b"\n"):
                try:
                    self._take(_decoded(self._where, line))
                except ServerAway:
                    continue  # a line that is none of the protocol's, such as a greeting
        self._gone = True
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(ServerAway(f"{self._where} is gone"))

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if "method" in message:
            if number is not None:  # it asks; only whether somebody is there is answered
                done = {"result": {}} if message["method"] == "ping" else {"error": _NO_METHOD}
                self._write({"jsonrpc": "2.0", "id": number, **done})
            return
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)


class HttpWire:
    """A server behind an address.

    Example: ``HttpWire("the server at http://host/mcp", "http://host/mcp", key="")``
    """

    def __init__(self, where: str, url: str, key: str) -> None:
        """`key`: sent as a bearer's; it stands in no message."""
        import requests

        self._where, self._url = where, url
        self._numbers = itertools.count(1)
        self._session = requests.Session()
        self._session.trust_env = False
        self._headers = {"Accept": "application/json, text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, params: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        number = next(self._numbers)
        for message in self._post(_message(method, params, number), limit_s):
            if message.get("id") == number and "method" not in message:
                if method == "initialize":
                    self._headers["MCP-Protocol-Version"] = str(
                        message.get("result", {}).get("protocolVersion", PROTOCOL)
                    )
                return _result(self._where, message)
        raise ServerAway(f"{self._where} ended without an answer")

    def tell(self, method: str, limit_s: float) -> None:
        for _ in self._post(_message(method, {}, None), limit_s):
            pass

    def close(self) -> None:
        import requests

        if "Mcp-Session-Id" in self._headers:
            with contextlib.suppress(requests.RequestException):  # it forgets by itself
                self._session.delete(self._url, headers=self._headers, timeout=CLOSE_S)
            del self._headers["Mcp-Session-Id"]
        self._session.close()

    def _post(self, message: Mapping[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        import requests

        try:
            with self._session.post(
                self._url,
                json=message,
                headers=self._headers,
                timeout=limit_s,
                allow_redirects=False,
                stream=True,
            ) as answer:
                if "Mcp-Session-Id" in answer.headers:
                    self._headers["Mcp-Session-Id"] = answer.headers["Mcp-Session-Id"]
                if answer.status_code >= 400:
                    self._refused(answer.status_code, next(answer.iter_content(2048), b""))
                if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    yield from self._events(answer)
                elif body := _body(self._where, answer):
                    yield _decoded(self._where, body)
        except requests.Timeout:
            raise ServerLate(f"{self._where} did not answer within {limit_s:g} s") from None
        except requests.RequestException as error:
            raise ServerAway(f"{self._where} does not answer: {type(error).__name__}") from None

    def _refused(self, status: int, body: bytes) -> None:
        said = f"{self._where} says {status}: {' '.join(body.decode(errors='replace').split())}"
        if status in (404, 408, 409, 425, 429) or status >= 500:  # 404: it forgot the session
            raise ServerAway(said)
        raise ServerRefused(said)

    def _events(self, answer: Any) -> Iterator[dict[str, Any]]:
        """The messages of a stream of server-sent events."""
        data: list[str] = []
        size = 0
        for line in answer.iter_lines(decode_unicode=True):
            size += len(line)
            if size > MESSAGE_BYTES_MAX:
                raise ServerAway(f"{self._where} says more than {MESSAGE_BYTES_MAX} bytes")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield _decoded(self._where, "\n".join(data))
                data = []


def _body(where: str, answer: Any) -> bytes:
    body = bytearray()
    for piece in answer.iter_content(1 << 16):
        body += piece
        if len(body) > MESSAGE_BYTES_MAX:
            raise ServerAway(f"{where} says more than {MESSAGE_BYTES_MAX} bytes")
    return bytes(body)
