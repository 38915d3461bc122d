"""The endpoint's process, without torch. It ends with its worker, which keeps the listening socket.

python -m dora_pipe.producers.sessions.server LISTEN LINK NAME     two descriptors; by `endpoint`
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
from typing import Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.pure.frames import LENGTH_BYTES
from dora_pipe.core.system.console import name_process
from dora_pipe.core.system.http_server import bounded_server
from dora_pipe.core.system.linux import die_with
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.sessions.app import Endpoint
from dora_pipe.producers.sessions.frames import (
    DOWN,
    Down,
    Setup,
    SourceSetup,
    Up,
    pack,
)
from dora_pipe.producers.sessions.sessions import Sessions, Source
from dora_pipe.producers.worker.chats import chat_options

CONNECTIONS_MAX: Final = 32_768
"""Maximum connections; others get 503."""

BACKLOG: Final = 4096


async def serve(listen: socket.socket, link: socket.socket) -> None:
    """Serve until the link closes. Raises PolicyError, ValueError."""
    reader, writer = await asyncio.open_unix_connection(sock=link)
    setup = await _received(reader)
    if not isinstance(setup, Setup):
        return
    die_with(setup.parent_pid)
    sessions = open_sessions(setup, lambda frame: writer.write(pack(frame)))
    vocabulary = Tokenizer(Path(setup.endpoint.assets)).size
    endpoint = Endpoint(sessions, model=setup.endpoint.model, vocabulary=vocabulary)
    server = bounded_server(endpoint.app(), connections_max=CONNECTIONS_MAX, backlog=BACKLOG)
    serving = asyncio.create_task(server.serve(sockets=[listen]))
    try:
        while frame := await _received(reader):
            if not isinstance(frame, Setup):
                sessions.take(frame)
    finally:
        server.should_exit = server.force_exit = True
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def open_sessions(setup: Setup, send: Callable[[Up], None]) -> Sessions:
    """Create sessions. Raises PolicyError for an unreadable tokenizer."""
    endpoint = setup.endpoint
    assets = Path(endpoint.assets)
    tokenizer = Tokenizer(assets)
    sources: dict[str, Source] = {}
    for source in endpoint.sources:
        sources |= dict.fromkeys(
            source.sources, _source(source, assets, tokenizer, endpoint.started_ns)
        )
    return Sessions(
        sources,
        secret=setup.secret,
        context_tokens=endpoint.context_tokens,
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


async def _received(reader: asyncio.StreamReader) -> Down | None:
    """Return the next frame, or None at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        frame: Down = DOWN.decode(await reader.readexactly(length))
        return frame
    except asyncio.IncompleteReadError:
        return None


def main() -> None:
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
