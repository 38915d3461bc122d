"""Whether `bisect` names a poisoned group: one of a finished run's batch gets poisoned rewards.

From a step on that a seed draws, the run goes on as it might have gone: the rewards of one of the
step's groups are -1000 where they were 1, and what would have held that back (a bound on the
gradient's norm, advantages divided by their deviation) is off. Nothing is sampled for it: later
batches are those of the log. `bisect` is then told of a version before and of one after, as anybody
would tell it. A group whose poison makes nothing worse is no case: the seed draws another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit.bisect import Fall, Limits, Subject, Trial, search
from dora_pipe.audit.culprits import Explanation
from dora_pipe.audit.measuring import Measuring, look_into
from dora_pipe.audit.probed_file import AboutProbe, ProbedFile
from dora_pipe.audit.repeat_steps import MadeWeights, Planted, StepRepeater
from dora_pipe.cli.bisect import conclusion, print_cause, print_fall
from dora_pipe.cli.probes import Probe, opened_probe
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.replay import open_trainer
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.run_dir import OpenRun

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
    """Groups that were drawn before it, whose poison made nothing worse."""
    fell: float
    found_step: str
    steps: int
    """Trained again in trials."""
    trials: int
    seconds: float
    named: bool
    said: str


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
    history = read_history(run.bus, run.topics, clock)
    found = []
    with opened_probe(run, "eval", None, CommandProgress()) as probe:
        for seed in range(1, seeds + 1):
            began_ns, harmless = clock.now_ns(), 0
            for plant in plants(run, seed):
                place = folder / f"{seed}-{plant.group}"
                fall, why, led = _look(run, history, plant, settings, probe, place, limits)
                if fall.sure:
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


def _look(
    run: OpenRun,
    history: CommitHistory,
    plant: Plant,
    settings: Mapping[str, float | bool],
    probe: Probe,
    folder: Path,
    limits: Limits,
) -> tuple[Fall, Explanation | None, int]:
    assert history.run_started is not None
    file = ProbedFile(folder)
    file.begin(AboutProbe(run=run.topics.run, started_ns=0, probe="eval", digest=plant.group))
    probe.begin(folder / "scratch")
    repeater = StepRepeater(
        run.bus,
        run.topics,
        run.policies,
        history,
        open_trainer(run, history.run_started),
        folder=folder / "scratch",
        clock=SystemClock(),
        planted=Planted(
            first=plant.step, change=BatchChange(rewards=plant.rewards), settings=settings
        ),
    )
    planted = _PlantedRun(run=run, history=history, plant=plant, repeater=repeater)
    measuring = Measuring(probe=probe, file=file, weights=planted.weights)
    good, bad = plant.step - BEFORE, plant.step + AFTER
    kept = [at for at in range(good, bad) if at <= plant.step]
    fall = measuring.run(search(good, bad, limits, kept=kept, direction=1.0))
    why = look_into(fall, measuring, repeater, limits, steps=bad) if fall.sure else None
    repeater.forget()
    return fall, why, repeater.led


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
        said="nothing fell" if why is None else conclusion(why)[0],
    )
