"""`bench paradigms`: the same task trained in every way, as real runs, one after the other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.bench.paradigms import BASE, Compared, ParadigmRun, compare, measure_run
from dora_pipe.cli.demo import REWARD_MIN, TASK, Children, warm
from dora_pipe.cli.init import example_config
from dora_pipe.cli.output import emit_json, emit_rows, emit_table, say
from dora_pipe.cli.rundir import opened
from dora_pipe.cli.start import Plan, plan_new, supervise
from dora_pipe.config.load import load_config
from dora_pipe.config.paradigms import PARADIGMS, paradigm
from dora_pipe.errors import UsageError

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


def paradigms(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every paradigm.")] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 48,
    target: Annotated[
        float, typer.Option(help="Evaluation reward, the time to which is measured.")
    ] = REWARD_MIN,
    workers: Annotated[int, typer.Option(min=1, help="Beside the trainer.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARADIGMS)}; all.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value of every run.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Where the runs go and stay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Train the demo's task in every paradigm on this machine and compare, with repeated seeds."""
    names = [paradigm(name).name for name in only or PARADIGMS]
    runs: list[ParadigmRun] = []
    with bench_place(keep) as place:
        config = warm_start(place)
        common = [
            f"run.steps={steps}",
            f"workers.count={workers}",
            f"evaluation.every={EVALUATE_EVERY}",
            f"evaluation.prompts={EVALUATION_PROMPTS}",
            f'model.path="{place / "start" / "warm"}"',
            *(override or ()),
        ]
        for seed in range(seeds):
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                own = [f'run.name="{name}-{seed}"', f"run.seed={seed}", *common]
                runs.append(_run(config, name, seed, own, place, target))
                say(_line(runs[-1]))
    setting = (
        f"{workers} worker{'s' * (workers > 1)} and a trainer of one thread each on "
        f"{os.cpu_count()} cores; {steps} steps, {EVALUATION_PROMPTS} prompts evaluated every "
        f"{EVALUATE_EVERY} steps, seeds 0 to {seeds - 1}, one run after the other"
    )
    _print(runs, target, setting, as_json=as_json)


def _run(
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
    try:
        if not supervise(plan, tell=lines.append):
            raise typer.Exit(130)
    except BaseException:
        for line in lines[-LINES_KEPT:]:
            say(line)
        raise


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


def _line(run: ParadigmRun) -> str:
    reached = "target not reached" if run.target_s is None else f"target in {run.target_s:.1f} s"
    return (
        f"{run.paradigm}, seed {run.seed}: {run.samples_per_s:.0f} samples/s, {reached}, "
        f"reward {run.reward:.3f}, {run.seconds:.1f} s"
    )


def _print(runs: Sequence[ParadigmRun], target: float, setting: str, *, as_json: bool) -> None:
    columns = [field.name for field in fields(ParadigmRun)]
    compared = {name: compare(runs, figure, base=BASE) for name, figure in FIGURES}
    if as_json:
        emit_json({"setting": setting, "target": target})
        emit_rows(columns, [asdict(run) for run in runs], as_json=True)
        for name, found in compared.items():
            emit_rows([], [{"figure": name, **asdict(one)} for one in found], as_json=True)
        return
    typer.echo(f"{setting}; target: evaluation reward {target:g}")
    emit_rows(columns, [asdict(run) for run in runs], as_json=False)
    for name, found in compared.items():
        typer.echo()
        emit_table(("paradigm", name, f"ratio to {BASE}", "lowest", "highest"), _rows(found))


def _rows(found: Sequence[Compared]) -> list[tuple[object, ...]]:
    return [(one.paradigm, one.mean, one.ratio, one.low, one.high) for one in found]
