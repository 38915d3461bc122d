"""Commands that change, pause or end a run through its control topic."""

from __future__ import annotations

import getpass
import time
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from dora_pipe.audit.effective_config import check_change
from dora_pipe.cli.options import RunArgument, RunsOption
from dora_pipe.config.changes import LOGGED
from dora_pipe.core.errors import UsageError
from dora_pipe.core.pure.records import Append
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.plan import refuse_over
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode


def set_keys(
    run: RunArgument,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Logged keys.")],
    root: RunsOption = RUNS,
) -> None:
    """Change settings of a run from its next step on."""
    args = {}
    for word in changes:
        key, equals, value = word.partition("=")
        if not equals or key not in LOGGED:
            keys = f"keys: {', '.join(sorted(LOGGED))}"
            raise UsageError(f"set: cannot use {word!r}, expected KEY=VALUE", hint=keys)
        args[key] = _toml_value(value)
    _send(run, "set", args, root)


def pause(run: RunArgument, root: RunsOption = RUNS) -> None:
    """Dispatch no new groups until `resume`."""
    _send(run, "pause", {}, root)


def resume(run: RunArgument, root: RunsOption = RUNS) -> None:
    """Continue a paused run, or one that halted because too many groups failed."""
    _send(run, "resume", {}, root)


def drain(
    run: RunArgument,
    name: Annotated[
        str, typer.Argument(metavar="WORKER", help="Name of the worker; default: all.")
    ] = "",
    root: RunsOption = RUNS,
) -> None:
    """Let a worker finish or migrate its requests and leave the run."""
    _send(run, "drain", {"worker": name} if name else {}, root)


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not finish the current batch.")] = False,
    after: Annotated[int | None, typer.Option(min=0, help="Last step of the run.")] = None,
    root: RunsOption = RUNS,
) -> None:
    """End a run after the groups in flight are trained."""
    if now and after is not None:
        raise UsageError("--now and --after exclude each other")
    last = {} if after is None else {"after": after}
    _send(run, "stop", {"now": True} if now else last, root)


def fail_batch(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Only if this step is in training.")] = None,
    root: RunsOption = RUNS,
) -> None:
    """End all groups of the batch in training as failed."""
    _send(run, "fail-batch", {} if step is None else {"step": step}, root)


def _send(run: str, verb: str, args: dict[str, Any], root: Path) -> None:
    command = Command(at_ns=time.time_ns(), user=getpass.getuser(), verb=verb, args=args)
    with opened(run, root) as open_run, closing(open_run.bus.writer()) as writer:
        topic = open_run.topics.control
        refuse_over(open_run.bus, open_run.topics, open_run.directory, root)
        check_change(open_run.bus, open_run.topics, command)
        (offset,) = writer.append([Append(topic=topic, key=b"user", value=encode(command))])
    say(f"{verb} written to {topic} at {offset}")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
