"""What `sql` asks and lists: the tables of a run's log."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from dora_pipe.catalogue.tables import TABLES, columns_of
from dora_pipe.cli.progress import progress
from dora_pipe.launch.run_dir import OpenRun


def answer(run: OpenRun, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a statement. Raises UsageError, ResourceError, BusError."""
    phase = "reading the log"
    with (
        progress(phase) as told,
        closing(run.tables(lambda share: told(phase, share, 1.0))) as tables,
    ):
        return tables.ask(query)


def table_rows() -> list[dict[str, Any]]:
    """The tables, a row each."""
    return [
        {
            "table": table.name,
            "columns": len(columns_of(table.row)),
            "what a row is": table.words,
        }
        for table in TABLES
    ]
