"""`dora-pipe bench`: series of whole runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora_pipe.cli.options import (
    OBJECTIVE_NAMES,
    OFFPOLICY_STEPS,
    JsonOption,
    OverrideOption,
    RunsOption,
)
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.core.console import RUNS, say
from dora_pipe.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from dora_pipe.bench.paper.tables import Table

EtasOption = Annotated[str, typer.Option(help="With commas: versions between sampler and step.")]

ObjectivesOption = Annotated[
    str, typer.Option(help=f"With commas, of {', '.join(OBJECTIVE_NAMES)}.")
]


def paradigms(
    task: Annotated[
        str,
        typer.Option(
            help="demo; gpu, the same at the pace of a modelled GPU; tools, a calculator that "
            "takes its time."
        ),
    ] = "demo",
    out: Annotated[
        Path | None, typer.Option(help="Where the study lies, and goes on; paradigms-TASK.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each that are compared.")] = 2,
    choose: Annotated[
        int,
        typer.Option(
            min=0,
            help="Other seeds, by which each gets the best C and learning rate: all are tried on "
            "the first, the better half on the next and so on; 0: its own.",
        ),
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, where time is virtual.")] = 1,
    processes: Annotated[
        bool, typer.Option("--processes", help="Real ones in real time; else time is virtual.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="40; of tools 16.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Evaluation reward, the time to which is measured: .85."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Beside the trainer.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Of the entrants; all.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Warmed up already; without, one is made.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Run nothing, show what is there.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tools, in sizes that show only that it works.")
    ] = False,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a task in every paradigm and compare, with paired seeds. What is done is kept: the same
    command goes on."""
    from dora_pipe.bench.paradigms_study import play, print_study, study_of

    study = study_of(
        out or Path(f"paradigms-{task}"),
        task,
        quick=quick,
        steps=steps,
        target=target,
        workers=workers,
        overrides=override or (),
        model=model,
        processes=processes,
    )
    chosen, runs = play(study, only, seeds=seeds, choose=choose, jobs=0 if report else jobs)
    print_study(study, chosen, runs, tries=choose, as_json=as_json)


def offpolicy(
    out: Annotated[Path, typer.Option(help="Where the study lies, and goes on.")] = Path(
        "offpolicy"
    ),
    etas: EtasOption = "",
    objectives: ObjectivesOption = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Of every cell.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Of every cell; {OFFPOLICY_STEPS}.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes that show only that it works.")] = (
        False
    ),
    report: Annotated[
        bool, typer.Option("--report", help="Measure nothing, show what is there.")
    ] = False,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the demo's task on samples of exactly so many versions ago, with every objective:
    the reward after equal samples. What is done is kept: the same command goes on."""
    names = [name for name in objectives.split(",") if name]
    from dora_pipe.bench.cells import CellFile
    from dora_pipe.bench.offpolicy import Cell, Measured, planned
    from dora_pipe.bench.offpolicy_study import (
        Study,
        draw_study,
        measure_cells,
        numbers_of,
        print_study,
    )

    cells = planned(numbers_of(etas), names, 1 if quick and seeds is None else seeds)
    study = Study(out=out, quick=quick, steps=steps, overrides=override or ())
    done: CellFile[Cell, Measured] = CellFile(out, study.setting(), kind=Measured)
    if not report:
        measure_cells(study, done, cells)
    chosen = [done.cells[cell] for cell in cells if cell in done.cells]
    if not chosen:
        raise UsageError(f"{out} has none of these cells yet", hint="leave out --report")
    draw_study(out, chosen)
    print_study(f"{study.summary()}; {len(chosen)} of {len(cells)} cells", chosen, as_json=as_json)


def traces(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the demo's task.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each is a run without and one with.")] = 5,
    steps: Annotated[int, typer.Option(min=3, help="Of every run.")] = 24,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="telemetry.traces_ratio of the runs with.")
    ] = 0.1,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value of every run.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Where the runs go and stay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Train with traces on and off, in turns on this machine, and compare the throughput."""
    from dora_pipe.bench.traces import (
        LOST_MAX,
        STILL,
        TracedRun,
        costs,
        line_of,
        order,
        print_traces,
        run_one,
        setting_of,
    )
    from dora_pipe.bench.whole_runs import bench_place

    runs: list[TracedRun] = []
    with bench_place(keep) as place:
        chosen, common = setting_of(config, place)
        common += [f"run.steps={steps}", STILL, *(override or ())]
        for round_ in range(rounds):
            for kind in order(round_):
                runs.append(run_one(chosen, place, round_, kind, common, ratio))
                say(line_of(runs[-1]))
    setting = (
        f"{rounds} rounds of {steps} steps, traces_ratio {ratio:g}, {os.cpu_count()} cores; the "
        f"endpoint is a process of this machine; at most {100 * LOST_MAX:g} % may be lost"
    )
    print_traces(setting, runs, costs(runs), as_json=as_json)


def faults(
    rounds: Annotated[
        int, typer.Option(min=1, help="How many; 30 hit every role 10 times on SQLite.")
    ] = 30,
    bus: Annotated[
        str, typer.Option(help="Where the log is: sqlite, or kafka (starts brokers of its own).")
    ] = "sqlite",
    brokers: Annotated[
        int, typer.Option(help="On Kafka: 1, or 3, and then leaders of partitions are killed.")
    ] = 1,
    role: Annotated[
        str | None,
        typer.Option(
            help="Kill only this one: worker, trainer, orchestrator or broker; with --episodes"
            " worker, agent, server or trainer."
        ),
    ] = None,
    stay_dead: Annotated[
        bool,
        typer.Option(
            "--stay-dead",
            help="Kill roles inside their appends, start them again after twice the lease.",
        ),
    ] = False,
    episodes: Annotated[
        bool,
        typer.Option(
            "--episodes",
            help="Runs of an agent, an environment on servers and tools, five kills in each: of"
            " workers, agents' processes, servers, trainer.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides who is killed when.")] = 0,
    first: Annotated[int, typer.Option("--from", min=0, help="The first round.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Kill roles with SIGKILL at random and aimed moments; exit code 5 unless all is clean.

    On Kafka the broker is killed too.
    """
    from dora_pipe.bench.faults.rounds import RoundResult, Session
    from dora_pipe.bench.faults.series import (
        COLUMNS,
        play_rounds,
        row,
        series_of,
        sum_up,
    )

    series = series_of(bus, brokers, role, seed, stay_dead=stay_dead, episodes=episodes)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".faults-"))
    played: list[RoundResult] = []
    with closing(Session(folder, brokers=series.brokers, episodes=episodes)) as session:
        for one in play_rounds(session, series, range(first, first + rounds)):
            played.append(one)
            if as_json:
                emit_json(row(one))
    if not as_json:
        emit_table(COLUMNS, [list(row(one).values())[: len(COLUMNS)] for one in played])
    sum_up(played, folder)


def paper(
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="lengths, law, share, dora, parts, sweep, others, order, verl, flash or"
            " stream; default all."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds per row.")] = 3,
    steps: Annotated[int, typer.Option(min=8, help="Steps per run.")] = 16,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the law again first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Published tables and the simulator's, side by side with the error."""
    from dora_pipe.bench.paper.scaling_model import FITTED
    from dora_pipe.bench.paper.scaling_model import fit as fit_law
    from dora_pipe.bench.paper.tables import SECTIONS, tables

    unknown = sorted(set(section or ()) - set(SECTIONS))
    if unknown:
        raise ConfigError(f"no section {unknown[0]}", hint=f"there are {', '.join(SECTIONS)}")
    law = fit_law(say) if fit else FITTED
    if fit:
        say("the same law as before" if law == FITTED else f"another law than {FITTED}")
    asked = [name for name in SECTIONS if not section or name in section]
    emit_tables(tables(asked, seeds=range(1, seeds + 1), steps=steps, law=law), as_json=as_json)


def emit_tables(found: Iterable[Table], *, as_json: bool) -> None:
    """One after the other, with their notes; as JSON a row a line."""
    for table in found:
        if as_json:
            for row in table.rows:
                emit_json({"section": table.name, **row})
            continue
        emit_line()
        emit_line(table.title)
        emit_rows(table.columns, table.rows, as_json=False)
        for note in table.notes:
            emit_line(f"  {note}")


def counterfactual(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="As elsewhere; without one, a small one is made.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="One of the commands; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each has every command once.")] = 3,
    keep: Annotated[Path | None, typer.Option(help="Where what is made goes, and stays.")] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """What rescore, diff, fork, retrain and bisect cost on a run's log, each beside
    something that does the same work with less around it."""
    from dora_pipe.bench.counterfactual import (
        CASES,
        BenchedRun,
        CounterfactualFigure,
        bench_counterfactual,
        made_run,
    )
    from dora_pipe.bench.whole_runs import bench_place
    from dora_pipe.launch.run_dir import find_run

    names = [one.command for one in CASES]
    if unknown := sorted({*(only or ())} - {*names}):
        raise UsageError(f"--only {unknown[0]}: unknown", hint=f"one of {', '.join(names)}")
    chosen = [one for one in CASES if not only or one.command in only]
    words = str(find_run(run, root).path.resolve()) if run else ""
    with bench_place(keep) as place:
        benched = BenchedRun(words=words or made_run(place), folder=place)
        figures = bench_counterfactual(benched, chosen, rounds, say)
    columns = [one.name for one in fields(CounterfactualFigure)]
    emit_rows(columns, [asdict(one) for one in figures], as_json=as_json)
