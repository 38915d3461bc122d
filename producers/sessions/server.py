"""The endpoint's process, without torch. It ends with its worker, which keeps the listening socket.

python -m dora_pipe.producers.sessions.server LISTEN LINK NAME     two descriptors; by `port`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.console import name_process
from dora_pipe.core.system.http_server import bounded_server
from dora_pipe.core.system.linux import die_with
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.sessions.app import Endpoint
from dora_pipe.producers.sessions.frames import (
    DOWN,
    Down,
    Listening,
    Setup,
    SourceSetup,
    Up,
    pack,
    unpack,
)
from dora_pipe.producers.sessions.sessions import Sessions, Source
from dora_pipe.producers.worker.chats import chat_options

CONNECTIONS_MAX: Final = 32_768
"""Maximum connections; others get 503."""

BACKLOG: Final = 4096
READ_BYTES: Final = 1 << 18


async def serve(listen: socket.socket, link: socket.socket) -> None:
    """Serve until the link closes. Raises PolicyError, ValueError."""
    reader, writer = await asyncio.open_unix_connection(sock=link)
    buffer = bytearray()
    setup = await _first(reader, buffer)
    if setup is None:
        return
    die_with(setup.parent_pid)
    sessions = open_sessions(setup, lambda frame: writer.write(pack(frame)))
    vocabulary = Tokenizer(Path(setup.assets)).size
    endpoint = Endpoint(sessions, model=setup.model, vocabulary=vocabulary)
    server = bounded_server(endpoint.app(), connections_max=CONNECTIONS_MAX, backlog=BACKLOG)
    serving = asyncio.create_task(server.serve(sockets=[listen]))
    writer.write(pack(Listening()))
    try:
        async for frame in _frames(reader, buffer):
            if not isinstance(frame, Setup):
                sessions.take(frame)
    finally:
        server.should_exit = server.force_exit = True
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def open_sessions(setup: Setup, send: Callable[[Up], None]) -> Sessions:
    """Create sessions. Raises PolicyError for an unreadable tokenizer."""
    assets = Path(setup.assets)
    tokenizer = Tokenizer(assets)
    sources: dict[str, Source] = {}
    for source in setup.sources:
        sources |= dict.fromkeys(
            source.sources, _source(source, assets, tokenizer, setup.started_ns)
        )
    return Sessions(
        sources,
        secret=setup.secret,
        context_tokens=setup.context_tokens,
        first_call=setup.first_call,
        send=send,
    )


def _source(setup: SourceSetup, assets: Path, tokenizer: Tokenizer, started_ns: int) -> Source:
    def chat() -> Chat:
        return Chat.open(assets, tokenizer, chat_options(setup.task, started_ns))

    return Source(
        chat=chat() if setup.chat else None,
        open_chat=chat,
        tokenizer=tokenizer.reading(setup.task.special_tokens),
        task=setup.task,
        sampling=setup.sampling,
    )


async def _first(reader: asyncio.StreamReader, buffer: bytearray) -> Setup | None:
    while data := await reader.read(READ_BYTES):
        buffer += data
        for body in unpack(buffer):
            frame = DOWN.decode(body)
            if not isinstance(frame, Setup):
                raise ValueError("the first frame is no Setup")
            return frame
    return None


async def _frames(reader: asyncio.StreamReader, buffer: bytearray) -> Any:
    while True:
        for body in unpack(buffer):
            frame: Down = DOWN.decode(body)
            yield frame
        data = await reader.read(READ_BYTES)
        if not data:
            return
        buffer += data


def main() -> None:
    """Serve on two descriptors, under a process name."""
    listen, link, *name = sys.argv[1:]
    name_process(*name)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        with socket.socket(fileno=int(listen)) as door, socket.socket(fileno=int(link)) as end:
            door.setblocking(False)
            end.setblocking(False)
            asyncio.run(serve(door, end))
    except (PolicyError, BrokenPipeError, ConnectionResetError) as error:
        sys.stderr.write(f"endpoint: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
