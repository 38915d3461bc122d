"""`tell`: what a user asks of a run, as a record in its control topic; the fold decides on it."""

from __future__ import annotations

import getpass
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import typer

from dora_pipe.bus.port import Append
from dora_pipe.cli.look import RunArgument, RunsOption
from dora_pipe.cli.output import say
from dora_pipe.cli.rundir import RUNS, opened
from dora_pipe.errors import UsageError
from dora_pipe.orchestrator.rules_command import ARGS
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode


def tell(
    run: RunArgument,
    verb: Annotated[str, typer.Argument(help="set, pause, resume, drain, stop or fail-batch.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="What the verb takes.")
    ] = None,
    root: RunsOption = RUNS,
) -> None:
    """Ask something of a run, living or stopped; it is obeyed where it stands in the log."""
    if verb not in ARGS:
        raise UsageError(f"no verb {verb!r}", hint=f"there are: {', '.join(sorted(ARGS))}")
    args = parse(verb, arguments or ())
    command = Command(at_ns=time.time_ns(), user=getpass.getuser(), verb=verb, args=args)
    with opened(run, root) as open_run, closing(open_run.bus.writer()) as writer:
        topic = open_run.topics.control
        (offset,) = writer.append([Append(topic=topic, key=b"user", value=encode(command))])
    say(f"{verb} written to {topic} at {offset}")


def parse(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as plain values, read as TOML; a bare word is text. Raises UsageError."""
    allowed = sorted(ARGS[verb])
    args: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in allowed:
            takes = f"it takes: {', '.join(allowed)}" if allowed else "it takes nothing"
            raise UsageError(f"{verb}: cannot use {word!r}", hint=takes)
        args[key] = _value(value)
    return args


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
