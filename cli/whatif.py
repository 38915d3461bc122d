"""`dora-pipe whatif`: how long a finished run would have taken with other settings."""

from __future__ import annotations

import os
from statistics import median
from typing import Annotated, Any

import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_pairs, emit_table
from dora_pipe.cli.rundir import RUNS, opened
from dora_pipe.config.load import load_config
from dora_pipe.config.paradigms import PARADIGMS
from dora_pipe.errors import UsageError


def whatif(
    run: RunArgument,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="Another setting."),
    ] = None,
    paradigm: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PARADIGMS)}; in the simulator also one-batch, proportional, "
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
    from dora_pipe.sim.whatif import SCHEDULERS, answer, as_it_was
    from dora_pipe.sim.whatif_facts import measure

    known = [*PARADIGMS, *SCHEDULERS]
    if paradigm and paradigm not in known:
        raise UsageError(f"no paradigm {paradigm!r}", hint=f"there are {', '.join(known)}")
    with opened(run, root, archive) as found:
        measured = measure(found.bus, found.topics)
        laid = paradigm if paradigm in PARADIGMS else ""
        changed = load_config(found.directory.config_file, override or (), paradigm=laid)
    cores = cores or os.cpu_count() or 1
    was = as_it_was(measured)
    again = answer(measured, measured.config, what="simulated", cores=cores)
    answers = [was, again]
    if override or paradigm:
        what = " ".join([paradigm, *(override or ())]).strip()
        scheduler = next((one for one in SCHEDULERS if one == paradigm), SCHEDULERS[0])
        answers.append(answer(measured, changed, what=what, cores=cores, scheduler=scheduler))
    error = again.wall_s / was.wall_s - 1
    if as_json:
        emit_json(_plain(measured, answers, error, cores))
        return
    _emit(measured, answers, error, cores)


def _plain(measured: Any, answers: list[Any], error: float, cores: int) -> dict[str, Any]:
    return {
        "error": error,
        "cores": cores,
        "speed": {
            "alone_ms": measured.speed.t0_s * 1e3,
            "per_active_ms": measured.speed.t1_s * 1e3,
            "slower_while_training": measured.speed.slower,
            "r2": measured.speed.r2,
        },
        "answers": [{name: getattr(one, name) for name in type(one).__slots__} for one in answers],
    }


def _emit(measured: Any, answers: list[Any], error: float, cores: int) -> None:
    speed = measured.speed
    emit_pairs(
        {
            "a token alone": f"{speed.t0_s * 1e3:.2f} ms",
            "more per active request": f"{speed.t1_s * 1e3:.3f} ms",
            "slower while a step trains": f"{speed.slower:.0%}",
            "explained of the requests' times": f"{speed.r2:.0%}",
            "a training step": (
                f"{measured.train_fixed_s:.2f} s + {measured.train_token_s * 1e3:.3f} ms per token"
                f", the first {measured.first_step_s:.1f} s more"
            ),
            "from response to record": f"{median(measured.reports_s) * 1e3:.0f} ms",
            "from a fact to its round": f"{measured.react_s * 1e3:.0f} ms",
            "from placement to slot": f"{measured.place_s * 1e3:.0f} ms",
            "from assignment to ready": f"{measured.load_s * 1e3:.0f} ms",
            "workers busy while a step trains": f"{measured.busy_training:.2f}",
            "cores": cores,
        },
        title="What the log says of the machine",
    )
    emit_table(
        ("", "total s", "step s", "waits s", "staleness", "slots used", "moves"),
        [
            (
                one.what,
                one.wall_s,
                one.step_s,
                one.waited_s,
                one.staleness,
                one.slots_used,
                one.moves,
            )
            for one in answers
        ],
        title="From the last worker's join to the last commit",
    )
    typer.echo(f"error of the reproduction: {error:+.1%}")
    if len(answers) > 2:
        ratio = answers[2].wall_s / answers[1].wall_s
        typer.echo(f"the run would take {ratio:.2f} of the time it takes as it was, simulated both")
    if measured.commands or measured.rejoined:
        typer.echo(
            f"not in the model: {measured.commands} user commands, "
            f"{measured.rejoined} workers that came back"
        )
