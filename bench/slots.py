"""Measures which share of a worker's slots is busy while judges and tools take their time; decides
nothing.

Production's machines in virtual time (`dora_pipe.sim.world`): one worker, whose engine takes the
same time for a step whatever runs in it, so that nothing depends on this machine. Sampling takes
from half to one and a half times its mean. The bound and the trainer leave room for all requests
that may be open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from dora_pipe.bench.moves_log import Span
from dora_pipe.bench.paradigms import spans_of
from dora_pipe.config.model import Config
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.producers.tasks.calls import EnvStep, PromptCall, TaskCall, TaskEvent
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.parts import (
    MS,
    PlainParts,
    SimTasks,
    Site,
    WorkerPlan,
    answer_of,
    observed_of,
    prompt_of,
)
from dora_pipe.sim.world import SECOND_NS, World

SLOTS: Final = 64
PREFETCH: Final = 16
TOKENS: Final = 40
"""Mean of one turn."""
TASK_NS: Final = 5 * MS
"""A call that nobody waits for."""
GROUP_SIZE: Final = 8
PER_STEP: Final = 2000
"""More than is sampled meanwhile: a worker that runs empty for a new version is another matter."""
BEGIN_S: Final = 45.0
END_S: Final = 105.0
"""What is before and after does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCase:
    """What requests wait for. Example: ``WaitCase(what="judge", sampling_s=2.0, reward_s=2.0)``"""

    what: str
    sampling_s: float
    """Mean of one turn."""
    turns: int = 1
    tool_s: float = 0.0
    reward_s: float = 0.0

    @property
    def life_s(self) -> float:
        """Whoever is in a slot is logged after so long; only then it is known that it was there."""
        return self.turns * (2 * self.sampling_s + self.tool_s) + self.reward_s + 5.0


CASES: Final = (
    WaitCase(what="nothing", sampling_s=2.0),
    WaitCase(what="a judge", sampling_s=2.0, reward_s=2.0),
    WaitCase(what="a slow judge", sampling_s=2.0, reward_s=10.0),
    WaitCase(what="a tool", sampling_s=2.0, tool_s=10.0, turns=4),
    WaitCase(what="an agent's thoughts", sampling_s=0.5, tool_s=1.0, turns=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFigure:
    """One worker of `SLOTS` slots."""

    waits_for: str
    sampling_s: float
    turns: int
    tool_s: float
    reward_s: float
    busy_slots: float
    """On average."""
    busy: float
    """Share of the slots."""
    samples_per_s: float
    rounds_per_s: float


def bench_slots(cases: Sequence[WaitCase] = CASES, *, end_s: float = END_S) -> list[SlotFigure]:
    """A figure per case."""
    return [_measure(case, end_s) for case in cases]


def worker_plan(sampling_s: float) -> WorkerPlan:
    """The worker, whose turns take so long on average."""
    return WorkerPlan(
        name="w0",
        slots=SLOTS,
        prefetch=PREFETCH,
        context_tokens=4096,
        token_ns=int(sampling_s * SECOND_NS / TOKENS),
    )


def _measure(case: WaitCase, end_s: float) -> SlotFigure:
    plan = worker_plan(case.sampling_s)
    parts = _Parts(case=case, lengths=turn_tokens, steps_max=1)
    with World(_config(case), workers=[plan], parts=parts) as world:
        begun_ns = world.clock.wall_ns()
        world.run(until_ns=int((end_s + case.life_s) * SECOND_NS))
        begin, end = (begun_ns + int(one * SECOND_NS) for one in (BEGIN_S, end_s))
        spans = spans_of(world.bus, world.topics, begin, end)
        times = [one.round.now_ns for one in read_rounds(world.bus, world.topics)]
    found: list[Span] = [one for of_epoch in spans.values() for one in of_epoch]
    seconds = end_s - BEGIN_S
    busy = sum(stop - start for start, stop in found) / 1e9 / seconds
    return SlotFigure(
        waits_for=case.what,
        sampling_s=case.sampling_s,
        turns=case.turns,
        tool_s=case.tool_s,
        reward_s=case.reward_s,
        busy_slots=busy,
        busy=busy / SLOTS,
        samples_per_s=len(found) / case.turns / seconds,
        rounds_per_s=sum(begin <= one < end for one in times) / seconds,
    )


def turn_tokens(seed: int, turn: int) -> int:
    """Tokens of a turn, from half to one and a half times `TOKENS`."""
    return Random(f"{seed}/{turn}").randint(TOKENS // 2, TOKENS * 3 // 2)


@dataclass(frozen=True, kw_only=True)
class _Parts(PlainParts):
    case: WaitCase

    @property
    def single_turn(self) -> bool:
        return self.case.turns == 1

    def tasks(self, site: Site, agents: Agents | None) -> SimTasks:
        answer = _Tasks(self.case)
        return SimTasks(site.clock, answer=answer, delay_ns=answer.delay_ns)


class _Tasks:
    def __init__(self, case: WaitCase) -> None:
        self._case = case
        self._turns: dict[str, int] = {}

    def delay_ns(self, call: TaskCall) -> int:
        if isinstance(call, PromptCall):
            return TASK_NS
        waits_s = self._case.tool_s if isinstance(call, EnvStep) else self._case.reward_s
        return max(TASK_NS, int(waits_s * SECOND_NS))

    def __call__(self, call: TaskCall) -> TaskEvent:
        if isinstance(call, PromptCall):
            return prompt_of(call, episode=self._case.turns > 1)
        if not isinstance(call, EnvStep):
            self._turns.pop(call.request, None)
            return answer_of(call)
        turn = self._turns[call.request] = self._turns.get(call.request, 1) + 1
        return observed_of(call, done=turn > self._case.turns)


def _config(case: WaitCase) -> Config:
    plain: dict[str, Any] = {
        "run": {"name": "slots", "steps": 1000},
        "model": {"path": "none"},
        "task": {"kind": "none", "turns_max": case.turns + 1},
        "sampling": {"max_tokens": 4 * TOKENS * case.turns},
        "groups": {"size": GROUP_SIZE, "per_step": PER_STEP, "filter_zero_advantage": False},
        "staleness": {"max_staleness": 0},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)
