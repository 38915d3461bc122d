"""`bench paradigms`: train a task with every paradigm."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from dora_pipe.bench.studies.cells import CellFile, setting_digest
from dora_pipe.bench.studies.entrants import ENTRANTS, overrides_of, own_setting, reported
from dora_pipe.bench.studies.paradigms import BASES, Cell, Compared, ParadigmRun, compare, quickness
from dora_pipe.cli.demo import TASK, warm
from dora_pipe.cli.options import JsonOption, OverrideOption
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import say
from dora_pipe.launch.examples import example_config, make_model
from dora_pipe.launch.roles import share_cores

FIGURES: Final[Sequence[tuple[str, Callable[[ParadigmRun], float | None]]]] = (
    ("samples/s", lambda run: run.samples_per_s),
    ("1 / time to target", quickness),
)
"""Figures compared as ratios; more is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Default sizes."""

    example: str
    """Base example."""
    steps: int
    target: float
    prompts: int
    every: int
    """Steps between evaluations, which take about an eighth of the samples."""
    rate: float = 4.5e-4
    overrides: tuple[str, ...] = ()
    pace: str


ONE_UPDATE: Final = "trainer.minibatches=1"
"""One update per step for all: a batch in parts has one."""

SMALL: Final = ("rollout.prompts_per_step=24", "task.options={mu=1.0, sigma=1.0, n_max=20}")
"""Demo task with shorter chains."""

_DEMO: Final = Scale(
    example=TASK,
    steps=40,
    target=0.85,
    prompts=128,
    every=2,
    overrides=(*SMALL, ONE_UPDATE),
    pace="demo",
)

SCALES: Final[Mapping[str, Scale]] = {
    "demo": _DEMO,
    "gpu": replace(_DEMO, pace="gpu"),
    "tools": Scale(
        example="calculator",
        steps=16,
        target=0.85,
        prompts=64,
        every=2,
        overrides=("rollout.prompts_per_step=16", "workers.max_num_seqs=16", ONE_UPDATE),
        pace="tools",
    ),
}
QUICK: Final = Scale(
    example="calculator",
    steps=4,
    target=0.85,
    prompts=8,
    every=2,
    overrides=(
        "rollout.prompts_per_step=4",
        "rollout.group_size=2",
        "rollout.filter_zero_advantage=false",
        "workers.max_num_seqs=4",
        "sampling.max_tokens=24",
        "evaluation.sampling.max_tokens=24",
        "task.max_turns=3",
        ONE_UPDATE,
    ),
    pace="tools",
)
"""Minimal sizes."""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one `bench paradigms`."""

    out: str
    """Folder, reused to resume."""
    task: str
    quick: bool
    scale: Scale
    workers: int
    overrides: Sequence[str]
    model: str = ""
    """Initial model of all runs; made if empty."""

    @property
    def config(self) -> Path:
        """Return the common configuration."""
        return Path(self.out) / "start" / "demo.toml"

    def begin(self) -> None:
        """Create configuration and initial model."""
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(example_config(self.scale.example))
        start = Path(self.start)
        if start.exists():
            return
        if self.model:
            raise UsageError(f"{self.model} is not there", hint="--model is a model directory")
        part = Path(self.out) / "start.part"
        shutil.rmtree(part, ignore_errors=True)
        if self.quick:
            make_model(part / start.name, self.scale.example)
        else:
            part.mkdir(parents=True)
            warm(part, self.scale.example)
        (part / start.name).rename(start)
        shutil.rmtree(part)

    @property
    def start(self) -> str:
        return self.model or str(self.config.parent / ("random" if self.quick else "warm"))

    def setting(self) -> dict[str, Any]:
        """Return what compared cells share."""
        fields = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if name != "out"}

    def load(self, cell: Cell) -> Config:
        """Return a configuration. Raises ConfigError."""
        entrant = ENTRANTS[cell.entrant]
        workers = self.workers + entrant.together + entrant.colocated
        overrides = [
            f'run.name="{entrant.name}-{cell.seed}"',
            f"run.steps={self.scale.steps}",
            f"workers.count={workers}",
            f"evaluation.every={self.scale.every}",
            f"evaluation.prompts={self.scale.prompts}",
            f'model.path="{Path(self.start).resolve()}"',
            *overrides_of(cell),
            *self.scale.overrides,
            *self.overrides,
        ]
        return load_config(self.config, overrides)

    def run(self, cell: Cell) -> ParadigmRun:
        from dora_pipe.bench.studies.paradigms_virtual import PACES, run_virtual

        config, setting = self.load(cell), setting_digest(self.setting())
        share_cores()
        pace = PACES[self.scale.pace]
        if ENTRANTS[cell.entrant].together:
            pace = pace.shared_by(config.workers.count)
        return run_virtual(config, cell, pace=pace, setting=setting, target=self.scale.target)

    def summary(self, seeds: int) -> str:
        """Return the common settings as text."""
        many = f"{self.workers} worker{'s' * (self.workers > 1)} and a trainer"
        how = f"{many} in virtual time at the pace of {self.scale.pace!r}"
        return (
            f"{how}; {self.scale.steps} steps, {self.scale.prompts} prompts evaluated every"
            f" {self.scale.every} steps, {seeds} seeds; target: evaluation reward"
            f" {self.scale.target:g}"
        )


def study_of(
    out: Path,
    task: str,
    *,
    quick: bool,
    steps: int | None,
    target: float | None,
    workers: int,
    overrides: Sequence[str],
    model: Path | None,
) -> Study:
    """Return a study with default sizes. Raises UsageError for an unknown task or size."""
    if task not in SCALES:
        raise UsageError(f"no task {task!r}", hint=f"one of {', '.join(SCALES)}")
    if quick and task != "tools":
        raise UsageError("--quick is for --task tools", hint="--steps and -o make others small")
    scale = QUICK if quick else SCALES[task]
    scale = replace(
        scale,
        steps=scale.steps if steps is None else steps,
        target=scale.target if target is None else target,
    )
    return Study(
        out=str(out),
        task=task,
        quick=quick,
        scale=scale,
        workers=workers,
        overrides=overrides,
        model="" if model is None else str(model.resolve()),
    )


def command(
    task: Annotated[
        str,
        typer.Option(
            help="demo; gpu, the same at the pace of a modelled GPU; tools, a calculator that "
            "takes its time."
        ),
    ] = "demo",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; default: paradigms-TASK.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per entrant.")] = 2,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; 40, tools: 16.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Evaluation reward that ends the timing; 0.85.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers of each run.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Entrants; default: all.")] = None,
    model: Annotated[Path | None, typer.Option(help="Warmed-up model; default: a new one.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print the report without a run.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use tiny sizes of tools to check the study.")
    ] = False,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a task in every paradigm and compare, with paired seeds. Repeat the command to
    resume."""
    study = study_of(
        out or Path(f"paradigms-{task}"),
        task,
        quick=quick,
        steps=steps,
        target=target,
        workers=workers,
        overrides=override or (),
        model=model,
    )
    print_study(study, play(study, only, seeds=seeds, report=report), as_json=as_json)


Done = CellFile[Cell, ParadigmRun]


def play(
    study: Study, only: Sequence[str] | None, *, seeds: int, report: bool
) -> list[ParadigmRun]:
    """Return the runs; with `report` finished ones. Raises UsageError if none."""
    names = list(only or ENTRANTS)
    if unknown := [name for name in names if name not in ENTRANTS]:
        raise UsageError(f"no entrant {unknown[0]!r}", hint=f"one of {', '.join(ENTRANTS)}")
    study.begin()
    done: Done = CellFile(Path(study.out), study.setting(), kind=ParadigmRun)
    settings = [own_setting(name, study.scale.rate) for name in names]
    cells = reported(settings, seeds)
    if not report:
        measure_cells(study, done, cells)
    runs = [done.cells[cell] for cell in cells if cell in done.cells]
    if not runs:
        raise UsageError(f"{study.out} has none of these runs yet", hint="remove --report")
    return runs


def measure_cells(study: Study, done: Done, cells: Sequence[Cell]) -> None:
    for cell in cells:
        if cell not in done.cells:
            done.add(run := study.run(cell))
            say(f"{line_of(run)}; {sum(cell not in done.cells for cell in cells)} to go")


def line_of(run: ParadigmRun) -> str:
    reached = "target not reached" if run.target_s is None else f"target in {run.target_s:.1f} s"
    return (
        f"{run.cell}: {run.samples_per_s:.2g} samples/s, {reached}, reward {run.reward:.3f},"
        f" {run.seconds:.1f} s"
    )


def print_study(study: Study, runs: Sequence[ParadigmRun], *, as_json: bool) -> None:
    seeds = len({run.cell.seed for run in runs})
    rows = [_row_of(run) for run in runs]
    compared = [
        (name, compare(runs, figure, base=base)) for name, figure in FIGURES for base in BASES
    ]
    if as_json:
        emit_json({"setting": study.summary(seeds)})
        emit_rows(
            [],
            [{**row, "course": run.course} for row, run in zip(rows, runs, strict=True)],
            as_json=True,
        )
        for name, comparisons in compared:
            emit_rows(
                [],
                [{"figure": name, **asdict(comparison)} for comparison in comparisons],
                as_json=True,
            )
        return
    emit_line(study.summary(seeds))
    emit_rows(list(rows[0]), rows, as_json=False)
    for name, comparisons in compared:
        if len(comparisons) > 1:
            emit_line()
            ratio = f"ratio to {comparisons[0].base}"
            heads = ("entrant", name, ratio, "lowest", "highest", "pairs", "95 %", "")
            emit_table(heads, [_compared_row(comparison) for comparison in comparisons])


def _row_of(run: ParadigmRun) -> dict[str, Any]:
    figures = msgspec.to_builtins(run)
    del figures["setting"], figures["cell"], figures["course"]
    return {"entrant": run.cell.entrant, "seed": run.cell.seed, **figures}


def _compared_row(compared: Compared) -> tuple[object, ...]:
    interval = "-" if compared.interval is None else "{:.2f} to {:.2f}".format(*compared.interval)
    note = (
        ""
        if compared.distinguishable or compared.entrant == compared.base
        else "not distinguishable"
    )
    return (
        compared.entrant,
        compared.mean,
        compared.ratio,
        compared.low,
        compared.high,
        compared.seeds,
        interval,
        note,
    )
