"""Commands that compute what a run would have been, and the simulator."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import closing
from typing import Annotated

import typer

from dora_pipe.cli.lazy import lazy_app
from dora_pipe.cli.options import PARADIGM_NAMES, ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, raise_if_damaged
from dora_pipe.cli.progress import watched
from dora_pipe.core.console import RUNS
from dora_pipe.core.errors import UsageError


def whatif(
    run: RunArgument,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Another setting."),
    ] = None,
    paradigm: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PARADIGM_NAMES)}; in the simulator also one-batch, proportional, "
            "legacy-fill, drop, roll-flash."
        ),
    ] = "",
    cores: Annotated[
        int, typer.Option(min=0, help="Cores the run had; 0: those of this machine.")
    ] = 0,
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Say how long a finished run would have taken with other settings, and how far to trust it.

    The run is simulated as it was first: the error of that is printed.
    """
    from dora_pipe.sim.whatif import SCHEDULERS, as_measured, check_question, estimate
    from dora_pipe.sim.whatif_facts import measure

    known = [*PARADIGM_NAMES, *SCHEDULERS]
    if paradigm and paradigm not in known:
        raise UsageError(f"no paradigm {paradigm!r}", hint=f"there are {', '.join(known)}")
    cores = cores or os.cpu_count() or 1
    from dora_pipe.cli.whatif import emit_answers, plain_answers
    from dora_pipe.config.load import load_config
    from dora_pipe.launch.run_dir import opened

    with opened(run, root, archive) as found, watched(found) as (looked, report):
        with closing(looked.tables()) as tables:
            measured = measure(looked.bus, looked.topics, tables)
        laid = paradigm if paradigm in PARADIGM_NAMES else ""
        before = load_config(found.directory.config_file, (), stored=True)
        changed = load_config(
            found.directory.config_file, override or (), paradigm=laid, stored=True
        )
        scheduler = next((one for one in SCHEDULERS if one == paradigm), SCHEDULERS[0])
        check_question(measured, before, changed, scheduler=scheduler)
        report("simulating the run as it was")
        was = as_measured(measured)
        again = estimate(measured, measured.config, what="simulated", cores=cores)
        answers = [was, again]
        if override or paradigm:
            what = " ".join([paradigm, *(override or ())]).strip()
            report(f"simulating {what}")
            answers.append(estimate(measured, changed, what=what, cores=cores, scheduler=scheduler))
    error = again.wall_s / was.wall_s - 1
    if as_json:
        emit_json(plain_answers(measured, answers, error, cores))
    else:
        emit_answers(measured, answers, error, cores)
    raise_if_damaged(measured.damage, ", and left out of these times")


def mismatch(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which step; default the last committed.")
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Say how much of a batch's ratios comes from staleness, numerics, sampling, tokenisation."""
    from dora_pipe.cli.mismatch import measure_step, print_mismatch
    from dora_pipe.launch.run_dir import opened

    with opened(run, root, archive) as found, watched(found) as (looked, report):
        measured = measure_step(looked, step, report)
    if as_json:
        emit_json(measured.plain())
    else:
        print_mismatch(measured)


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
            "scale": ("bench.scale.command:scale", "What 4 096 accelerators would cost."),
        }
    },
    name="sim",
    help="Play runs under faults drawn from seeds; exit code 5 with the seed if anything breaks.",
    callback=sim,
)
