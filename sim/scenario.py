"""What a seed means: the configuration, the workers and the faults of one simulated run.

Swarm testing: every seed leaves most faults out and has the others more or less often, so that
between them they meet every combination. Everything is drawn in one fixed order.
Most runs are short, because long runs spend most of their time after the last fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config.model import Config, RewardUse
from dora_pipe.config.several import with_each_task
from dora_pipe.sim.faults import (
    APART,
    FAULTS,
    HANGING,
    MOVING,
    OF_AGENTS,
    OF_EPISODES,
    OF_PATCHES,
    STRIKING,
)
from dora_pipe.sim.parts import MS, Delays, WorkerPlan

ALWAYS: Final = 3
"""A seed has at least so many kinds of faults."""

STEPS_LONG: Final = 11
"""Of a long run, at least."""

SIBLINGS_MEAN: Final = 42
"""Small batches get more steps in a long run."""

Form = Literal["swarm", "long", "plain"]
"""How a seed is drawn. `swarm`: most runs are short, for many short ones find more than few long
ones. As seeds were before that, and before there were agents: `long`, and of that without agents
and what befalls them `plain`."""

LONG_SHARE: Final = 1 / 10
"""Of seeds in `swarm` whose runs are long: what is deleted, restarted or drawn by history, again
and again, needs these."""

SHORT_STEPS: Final = (5, 8)
"""Of a short run: at least, at most."""

SHORT_GROUPS: Final = 2
"""Most groups of a step, and most siblings of a group, in a short run; where requests are to move,
one sibling more."""

SHORT_WORKERS: Final = 4

SHORT_HEARTBEATS: Final = (0.2, 0.4, 0.4)
"""Seconds."""

SHORT_TOKENS: Final = 96
"""Most that a request samples in a short run."""

UPDATES_SHARE: Final = 0.5
"""Of seeds in `swarm` with batches in parts: each part is an update."""

PUBLISHES_MS: Final = (5, 100, 600)
"""A policy is published for so long where batches have parts: the next step begins meanwhile."""

SLOW: Final = (1, 1, 1, 6)
"""Generation may be slow beside everything else, on few slots: only then it pays to move."""

WORKERS_MAX: Final = 6

KEEP_EVERY: Final = (0, 1, 2, 3)
"""Most seeds delete versions; drawn apart, so that a seed's faults stay what they were."""


PATIENT_SHARE: Final = 0.3
"""Of seeds whose tools and judges take long beside sampling; drawn apart, too."""

SEVERAL_SHARE: Final = 0.25
"""Of seeds whose runs have several tasks and evaluations."""

TOGETHER_SHARE: Final = 0.25
"""Of seeds some tasks of which have a reward of groups."""

CURRICULUM_SHARE: Final = 0.25
"""Of seeds some of whose tasks draw their rows, or skip those that are solved."""

IMPATIENT_SHARE: Final = 0.25
"""Of seeds whose groups have spare siblings; and of those whose groups have a bounded time."""

AGENTS_SHARE: Final = 0.25
"""Of seeds some of whose tasks are agents."""

RESIDENT_SHARE: Final = 0.3
"""Of these, whose workers host several versions."""

ELASTIC_SHARE: Final = 0.2
"""Of seeds in `swarm` some of whose workers sleep while a step is computed."""

AGENTS_SECONDS: Final = 64.0
"""Groups of agents have so long at least, where their time is bounded: else those of slow workers
would all be over before they end, and the run with them."""

PARTS_SHARE: Final = 1 / 3
"""Of seeds whose batches are taken in parts, where they have several groups."""

EPISODE_TURNS: Final = (3, 6)
"""Of long episodes, at least and at most."""

TALKATIVE_SHARE: Final = 0.5
"""Of seeds in `swarm` whose environments can be told again: their episodes are long."""

PATCHES_SHARE: Final = 0.25
"""Of seeds in `swarm` whose versions are patches, but for some."""

FOLLOWS_SHARE: Final = 0.25
"""Of seeds in which C is automatic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a seed means."""

    seed: int
    config: Config
    workers: tuple[WorkerPlan, ...]
    """Those that are there from the beginning, then those that may join."""
    first: int
    """How many are there from the beginning."""
    delays: Delays
    steps_max: int
    """Engine steps per event."""
    faults: Mapping[str, float]
    """The enabled faults and how often each comes, relative to the others."""
    strike_ns: int
    """Mean time between two faults that strike."""
    append_share: float
    """Appends that something befalls, where such faults are enabled."""
    away_ns: int
    """Mean time that what is stopped, away or dead stays so."""
    task_share: float
    """Calls of the task that fail, where such faults are enabled."""
    episodes: bool
    replayable: bool = False
    """Environments that are told the same say the same."""
    faulty_ns: int
    """The faults stop after so long at the latest."""


def draw(seed: int, *, steps: int = 1, resident: bool = False, form: Form = "swarm") -> Scenario:
    """What this seed means, with at least so many steps. Example: ``draw(17).config.groups``

    With `resident`, most workers host several versions at once. All else stays what it was.
    """
    scenario = _drawn(seed, resident=resident)
    if form != "plain":
        scenario = _agents(scenario)
    if form == "swarm":
        if Random(f"dora-pipe sim long {seed}").random() >= LONG_SHARE:
            scenario = _short(scenario)
        scenario = _talkative(_patches(_updates(_refused(scenario))))
        scenario = replace(scenario, workers=_elastic(seed, scenario.workers))
    return _with_steps(scenario, max(steps, scenario.config.run.steps))


def _drawn(seed: int, *, resident: bool) -> Scenario:
    chance = Random(f"dora-pipe sim {seed}")
    slow = chance.choice(SLOW)  # See `_is_slow`.
    config = _config(chance, seed, crowded=slow > 1)
    keep_every = Random(f"dora-pipe sim keep {seed}").choice(KEEP_EVERY)
    store = msgspec.structs.replace(config.store, keep_every=keep_every)
    config = _several(seed, msgspec.structs.replace(config, store=store))
    config = _curriculum(seed, _together(seed, config))
    names = sorted(FAULTS.keys() - set(APART))
    count = chance.randint(ALWAYS, 16)
    faults = {name: chance.choice((0.3, 1.0, 3.0)) for name in chance.sample(names, count)}
    faults[chance.choice(STRIKING)] = 1.0
    if slow > 1 and Random(f"dora-pipe sim moving {seed}").random() < 0.75:
        faults = dict.fromkeys(MOVING, 1.0) | faults
    config = _follows(seed, _parts(seed, _impatient(seed, config, slow)))
    if config.groups.spare or config.groups.seconds_max:
        faults[HANGING] = 1.0
    first = chance.randint(1, WORKERS_MAX)
    first = max(first, 3) if slow > 1 else first
    rates = "clock-rate" in faults
    plans = tuple(_plan(chance, number, rates, slow) for number in range(first + 3))
    if resident:
        plans = _resident(seed, plans)
    return Scenario(
        seed=seed,
        config=config,
        workers=plans,
        first=first,
        delays=replace(_delays(chance), slow_ns=_slow_ns(seed)),
        steps_max=chance.choice((1, 2)),
        faults=faults,
        strike_ns=chance.choice((150, 400, 1000)) * MS * slow,
        append_share=chance.choice((0.005, 0.02, 0.08)),
        away_ns=chance.choice((100, 600, 2500)) * MS,
        task_share=chance.choice((0.03, 0.1, 0.3)),
        episodes=chance.random() < 0.2,
        faulty_ns=chance.choice((5, 10, 20)) * 1000 * MS * slow,
    )


def _is_slow(seed: int) -> bool:
    return Random(f"dora-pipe sim {seed}").choice(SLOW) > 1


def _short(scenario: Scenario) -> Scenario:
    """The same with few steps and small groups; drawn apart."""
    chance = Random(f"dora-pipe sim short {scenario.seed}")
    config, is_slow = scenario.config, _is_slow(scenario.seed)
    groups, sampling, change = config.groups, config.sampling, msgspec.structs.replace
    per_step = min(groups.per_step, SHORT_GROUPS)
    size = min(groups.size, SHORT_GROUPS + is_slow)
    config = change(
        config,
        groups=change(groups, size=size, per_step=per_step),
        trainer=change(config.trainer, parts=min(config.trainer.parts, per_step)),
        sampling=change(sampling, max_tokens=min(sampling.max_tokens, SHORT_TOKENS)),
        timing=change(config.timing, heartbeat_s=chance.choice(SHORT_HEARTBEATS)),
    )
    short = replace(
        scenario,
        config=config,
        first=min(scenario.first, SHORT_WORKERS),
        faulty_ns=scenario.faulty_ns // (2 if is_slow else 1),
    )
    return _with_steps(short, chance.randint(*SHORT_STEPS))


def _updates(scenario: Scenario) -> Scenario:
    """The same with parts that are updates, in half of those seeds that have parts; drawn apart."""
    chance, config = Random(f"dora-pipe sim updates {scenario.seed}"), scenario.config
    parts = config.trainer.parts
    if parts < 2:
        return scenario
    trainer = config.trainer
    if chance.random() < UPDATES_SHARE:
        trainer = msgspec.structs.replace(trainer, minibatches=parts)
    return replace(
        scenario,
        config=msgspec.structs.replace(config, trainer=trainer),
        delays=replace(scenario.delays, publish_ns=chance.choice(PUBLISHES_MS) * MS),
    )


def _refused(scenario: Scenario) -> Scenario:
    """The same with batches that a user refuses, in half of the seeds in which the step after them
    may have a part; drawn apart."""
    chance = Random(f"dora-pipe sim refused {scenario.seed}")
    if scenario.config.trainer.parts == 1 or chance.random() < 0.5:
        return scenario
    return replace(scenario, faults={"command-fail-batch": 1.0, **scenario.faults})


def _patches(scenario: Scenario) -> Scenario:
    """The same with versions that are patches of those before them, in one of four seeds, and what
    befalls these; drawn apart."""
    chance, config = Random(f"dora-pipe sim patches {scenario.seed}"), scenario.config
    if chance.random() >= PATCHES_SHARE:
        return scenario
    every, checkpoints = chance.choice((2, 4, 8)), chance.choice((2, 3, 5))
    faults = {name: chance.choice((1.0, 3.0)) for name in OF_PATCHES if chance.random() < 0.5}
    change = msgspec.structs.replace
    config = change(
        config,
        policies=change(config.policies, whole_every=every),
        trainer=change(config.trainer, checkpoint_every=checkpoints),
    )
    return replace(scenario, config=config, faults={**scenario.faults, **faults})


def _talkative(scenario: Scenario) -> Scenario:
    """The same with long episodes, in half of those seeds whose environments can be told again;
    drawn apart."""
    chance, config = Random(f"dora-pipe sim talkative {scenario.seed}"), scenario.config
    if not scenario.replayable or chance.random() >= TALKATIVE_SHARE:
        return scenario
    change, turns = msgspec.structs.replace, chance.randint(*EPISODE_TURNS)
    return replace(
        scenario, config=with_each_task(config, lambda task: change(task, turns_max=turns))
    )


def _with_steps(scenario: Scenario, steps: int) -> Scenario:
    run = msgspec.structs.replace(scenario.config.run, steps=steps)
    return replace(scenario, config=msgspec.structs.replace(scenario.config, run=run))


def _config(chance: Random, seed: int, *, crowded: bool) -> Config:
    eta = chance.randrange(4)
    size, per_step = chance.choice((1, 2, 2, 3, 4)), chance.choice((1, 1, 2, 2, 3, 4))
    if crowded:
        eta, size, per_step = max(1, eta), max(3, size), max(3, per_step)
    steps = STEPS_LONG + chance.randrange(3) + SIBLINGS_MEAN // (size * per_step)
    plain: dict[str, Any] = {
        "run": {"name": "sim", "steps": steps, "seed": seed},
        "model": {"path": "none"},
        "task": {"kind": "none", "turns_max": chance.randint(1, 3)},
        "sampling": {"max_tokens": 96 if crowded else chance.choice((24, 96))},
        "groups": {
            "size": size,
            "per_step": per_step,
            "min_valid_siblings": chance.randint(1, min(2, size)),
            "filter_zero_advantage": size > 1 and chance.random() < 0.25,
            "attempts_max": chance.choice((2, 3, 5)),
        },
        "staleness": {
            "max_staleness": eta,
            "in_flight_batches": chance.choice((None, 1.0, 1.0 + eta * chance.random())),
        },
        "planner": {"moves": chance.random() < 0.85},
        "evaluation": {
            "prompts": chance.choice((0, 0, 2, 3)),
            "every": chance.choice((0, 2, 4)),
            "siblings": chance.randint(1, 2),
            "sampling": {"max_tokens": 24},
        },
        "trainer": {"checkpoint_every": chance.randint(1, 4)},
        "workers": {"checkpoint_tokens": chance.choice((4, 16))},
        "bus": {"partitions": chance.randint(1, 4)},
        "timing": {
            "heartbeat_s": 0.2,
            "lease_s": chance.choice((1.0, 2.0)),
            "stop_timeout_s": chance.choice((1.0, 10.0)),
        },
    }
    return msgspec.convert(plain, Config)


def _parts(seed: int, config: Config) -> Config:
    """The same with batches in parts, in one of three seeds; drawn apart."""
    chance, most = Random(f"dora-pipe sim parts {seed}"), config.groups.per_step
    if chance.random() >= PARTS_SHARE or most < 2:
        return config
    trainer = msgspec.structs.replace(config.trainer, parts=chance.randint(2, most))
    return msgspec.structs.replace(config, trainer=trainer)


def _follows(seed: int, config: Config) -> Config:
    """The same with C automatic, in one of four seeds; drawn apart."""
    if Random(f"dora-pipe sim follows {seed}").random() >= FOLLOWS_SHARE:
        return config
    staleness = msgspec.structs.replace(config.staleness, in_flight_batches="auto")
    return msgspec.structs.replace(config, staleness=staleness)


def _several(seed: int, config: Config) -> Config:
    """The same with several tasks and evaluations, in one of four seeds; drawn apart."""
    chance = Random(f"dora-pipe sim several {seed}")
    if chance.random() >= SEVERAL_SHARE:
        return config
    ratios = [chance.choice((0.3, 1.0, 2.0, 5.0)) for _ in range(chance.randint(2, 4))]
    tasks = [
        msgspec.structs.replace(config.task, name=f"t{place}", ratio=ratio)
        for place, ratio in enumerate(ratios)
    ]
    evaluations = [
        msgspec.structs.replace(
            config.evaluation,
            name=f"e{place}",
            task=chance.choice(tasks).name,
            every=chance.choice((0, 2, 3)),
            siblings=chance.randint(1, 3),
        )
        for place in range(chance.randint(2, 3))
    ]
    return msgspec.structs.replace(
        config,
        task=tasks[0],
        more_tasks=tuple(tasks[1:]),
        evaluation=evaluations[0],
        more_evaluations=tuple(evaluations[1:]),
    )


def _together(seed: int, config: Config) -> Config:
    """The same with groups that are scored together, in one of four seeds; drawn apart."""
    chance = Random(f"dora-pipe sim together {seed}")
    if chance.random() >= TOGETHER_SHARE:
        return config
    reward = (RewardUse(use="sim:place", group=True),)
    first, *more = [
        msgspec.structs.replace(one, reward=reward) if chance.random() < 0.75 else one
        for one in config.tasks
    ]
    return msgspec.structs.replace(config, task=first, more_tasks=tuple(more))


def _curriculum(seed: int, config: Config) -> Config:
    """The same with a sampler or a window, or both, for its tasks, in one of four seeds; drawn
    apart."""
    chance = Random(f"dora-pipe sim curriculum {seed}")
    if chance.random() >= CURRICULUM_SHARE:
        return config
    return with_each_task(
        config,
        lambda task: msgspec.structs.replace(
            task,
            sampler=chance.choice(("", "dora_pipe.sim.parts:weights")),
            drop_solved=chance.choice((None, 0.5, 1.0)),
        ),
    )


def _impatient(seed: int, config: Config, slow: int) -> Config:
    """The same with spare siblings in one of four seeds, and with groups that are not waited for
    for ever in one of four; drawn apart."""
    chance = Random(f"dora-pipe sim impatient {seed}")
    spare = chance.choice((1, 1, 2)) if chance.random() < IMPATIENT_SHARE else 0
    seconds = float(chance.choice((8, 20)) * slow)
    groups = msgspec.structs.replace(
        config.groups,
        spare=spare,
        seconds_max=seconds if chance.random() < IMPATIENT_SHARE else None,
    )
    return msgspec.structs.replace(config, groups=groups)


def _agents(scenario: Scenario) -> Scenario:
    """The same with agents in place of tasks in one of four seeds, and what befalls these and
    episodes; drawn apart."""
    chance = Random(f"dora-pipe sim agents {scenario.seed}")
    config, faults = scenario.config, dict(scenario.faults)
    again = Random(f"dora-pipe sim replayable {scenario.seed}").random() < 0.5
    scenario = replace(scenario, replayable=scenario.episodes and again)
    some = chance.random() < AGENTS_SHARE
    kinds = (OF_EPISODES if scenario.episodes or some else ()) + (OF_AGENTS if some else ())
    for name in kinds:
        if chance.random() < 0.5:
            faults[name] = chance.choice((0.3, 1.0))
    if not some:
        return replace(scenario, faults=faults)
    workers, config = scenario.workers, _with_agents(chance, config)
    if chance.random() < RESIDENT_SHARE:
        workers = _resident(scenario.seed, workers)
    return replace(scenario, config=config, faults=faults, workers=workers)


def _with_agents(chance: Random, config: Config) -> Config:
    """Its first task is an agent, and most others are; what they may sample is enough for some."""
    first, *more = [
        msgspec.structs.replace(
            task,
            agent="sim:agent" if not place or chance.random() < 0.6 else "",
            turns_max=chance.choice((3, 64)),
        )
        for place, task in enumerate(config.tasks)
    ]
    groups = config.groups
    if groups.seconds_max is not None:
        longer_s = max(AGENTS_SECONDS, groups.seconds_max)
        config = msgspec.structs.replace(
            config, groups=msgspec.structs.replace(groups, seconds_max=longer_s)
        )
    tokens = chance.choice((48, 256))
    sampling = msgspec.structs.replace(config.sampling, max_tokens=tokens)
    more_tasks = tuple(more) or msgspec.UNSET
    return msgspec.structs.replace(config, task=first, more_tasks=more_tasks, sampling=sampling)


def _plan(chance: Random, number: int, rates: bool, slow: int) -> WorkerPlan:
    return WorkerPlan(
        name=f"w{number}",
        slots=chance.randint(1, 8 if slow == 1 else 3),
        prefetch=chance.randrange(4),
        token_ns=chance.choice((2, 5, 15)) * MS * slow,
        load_ns=chance.choice((50, 200, 800)) * MS,
        rate=chance.choice((0.5, 0.8, 1.0, 1.25, 2.0)) if rates else 1.0,
    )


def _resident(seed: int, plans: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """The same workers with room for several versions; half of the seeds mix them with others."""
    chance = Random(f"dora-pipe sim resident {seed}")
    rooms = chance.choice(((2, 3, 5), (1, 2, 4)))
    return tuple(replace(plan, versions=chance.choice(rooms)) for plan in plans)


def _elastic(seed: int, plans: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """The same workers, and in some seeds all of them, or every other one, elastic, where they host
    one version at a time; drawn apart."""
    chance = Random(f"dora-pipe sim elastic {seed}")
    if chance.random() >= ELASTIC_SHARE:
        return plans
    every = chance.choice((1, 2))
    return tuple(
        replace(plan, elastic=plan.versions == 1 and not place % every)
        for place, plan in enumerate(plans)
    )


def _slow_ns(seed: int) -> int:
    """How long tools and judges take in this seed; most are quick."""
    chance = Random(f"dora-pipe sim patient {seed}")
    return chance.choice((400, 1500)) * MS if chance.random() < PATIENT_SHARE else 0


def _delays(chance: Random) -> Delays:
    return Delays(
        task_ns=chance.choice((1, 10, 100)) * MS,
        train_ns=chance.choice((50, 300, 1200)) * MS,
        restore_ns=chance.choice((10, 200)) * MS,
        fetch_ns=chance.choice((5, 50)) * MS,
        publish_ns=chance.choice((5, 100)) * MS,
    )
