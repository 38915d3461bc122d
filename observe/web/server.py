"""Serve the pages on this machine only.

1. Listens on 127.0.0.1 and requires a Host of this machine, which stops DNS rebinding.
2. Accepts only GET and HEAD; nothing changes state.
3. The content security policy forbids external resources and inline scripts and styles.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.core.system.local_http import LOOPBACK, LocalHandler, LocalServer
from dora_pipe.observe.web.view import Query, parse_query

RUN: Final = re.compile(r"(?s)(?:/run/([^/]+)(?=/))?(.*)")
"""Name of a run, if any, and the path of its page."""

REQUESTS_MAX: Final = 32

IDLE_S: Final = 30.0

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


def static_files() -> dict[str, bytes]:
    folder = files("dora_pipe.observe.web") / "static"
    static = [file for file in folder.iterdir() if file.name[file.name.rfind(".") :] in TYPES]
    return {file.name: file.read_bytes() for file in sorted(static, key=lambda file: file.name)}


class Answers(Protocol):
    """Answers of one run, or of several: a query on one of those begins with its name."""

    def ask(self, asked: Query, /) -> dict[str, Any]: ...


class PageServer(LocalServer):
    """Server of the pages: at `/` of one run or the list of runs, at `/run/NAME/` of each.

    Example: ``PageServer(worker, port=0).serve_forever()``.
    """

    def __init__(self, answers: Answers, *, port: int) -> None:
        self.answers = answers
        self.static = static_files()
        super().__init__(_Handler, host=LOOPBACK, port=port, requests_max=REQUESTS_MAX)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


class _Handler(LocalHandler):
    server: PageServer
    timeout = IDLE_S

    def answer(self) -> None:
        run, path = RUN.fullmatch(urlsplit(self.path).path).groups()  # type: ignore[union-attr]
        if path.startswith("/api/"):
            self._api(f"{run or ''}{self.path.removeprefix(f'/run/{run}').removeprefix('/api')}")
            return
        name = "index.html" if path == "/" else path.removeprefix("/static/")
        body = self.server.static.get(name)
        if body is None or (path != "/" and not path.startswith("/static/")):
            self.say(HTTPStatus.NOT_FOUND, "no such page")
            return
        self._send(HTTPStatus.OK, TYPES[name[name.rfind(".") :]], body)

    def _api(self, address: str) -> None:
        try:
            answer = self.server.answers.ask(parse_query(address))
        except UsageError as error:
            self._send_json(HTTPStatus.NOT_FOUND, _said(error))
        except DoraError as error:
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, _said(error))
        except TimeoutError:
            self._send_json(HTTPStatus.GATEWAY_TIMEOUT, {"error": "timed out reading the log"})
        else:
            self._send_json(HTTPStatus.OK, answer)

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, "application/json", msgspec.json.encode(value))

    def say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_whole(status, {**HEADERS, "Content-Type": kind}, body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that the library rejects: other methods, invalid HTTP."""
        method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if method else HTTPStatus(code)
        self.close_connection = True
        self.say(status, "only GET and HEAD" if method else status.phrase)


def _said(error: DoraError) -> dict[str, str]:
    return {"error": error.message, "hint": error.hint or ""}
