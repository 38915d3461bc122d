"""`bench paradigms`: the same task trained in every way, as real runs, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

import typer

from dora_pipe.bench.paradigms import BASES, Compared, ParadigmRun, compare, measure_run
from dora_pipe.cli.demo import TASK, warm
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table
from dora_pipe.config.load import load_config
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.children import Children
from dora_pipe.launch.examples import example_config
from dora_pipe.launch.plan import Plan, plan_new
from dora_pipe.launch.run import supervise
from dora_pipe.launch.run_dir import opened

EVALUATE_EVERY: Final = 4
EVALUATION_PROMPTS: Final = 128
"""About an eighth of what a step samples, every fourth step."""

LINES_KEPT: Final = 12
"""Of what a run said, shown when it fails."""

FIGURES: Final[Sequence[tuple[str, Callable[[ParadigmRun], float | None]]]] = (
    ("samples/s", lambda run: run.samples_per_s),
    ("1 / time to target", lambda run: 1 / run.target_s if run.target_s else None),
)
"""What is compared as a ratio; more is better."""


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


def warm_start(place: Path) -> Path:
    """The configuration, and beside it the model that every run starts from."""
    start = place / "start"
    if start.exists():
        raise UsageError(f"{start} exists", hint="--keep takes a folder of its own")
    start.mkdir(parents=True)
    config = start / "demo.toml"
    config.write_text(example_config(TASK))
    with closing(Children({"warm start": lambda: warm(start)})) as children:
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
