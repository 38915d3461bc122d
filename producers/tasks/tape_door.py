"""The door of an agent's tape to processes that the agent starts: decides what they are told.

All that belong to one trajectory ask the one tape that it has in its task process, so that their
calls stand in one order, are counted together, and know neither the cassette nor its mode. A door
is a socket in a folder that is its user's alone, and is there as long as the agent runs. What goes
over it stands in `tape_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.producers.tasks.cassette import Answer, CassetteMiss, CassetteRefused, tool_call
from dora_pipe.producers.tasks.port import Retry
from dora_pipe.producers.tasks.tape import Begun, EpisodeTape
from dora_pipe.producers.tasks.tape_client import (
    LINE_BYTES_MAX,
    VARIABLE,
    DoorAnswer,
    DoorCall,
    DoorReply,
)

CONNECTIONS_MAX: Final = 256
"""Calls of one agent at the same time."""

FOLDER_CHARACTERS_MAX: Final = 60
"""Of the folder for temporary files: the path of a socket has 107 at most."""

_DOOR: ContextVar[str] = ContextVar("path of the door of this agent", default="")
_CALLS: Final = msgspec.json.Decoder(DoorCall)
_ANSWERS: Final = msgspec.json.Decoder(DoorAnswer)


def cassette_variables() -> dict[str, str]:
    """What the environment of a process needs that an agent starts, so that the cassette of its
    run answers it; nothing where there is none.

    Example: ``subprocess.run(words, env={**os.environ, **cassette_variables()})``
    """
    path = _DOOR.get()
    return {VARIABLE: path} if path else {}


def for_no_trajectory() -> None:
    """What the present task of the loop starts from now on belongs to no trajectory."""
    _DOOR.set("")


@asynccontextmanager
async def open_door(tape: EpisodeTape | None) -> AsyncIterator[None]:
    """Let processes that are started in the block ask a tape. Raises OSError."""
    if tape is None:
        yield
        return
    short = len(tempfile.gettempdir()) <= FOLDER_CHARACTERS_MAX
    with tempfile.TemporaryDirectory(prefix="dora-pipe-", dir=None if short else "/tmp") as folder:
        path = str(Path(folder, "cassette"))
        door = _Door(tape)
        server = await asyncio.start_unix_server(door.serve, path, limit=LINE_BYTES_MAX)
        before = _DOOR.set(path)
        try:
            yield
        finally:
            _DOOR.reset(before)
            server.close()
            await door.close()


class _Door:
    def __init__(self, tape: EpisodeTape) -> None:
        self._tape = tape
        self._open: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends or the agent does."""
        me = asyncio.current_task()
        assert me is not None
        self._open.add(me)
        try:
            if len(self._open) > CONNECTIONS_MAX:
                await self._refuse(writer, f"more than {CONNECTIONS_MAX} calls at once")
                return
            while line := await reader.readline():
                await self._call(line, reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # who has asked is gone, or the door is
        except ValueError as error:  # msgspec's are, and of what is longer than a line may be
            with contextlib.suppress(OSError):
                await self._refuse(writer, f"no line of a call: {error}")
        finally:
            self._open.discard(me)
            writer.close()

    async def close(self) -> None:
        """Nobody is heard any more."""
        for one in self._open:
            one.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _call(
        self, line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises ValueError for what is no call, or no answer."""
        try:
            begun = self._begun(_CALLS.decode(line))
        except CassetteMiss as error:
            await _say(writer, DoorReply(refused=str(error)))
            return
        if begun.found is not None:
            await _say(writer, DoorReply(answer=dict(begun.found)))
            return
        await _say(writer, DoorReply(ask=True))
        if not (line := await reader.readline()).endswith(b"\n"):
            raise EOFError
        try:
            begun.answered(_checked(_ANSWERS.decode(line).answer))
        except Retry as error:
            await _say(writer, DoorReply(refused=str(error)))
            return
        await _say(writer, DoorReply(recorded=True))

    async def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        """It is held against the trajectory: where nobody records, the tool would have answered."""
        self._tape.fail(CassetteRefused(why))
        await _say(writer, DoorReply(refused=why))

    def _begun(self, call: DoorCall) -> Begun:
        if call.outside:
            return self._tape.begin_outside(call.name, call.arguments)
        return self._tape.begin(tool_call(call.name, call.arguments))


def _checked(answer: dict[str, Any]) -> Answer:
    """Raises ValueError for what `taped` could not give again."""
    texts = all(isinstance(answer.get(one), str) for one in ("error", "message"))
    if set(answer) != {"value"} and not (texts and set(answer) == {"error", "message"}):
        raise ValueError("an answer has a `value`, or the texts `error` and `message`")
    return answer


async def _say(writer: asyncio.StreamWriter, reply: DoorReply) -> None:
    writer.write(msgspec.json.encode(reply) + b"\n")
    await writer.drain()
