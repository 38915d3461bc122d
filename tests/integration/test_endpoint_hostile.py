"""Tests of slow, torn, large or many requests, and of a restart of the endpoint."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests

from dora_pipe.core.system.http_server import HEAD_BYTES_MAX
from dora_pipe.producers.sessions import app
from dora_pipe.producers.tasks.calls import EpisodeLost
from tests.support.chat_models import write_chat_model
from tests.support.endpoints import Stage, says, stage

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("qwen"), "qwen2_5")


@pytest.fixture(scope="module")
def shared_stage(assets: Path) -> Iterator[Stage]:
    with stage(assets, says(assets, "hi<|im_end|>")) as opened:
        yield opened


def place_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    return host, int(port)


def ask(address: tuple[str, str]) -> requests.Response:
    url, key = address
    head = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{url}/chat/completions", json=HELLO, headers=head, timeout=60)


def raw(address: tuple[str, str], head: str, body: bytes = b"") -> socket.socket:
    url, key = address
    connection = socket.create_connection(place_of(url), timeout=60)
    path = url.removeprefix("http://").partition("/")[2]
    text = head.format(path=f"/{path}/chat/completions", key=key)
    connection.sendall(text.encode() + body)
    return connection


def head_of(connection: socket.socket) -> bytes:
    return connection.recv(65536).partition(b"\r\n")[0]


POST = "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"


def test_a_thousand_open_connections_and_half_requests_hold_nobody(shared_stage: Stage) -> None:
    address = shared_stage.open("g-0/0")
    ask(address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as stack:
        for index in range(1000):
            text = ("", "POST /s", POST, POST + "Content-Length: 1000\r\n\r\n")[index % 4]
            stack.enter_context(raw(address, text))
        assert ask(address).json()["choices"][0]["message"]["content"] == "hi"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_body_that_is_too_large_is_refused_before_it_comes(shared_stage: Stage) -> None:
    address = shared_stage.open("g-0/2")
    size = app.BODY_BYTES_MAX + 1
    with raw(address, POST + f"Content-Length: {size}\r\n\r\n", b"{") as connection:
        assert b" 413 " in head_of(connection)


def test_a_body_that_no_context_holds_is_refused_unread(shared_stage: Stage) -> None:
    url, key = shared_stage.open("g-0/3")
    text = "x" * (4096 * app.TOKEN_BYTES_MAX + app.SMALL_BYTES)
    body = {"messages": [{"role": "user", "content": text}]}
    asked = len(shared_stage.calls)
    head = {"Authorization": f"Bearer {key}"}
    answer = requests.post(f"{url}/chat/completions", json=body, headers=head, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(shared_stage.calls) == asked


def test_without_a_key_no_body_is_read(shared_stage: Stage) -> None:
    url, _ = shared_stage.open("g-0/4")
    with raw((url, "nothing"), POST + "Content-Length: 50000000\r\n\r\n") as connection:
        assert b" 401 " in head_of(connection)


def test_what_is_no_request_is_answered_or_hung_up(shared_stage: Stage) -> None:
    address = shared_stage.open("g-0/6")
    for text in (
        "\x00\x01\x02\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "PUT " + POST[5:] + "\r\n",
    ):
        with raw(address, text) as connection:
            assert head_of(connection).split(b" ")[1:2] in ([], [b"400"], [b"404"], [b"405"])
    assert ask(address).status_code == 200


def test_a_head_beyond_its_bound_is_refused_before_it_ends(shared_stage: Stage) -> None:
    address = shared_stage.open("g-0/7")
    text = POST + "x: " + "x" * HEAD_BYTES_MAX
    with raw(address, text) as connection, suppress(ConnectionResetError):
        assert head_of(connection).split(b" ")[1:2] in ([], [b"400"])
    assert ask(address).status_code == 200


def test_a_process_that_dies_is_at_the_same_address_again(assets: Path) -> None:
    with stage(assets, says(assets, "hi<|im_end|>")) as opened:
        address = opened.open("g-0/0")
        assert ask(address).status_code == 200
        os.kill(opened.port.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while not opened.events[-1:] or not isinstance(opened.events[-1], EpisodeLost):
            assert time.monotonic() < end
            time.sleep(0.01)
        lost = opened.events[-1]
        assert (lost.request, "endpoint's process ended" in lost.message) == ("g-0/0", True)
        first = opened.calls[-1].call
        later = opened.open("g-0/1")
        assert later[0].partition("/s/")[0] == address[0].partition("/s/")[0]
        assert ask(later).status_code == 200
        assert opened.calls[-1].call > first, "no two processes give a call the same number"
