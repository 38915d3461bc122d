"""Commands of the simulator."""

from __future__ import annotations

import gc
import logging
from typing import Annotated

import typer

from dora_pipe.cli.lazy import lazy_app


def sim(
    context: typer.Context,
    seed: Annotated[int | None, typer.Option(min=0, help="Play this one and tell of it.")] = None,
    seeds: Annotated[str, typer.Option(help="Play these: A..B, both ends included.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Play so many, from 0.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run, at least.")] = 1,
    resident: Annotated[
        bool, typer.Option("--resident", help="Most workers host several versions at once.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a seed.")] = False,
) -> None:
    """Play runs under faults drawn from seeds; exit code 5 with the seed if anything breaks."""
    if context.invoked_subcommand is not None:
        return
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)  # What breaks here is meant to.
    from dora_pipe.cli.sim import COLLECT_AFTER, play_many, play_one, range_of

    gc.set_threshold(*COLLECT_AFTER)
    if seed is not None:
        play_one(seed, steps, resident, as_json)
    else:
        first, last = range_of(seeds) if seeds else (0, count - 1)
        play_many((first, last), jobs, steps, resident, as_json)


sim_app = lazy_app(
    {
        "Commands": {
            "bugs": ("bench.mutants.command:bugs", "Planted bugs, and the seeds that find them."),
            "paper": ("bench.study_commands:paper", "Published tables, simulated."),
        }
    },
    name="sim",
    help="Play runs under faults drawn from seeds; exit code 5 with the seed if anything breaks.",
    callback=sim,
)
