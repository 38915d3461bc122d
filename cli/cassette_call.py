"""`cassette call` and `cassette mcp`: an agent's command or MCP server, answered by the cassette of
its run. What is started here does not know of the cassette: what it does is its caller's answer."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from dora_pipe.core.console import die_with
from dora_pipe.core.errors import ResourceError, TaskError, UsageError
from dora_pipe.producers.tasks.cassette import CassetteMiss
from dora_pipe.producers.tasks.tape_client import LINE_BYTES_MAX, VARIABLE, client_here

BY_SIGNAL: Final = 128
"""A command that a signal has ended has this and the signal's number as its status, as in a
shell."""


def call_command(words: Sequence[str], *, name: str, stdin: bool) -> int:
    """The status of a command whose output was written here. Raises TaskError where a strict
    cassette does not have it, ResourceError where it cannot be recorded, UsageError where it cannot
    be started."""
    tape = client_here()
    if tape is None:
        _become(words, stdin=stdin)
    os.environ[VARIABLE] = ""  # what is started does not have it
    given = sys.stdin.buffer.read(LINE_BYTES_MAX) if stdin else None
    arguments = {"command": list(words)} | ({} if given is None else _text("stdin", given))
    try:
        begun = tape.begin(name or Path(words[0]).name, arguments)
    except CassetteMiss as error:
        raise TaskError(str(error)) from None
    if begun.found is not None:
        value = begun.found["value"]
    else:
        value = _made(words, given)
        begun.answered({"value": value})
    for stream, key in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.buffer.write(_bytes(key, value))
        stream.flush()
    return int(value["status"])


def serve_mcp(words: Sequence[str], *, name: str) -> None:
    """Until the input ends. Raises UsageError where the command cannot be started."""
    tape = client_here()
    if tape is None:
        _become(words, stdin=True)
    from dora_pipe.producers.adapters.mcp_proxy import serve

    os.environ[VARIABLE] = ""
    serve(words, tape, sys.stdin.buffer, sys.stdout.buffer, name=name)


def _become(words: Sequence[str], *, stdin: bool) -> NoReturn:
    if not stdin:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        raise _not_started(words, error) from None


def _made(words: Sequence[str], given: bytes | None) -> dict[str, Any]:
    """What a command writes, and its status; it does not outlive this process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            ended = subprocess.run(
                words,
                input=given,
                stdin=subprocess.DEVNULL if given is None else None,
                stdout=out,
                stderr=errors,
                preexec_fn=partial(die_with, os.getpid()),
                check=False,
            )
        except OSError as error:
            raise _not_started(words, error) from None
        code = ended.returncode
        status = BY_SIGNAL - code if code < 0 else code
        return {"status": status, **_written("stdout", out), **_written("stderr", errors)}


def _written(key: str, file: IO[bytes]) -> dict[str, str]:
    file.seek(0)
    found = file.read(LINE_BYTES_MAX)
    if len(found) == LINE_BYTES_MAX:
        raise ResourceError(
            f"the command has written {LINE_BYTES_MAX} bytes to {key}, too much for a cassette"
        )
    return _text(key, found)


def _text(key: str, found: bytes) -> dict[str, str]:
    """As JSON can have it: ``{"stdout": "text"}``, or ``{"stdout_base64": "..."}``."""
    try:
        return {key: found.decode()}
    except UnicodeDecodeError:
        return {f"{key}_base64": base64.b64encode(found).decode()}


def _bytes(key: str, value: dict[str, Any]) -> bytes:
    if (coded := value.get(f"{key}_base64")) is not None:
        return base64.b64decode(coded)
    return str(value[key]).encode()


def _not_started(words: Sequence[str], error: OSError) -> UsageError:
    return UsageError(f"{words[0]}: {error.strerror or error}", hint="what is behind `--` starts")
