"""Sessions of agents: from the call to the record, and through whatever ends a worker.

A recording engine says what was asked of it and what it sampled; the record of a trajectory must
say the same, and what the agent was told.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.audit.replay_trajectory import generate_again
from dora_pipe.producers.engines.simulated import Lengths, SimulatedEngine
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    RewardCall,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.sessions import CALLS_OPEN_MAX
from dora_pipe.schemas.context_tokens import call_fault, contexts_of
from dora_pipe.schemas.contexts import prompt_digest
from dora_pipe.schemas.control import (
    RequestFailed,
    RequestReleased,
    Resume,
    TrajectoryLogged,
    WorkerLeft,
)
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.rounds import ScheduledRequest
from dora_pipe.schemas.trajectory import Trajectory, TurnProgress
from dora_pipe.schemas.trajectory_codec import decode_any_progress
from dora_pipe.sim.agents import Ask
from tests.support.agents import (
    Agent,
    AgentsPort,
    Play,
    RecordingEngine,
    recording_engine,
    turns,
    wandering,
)
from tests.support.worker import TOPICS, Worker, World

NAME = "g0000000000-000"
KEY = f"{NAME}/1"


def length_of(most: int = 6) -> Lengths:
    return lambda seed, turn: 1 + (seed >> 7) % most


class Stage:
    def __init__(self, play: Play, *, think: int = 0, lengths: Lengths | None = None) -> None:
        self.play = play
        self.think = think
        self.engines: list[RecordingEngine] = []
        self.world = World(lengths=lengths or length_of(), engine=self._engine)
        self.workers: list[Worker] = []

    def _engine(self, setup: WorkerSetup) -> RecordingEngine:
        self.engines.append(recording_engine(self.world, setup))
        return self.engines[-1]

    def worker(self, **changes: Any) -> Worker:
        random = Random(len(self.workers))
        agents = AgentsPort(self.play, thinks=lambda: random.randint(0, self.think))
        name = f"w{len(self.workers)}"
        worker = self.world.start(worker=name, agents=agents, **changes)
        self.workers.append(worker)
        return worker

    def place(
        self, worker: Worker, ordinal: int = 0, *, attempt: int = 1, resume: Resume | None = None
    ) -> ScheduledRequest:
        request = self.world.place(worker, ordinal, attempt=attempt, resume=resume)
        self.world.decide(request)
        return request

    def trajectory(self, name: str = NAME) -> Trajectory:
        return self.world.trajectories()[name]

    def sampled(self) -> list[tuple[list[int], int, list[int]]]:
        return [
            (list(asked.token_ids), asked.seed, engine.sampled[key])
            for engine in self.engines
            for key, asked in engine.asked.items()
        ]


def agents(worker: Worker) -> AgentsPort:
    assert worker.agents is not None
    return worker.agents


def told(worker: Worker, key: str = KEY) -> list[tuple[list[int], list[int]]]:
    return agents(worker).answered.get(key, [])


def until_told(stage: Stage, worker: Worker, answers: int) -> None:
    stage.world.ticks(worker, 3)
    stage.world.until(worker, lambda: len(told(worker)) == answers)


def check_again(stage: Stage, trajectory: Trajectory) -> None:
    asked = next(entry for engine in stage.engines for entry in engine.asked.values())
    params = replace(asked.params, max_tokens=1000)
    tokens = stage.engines[0].context_tokens
    fresh = SimulatedEngine(slots=4, context_tokens=tokens, lengths=stage.world.lengths)
    given = {trajectory.meta.source: params}
    (again,) = generate_again(fresh, [trajectory], given, lambda *_: Path())
    assert again.difference == ""


def check_record(stage: Stage, worker: Worker, trajectory: Trajectory, key: str = KEY) -> None:
    meta, ids = trajectory.meta, list(trajectory.token_ids)
    heard = told(worker, key)
    assert len(meta.calls) == len(heard)
    contexts = list(contexts_of(trajectory))
    sampled = stage.sampled()
    texts: list[tuple[list[int], list[int]]] = []
    for call in meta.calls:
        (prompt,) = {
            tuple(context.token_ids[: context.own + call.start - context.start].tolist())
            for context in contexts
            if context.start <= call.start <= context.start + len(context.token_ids) - context.own
            and _begins(trajectory, context.start, call.start)
        }
        tokens = ids[call.start : call.end]
        assert (list(prompt), call.seed, tokens) in sampled
        digest = prompt_digest(prompt)
        assert call.seed == call_seed(meta.seed, digest, call.occurrence)
        texts.append((list(prompt), tokens))
    assert sorted(texts) == sorted(heard)
    assert call_fault(trajectory) == ""
    check_again(stage, trajectory)
    assert trajectory.sampled == sum(call.end - call.start for call in meta.calls)
    in_contexts = np.concatenate([context.loss_mask[context.own :] for context in contexts])
    assert int(in_contexts.sum()) == trajectory.sampled, "each sampled token once"
    starts = {segment.start for segment in trajectory.segments if segment.kind == "model"}
    assert set(meta.prefills) == starts


def _begins(trajectory: Trajectory, context: int, call: int) -> bool:
    later = [entry.start for entry in trajectory.meta.contexts if entry.start > context]
    return not later or call < min(later)


# What a session becomes


def test_agent_that_goes_on_with_one_conversation_has_one_context() -> None:
    stage = Stage(turns([1, 2, 3], [41, 42], [43]))
    worker = stage.worker()
    stage.place(worker)
    stage.world.until_idle(worker)
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory)
    assert trajectory.meta.contexts == ()
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds == ["prompt", "model", "environment", "model", "environment", "model"]
    assert [segment.turn for segment in trajectory.segments] == [0, 0, 0, 1, 1, 2]
    assert (trajectory.meta.prompt_tokens, trajectory.meta.finish) == (3, "environment")
    assert trajectory.reward == 1.0
    assert [call.api for call in trajectory.meta.calls] == ["generate"] * 3
    for call, later in zip(trajectory.meta.calls, trajectory.meta.calls[1:], strict=False):
        assert call.asked_ns <= call.answered_ns <= later.asked_ns
    assert worker.engine.active == 0
    assert agents(worker).closed == [KEY]


def test_reward_is_asked_for_with_what_the_model_said_last_unless_the_agent_says() -> None:
    def play(call: AgentCall) -> Agent:
        yield [Ask([1, 2])]
        yield [Ask([5, 6])]
        yield [Ask([1, 2])]
        own = Rewarded(request=call.request, reward=0.25, raw=None, parts={"a": 1.0})
        return (None, "forty-two", own)[call.index]

    stage = Stage(play)
    worker = stage.worker()
    for ordinal in range(3):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    calls = [call for call in worker.tasks.seen if isinstance(call, RewardCall)]
    asked = {call.index: call.completion.text for call in calls}
    assert asked == {0: " ".join(map(str, told(worker)[-1][1])), 1: "forty-two"}
    metas = (stage.trajectory(f"g000000000{index}-000").meta for index in range(3))
    given = [(meta.agent_answer, meta.rewarded_by, meta.reward_parts.get("a")) for meta in metas]
    assert given == [(None, "task", None), ("forty-two", "task", None), (None, "agent", 1.0)]


def test_answer_leaves_when_its_record_is_in_the_log() -> None:
    stage = Stage(turns([1, 2], [41]))
    worker = stage.worker()
    stage.place(worker)
    for _ in range(200):
        stage.world.ticks(worker, 1)
        records = stage.world.records(TOPICS.progress)
        heard = len(told(worker))
        assert heard <= len(records)
    records = stage.world.records(TOPICS.progress)
    chain = [cast("TurnProgress", decode_any_progress(record.value)) for record in records]
    assert [progress.turn for progress in chain] == [0, 1]
    assert [list(trajectory.token_ids) for trajectory in chain] == [
        tokens for _, tokens in told(worker)
    ]
    assert [list(progress.given_ids) for progress in chain] == [[1, 2], [41]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_every_token_is_the_engine_s_and_every_context_what_the_agent_was_told(seed: int) -> None:
    stage = Stage(lambda call: wandering(Random(f"{seed} {call.request}"), 10), think=3)
    worker = stage.worker(max_tokens=1000)
    for ordinal in range(6):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    for logged in stage.world.facts(TrajectoryLogged):
        trajectory = stage.world.trajectory(logged)
        check_record(stage, worker, trajectory, f"{logged.trajectory}/1")
        assert logged.contexts == 1 + len(trajectory.meta.contexts)
        assert logged.calls == len(trajectory.meta.calls)
    assert len(stage.world.trajectories()) == 6


# What cannot be taken


def refused(play: Play, *, lengths: Lengths | None = None, **changes: Any) -> tuple[Stage, Worker]:
    stage = Stage(play, lengths=lengths)
    worker = stage.worker(**changes)
    stage.place(worker)
    stage.world.until_idle(worker)
    return stage, worker


def codes(worker: Worker) -> list[tuple[int, str]]:
    return [(entry.status, entry.code) for entry in agents(worker).refused]


def test_prompt_that_fills_a_context_is_refused_and_the_trajectory_ends_by_length() -> None:
    def play(call: AgentCall) -> Agent:
        yield [Ask([1, 2])]
        yield [Ask([7] * 512)]
        return None

    stage, worker = refused(play)
    assert codes(worker) == [(400, "context_length_exceeded")]
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory)
    assert trajectory.meta.finish == "length"


def test_call_beyond_turns_max_is_refused() -> None:
    stage, worker = refused(turns([1], [41], [42], [43]), max_turns={"train": 2})
    assert codes(worker) == [(429, "max_turns")]
    assert len(stage.trajectory().meta.calls) == 2
    assert stage.trajectory().meta.finish == "length"


def test_tokens_of_a_trajectory_are_bounded_and_the_call_behind_the_bound_is_refused() -> None:
    stage, worker = refused(turns([1], [41], [42]), lengths=lambda seed, turn: 7, max_tokens=10)
    assert codes(worker) == [(429, "max_tokens")]
    trajectory = stage.trajectory()
    assert [(call.end - call.start, call.finish) for call in trajectory.meta.calls] == [
        (7, "stop"),
        (3, "length"),
    ]
    assert trajectory.meta.finish == "length"


def test_too_many_calls_at_once_are_refused_and_may_be_made_again() -> None:
    def play(call: AgentCall) -> Agent:
        yield [Ask([1, 2])] * (CALLS_OPEN_MAX + 1)
        yield [Ask([1, 2])]
        return None

    stage, worker = refused(play, slots=CALLS_OPEN_MAX)
    assert codes(worker) == [(429, "too_many_open")]
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory)
    assert {call.occurrence for call in trajectory.meta.calls} == set(range(CALLS_OPEN_MAX + 1))
    assert trajectory.meta.finish == "environment"


@pytest.mark.parametrize(
    ("error", "finish"),
    [
        ("RateLimitError", "length"),  # what OpenAI's client makes of the 429
        ("TimedOut", "error"),
        ("Retry", "error"),
        ("NoAnswer", "error"),
    ],
)
def test_agent_that_raises_behind_a_limit_ends_by_length_and_is_rewarded(
    error: str, finish: str
) -> None:
    def play(call: AgentCall) -> Agent:
        yield [Ask([1, 2])]
        yield [Ask([7] * 512)]
        yield [Ask([7] * 512)]
        return None

    stage = Stage(play, think=1000)
    worker = stage.worker()
    stage.place(worker)
    stage.world.until(worker, lambda: len(codes(worker)) == 1)
    worker.tasks.events.append(TaskFailed(request=KEY, error=error, message="no"))
    stage.world.until_idle(worker)
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory)
    assert trajectory.meta.finish == finish
    assert (trajectory.reward is None) == (finish == "error")


# What a worker does with them


def alone(play: Play) -> Trajectory:
    stage = Stage(play)
    worker = stage.worker(max_tokens=1000)
    stage.place(worker)
    stage.world.until_idle(worker)
    return stage.trajectory()


def check_same(trajectory: Trajectory, other: Trajectory) -> None:
    assert list(trajectory.token_ids) == list(other.token_ids)
    assert list(trajectory.logprobs) == list(other.logprobs)
    assert list(trajectory.loss_mask) == list(other.loss_mask)
    assert trajectory.meta.contexts == other.meta.contexts
    calls = [(c.start, c.end, c.seed, c.occurrence, c.finish) for c in trajectory.meta.calls]
    assert calls == [(c.start, c.end, c.seed, c.occurrence, c.finish) for c in other.meta.calls]


TALKS = turns([1, 2, 3], *([40 + at] for at in range(8)))


@pytest.mark.parametrize("answers", [0, 1, 4, 8])
def test_session_that_moves_goes_on_elsewhere_with_the_same_tokens(answers: int) -> None:
    stage = Stage(TALKS, lengths=length_of(), think=2)
    source, target = stage.worker(max_tokens=1000), stage.worker(max_tokens=1000)
    world = stage.world
    request = stage.place(source)
    until_told(stage, source, answers)
    world.decide(world.move(request, target))
    world.until(source, lambda: bool(world.facts(RequestReleased)))
    (released,) = world.facts(RequestReleased)
    assert (released.resume is None) == (answers == 0)
    assert released.kv is None and agents(source).closed == [KEY]
    assert source.engine.active == 0 and KEY in source.tasks.forgotten
    stage.place(target, attempt=2, resume=released.resume)
    world.until_idle(target)
    trajectory = stage.trajectory()
    check_same(trajectory, alone(TALKS))
    check_record(stage, target, trajectory, f"{NAME}/2")
    workers = [segment.worker for segment in trajectory.segments if segment.kind == "model"]
    recorded = target.counts["calls answered from the record"]
    assert recorded >= answers
    assert workers == ["w0"] * recorded + ["w1"] * (9 - recorded)


def test_worker_that_leaves_names_the_last_record_of_its_sessions() -> None:
    stage = Stage(TALKS, think=2)
    source = stage.worker(max_tokens=1000)
    stage.place(source)
    until_told(stage, source, 3)
    stage.world.stop(source)
    (fact,) = stage.world.facts(WorkerLeft)
    newest = stage.world.records(TOPICS.progress)[-1]
    assert fact.progress[NAME].offset == newest.offset
    target = stage.worker(max_tokens=1000)
    stage.place(target, attempt=2, resume=fact.progress[NAME])
    stage.world.until_idle(target)
    check_same(stage.trajectory(), alone(TALKS))


def test_session_keeps_its_version_on_the_worker_until_it_ends() -> None:
    stage = Stage(TALKS, think=30)
    worker = stage.worker(max_tokens=1000)
    stage.place(worker)
    world = stage.world
    until_told(stage, worker, 1)
    world.decide(world.assign(worker, 1))
    for _ in range(1000):
        world.ticks(worker, 1)
        assert worker.machine.loading is None or KEY not in agents(worker).opened
    world.until_idle(worker)
    assert stage.trajectory().versions == [0] * 9


def test_agent_whose_process_died_is_handed_back_and_goes_on_from_its_record() -> None:
    stage = Stage(TALKS, think=2)
    worker = stage.worker(max_tokens=1000)
    stage.place(worker)
    world = stage.world
    until_told(stage, worker, 3)
    resume = worker.machine.requests.progress()[NAME]
    agents(worker).lose(KEY)
    world.until_idle(worker)
    (fact,) = world.facts(RequestFailed)
    assert (fact.error, fact.retryable) == ("EpisodeLost", True)
    assert agents(worker).closed == [KEY] and KEY in worker.tasks.forgotten
    stage.place(worker, attempt=2, resume=resume)
    world.until_idle(worker)
    assert worker.counts["calls answered from the record"] >= 3
    check_record(stage, worker, stage.trajectory(), f"{NAME}/2")
    check_same(stage.trajectory(), alone(TALKS))


def test_recorded_calls_that_are_not_asked_again_are_no_part_of_the_trajectory() -> None:
    starts: list[str] = []

    def play(call: AgentCall) -> Agent:
        starts.append(call.request)
        first = [1, 2] if len(starts) == 1 else [3, 4]
        for prompt in (first, [9, 9], [*first, 5]):
            yield [Ask(prompt)]
        return None

    stage = Stage(play, think=2)
    worker = stage.worker()
    stage.place(worker)
    until_told(stage, worker, 2)
    resume = worker.machine.requests.progress()[NAME]
    agents(worker).lose(KEY)
    stage.world.until_idle(worker)
    stage.place(worker, attempt=2, resume=resume)
    stage.world.until_idle(worker)
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory, f"{NAME}/2")
    assert len(trajectory.meta.calls) == 3
    assert worker.counts["calls answered from the record"] == 1
    assert worker.counts["recorded calls not asked again"] >= 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_killed_at_any_moment_it_goes_on_elsewhere_with_the_same_tokens(
    seed: int, kills: list[int]
) -> None:
    def play(call: AgentCall) -> Agent:
        return wandering(Random(f"{seed} {call.request.partition('/')[0]}"), 10)

    stage = Stage(play, think=2)
    resume: Resume | None = None
    for attempt, ticks in enumerate([*kills, 0], start=1):
        worker = stage.worker(max_tokens=1000)
        stage.place(worker, attempt=attempt, resume=resume)
        stage.world.ticks(worker, ticks)
        if not ticks:
            stage.world.until_idle(worker)
        resume = worker.machine.requests.progress().get(NAME, resume)
        if stage.world.facts(TrajectoryLogged):
            break
    trajectory = stage.trajectory()
    check_record(stage, worker, trajectory, f"{NAME}/{attempt}")
    calm = Stage(play)
    other = calm.worker(max_tokens=1000)
    calm.place(other)
    calm.world.until_idle(other)
    assert sorted(told(other)) == sorted(told(worker, f"{NAME}/{attempt}"))
    assert worker.counts["progress unusable"] == 0
