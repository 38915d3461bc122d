"""Tests of the bounds on request heads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dora_pipe.core.system import http_server
from dora_pipe.core.system.http_server import PageServer

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def page(request: Request) -> Response:
    return PlainTextResponse("a page")


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    with PageServer([Route("/", page)], port=0, connections_max=8) as server:
        port = int(server.origin.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as opened:
            yield opened


@pytest.mark.parametrize("sent", [b"", GET])
def test_a_first_head_that_is_late_ends_the_connection(
    connection: socket.socket, sent: bytes
) -> None:
    connection.sendall(sent)
    assert connection.recv(4096) == b""


def test_a_next_head_that_is_late_ends_the_connection(connection: socket.socket) -> None:
    connection.sendall(GET + b"\r\n" + GET)
    answer = b""
    while received := connection.recv(4096):
        answer += received
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"a page")
    assert answer.count(b"HTTP/1.1") == 1
