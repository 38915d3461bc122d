"""CPU time and memory of the agents' endpoint, with an engine that answers immediately."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dora_pipe.bench.support import emit_figures
from dora_pipe.cli.options import JsonOption
from dora_pipe.config import model
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.sessions.endpoint import SessionPort
from dora_pipe.producers.sessions.frames import EndpointSetup, SessionAddress, SourceSetup
from dora_pipe.producers.tasks import calculator
from dora_pipe.producers.worker.effects import AnswerCall, CallAsked, OpenSession

CONTEXT_TOKENS: Final = 32_768
SIZES: Final = ((64, 16), (64, 1024), (4096, 16))
"""Tokens of prompt and answer."""
CALLS: Final = 200
WARM_CALLS: Final = 20
SESSIONS: Final = 10_000
CALLED: Final = 500
"""Sessions that made a call."""

IDLE_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigure:
    """Sequential calls of one agent.

    Example: ``CallFigure(prompt_tokens=64, sampled_tokens=16, ms_per_call=3.1,
    endpoint_us_per_call=2100.0, worker_us_per_call=90.0, endpoint_us_per_token=26.0)``
    """

    prompt_tokens: int
    sampled_tokens: int
    ms_per_call: float
    """Latency seen by the agent, with a zero-time engine."""
    endpoint_us_per_call: float
    """CPU time of the endpoint process."""
    worker_us_per_call: float
    """CPU time of the port in the engine's process."""
    endpoint_us_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigure:
    """Memory of open sessions.

    Example: ``MemoryFigure(sessions=10000, process_mb=120.0, kb_per_session=1.1, kb_per_call=2.0)``
    """

    sessions: int
    process_mb: float
    """Memory with all sessions open."""
    kb_per_session: float
    kb_per_call: float
    """Added by a call of 64 prompt and 16 sampled tokens."""


def command(
    sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 10_000,
    as_json: JsonOption = False,
) -> None:
    """Measure CPU time per call and token in endpoint and worker, and memory per session."""
    emit_figures(bench_calls(), as_json=as_json)
    emit_figures([bench_memory(sessions, called=min(CALLED, sessions))], as_json=as_json)


def bench_calls(
    sizes: Sequence[tuple[int, int]] = SIZES, *, calls: int = CALLS
) -> Iterator[CallFigure]:
    for prompt, sampled in sizes:
        with _endpoint() as port:
            loop = _Answering(port, sampled)
            address = _open(port, "g-0/0")
            loop.drive(partial(_ask_often, address, prompt, WARM_CALLS))
            before_s, loop.port_s, start_s = _cpu_s(port.pid), 0.0, time.perf_counter()
            loop.drive(partial(_ask_often, address, prompt, calls))
            took_s = time.perf_counter() - start_s
            endpoint_us = (_cpu_s(port.pid) - before_s) / calls * 1e6
            yield CallFigure(
                prompt_tokens=loop.prompt_tokens,
                sampled_tokens=sampled,
                ms_per_call=took_s / calls * 1e3,
                endpoint_us_per_call=endpoint_us,
                worker_us_per_call=loop.port_s / calls * 1e6,
                endpoint_us_per_token=endpoint_us / (loop.prompt_tokens + sampled),
            )


def bench_memory(sessions: int = SESSIONS, *, called: int = CALLED) -> MemoryFigure:
    """Measure open sessions."""
    with _endpoint() as port:
        loop = _Answering(port, 16)
        first = _open(port, "g-0/0")
        loop.drive(lambda: _ask_often(first, 64, WARM_CALLS))
        empty = rss_bytes(port.pid)
        addresses = [_open(port, f"g-{index}/1") for index in range(sessions)]
        loop.drive(lambda: _ask_often(first, 64, 1))  # queued after all of them
        opened = rss_bytes(port.pid)

        def one_call_each() -> None:
            for address in addresses[:called]:
                _ask_often(address, 64, 1)

        loop.drive(one_call_each)
        return MemoryFigure(
            sessions=sessions,
            process_mb=opened / 1e6,
            kb_per_session=(opened - empty) / sessions / 1e3,
            kb_per_call=(rss_bytes(port.pid) - opened) / called / 1e3,
        )


@contextmanager
def _endpoint() -> Iterator[SessionPort]:
    with tempfile.TemporaryDirectory(prefix="bench-endpoint-") as folder:
        assets = Path(folder)
        write_word_tokenizer(assets, calculator.WORDS, calculator.ROLES)
        (assets / "chat_template.jinja").write_text(calculator.CHAT_TEMPLATE)
        task = model.Task(kind="calculator", agent="agent:run")
        source = SourceSetup(sources=("train",), task=task, sampling=model.Sampling(), chat=True)
        setup = EndpointSetup(
            listen="127.0.0.1:0",
            assets=folder,
            started_ns=0,
            model="bench",
            context_tokens=CONTEXT_TOKENS,
            sources=(source,),
        )
        port = SessionPort(setup)
        try:
            yield port
        finally:
            port.close()


def _open(port: SessionPort, request: str) -> SessionAddress:
    port.start(OpenSession(request=request, source="train"))
    return port.addresses.of(request)


class _Answering:
    def __init__(self, port: SessionPort, sampled: int) -> None:
        self._port, self._ids = port, [10] * sampled
        self.port_s = 0.0
        self.prompt_tokens = 0

    def drive(self, agent: Any) -> None:
        """Answer calls until the agent's thread ends."""
        thread = threading.Thread(target=agent, daemon=True)
        thread.start()
        while thread.is_alive():
            start_s = time.thread_time()
            asked = [event for event in self._port.poll() if isinstance(event, CallAsked)]
            for request in asked:
                self.prompt_tokens = len(request.token_ids)
                self._port.start(_answer(request, self._ids))
            if asked:
                self.port_s += time.thread_time() - start_s
            else:
                time.sleep(IDLE_S / 4)


def _answer(asked: CallAsked, ids: list[int]) -> AnswerCall:
    return AnswerCall(
        request=asked.request,
        call=asked.call,
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        finish="stop",
        prompt_tokens=len(asked.token_ids),
    )


def _ask_often(address: SessionAddress, words: int, calls: int) -> None:
    async def ask() -> None:
        async with asyncio.timeout(600):
            connection = await _connected(address)
            for _ in range(calls):
                await _ask(connection, address, words)
            await _hang_up(connection)

    asyncio.run(ask())


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected(address: SessionAddress) -> _Connection:
    host, _, port = address.base_url.removeprefix("http://").partition("/")[0].partition(":")
    return await asyncio.open_connection(host, int(port))


async def _hang_up(connection: _Connection) -> None:
    connection[1].close()
    await connection[1].wait_closed()


async def _ask(connection: _Connection, address: SessionAddress, words: int) -> None:
    """Bypasses client libraries, whose cost is not the endpoint's."""
    reader, writer = connection
    body = json.dumps({"messages": [{"role": "user", "content": "7 " * words}]}).encode()
    path = "/" + address.base_url.removeprefix("http://").partition("/")[2]
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nHost: bench\r\n"
        f"Authorization: Bearer {address.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in answer.partition(b"\r\n")[0], answer
    length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
