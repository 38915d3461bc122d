"""Whether `bisect` names a poisoned group: one of a finished run's batch gets poisoned rewards.

From a step on that a seed draws, the run goes on as it might have gone: the rewards of one of the
step's groups are -1000 where they were 1, and what would have held that back (a bound on the
gradient's norm, advantages divided by their deviation) is off. Nothing is sampled for it: later
batches are those of the log. `bisect` is then told of a version before and of one after, as anybody
would tell it. A group whose poison makes nothing worse is no case, and the seed draws another one:
where nothing falls, or the steps with the true rewards under the same settings fall too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.audit.bisect import (
    Ask,
    Comparison,
    Fall,
    Limits,
    Reference,
    Subject,
    Trial,
    Values,
    Version,
    carry_out,
    search,
)
from dora_pipe.audit.culprits import Explanation
from dora_pipe.audit.measuring import Measuring, Weights, look_into
from dora_pipe.audit.probed_file import AboutProbe, ProbedFile
from dora_pipe.audit.repeat_steps import MadeWeights, Planted, StepRepeater
from dora_pipe.bench.support import emit_figures, scratch
from dora_pipe.cli.bisect import conclusion, print_cause, print_fall
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.probes import Probe, opened_probe
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.replay import open_trainer
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.console import RUNS, say
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.launch.run_dir import OpenRun, opened

POISON: Final = -1000.0
"""Reward of an answer that was worth 1."""

SETTINGS: Final[Mapping[str, float | bool]] = {
    "objective.advantage_std": False,
    "trainer.grad_norm_max": 1e9,
}
"""In force from the poisoned step on, beside a learning rate."""

LEARNING_RATE: Final = 7e-4

BEFORE: Final = 1
AFTER: Final = 4
"""Versions from the poisoned step to the good one and to the bad one."""

DRAWS_MAX: Final = 8
"""Groups that a seed draws, until one of them makes the run worse."""

MIXED: Final = (2, 6)
"""Right answers of 8 in a group that may be poisoned: with a gradient from both kinds."""

GROUPS: Final = """
    select step, group_id, list(trajectory_id order by sibling), list(t.reward order by sibling)
    from groups join trajectories t using (group_id)
    where fate = 'trained' and step between ? and ? group by all order by step, group_id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What a seed has drawn."""

    seed: int
    step: int
    group: str
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlant:
    """What `bisect` made of it. The fields are the columns of the table."""

    seed: int
    step: int
    """The poisoned one."""
    group: str
    harmless: int
    """Groups that were drawn before it, whose poison made nothing worse than the steps were."""
    fell: float
    found_step: str
    steps: int
    """Trained again in trials."""
    trials: int
    seconds: float
    named: bool
    said: str


def command(
    run: RunArgument,
    seeds: Annotated[
        int, typer.Option(min=1, help="Groups that are poisoned, one at a time.")
    ] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Where values are kept; the same command goes on.")
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(help="From the poisoned step on; small ones hold the poison back.")
    ] = 7e-4,
    whole: Annotated[bool, typer.Option("--whole", help="What bisect prints of each.")] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Whether bisect names a group whose rewards were poisoned, in a finished run, and in how many
    steps; exit code 5 unless it names every one."""

    with opened(run, root) as found, scratch(out) as folder:
        figures = bench_bisect(
            found,
            seeds,
            folder,
            limits=Limits(draws=128),
            told=say,
            learning_rate=learning_rate,
            whole=whole,
        )
    emit_figures(figures, as_json=as_json)
    missed = [one.seed for one in figures if not one.named]
    if missed:
        raise InvariantBroken(f"of {len(figures)} seeds {len(missed)} were not named: {missed}")


def plants(run: OpenRun, seed: int) -> Iterator[Plant]:
    """The steps and groups that a seed draws, one after the other, of the later half of the run.

    Raises UsageError for a run without such groups.
    """
    steps = len(read_history(run.bus, run.topics, SystemClock()).notes)
    with closing(run.tables()) as tables:
        rows = tables.query(GROUPS, [max(steps // 2, BEFORE), steps - AFTER])
    mixed = [row for row in rows if MIXED[0] <= sum(one or 0.0 for one in row[3]) <= MIXED[1]]
    if not mixed:
        raise UsageError("no step of this run has a group that could be poisoned")
    chance = random.Random(seed)
    for _ in range(DRAWS_MAX):
        step, group, names, rewards = chance.choice(mixed)
        poisoned = {
            name: POISON * reward
            for name, reward in zip(names, rewards, strict=True)
            if reward is not None
        }
        yield Plant(seed=seed, step=step, group=group, rewards=poisoned)


@dataclass(slots=True, kw_only=True)
class _PlantedRun:
    """The run as it might have gone."""

    run: OpenRun
    history: CommitHistory
    plant: Plant
    repeater: StepRepeater

    def weights(self, subject: Subject) -> tuple[Path, MadeWeights]:
        """See `measuring.Weights`: versions behind the poisoned step are made."""
        if isinstance(subject, Trial):
            return self.repeater.train(subject)
        at = subject.version
        if at > self.plant.step:  # Each from the one before.
            return [self.repeater.before(one) for one in range(self.plant.step + 1, at + 1)][-1]
        digest = self.history.digest_of(at)
        path = self.run.policies.weights(digest)
        return path, MadeWeights(of=subject.words, digest=digest)


def bench_bisect(
    run: OpenRun,
    seeds: int,
    folder: Path,
    *,
    limits: Limits,
    told: Callable[[str], None],
    learning_rate: float = LEARNING_RATE,
    whole: bool = False,
    clock: Clock | None = None,
) -> list[NamedPlant]:
    """Plant and look for it, seed by seed; `whole`: print what the command prints. Raises as
    `bisect` does."""
    settings = {**SETTINGS, "trainer.learning_rate": learning_rate}
    clock = clock or SystemClock()
    found = []
    with opened_probe(run, "eval", None, CommandProgress()) as probe:
        case = _Case(
            run=run,
            history=read_history(run.bus, run.topics, clock),
            settings=settings,
            probe=probe,
            limits=limits,
        )
        for seed in range(1, seeds + 1):
            began_ns, harmless = clock.now_ns(), 0
            for plant in plants(run, seed):
                place = folder / f"{seed}-{plant.group}"
                fall, why, led = case.look(plant, place)
                if why is not None:
                    break
                harmless += 1
            if whole:
                print_fall(fall, "eval", place)
            if whole and why is not None:
                print_cause(why, led)
            seconds = (clock.now_ns() - began_ns) / 1e9
            found.append(_named(plant, fall, why, seconds, harmless))
            told(f"seed {seed}: {found[-1].said}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What every plant is tried with."""

    run: OpenRun
    history: CommitHistory
    settings: Mapping[str, float | bool]
    probe: Probe
    limits: Limits

    def look(self, plant: Plant, folder: Path) -> tuple[Fall, Explanation | None, int]:
        """Plant and look for it; there is no explanation where the poison has made nothing worse.

        Last: how many steps were trained as they were.
        """
        self.probe.begin(folder / "scratch")
        repeater = self._repeater(plant, BatchChange(rewards=plant.rewards), folder / "scratch")
        planted = _PlantedRun(run=self.run, history=self.history, plant=plant, repeater=repeater)
        measuring = self._measuring(plant, planted.weights, folder)
        good, bad = plant.step - BEFORE, plant.step + AFTER
        kept = [at for at in range(good, bad) if at <= plant.step]
        fall = measuring.run(search(good, bad, self.limits, kept=kept, direction=1.0))
        why = None
        if fall.sure and self._goes_well(plant, good, bad, measuring, folder / "true"):
            why = look_into(fall, measuring, repeater, self.limits, steps=bad)
        repeater.forget()
        return fall, why, repeater.led

    def _goes_well(
        self, plant: Plant, good: int, bad: int, measuring: Measuring, folder: Path
    ) -> bool:
        """Whether the same steps come to what is good, under the same settings, when every reward
        is the true one."""
        repeater = self._repeater(plant, UNCHANGED, folder / "scratch")
        true = self._measuring(plant, _trained_by(repeater), folder)

        def values(ask: Ask) -> Values:
            return (true if isinstance(ask.subject, Trial) else measuring).values(ask)

        reference = Reference(good=Version(good), bad=Version(bad))
        steps = Trial(first=plant.step, last=bad - 1)
        found = carry_out(Comparison(reference, self.limits).judge(steps), values)
        repeater.forget()
        return found.verdict == "good"

    def _repeater(self, plant: Plant, change: BatchChange, folder: Path) -> StepRepeater:
        assert self.history.run_started is not None
        return StepRepeater(
            self.run.bus,
            self.run.topics,
            self.run.policies,
            self.history,
            open_trainer(self.run, self.history.run_started),
            folder=folder,
            clock=SystemClock(),
            planted=Planted(first=plant.step, change=change, settings=self.settings),
        )

    def _measuring(self, plant: Plant, weights: Weights, folder: Path) -> Measuring:
        file = ProbedFile(folder)
        about = AboutProbe(run=self.run.topics.run, started_ns=0, probe="eval", digest=plant.group)
        file.begin(about)
        return Measuring(probe=self.probe, file=file, weights=weights)


def _trained_by(repeater: StepRepeater) -> Weights:
    """What steps come to that are trained again; a version is not asked for."""

    def weights(subject: Subject) -> tuple[Path, MadeWeights]:
        assert isinstance(subject, Trial)
        return repeater.train(subject)

    return weights


def _named(
    plant: Plant, fall: Fall, why: Explanation | None, seconds: float, harmless: int
) -> NamedPlant:
    cause = [] if why is None else [one.name for one in why.cause]
    first, last = fall.last_good, fall.first_bad - 1
    return NamedPlant(
        seed=plant.seed,
        step=plant.step,
        group=plant.group,
        harmless=harmless,
        fell=fall.fell.value,
        found_step=str(last) if first == last else f"{first} to {last}",
        steps=0 if why is None else why.steps,
        trials=0 if why is None else len(why.trials),
        seconds=seconds,
        named=cause == [plant.group],
        said="nothing fell for it" if why is None else conclusion(why)[0],
    )
