"""`sql`: query the tables of a run's log."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from dora_pipe.bus.logged import Damage
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_table
from dora_pipe.cli.progress import progress
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import opened
from dora_pipe.ledger.calls import ask
from dora_pipe.ledger.tables import CALLS, TABLES, columns_of


def sql(
    run: RunArgument,
    query: Annotated[
        str | None,
        typer.Argument(help="A DuckDB statement; default: list the tables."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Query the tables of a run's log in SQL; docs/reference/sql.md lists them.

    The tables of a finished run are kept in its directory, in catalogue.duckdb.
    """
    if query is None:
        names = ["table", "columns", "row"]
        rows: list[tuple[Any, ...]] = [
            (table.name, len(columns_of(table.row)), table.description)
            for table in (*TABLES, CALLS)
        ]
        damage = Damage()
    else:
        phase = "reading the log"
        with (
            opened(run, root) as open_run,
            progress(phase) as report,
            closing(open_run.tables(lambda share: report(phase, share, 1.0))) as tables,
        ):
            names, rows, damage = ask(tables, open_run.bus, open_run.topics, query)
    if as_json:
        for row in rows:
            emit_json(dict(zip(names, row, strict=True)))
    else:
        emit_table(names, rows)
    if query is None:
        say("docs/reference/sql.md describes each column")
    damage.raise_if_any(": their calls are not in the table")
