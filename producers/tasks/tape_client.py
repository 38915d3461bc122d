"""The tape of an agent's trajectory, as a process that the agent has started asks it: over a socket
whose path stands in the environment variable `DORA_PIPE_CASSETTE`, lines of JSON.

    -> {"name": "search", "arguments": {"query": "x"}}
    <- {"answer": {"value": ["found"]}}     or what it raised: {"error": "KeyError", "message": "x"}
    <- {"ask": true}                        nobody has recorded it: ask the real one, then say
    -> {"answer": {"value": ["found"]}}
    <- {"recorded": true}
    <- {"refused": "row 3 of train: ..."}   in place of either

One connection is for one call after the other; calls at the same time have one each. Who goes
without saying what came of a call has recorded nothing. The other end is `tape_door`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.tasks.cassette import Answer, CassetteMiss

VARIABLE: Final = "DORA_PIPE_CASSETTE"
"""In the environment of an agent's processes: the path of their tape's socket. Empty: there is
none, whatever stands in the environment of who has started them."""

OF_NO_TRAJECTORY: Final = "of no trajectory"
"""In place of a path, where a strict cassette must not be gone around."""

LINE_BYTES_MAX: Final = 1 << 24
"""Of one line, either way; less than a cassette's own lines (`cassette_file`)."""

ABOVE_MAX: Final = 32
"""Processes between an agent and one that it has started through others."""

_ASSIGNED: Final = f"{VARIABLE}=".encode()

SAY_S: Final = 60.0
"""For the tape to say something: it looks up a file, or appends to it."""


class DoorCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Example: ``DoorCall(name="search", arguments={"query": "x"})``."""

    name: str
    arguments: dict[str, Any]
    outside: bool = False
    """It is of no trajectory (`tape.outside`): what a server of tools says of itself."""


class DoorAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the real one has answered. Example: ``DoorAnswer(answer={"value": 4})``."""

    answer: dict[str, Any]


class DoorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the tape says: one of its fields.

    Example: ``DoorReply(answer={"value": 4})``
    """

    answer: dict[str, Any] | None = None
    ask: bool = False
    recorded: bool = False
    refused: str = ""


_REPLIES: Final = msgspec.json.Decoder(DoorReply)


class TapeCall:
    """A call that was begun: what the cassette has, or else whom to tell what the real one says."""

    def __init__(self, connection: _Connection, found: Answer | None) -> None:
        self._connection = connection
        self.found = found
        if found is not None:
            connection.close()

    def answered(self, answer: Answer) -> None:
        """What the real one has answered. Raises ResourceError where it cannot be recorded."""
        try:
            reply = self._connection.ask({"answer": dict(answer)})
        finally:
            self._connection.close()
        if not reply.recorded:
            raise ResourceError(f"the answer is not recorded: {reply.refused}")

    def close(self) -> None:
        """Nothing came of it."""
        self._connection.close()


class TapeClient:
    """Any thread may begin calls.

    Example: ``TapeClient(os.environ[VARIABLE]).begin("search", {"query": "x"})``
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def begin(self, name: str, arguments: Mapping[str, Any], *, outside: bool = False) -> TapeCall:
        """A call behind all that the agent has begun before. Raises CassetteMiss, ResourceError."""
        if self.path == OF_NO_TRAJECTORY:
            raise ResourceError(
                f"{name} is asked by a process of no trajectory, and the cassette is strict",
                hint="its environment needs `taped.cassette_variables()` (docs/cassettes.md)",
            )
        call = DoorCall(name, dict(arguments), outside)
        connection = _Connection(self.path)
        try:
            reply = connection.ask(msgspec.to_builtins(call))
        except ResourceError:
            connection.close()
            raise
        if reply.refused:
            connection.close()
            raise CassetteMiss(reply.refused)
        return TapeCall(connection, reply.answer)


def client_here() -> TapeClient | None:
    """That of the agent that has started this process; None where there is no cassette.

    Clients of MCP start their servers with a few variables only: then the nearest process above
    says it that has the variable (Linux).
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        path = _above()
    return TapeClient(path) if path else None


@functools.cache
def _above() -> str:
    """What the variable was when the nearest process above began that has it; empty: none has."""
    process = os.getppid()
    for _ in range(ABOVE_MAX):
        about = Path("/proc", str(process))
        try:
            for one in (about / "environ").read_bytes().split(b"\0"):
                if one.startswith(_ASSIGNED):
                    return os.fsdecode(one[len(_ASSIGNED) :])
            # Behind the name, which may hold anything: state, parent.
            process = int((about / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # another user's, or there is no such folder
            return ""
    return ""


class _Connection:
    def __init__(self, path: str) -> None:
        """Raises ResourceError where nobody listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SAY_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ResourceError(
                f"the cassette at {VARIABLE}={path} cannot be reached: {error.strerror or error}",
                hint="it is there as long as its agent's trajectory",
            ) from None
        self._lines = self._socket.makefile("rb")

    def ask(self, said: Mapping[str, Any]) -> DoorReply:
        """Raises ResourceError."""
        line = msgspec.json.encode(said) + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise ResourceError(
                f"{len(line)} bytes are too much for a call on a cassette",
                hint=f"{LINE_BYTES_MAX} bytes are the most",
            )
        try:
            with contextlib.suppress(BrokenPipeError):  # It has refused before it was asked.
                self._socket.sendall(line)
            return _REPLIES.decode(self._lines.readline(LINE_BYTES_MAX))
        except (OSError, msgspec.DecodeError) as error:
            raise ResourceError(f"the cassette does not answer: {error}") from None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
