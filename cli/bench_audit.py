"""`bench audit`: what an audit costs beside reading the log and throwing it away."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.audit_helper import Log, help_audit, starting
from dora_pipe.cli.forks import Forks
from dora_pipe.cli.look import JsonOption
from dora_pipe.cli.output import emit_rows

TOKENS = (2_048, 16_384)


def audit(
    bus: Annotated[
        list[str] | None, typer.Option(help="A log to measure beside SQLite: kafka://HOST:PORT.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    trajectories: Annotated[int, typer.Option(min=1, help="Of each run.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Medians over so many.")] = 3,
    memory: Annotated[
        int, typer.Option(min=0, help="Also how memory grows in an audit of so many trajectories.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Audits of a run by every log: the first, a quick one, one from the index; and memory."""
    from dora_pipe.bench.audit import AuditFigure, MemoryFigure, bench_audit, bench_memory

    place = tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")
    with Forks(help_audit) as forks, place as folder:
        figures = bench_audit(
            [f"sqlite:{folder}/bench.sqlite", *(bus or ())],
            tokens=tokens or TOKENS,
            trajectories=trajectories,
            repeats=repeats,
            starting=lambda url: starting(forks, Log(url=url)),
            helpers_pid=forks.pid,
        )
        names = [one.name for one in fields(AuditFigure)]
        emit_rows(names, [asdict(one) for one in figures], as_json=as_json)
        if memory:
            found = bench_memory(Path(folder), trajectories=memory)
            names = [one.name for one in fields(MemoryFigure)]
            emit_rows(names, [asdict(found)], as_json=as_json)
