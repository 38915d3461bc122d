"""`bench offpolicy`: train the demo at exact stalenesses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from dora_pipe.bench.studies.cells import CellFile
from dora_pipe.bench.studies.offpolicy import (
    BASE,
    OBJECTIVES,
    Cell,
    Measured,
    Spread,
    Summary,
    planned,
    summarise,
)
from dora_pipe.cli.demo import TASK
from dora_pipe.cli.options import SFT_BATCH, SFT_LEARNING_RATE, SFT_SEED, JsonOption, OverrideOption
from dora_pipe.cli.output import emit_line, emit_rows, emit_table
from dora_pipe.config.load import leaves, load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import say
from dora_pipe.launch.examples import example_config, make_model
from dora_pipe.launch.roles import share_cores
from dora_pipe.launch.warm_start import demonstrations, sft_options, warm_up

if TYPE_CHECKING:
    from dora_pipe.bench.studies.offpolicy_cell import Bench

WARM_STEPS: Final = 200
STEPS: Final = 36

OVERRIDES: Final = (
    "rollout.prompts_per_step=24",
    "task.options={mu=1.0, sigma=1.0, n_max=20}",
    "evaluation.prompts=256",
    "evaluation.every=6",
    "trainer.learning_rate=4.5e-4",
    "trainer.minibatches=2",
)
"""The whole study takes an hour on one core."""

QUICK: Final = (
    "rollout.prompts_per_step=4",
    "task.options={mu=1.0, sigma=1.0, n_max=6}",
    "evaluation.prompts=32",
    "evaluation.every=2",
)
QUICK_STEPS: Final = 4
QUICK_WARM_STEPS: Final = 20

COMPARED: Final = ("objective.", "trainer.", "sampling.", "groups.", "evaluation.")
COMPARED_KEYS: Final = ("run.steps", "task.kind", "task.options")
"""Configuration keys that must be equal in compared cells."""
NOT_COMPARED: Final = ("trainer.gpus", "objective.options")
"""Keys that may differ: the GPU, and options of a user's objective."""


def command(
    out: Annotated[Path, typer.Option(help="Folder of the study; the command resumes it.")] = Path(
        "offpolicy"
    ),
    etas: Annotated[str, typer.Option(help="Staleness values, separated by commas.")] = "",
    objectives: Annotated[
        str, typer.Option(help=f"Objectives, separated by commas: {', '.join(OBJECTIVES)}.")
    ] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of every cell.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"Steps of every cell; {STEPS}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use tiny sizes to check the study.")] = (
        False
    ),
    report: Annotated[
        bool, typer.Option("--report", help="Print the report without a measurement.")
    ] = False,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the demo's task at exact stalenesses with every objective, and compare the reward
    after equal samples."""
    names = [name for name in objectives.split(",") if name]
    cells = planned(numbers_of(etas), names, 1 if quick and seeds is None else seeds)
    study = Study(out=out, quick=quick, steps=steps, overrides=override or ())
    done: CellFile[Cell, Measured] = CellFile(out, study.setting(), kind=Measured)
    if not report:
        measure_cells(study, done, cells)
    chosen = [done.cells[cell] for cell in cells if cell in done.cells]
    if not chosen:
        raise UsageError(f"{out} has none of these cells yet", hint="remove --report")
    print_study(f"{study.summary()}; {len(chosen)} of {len(cells)} cells", chosen, as_json=as_json)


def measure_cells(study: Study, done: CellFile[Cell, Measured], cells: Sequence[Cell]) -> None:
    """Train missing cells on one thread."""
    share_cores()
    with tempfile.TemporaryDirectory(dir=study.out, prefix=".bench-") as folder:
        for cell in cells:
            if cell not in done.cells:
                measured = study.measure(cell, Path(folder), done.setting)
                done.add(measured)
                missing = sum(cell not in done.cells for cell in cells)
                say(f"{_line(measured)}; {missing} to go")


@dataclass(slots=True, kw_only=True)
class Study:
    """Common settings and engines."""

    out: Path
    quick: bool
    steps: int | None
    overrides: Sequence[str]
    benches: dict[int, Bench] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "demo.toml").write_text(example_config(TASK))
        self.config(0)

    @property
    def warm_steps(self) -> int:
        return QUICK_WARM_STEPS if self.quick else WARM_STEPS

    def config(self, seed: int) -> Config:
        """Return a configuration. Raises ConfigError."""
        own = [
            'run.name="offpolicy"',
            f"run.seed={seed}",
            f"run.steps={QUICK_STEPS if self.quick else STEPS}",
            f'model.path="{self.out / f"warm-{seed}"}"',
            "trainer.batch_parts=1",
            "trainer.device=auto",  # as in the recorded setting
        ]
        sizes = QUICK if self.quick else OVERRIDES
        given = [] if self.steps is None else [f"run.steps={self.steps}"]
        return load_config(self.out / "demo.toml", [*own, *sizes, *given, *self.overrides])

    def setting(self) -> dict[str, Any]:
        """Return what compared cells share."""
        return {
            **{
                key: value
                for key, value in leaves(self.config(0)).items()
                if key in COMPARED_KEYS or (key.startswith(COMPARED) and key not in NOT_COMPARED)
            },
            "warm": [self.warm_steps, SFT_BATCH, SFT_LEARNING_RATE, SFT_SEED],
            "objectives": {name: dict(keys) for name, keys in OBJECTIVES.items()},
        }

    def summary(self) -> str:
        """Return the setting as text."""
        config = self.config(0)
        groups, size = config.rollout.prompts_per_step, config.rollout.group_size
        return (
            f"{config.run.steps} steps of {groups * size} samples ({groups} groups of {size}),"
            f" {config.trainer.minibatches} updates each, learning rate"
            f" {config.trainer.learning_rate:g}; {config.evaluation.prompts} prompts evaluated"
            f" every {config.evaluation.every} steps"
        )

    def measure(self, cell: Cell, folder: Path, setting: str) -> Measured:
        from dora_pipe.bench.studies.offpolicy_cell import Bench

        if cell.seed not in self.benches:
            config = self.config(cell.seed)
            self._warm(config, cell.seed)
            cell_folder = folder / str(cell.seed)
            cell_folder.mkdir()
            self.benches[cell.seed] = Bench(config, Path(config.model.path), cell_folder)
        return self.benches[cell.seed].run(cell, setting=setting)

    def _warm(self, config: Config, seed: int) -> None:
        if Path(config.model.path).exists():
            return
        say(f"warm start of seed {seed}")
        part = self.out / f"warm-{seed}.part"
        shutil.rmtree(part, ignore_errors=True)
        make_model(part / "random", TASK, seed=seed)
        chance = SFT_SEED + seed
        random = msgspec.structs.replace(config.model, path=str(part / "random"))
        options = sft_options(
            config,
            steps=self.warm_steps,
            batch=SFT_BATCH,
            learning_rate=SFT_LEARNING_RATE,
            seed=chance,
        )
        rows = demonstrations(config, seed=chance, count=self.warm_steps * SFT_BATCH)
        warm_up(msgspec.structs.replace(config, model=random), rows, part / "warm", options)
        (part / "warm").rename(config.model.path)
        shutil.rmtree(part, ignore_errors=True)


def numbers_of(text: str) -> list[int]:
    """Parse comma-separated numbers."""
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise UsageError(f"--etas {text}: whole numbers with commas") from None


def _line(measured: Measured) -> str:
    return (
        f"{measured.cell}: reward {measured.rewards[0][1]:.3f} -> {measured.last:.3f}, mean"
        f" {measured.area:.3f},"
        f" {measured.cpu_s:.0f} s of CPU"
    )


def print_study(setting: str, chosen: Sequence[Measured], *, as_json: bool) -> None:
    summaries = summarise(chosen)
    rows = [_row(summary) for summary in summaries]
    if as_json:
        emit_rows([], rows, as_json=True)
        return
    emit_line(setting)
    emit_line("reward after the last step, mean of the seeds (lowest to highest), by eta:")
    emit_table(*_grid(summaries, lambda summary: summary.last))
    emit_line("the same over the course, from the first evaluation to the last:")
    emit_table(*_grid(summaries, lambda summary: summary.area))
    emit_line("all of it:")
    emit_table(list(rows[0]), [list(row.values()) for row in rows])


def _grid(
    summaries: Sequence[Summary], figure: Callable[[Summary], Spread]
) -> tuple[list[str], list[list[Any]]]:
    etas = sorted({summary.eta for summary in summaries})
    lines: dict[str, dict[int, str]] = {}
    for summary in summaries:
        lines.setdefault(summary.objective, {})[summary.eta] = _spread(figure(summary))
    rows = [[name, *(line.get(eta) for eta in etas)] for name, line in lines.items()]
    return ["objective", *(str(eta) for eta in etas)], rows


def _row(summary: Summary) -> dict[str, Any]:
    return {
        "objective": summary.objective,
        "eta": summary.eta,
        "seeds": summary.seeds,
        "reward": _spread(summary.last),
        "over the course": _spread(summary.area),
        f"less {BASE} at eta 0": None
        if summary.to_base is None
        else _spread(summary.to_base, sign="+"),
        "clipped": summary.clipped,
        "left out": summary.masked,
        "diverged": summary.diverged,
    }


def _spread(spread: Spread, *, sign: str = "") -> str:
    if spread.low == spread.high:
        return f"{spread.mean:{sign}.3f}"
    return f"{spread.mean:{sign}.3f} ({spread.low:{sign}.3f} to {spread.high:{sign}.3f})"
