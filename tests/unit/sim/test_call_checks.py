"""Negative controls of checks of agent calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.machine import Machine
from dora_pipe.core.pure.records import Record
from dora_pipe.producers.worker.effects import AnswerCall
from dora_pipe.schemas.rounds import Dispatch, decode_round
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.sim.agents import AgentObserver
from dora_pipe.sim.call_checks import CallChecks, answers_of, length_of, strange_token
from dora_pipe.sim.fault_injector import FaultInjector
from dora_pipe.sim.faulty_parts import FaultyParts
from dora_pipe.sim.role import Role
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.world import SECOND_NS, World

Step = tuple[str, tuple[Any, ...]]
"""Method of `CallChecks` and its arguments."""

SEED = 9
"""Seed of agents, some with sub-agents."""


@dataclass
class Recorder(AgentObserver):
    steps: list[Step] = field(default_factory=list)

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        for record in records:
            if record.topic.endswith(".decisions"):
                for decision in decode_round(record.value).decisions:
                    if isinstance(decision, Dispatch):
                        self.steps.append(("dispatched", (decision.spec,)))
            elif record.topic.endswith((".progress", ".trajectories")):
                self.steps.append(("landed", (record, -1 if role is None else role.number)))

    def wrap(self, role: Role, machine: Machine) -> Machine:
        return machine

    def began(self, *text: Any) -> None:
        self.steps.append(("began", text))

    def asked(self, *text: Any) -> None:
        self.steps.append(("asked", text))

    def refused(self, *text: Any) -> None:
        self.steps.append(("refused", text))

    def answered(self, *text: Any) -> None:
        self.steps.append(("answered", text))


@pytest.fixture(scope="module")
def sound() -> list[Step]:
    scenario = replace(draw(SEED), faults={})
    recorder = Recorder()
    parts = FaultyParts(
        delays=scenario.delays,
        steps_max=scenario.steps_max,
        injector=FaultInjector(scenario),
        observer=recorder,
    )
    with World(
        scenario.config,
        workers=scenario.workers[: scenario.first],
        parts=parts,
        seed=SEED,
        observer=recorder,
    ) as world:
        assert world.run(until_ns=600 * SECOND_NS)
    return recorder.steps


def check_of(steps: Sequence[Step]) -> str:
    def wrong(check: str, what: str) -> None:
        raise InvariantBroken(f"{check}: {what}")

    checks = CallChecks(wrong)
    try:
        for name, text in steps:
            getattr(checks, name)(*text)
    except InvariantBroken as error:
        return error.message.partition(":")[0]
    assert checks.counted["call answered"] > 50
    return ""


def changed(steps: Sequence[Step], change: Callable[[AnswerCall], AnswerCall]) -> list[Step]:
    (index,) = [index for index, step in enumerate(steps) if step[0] == "answered"][20:21]
    name, (incarnation, prompt, answer) = steps[index]
    return [*steps[:index], (name, (incarnation, prompt, change(answer))), *steps[index + 1 :]]


def test_sound_run_of_agents_holds(sound: list[Step]) -> None:
    assert check_of(sound) == ""


def test_answer_that_is_not_in_the_log_is_found(sound: list[Step]) -> None:
    answered_at = next(index for index, step in enumerate(sound) if step[0] == "answered")
    late = [step for step in sound[:answered_at] if step[0] == "landed"]
    assert late
    assert check_of([step for step in sound if step not in late]) == "calls"


def test_answer_of_another_seed_or_version_is_found(sound: list[Step]) -> None:
    def other(answer: AnswerCall) -> AnswerCall:
        return msgspec.structs.replace(
            answer, token_ids=[7] * len(answer.token_ids), logprobs=answer.logprobs
        )

    assert check_of(changed(sound, other)) == "C1"


def test_answer_that_is_cut_on_its_way_is_found(sound: list[Step]) -> None:
    def shorter(answer: AnswerCall) -> AnswerCall:
        tokens, logprobs = answer.token_ids[:-1], answer.logprobs[:-1]
        return msgspec.structs.replace(answer, token_ids=tokens, logprobs=logprobs)

    assert check_of(changed(sound, shorter)) == "calls"


def test_record_with_an_answer_that_its_agent_has_not_heard_is_found(sound: list[Step]) -> None:
    answered_at = next(index for index, step in enumerate(sound) if step[0] == "answered")
    assert check_of([*sound[:answered_at], *sound[answered_at + 1 :]]) == "calls"


def test_record_tells_of_each_token_once(sound: list[Step]) -> None:
    records = [text[0] for name, text in sound if name == "landed"]
    logged = [
        decode_trajectory(record.value)
        for record in records
        if record.topic.endswith(".trajectories")
    ]
    several = [trajectory for trajectory in logged if trajectory.meta.contexts]
    assert several and all(strange_token(fact) is None for fact in logged)
    for entry in several:
        assert length_of(list(answers_of(entry))) == entry.length
    assert length_of([((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 2, 9), (6,))]) == 3 + 2 + 2
