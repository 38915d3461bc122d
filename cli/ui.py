"""`ui`: a local web application on a log, or the same pages as one file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.cli.look import ArchiveOption, RunArgument, RunsOption
from dora_pipe.cli.output import say
from dora_pipe.cli.rundir import RUNS, OpenRun, find_run, opened
from dora_pipe.errors import PolicyError, UsageError
from dora_pipe.ui.desk import Desk, Opener
from dora_pipe.ui.export import export_file
from dora_pipe.ui.pages import Decode, Source
from dora_pipe.ui.replayed import read_replay
from dora_pipe.ui.server import Server
from dora_pipe.views.lineage import policy_after

PORT: Final = 8765


def ui(
    run: RunArgument,
    beside: Annotated[
        str, typer.Option(metavar="RUN", help="A second run, to be compared with the first.")
    ] = "",
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `replay RUN --json` printed, to be compared."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the pages into one HTML file instead."),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Hide texts and token ids, and what tasks said.")
    ] = False,
    port: Annotated[int, typer.Option(help="Of localhost; 0 takes a free one.")] = PORT,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Look at a run in a browser, while it goes on or afterwards: http://127.0.0.1:8765."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is none", hint="0 to 65535")
    replayed = None if replay is None else read_replay(replay)
    with ExitStack() as stack:
        desks = []
        for place, name in enumerate(filter(None, (run, beside))):
            find_run(name, root)
            opener = opener_of(name, root, None if place else archive, redact=redact)
            desks.append(Desk(opener, None if place else replayed))
            stack.callback(desks[-1].close)
        if export is not None:
            for desk in desks:
                desk.read_all()
            done = export_file(desks, export)
            say(f"{export}: {done.bytes / 1e6:.1f} MB, {done.pages} pages")
            return
        server = Server(desks, port=port)
        stack.callback(server.server_close)
        for desk in desks:
            desk.start()
        typer.echo(server.address)
        say("open it in a browser; Ctrl-C ends this")
        server.serve_forever()


def opener_of(
    name: str, root: Path, archive: Path | None = None, *, redact: bool = False
) -> Opener:
    """Opens a run, or the archive of one, as the pages need it."""

    @contextmanager
    def open_source() -> Iterator[Source]:
        with opened(name, root, archive) as run:
            yield Source(
                bus=run.bus,
                topics=run.topics,
                policies=run.policies if run.has_policies else None,
                decode=None if redact else _decoder(run),
                redact=redact,
            )

    return open_source


def _decoder(run: OpenRun) -> Decode | None:
    """The run's tokenizer; None, and said, where it cannot be used."""
    if not run.has_policies or importlib.util.find_spec("tokenizers") is None:
        say("texts are shown as token ids: no tokenizer can be used here")
        return None
    from dora_pipe.producers.tokenizer import Tokenizer

    try:
        started, _ = policy_after(run.bus, run.topics, 0)
        assets = run.policies.assets(started.assets_digest)
        if any(assets.glob("tokenizer*")):
            return Tokenizer(assets).full_text
        say("texts are shown as token ids: the model directory has no tokenizer")
    except (PolicyError, UsageError, OSError) as error:
        say(f"texts are shown as token ids: {error}")
    return None
