"""`dora-pipe sim paper`: published tables and the simulator's, side by side with the error."""

from __future__ import annotations

from typing import Annotated

import typer

from dora_pipe.cli.output import emit_json, emit_rows, say
from dora_pipe.errors import ConfigError

SEEDS_MAX = 100
STEPS_MIN = 8


def paper(
    section: Annotated[
        list[str] | None,
        typer.Option(help="lengths, law, dora, sweep, others, flash, stream; default all."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS_MAX, help="Seeds per row.")] = 3,
    steps: Annotated[int, typer.Option(min=STEPS_MIN, help="Steps per run.")] = 16,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the law again first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Published tables and the simulator's, side by side with the error."""
    from dora_pipe.sim.law import FITTED
    from dora_pipe.sim.law import fit as fit_law
    from dora_pipe.sim.tables import SECTIONS, tables

    unknown = sorted(set(section or ()) - set(SECTIONS))
    if unknown:
        raise ConfigError(f"no section {unknown[0]}", hint=f"there are {', '.join(SECTIONS)}")
    law = fit_law(say) if fit else FITTED
    if fit:
        say("the same law as before" if law == FITTED else f"another law than {FITTED}")
    asked = [name for name in SECTIONS if not section or name in section]
    for table in tables(asked, seeds=range(1, seeds + 1), steps=steps, law=law):
        if as_json:
            for row in table.rows:
                emit_json({"section": table.name, **row})
            continue
        typer.echo(f"\n{table.title}")
        emit_rows(table.columns, table.rows, as_json=False)
        for note in table.notes:
            typer.echo(f"  {note}")
