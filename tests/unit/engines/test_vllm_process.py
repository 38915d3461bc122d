"""Tests of a server's process: key, end, failed start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError, PolicyError, ResourceError
from dora_pipe.producers.engines.vllm import process as vllm_process
from dora_pipe.producers.engines.vllm import serve as vllm_serve
from dora_pipe.producers.engines.vllm.http import Address, call
from dora_pipe.producers.engines.vllm.process import ServerProcess
from dora_pipe.producers.engines.vllm.server import VllmEngine


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "PROGRAM", "tests.support.fake_vllm_server")


def _start(model: str) -> ServerProcess:
    settings = Vllm(kv_cache_gb=0.5, enforce_eager=False, args={"swap_space": 2})
    return ServerProcess.start(Path(model), settings, slots=3, context_tokens=64, threads=1)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    started = _start("model")
    yield started
    started.close()


def test_key_is_fresh_and_on_no_command_line(server: ServerProcess) -> None:
    other = _start("model")
    other.close()
    key = server.address.key
    assert len(key) >= 32 and key != other.address.key
    assert key not in repr(server.address) and key not in str(server.address)
    line = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
    assert key.encode() not in b" ".join(line)
    assert {b"--kv-cache-gb", b"--graphs", b'{"swap_space": 2}', b"--lifeline"} < set(line)
    with pytest.raises(ResourceError, match="401"):
        call(Address.of(str(server.address), "other"), "GET", "/health")


def test_killed_server_is_named_by_what_ended_it(server: ServerProcess) -> None:
    server.check()
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match="vLLM's server ended by SIGKILL"):
        server.settle()


def test_engine_tells_how_its_server_ended(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path, slots=3, context_tokens=64)
    process = engine._server._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match="vLLM's server ended by SIGKILL"):
        engine.load(tmp_path / "a", version=0, digest="a")
    engine.close()


def test_server_ends_when_nobody_holds_its_stdin(server: ServerProcess) -> None:
    assert server._process.stdin is not None
    server._process.stdin.close()
    assert server._process.wait(30) == 0


def test_start_that_is_refused_or_fails_says_so_in_one_line() -> None:
    with pytest.raises(PolicyError, match="vLLM does not take it"):
        _start("refused")
    with pytest.raises(ResourceError, match="ended with exit code 41"):
        _start("dies")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "https://h:1",
        "http://h",
        "http://h:1/v1",
        "http://u@h:1",
        "http://h:x",
    ],
)
def test_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        Address.of(url, "")


@pytest.mark.parametrize("key", ["two\nlines", " padded", "schlüssel"])
def test_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError, match="key of vLLM's server") as raised:
        Address.of("http://h:1", key)
    assert key not in str(raised.value)


def test_address_of_the_next_protocol_is_one() -> None:
    assert str(Address.of("http://[::1]:8000/", "")) == "http://[::1]:8000"


@pytest.mark.parametrize("path", ["/health", "/collective_rpc", "/v1/models", "/update_weights"])
@pytest.mark.parametrize("shown", [None, b"Bearer wrong", b"Bearer ", b"secret", b"Bearer secret"])
def test_guard_asks_for_the_key_on_every_path(
    monkeypatch: pytest.MonkeyPatch, path: str, shown: bytes | None
) -> None:
    monkeypatch.setenv(vllm_serve.KEY_VARIABLE, "secret")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("through")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads nothing")

    headers = [] if shown is None else [(b"authorization", shown)]
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(vllm_serve.Guard(app)(scope, receive, send))
    if shown == b"Bearer secret":
        assert sent == ["through"]
    else:
        assert sent[0]["status"] == 401


def test_server_without_a_key_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(vllm_serve.KEY_VARIABLE, raising=False)
    words = ["model", "--max-num-seqs", "1", "--max-model-len", "64"]
    assert vllm_serve.main(words) == ConfigError.exit_code
    assert capsys.readouterr().err == "error: VLLM_API_KEY is not set\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lora-rank", "513"], "ranks up to 512, not 513"),
        (["--lora-rank", "-1"], "ranks up to 512, not -1"),
        (["--max-resident-versions", "0"], "room for at least one version"),
    ],
)
def test_server_is_not_started_with_adapters_that_cannot_be(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(vllm_serve.KEY_VARIABLE, "key")
    plain = ["model", "--max-num-seqs", "1", "--max-model-len", "8"]
    assert vllm_serve.main([*plain, *words]) == ConfigError.exit_code
    assert text in capfd.readouterr().err
