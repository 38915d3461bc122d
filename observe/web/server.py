"""Serve the pages on this machine only.

1. Accepts only GET and HEAD; nothing changes state.
2. The content security policy forbids external resources and inline scripts and styles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.core.system.http_server import PageServer
from dora_pipe.observe.web.view import Query, parse_query

RUN: Final = re.compile(r"(?s)(?:/run/([^/]+)(?=/))?(.*)")
"""Name of a run, if any, and the path of its page."""

CONNECTIONS_MAX: Final = 64

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


def page_server(answers: Answers, *, port: int) -> PageServer:
    """Return the server of the pages: at `/` of one run or the list of runs, at `/run/NAME/` of
    each. Raises ResourceError."""
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Mount, Route

    static = static_files()

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in static:
            return PlainTextResponse("no such page\n", HTTPStatus.NOT_FOUND)
        return Response(static[name], media_type=TYPES[Path(name).suffix])

    def api(request: Request) -> Response:
        path = request.scope["raw_path"].decode()
        run, path = RUN.fullmatch(path).groups()  # type: ignore[union-attr]
        address = f"{run or ''}{path.removeprefix('/api')}?{request.url.query}"
        status, answer = _answer(answers, address)
        return Response(msgspec.json.encode(answer), status, media_type="application/json")

    pages = [Route("/", page), Route("/static/{name}", page), Route("/api/{path:path}", api)]
    routes = [*pages, Mount("/run/{run}", routes=pages)]
    return PageServer(routes, port=port, connections_max=CONNECTIONS_MAX, headers=HEADERS)


def _answer(answers: Answers, address: str) -> tuple[HTTPStatus, dict[str, Any]]:
    try:
        return HTTPStatus.OK, answers.ask(parse_query(address))
    except UsageError as error:
        return HTTPStatus.NOT_FOUND, _error_body(error)
    except DoraError as error:
        return HTTPStatus.INTERNAL_SERVER_ERROR, _error_body(error)
    except TimeoutError:
        return HTTPStatus.GATEWAY_TIMEOUT, {"error": "timed out reading the log"}


def _error_body(error: DoraError) -> dict[str, str]:
    return {"error": error.message, "hint": error.hint or ""}
