"""`bench paradigms`: the same task trained in every way, one run after the other; it decides how
large the runs are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

import typer

from dora_pipe.bench.paradigms import BASES, Compared, ParadigmRun, compare, measure_run
from dora_pipe.cli.demo import TASK, warm
from dora_pipe.cli.options import REWARD_MIN
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.config.load import load_config
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.children import Children, share_cores
from dora_pipe.launch.examples import example_config, make_model
from dora_pipe.launch.plan import Plan, plan_new
from dora_pipe.launch.run import supervise
from dora_pipe.launch.run_dir import opened

EVALUATE_EVERY: Final = 4
"""About an eighth of what the steps between sample."""

LINES_KEPT: Final = 12
"""Of what a run said, shown when it fails."""

FIGURES: Final[Sequence[tuple[str, Callable[[ParadigmRun], float | None]]]] = (
    ("samples/s", lambda run: run.samples_per_s),
    ("1 / time to target", lambda run: 1 / run.target_s if run.target_s else None),
)
"""What is compared as a ratio; more is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How a task is trained where nothing else is said."""

    example: str
    """Whose configuration and model it has."""
    steps: int
    target: float
    evaluation_prompts: int
    overrides: tuple[str, ...] = ()


QUIET: Final = ("timing.alarm_s=3600.0", "timing.alarm_work_s=3600.0")
"""Tools that take long are no alarm here."""

SCALES: Final[Mapping[str, Scale]] = {
    "demo": Scale(example=TASK, steps=48, target=REWARD_MIN, evaluation_prompts=128),
    "tools": Scale(
        example="calculator",
        steps=16,
        target=0.85,
        evaluation_prompts=64,
        overrides=("groups.per_step=16", "workers.slots=16", "workers.prefetch=8", *QUIET),
    ),
}
QUICK: Final = Scale(
    example="calculator",
    steps=4,
    target=0.85,
    evaluation_prompts=8,
    overrides=(
        "groups.per_step=2",
        "groups.size=2",
        "workers.slots=4",
        "workers.prefetch=2",
        "sampling.max_tokens=24",
        "evaluation.sampling.max_tokens=24",
        "task.turns_max=3",
        *QUIET,
    ),
)
"""Sizes that show only that it works, of a model that has learnt nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The runs of one `bench paradigms`."""

    task: str
    quick: bool
    scale: Scale
    workers: int
    overrides: Sequence[str]
    model: Path | None = None
    """That all runs start from; without one it is made."""

    def begin(self, place: Path) -> Path:
        """The configuration; the model lies beside it, or is the one that was given."""
        if self.model is None and not self.quick:
            return warm_start(place, self.scale.example)
        config = place / "config.toml"
        place.mkdir(parents=True, exist_ok=True)
        config.write_text(example_config(self.scale.example))
        if self.model is None:
            make_model(place / "random", self.scale.example)
        return config

    def run(self, place: Path, config: Path, name: str, seed: int) -> ParadigmRun:
        """One run of a paradigm and its figures."""
        made = "random" if self.quick else "start/warm"
        overrides = [
            f'run.name="{name}-{seed}"',
            f"run.seed={seed}",
            f"run.steps={self.scale.steps}",
            f"workers.count={self.workers}",
            f"evaluation.every={EVALUATE_EVERY}",
            f"evaluation.prompts={self.scale.evaluation_prompts}",
            f'model.path="{(self.model or place / made).resolve()}"',
            *self.scale.overrides,
            *self.overrides,
        ]
        if self.task == "demo":
            return run_one(config, name, seed, overrides, place, self.scale.target)
        from dora_pipe.bench.paradigms_tools import run_tools

        say(f"{name}, seed {seed} ...")
        share_cores()
        resolved = load_config(config, overrides, paradigm=name)
        return run_tools(resolved, name, target=self.scale.target)

    def setting(self, seeds: int) -> str:
        """What all runs have in common, as people read it."""
        many = f"{self.workers} worker{'s' * (self.workers > 1)} and a trainer"
        how = f"{many} of one thread each on {os.cpu_count()} cores, one run after the other"
        if self.task == "tools":
            how = f"{many} in virtual time, tools that take N(10, 10) s"
        return (
            f"{how}; {self.scale.steps} steps, {self.scale.evaluation_prompts} prompts evaluated "
            f"every {EVALUATE_EVERY} steps, seeds 0 to {seeds - 1}"
        )


def study_of(
    task: str,
    *,
    quick: bool,
    steps: int | None,
    target: float | None,
    workers: int,
    overrides: Sequence[str],
    model: Path | None,
) -> Study:
    """A study with its task's sizes where none are given. Raises UsageError for another task, or
    quick runs of the demo's, which are processes that take their time."""
    if task not in SCALES:
        raise UsageError(f"no task {task!r}", hint=f"one of {', '.join(SCALES)}")
    if quick and task != "tools":
        raise UsageError("--quick is for --task tools", hint="--steps and -o make the demo small")
    scale = QUICK if quick else SCALES[task]
    scale = replace(
        scale,
        steps=scale.steps if steps is None else steps,
        target=scale.target if target is None else target,
    )
    return Study(
        task=task, quick=quick, scale=scale, workers=workers, overrides=overrides, model=model
    )


def run_one(
    config: Path, name: str, seed: int, overrides: Sequence[str], place: Path, target: float
) -> ParadigmRun:
    """One run and its figures, its audit among them."""
    say(f"{name}, seed {seed} ...")
    plan = plan_new(load_config(config, overrides, paradigm=name), place)
    run_whole(plan)
    with opened(str(plan.directory.path)) as run:
        return measure_run(run.bus, run.topics, paradigm=name, seed=seed, target=target)


def run_whole(plan: Plan) -> None:
    """A run of a bench, which says nothing unless it fails: then what it said last."""
    lines: list[str] = []

    def tell_the_last() -> None:
        for line in lines[-LINES_KEPT:]:
            say(line)

    with ExitStack() as failing:
        failing.callback(tell_the_last)
        if not supervise(plan, report=lines.append):
            raise typer.Exit(130)
        failing.pop_all()


def warm_start(place: Path, task: str = TASK) -> Path:
    """The configuration, and beside it the model that every run starts from."""
    start = place / "start"
    if start.exists():
        raise UsageError(f"{start} exists", hint="--keep takes a folder of its own")
    start.mkdir(parents=True)
    config = start / "demo.toml"
    config.write_text(example_config(task))
    with closing(Children({"warm start": lambda: warm(start, task)})) as children:
        children.run("warm start")
    return config


@contextmanager
def bench_place(keep: Path | None) -> Iterator[Path]:
    """Where runs of a bench go: a folder that stays, or one that is removed afterwards."""
    if keep is not None:
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        yield Path(folder)


def line_of(run: ParadigmRun) -> str:
    """A run in one line."""
    reached = "target not reached" if run.target_s is None else f"target in {run.target_s:.1f} s"
    return (
        f"{run.paradigm}, seed {run.seed}: {run.samples_per_s:.0f} samples/s, {reached}, "
        f"reward {run.reward:.3f}, {run.seconds:.1f} s"
    )


def print_paradigms(
    runs: Sequence[ParadigmRun], target: float, setting: str, *, as_json: bool
) -> None:
    """Every run, and how the paradigms compare."""
    columns = [field.name for field in fields(ParadigmRun)]
    compared = [
        (name, compare(runs, figure, base=base)) for name, figure in FIGURES for base in BASES
    ]
    if as_json:
        emit_json({"setting": setting, "target": target})
        emit_rows(columns, [asdict(run) for run in runs], as_json=True)
        for name, found in compared:
            emit_rows([], [{"figure": name, **asdict(one)} for one in found], as_json=True)
        return
    emit_line(f"{setting}; target: evaluation reward {target:g}")
    emit_rows(columns, [asdict(run) for run in runs], as_json=False)
    for name, found in compared:
        if len(found) > 1:
            emit_line()
            ratio = f"ratio to {found[0].base}"
            heads = ("paradigm", name, ratio, "lowest", "highest", "pairs", "95 %", "")
            emit_table(heads, [_row(one) for one in found])


def _row(one: Compared) -> tuple[object, ...]:
    interval = "-" if one.interval is None else "{:.2f} to {:.2f}".format(*one.interval)
    said = "" if one.told_apart or one.paradigm == one.base else "not told apart from 1"
    return one.paradigm, one.mean, one.ratio, one.low, one.high, one.seeds, interval, said
