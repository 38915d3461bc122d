"""Test of `bisect`: find a group with poisoned rewards in a finished run.

From a drawn step on, the run is retrained with a group's rewards of 1 replaced by -1000, without
gradient clipping and deviation scaling. A group is redrawn if the poison is harmless, or if the
true rewards degrade too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.analysis.bisect import Comparison, Explanation, Fall, Limits, Subject, Values
from dora_pipe.analysis.bisected_run import BisectedRun, Repeater
from dora_pipe.analysis.change import Change, changed_batch
from dora_pipe.analysis.probes import Probe, opened_probe
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.bench.support import emit_figures, scratch
from dora_pipe.cli.bisect import conclusion
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun, opened

POISON: Final = -1000.0

SETTINGS: Final[Mapping[str, float | bool]] = {
    "objective.advantage_std": False,
    "trainer.max_grad_norm": 1e9,
}
"""Settings from the poisoned step on, besides the learning rate."""

LEARNING_RATE: Final = 7e-4

TRUE: Final = -1
"""Subject: last version with the true rewards."""

BEFORE: Final = 1
AFTER: Final = 3
"""Versions from the poisoned step to the good and the bad one."""

DRAWS: Final = 128

DRAWN_MAX: Final = 8
"""Maximum groups drawn per seed."""

MIXED: Final = (2, 6)
"""Range of correct answers, of 8, in a group to poison."""

GROUPS: Final = """
    select step, group_id, list(trajectory_id order by sample), list(t.reward order by sample)
    from groups join trajectories t using (group_id)
    where outcome = 'trained' and step between ? and ? group by all order by step, group_id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """Drawn group."""

    step: int
    group: str
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlant:
    """Result; fields are table columns."""

    seed: int
    step: int
    group: str
    harmless: int
    """Harmless groups drawn before."""
    fell: float
    found_step: int
    steps: int
    """Steps repeated in trials."""
    trials: int
    seconds: float
    named: bool
    conclusion: str


def command(
    run: RunArgument,
    seeds: Annotated[int, typer.Option(min=1, help="Poisoned groups, one at a time.")] = 10,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate from the poisoned step on.")
    ] = LEARNING_RATE,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Test whether bisect finds a group with poisoned rewards in a finished run, and in how many
    steps.

    Exit code 5 unless it finds 9 of 10.
    """
    with opened(run, root) as opened_run, scratch() as folder:
        figures = bench_bisect(
            opened_run,
            range(1, seeds + 1),
            folder,
            limits=Limits(draws=DRAWS),
            say=say,
            learning_rate=learning_rate,
        )
    emit_figures(figures, as_json=as_json)
    missed = [figure.seed for figure in figures if not figure.named]
    if 10 * len(missed) > len(figures):
        raise InvariantBroken(f"{len(missed)} of {len(figures)} groups were not named: {missed}")


def plants(run: OpenRun, seed: int) -> Iterator[Plant]:
    """Yield groups of the later half. Raises UsageError if none."""
    steps = SourceRun.of(run).history.next_step
    with closing(run.tables()) as tables:
        rows = tables.query(GROUPS, [max(steps // 2, BEFORE), steps - AFTER])
    mixed = [row for row in rows if MIXED[0] <= sum(value or 0.0 for value in row[3]) <= MIXED[1]]
    if not mixed:
        raise UsageError("no step of this run has a group that could be poisoned")
    chance = random.Random(seed)
    for _ in range(DRAWN_MAX):
        step, group, names, rewards = chance.choice(mixed)
        pairs = zip(names, rewards, strict=True)
        yield Plant(
            step=step,
            group=group,
            rewards={name: POISON * reward for name, reward in pairs if reward is not None},
        )


def planted_run(run: OpenRun, step: int, change: Change) -> SourceRun:
    source = SourceRun.of(run)

    def altered(batch: TrainBatch, settings: Settings) -> tuple[TrainBatch, Settings]:
        if batch.step < step:
            return batch, settings
        return changed_batch(batch, change), {**settings, **change.settings}

    source.altered = altered
    history = source.history
    history.notes = [
        note if note.step < step else replace(note, digest="", checkpoint=None)
        for note in history.notes
    ]
    return source


def bench_bisect(
    run: OpenRun,
    seeds: Sequence[int],
    folder: Path,
    *,
    limits: Limits,
    say: Callable[[str], None],
    learning_rate: float = LEARNING_RATE,
) -> list[NamedPlant]:
    """Plant and search. Raises like `bisect`."""
    settings = {**SETTINGS, "trainer.learning_rate": learning_rate}
    clock, figures = SystemClock(), list[NamedPlant]()
    with opened_probe(run, "eval", None, CommandProgress()) as probe:
        for seed in seeds:
            began_ns, harmless = clock.now_ns(), 0
            for plant in plants(run, seed):
                directory = folder / f"{seed}-{harmless}"
                fall, why = _look(run, plant, settings, directory, probe, limits)
                if why is not None:
                    break
                harmless += 1
            seconds = (clock.now_ns() - began_ns) / 1e9
            figures.append(_named(seed, plant, fall, why, seconds, harmless))
            say(f"seed {seed}: {figures[-1].conclusion}")
    return figures


def _look(
    run: OpenRun, plant: Plant, settings: Settings, folder: Path, probe: Probe, limits: Limits
) -> tuple[Fall, Explanation | None]:
    good, bad = plant.step - BEFORE, plant.step + AFTER
    poisoned, true = (
        _bisected(run, plant.step, change, folder / name, probe, limits)
        for name, change in (
            ("poisoned", Change(rewards=plant.rewards, settings=settings)),
            ("true", Change(settings=settings)),
        )
    )
    fall = poisoned.search(good, bad)
    if not fall.sure:
        return fall, None

    def measure(subject: Subject) -> Values:
        return true.measure(bad) if subject == TRUE else poisoned.measure(subject)

    # True rewards must not degrade.
    harmed = Comparison(measure, good, bad).judge(TRUE).verdict == "good"
    return fall, poisoned.explain(fall, good) if harmed else None


def _bisected(
    run: OpenRun, step: int, change: Change, folder: Path, probe: Probe, limits: Limits
) -> BisectedRun:
    folder.mkdir(parents=True, exist_ok=True)
    repeater = Repeater(run=planted_run(run, step, change), folder=folder)
    return BisectedRun(repeater=repeater, probe=probe, limits=limits)


def _named(
    seed: int, plant: Plant, fall: Fall, why: Explanation | None, seconds: float, harmless: int
) -> NamedPlant:
    return NamedPlant(
        seed=seed,
        step=plant.step,
        group=plant.group,
        harmless=harmless,
        fell=fall.fell.value,
        found_step=fall.step,
        steps=0 if why is None else why.steps,
        trials=0 if why is None else len(why.trials),
        seconds=seconds,
        named=why is not None and [suspect.name for suspect in why.cause] == [plant.group],
        conclusion="nothing fell for it" if why is None else conclusion(why),
    )
