"""`python -m sim bugs`: look for every planted bug until the first seed finds it."""

from __future__ import annotations

import gc
import logging
from typing import Annotated, Final

import typer

from dora_pipe.cli.main import run_command
from dora_pipe.cli.output import emit_table
from dora_pipe.cli.sim import COLLECT_AFTER
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.sim.seed_runner import run_seed
from tests.support.mutants.rules import BUGS, mutated
from tests.support.mutants.seeds import seeds_of

app = typer.Typer(add_completion=False)

BUG_SEEDS: Final = 500
"""A planted bug is looked for in so many seeds."""


@app.command()
def bugs(
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run, at least.")] = 1,
) -> None:
    """Plant wrong rules, one at a time, and say which seed finds each; exit code 5 where none
    does."""
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)  # What breaks here is meant to.
    gc.set_threshold(*COLLECT_AFTER)
    rows, missed = [], []
    for name, bug in BUGS.items():
        with mutated(name):
            tried = (run_seed(seed, steps=steps) for seed in seeds_of(name, BUG_SEEDS))
            found = next((one for one in tried if not one.holds), None)
        rows.append(
            (name, bug.what, found.seed + 1 if found else None, found.check if found else None)
        )
        say(f"{name}: {'not found' if found is None else found.line}")
        missed += [] if found else [name]
    emit_table(("bug", "what", "seeds needed", "found by"), rows)
    if missed:
        raise InvariantBroken(f"{missed[0]} was not found within {BUG_SEEDS} seeds")


if __name__ == "__main__":
    run_command("tests.support.mutants.command")
