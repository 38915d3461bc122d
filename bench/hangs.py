"""Measures which groups are held where some environments hang for ever; decides nothing.

Production's machines in virtual time (`dora_pipe.sim.world`), so that nothing depends on this
machine: one worker, and an environment that hangs for one trajectory in a hundred, drawn by its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from dora_pipe.bench.slots import (
    GROUP_SIZE,
    TASK_NS,
    TOKENS,
    turn_tokens,
    worker_plan,
)
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.config.model import Config
from dora_pipe.producers.tasks.calls import EnvStep, PromptCall, TaskCall, TaskEvent
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.parts import PlainParts, SimTasks, Site, answer_of, prompt_of
from dora_pipe.sim.world import SECOND_NS, World

HANGING: Final = 0.01
"""Share of the trajectories."""
FOR_EVER_S: Final = 10.0**6
SAMPLING_S: Final = 2.0
PER_STEP: Final = 8
SECONDS: Final = 120.0
HELD_S: Final = 30.0
"""A group that was dispatched so long ago and is not complete is held: none takes half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCase:
    """How groups wait. Example: ``HangCase(spare=1, seconds_max=60.0)``"""

    spare: int
    seconds_max: float | None = None


CASES: Final = (
    HangCase(spare=0),
    HangCase(spare=1),
    HangCase(spare=2),
    HangCase(spare=0, seconds_max=30.0),
    HangCase(spare=1, seconds_max=30.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFigure:
    """One worker, `SECONDS` of virtual time."""

    spare: int
    seconds_max: float | None
    steps: int
    trained_groups: int
    hit_groups: int
    """Groups with a sibling that hangs."""
    held_groups: int
    """Of those, at the end."""
    surplus: int
    """Siblings that were not waited for."""
    expired: int


def bench_hangs(cases: Sequence[HangCase] = CASES, *, seconds: float = SECONDS) -> list[HangFigure]:
    """A figure per case."""
    return [_measure(case, seconds) for case in cases]


def hangs(trajectory: str) -> bool:
    """Whether the environment of a trajectory never answers."""
    return Random(f"hangs {trajectory}").random() < HANGING


_COUNTS: Final = """
    select count(*) filter (where g.fate = 'trained'),
           count(*) filter (where g.complete_ns is null and g.fate = 'open' and g.dispatched_ns < ?)
    from groups g where g.purpose = 'train'
"""


def _measure(case: HangCase, seconds: float) -> HangFigure:
    plan = worker_plan(SAMPLING_S)
    parts = _Parts(lengths=turn_tokens, steps_max=1)
    with World(_config(case), workers=[plan], parts=parts) as world:
        begun_ns = world.clock.wall_ns()
        world.run(until_ns=int(seconds * SECOND_NS))
        held_ns = begun_ns + int((seconds - HELD_S) * SECOND_NS)
        with closing(read_catalogue(world.bus, world.topics)) as tables:
            ((trained, held),) = tables.query(_COUNTS, [held_ns])
            ((steps,),) = tables.query("select count(*) from steps")
            fates = dict(tables.query("select own_fate, count(*) from trajectories group by all"))
            placed = tables.query("select trajectory_id, group_id from trajectories")
    return HangFigure(
        spare=case.spare,
        seconds_max=case.seconds_max,
        steps=steps,
        trained_groups=trained,
        hit_groups=len({group for name, group in placed if hangs(name)}),
        held_groups=held,
        surplus=fates.get("surplus", 0),
        expired=fates.get("expired", 0),
    )


@dataclass(frozen=True, kw_only=True)
class _Parts(PlainParts):
    @property
    def single_turn(self) -> bool:
        return False

    def tasks(self, site: Site, agents: Agents | None) -> SimTasks:
        return SimTasks(site.clock, answer=_answer, delay_ns=_delay_ns)


def _answer(call: TaskCall) -> TaskEvent:
    return prompt_of(call, episode=True) if isinstance(call, PromptCall) else answer_of(call)


def _delay_ns(call: TaskCall) -> int:
    name = call.request.partition("/")[0]
    return int(FOR_EVER_S * SECOND_NS) if isinstance(call, EnvStep) and hangs(name) else TASK_NS


def _config(case: HangCase) -> Config:
    plain: dict[str, Any] = {
        "run": {"name": "hangs", "steps": 1000},
        "model": {"path": "none"},
        "task": {"kind": "none", "turns_max": 2},
        "sampling": {"max_tokens": 4 * TOKENS},
        "groups": {
            "size": GROUP_SIZE,
            "per_step": PER_STEP,
            "spare": case.spare,
            "seconds_max": case.seconds_max,
        },
        "staleness": {"max_staleness": 1},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)
