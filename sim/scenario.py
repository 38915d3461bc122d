"""Configuration, workers and faults of a seed.

Swarm testing: every seed omits most faults and varies the others. Features are drawn separately
(`_chance`), so that adding one changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import msgspec

from dora_pipe.config.model import Config, RewardUse
from dora_pipe.config.several import with_each_task
from dora_pipe.sim.faults import (
    APART,
    FAULTS,
    HANGING,
    MOVING,
    OF_AGENTS,
    OF_DELTAS,
    OF_EPISODES,
    STRIKING,
)
from dora_pipe.sim.parts import MS, Delays, WorkerPlan

ALWAYS: Final = 3
STEPS_LONG: Final = 11
SAMPLES_MEAN: Final = 42
SHORT_STEPS: Final = (5, 8)

SHORT_GROUPS: Final = 2
"""Maximum groups per step and trajectories per group in a short run; one trajectory more if
requests are to move."""

SHORT_WORKERS: Final = 4
SHORT_TOKENS: Final = 96
WORKERS_MAX: Final = 6
PUBLISHES_MS: Final = (5, 100, 600)
SLOW: Final = (1, 1, 1, 6)

AGENTS_SECONDS: Final = 64.0
"""Minimum time limit with agents; otherwise slow groups always expire."""

SHARES: Final[Mapping[str, float]] = {
    "long": 0.1,  # pruning and restarts need long runs
    "moving": 0.75,  # all faults of moves
    "patient": 0.3,  # tools and judges are slow
    "several": 0.25,
    "together": 0.25,
    "curriculum": 0.25,
    "parts": 1 / 3,  # if a step has several groups
    "updates": 0.5,  # parts are updates
    "follows": 0.25,  # automatic in-flight limit
    "agents": 0.25,
    "replayable": 0.5,  # of seeds with episodes
    "talkative": 0.5,  # long episodes
    "deltas": 0.25,  # deltas
    "resident sharing": 0.25,
    "colocated": 0.2,  # colocated workers
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    config: Config
    workers: tuple[WorkerPlan, ...]
    """Initial ones first."""
    first: int
    delays: Delays
    steps_max: int
    """Engine steps per event."""
    faults: Mapping[str, float]
    strike_ns: int
    """Mean time between faults."""
    append_share: float
    away_ns: int
    task_share: float
    episodes: bool
    replayable: bool = False
    faulty_ns: int


def draw(seed: int, *, steps: int = 1) -> Scenario:
    """Return a seed's scenario. Example: ``draw(17).config.rollout``"""
    scenario = _agents(_drawn(seed))
    if _chance(seed, "long") is None:
        scenario = _with_few_steps(scenario)
    scenario = _with_long_episodes(_with_deltas(_with_updates(_with_refusals(scenario))))
    scenario = replace(scenario, workers=_colocated(seed, _resident(seed, scenario.workers)))
    steps = max(steps, scenario.config.run.steps)
    return replace(scenario, config=_changed(scenario.config, run={"steps": steps}))


def _chance(seed: int, what: str) -> Random | None:
    chance = Random(f"dora-pipe sim {what} {seed}")
    return chance if chance.random() < SHARES[what] else None


def _changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    change = msgspec.structs.replace
    new = {name: change(getattr(config, name), **keys) for name, keys in sections.items()}
    return change(config, **new)


def _drawn(seed: int) -> Scenario:
    chance = Random(f"dora-pipe sim {seed}")
    slow = chance.choice(SLOW)
    config = _config(chance, seed, crowded=slow > 1)
    keep_every = Random(f"dora-pipe sim keep {seed}").choice((0, 1, 2, 3))
    config = _several(seed, _changed(config, store={"keep_every": keep_every}))
    config = _curriculum(seed, _together(seed, config))
    names = sorted(FAULTS.keys() - set(APART))
    count = chance.randint(ALWAYS, 16)
    faults = {name: chance.choice((0.3, 1.0, 3.0)) for name in chance.sample(names, count)}
    faults[chance.choice(STRIKING)] = 1.0
    if slow > 1 and _chance(seed, "moving"):
        faults = dict.fromkeys(MOVING, 1.0) | faults
    config = _follows(seed, _parts(seed, _impatient(seed, config, slow)))
    if config.rollout.group_redundancy or config.rollout.group_timeout_s:
        faults[HANGING] = 1.0
    first = chance.randint(1, WORKERS_MAX)
    first = max(first, 3) if slow > 1 else first
    rates = "clock-rate" in faults
    return Scenario(
        seed=seed,
        config=config,
        workers=tuple(_plan(chance, number, rates, slow) for number in range(first + 3)),
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


def _with_few_steps(scenario: Scenario) -> Scenario:
    chance = Random(f"dora-pipe sim short {scenario.seed}")
    config, is_slow = scenario.config, _is_slow(scenario.seed)
    per_step = min(config.rollout.prompts_per_step, SHORT_GROUPS)
    heartbeat_s = chance.choice((0.2, 0.4, 0.4))
    config = _changed(
        config,
        run={"steps": chance.randint(*SHORT_STEPS)},
        rollout={
            "group_size": min(config.rollout.group_size, SHORT_GROUPS + is_slow),
            "prompts_per_step": per_step,
        },
        trainer={"batch_parts": min(config.trainer.batch_parts, per_step)},
        sampling={"max_tokens": min(config.sampling.max_tokens, SHORT_TOKENS)},
        timing={"heartbeat_s": heartbeat_s},
    )
    return replace(
        scenario,
        config=config,
        first=min(scenario.first, SHORT_WORKERS),
        faulty_ns=scenario.faulty_ns // (2 if is_slow else 1),
    )


def _with_updates(scenario: Scenario) -> Scenario:
    config, parts = scenario.config, scenario.config.trainer.batch_parts
    if parts < 2:
        return scenario
    chance = Random(f"dora-pipe sim updates {scenario.seed}")
    if chance.random() < SHARES["updates"]:
        config = _changed(config, trainer={"minibatches": parts})
    delays = replace(scenario.delays, publish_ns=chance.choice(PUBLISHES_MS) * MS)
    return replace(scenario, config=config, delays=delays)


def _with_refusals(scenario: Scenario) -> Scenario:
    chance = Random(f"dora-pipe sim refused {scenario.seed}")
    if scenario.config.trainer.batch_parts == 1 or chance.random() < 0.5:
        return scenario
    return replace(scenario, faults={"command-fail-batch": 1.0, **scenario.faults})


def _with_deltas(scenario: Scenario) -> Scenario:
    chance = _chance(scenario.seed, "deltas")
    if chance is None:
        return scenario
    every, checkpoints = chance.choice((2, 4, 8)), chance.choice((2, 3, 5))
    faults = {name: chance.choice((1.0, 3.0)) for name in OF_DELTAS if chance.random() < 0.5}
    config = _changed(
        scenario.config, policies={"full_every": every}, trainer={"checkpoint_every": checkpoints}
    )
    return replace(scenario, config=config, faults={**scenario.faults, **faults})


def _with_long_episodes(scenario: Scenario) -> Scenario:
    chance = _chance(scenario.seed, "talkative")
    if not scenario.replayable or chance is None:
        return scenario
    change, turns = msgspec.structs.replace, chance.randint(3, 6)
    config = with_each_task(scenario.config, lambda task: change(task, max_turns=turns))
    return replace(scenario, config=config)


def _config(chance: Random, seed: int, *, crowded: bool) -> Config:
    max_staleness = chance.randrange(4)
    size, per_step = chance.choice((1, 2, 2, 3, 4)), chance.choice((1, 1, 2, 2, 3, 4))
    if crowded:
        max_staleness, size, per_step = max(1, max_staleness), max(3, size), max(3, per_step)
    steps = STEPS_LONG + chance.randrange(3) + SAMPLES_MEAN // (size * per_step)
    plain: dict[str, Any] = {
        "run": {"name": "sim", "steps": steps, "seed": seed},
        "model": {"path": "none"},
        "task": {"kind": "none", "max_turns": chance.randint(1, 3)},
        "sampling": {"max_tokens": 96 if crowded else chance.choice((24, 96))},
        "rollout": {
            "group_size": size,
            "prompts_per_step": per_step,
            "min_valid_trajectories": chance.randint(1, min(2, size)),
            "filter_zero_advantage": size > 1 and chance.random() < 0.25,
            "max_attempts": chance.choice((2, 3, 5)),
        },
        "staleness": {
            "max_staleness": max_staleness,
            "async_batches": chance.choice((None, 1.0, 1.0 + max_staleness * chance.random())),
        },
        "evaluation": {
            "prompts": chance.choice((0, 0, 2, 3)),
            "every": chance.choice((0, 2, 4)),
            "group_size": chance.randint(1, 2),
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
    chance, most = _chance(seed, "parts"), config.rollout.prompts_per_step
    if chance is None or most < 2:
        return config
    return _changed(config, trainer={"batch_parts": chance.randint(2, most)})


def _follows(seed: int, config: Config) -> Config:
    automatic = {"async_batches": "auto"} if _chance(seed, "follows") else {}
    return _changed(config, staleness=automatic)


def _several(seed: int, config: Config) -> Config:
    chance = _chance(seed, "several")
    if chance is None:
        return config
    change = msgspec.structs.replace
    ratios = [chance.choice((0.3, 1.0, 2.0, 5.0)) for _ in range(chance.randint(2, 4))]
    tasks = [
        change(config.task, name=f"t{index}", ratio=ratio) for index, ratio in enumerate(ratios)
    ]
    evaluations = [
        change(
            config.evaluation,
            name=f"e{index}",
            task=chance.choice(tasks).name,
            every=chance.choice((0, 2, 3)),
            group_size=chance.randint(1, 3),
        )
        for index in range(chance.randint(2, 3))
    ]
    return change(
        config,
        task=tasks[0],
        more_tasks=tuple(tasks[1:]),
        evaluation=evaluations[0],
        more_evaluations=tuple(evaluations[1:]),
    )


def _together(seed: int, config: Config) -> Config:
    chance = _chance(seed, "together")
    if chance is None:
        return config
    reward = (RewardUse(use="sim:rank", group=True),)
    first, *more = [
        msgspec.structs.replace(task, reward=reward) if chance.random() < 0.75 else task
        for task in config.tasks
    ]
    return msgspec.structs.replace(config, task=first, more_tasks=tuple(more))


def _curriculum(seed: int, config: Config) -> Config:
    chance = _chance(seed, "curriculum")
    if chance is None:
        return config
    return with_each_task(
        config,
        lambda task: msgspec.structs.replace(
            task,
            sampler=chance.choice(("", "dora_pipe.sim.parts:weights")),
            max_solve_rate=chance.choice((None, 0.25, 0.5)),
        ),
    )


def _impatient(seed: int, config: Config, slow: int) -> Config:
    chance = Random(f"dora-pipe sim impatient {seed}")
    spare = chance.choice((1, 1, 2)) if chance.random() < 0.25 else 0
    seconds = float(chance.choice((8, 20)) * slow)
    group_timeout_s = seconds if chance.random() < 0.25 else None
    return _changed(config, rollout={"group_redundancy": spare, "group_timeout_s": group_timeout_s})


def _agents(scenario: Scenario) -> Scenario:
    chance = Random(f"dora-pipe sim agents {scenario.seed}")
    config, faults = scenario.config, dict(scenario.faults)
    again = scenario.episodes and _chance(scenario.seed, "replayable") is not None
    with_agents = chance.random() < SHARES["agents"]
    kinds = (OF_EPISODES if scenario.episodes or with_agents else ()) + (
        OF_AGENTS if with_agents else ()
    )
    for name in kinds:
        if chance.random() < 0.5:
            faults[name] = chance.choice((0.3, 1.0))
    if with_agents:
        config = _with_agents(chance, config)
    return replace(scenario, config=config, faults=faults, replayable=again)


def _with_agents(chance: Random, config: Config) -> Config:
    first, *more = [
        msgspec.structs.replace(
            task,
            agent="sim:agent" if not index or chance.random() < 0.6 else "",
            max_turns=chance.choice((3, 64)),
        )
        for index, task in enumerate(config.tasks)
    ]
    if config.rollout.group_timeout_s is not None:
        longer_s = max(AGENTS_SECONDS, config.rollout.group_timeout_s)
        config = _changed(config, rollout={"group_timeout_s": longer_s})
    config = _changed(config, sampling={"max_tokens": chance.choice((48, 256))})
    more_tasks = tuple(more) or msgspec.UNSET
    return msgspec.structs.replace(config, task=first, more_tasks=more_tasks)


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
    if not _chance(seed, "resident sharing"):
        return plans
    chance = Random(f"dora-pipe sim resident {seed}")
    rooms = chance.choice(((2, 3, 5), (1, 2, 4)))
    return tuple(replace(plan, versions=chance.choice(rooms)) for plan in plans)


def _colocated(seed: int, plans: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    chance = _chance(seed, "colocated")
    if chance is None:
        return plans
    every = chance.choice((1, 2))
    return tuple(
        replace(plan, colocated=plan.versions == 1 and not index % every)
        for index, plan in enumerate(plans)
    )


def _slow_ns(seed: int) -> int:
    chance = _chance(seed, "patient")
    return 0 if chance is None else chance.choice((400, 1500)) * MS


def _delays(chance: Random) -> Delays:
    return Delays(
        task_ns=chance.choice((1, 10, 100)) * MS,
        train_ns=chance.choice((50, 300, 1200)) * MS,
        restore_ns=chance.choice((10, 200)) * MS,
        fetch_ns=chance.choice((5, 50)) * MS,
        publish_ns=chance.choice((5, 100)) * MS,
    )
