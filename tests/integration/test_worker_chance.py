"""Any course of decisions, losses and delays: every placement ends once, and nothing stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.producers.tasks.calls import EnvStep, PromptCall, RewardCall
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged, WorkerReady
from dora_pipe.schemas.rounds import ScheduledRequest
from tests.support.inline_tasks import InlineTasks, episode_tasks
from tests.support.worker import World, digest_of

ORDINALS = st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.just("place"), ORDINALS),
    st.tuples(st.just("cancel"), ORDINALS),
    st.tuples(st.just("assign"), st.integers(0, 3)),
    st.tuples(st.just("hold"), st.sampled_from([PromptCall, EnvStep, RewardCall])),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("lose"), ORDINALS),
    st.tuples(st.just("ticks"), st.integers(1, 12)),
)


class Course:
    def __init__(self, *, episodes: bool) -> None:
        self.world = World(lengths=lambda seed, turn: 3 + seed % 30)
        self.tasks = episode_tasks(last=2) if episodes else InlineTasks()
        self.worker = self.world.start(slots=2, prefetch=4, checkpoint_tokens=8, tasks=self.tasks)
        self.target = 0
        self.placed: dict[tuple[str, int], ScheduledRequest] = {}
        self.cancelled: set[tuple[str, int]] = set()

    def act(self, name: str, value: Any) -> None:
        getattr(self, f"_{name}")(value)
        requests = self.worker.machine.requests
        assert self.worker.engine.active <= 2
        assert len(requests.by_key) <= self.worker.setup.requests_max

    def finish(self) -> None:
        self.tasks.held.clear()
        self.world.ticks(self.worker, 4)
        requests = self.worker.machine.requests
        self.world.until(self.worker, lambda: not requests.by_key, ticks_max=1_000)

    def _place(self, ordinal: int) -> None:
        attempt = 1 + sum(key[0].startswith(f"g{ordinal:010d}") for key in self.placed)
        request = self.world.place(self.worker, ordinal, version=self.target, attempt=attempt)
        self.placed[request.trajectory, attempt] = request
        self.world.decide(request)

    def _cancel(self, ordinal: int) -> None:
        for key, request in self.placed.items():
            if request.spec.ordinal == ordinal:
                self.cancelled.add(key)
                self.world.decide(self.world.cancel(request))

    def _assign(self, version: int) -> None:
        self.target = version
        self.world.decide(self.world.assign(self.worker, version))

    def _hold(self, kind: type) -> None:
        self.tasks.held.add(kind)

    def _release(self, _: None) -> None:
        self.tasks.held.clear()

    def _lose(self, ordinal: int) -> None:
        for key, row in self.worker.machine.requests.by_key.items():
            if row.episode and row.place.spec.ordinal == ordinal:
                self.tasks.lose(key)

    def _ticks(self, count: int) -> None:
        self.world.ticks(self.worker, count)


@settings(max_examples=60)
@given(st.booleans(), st.lists(ACTIONS, min_size=10, max_size=60))
def test_every_placement_ends_once_in_any_course_of_events(
    episodes: bool, actions: list[tuple[str, Any]]
) -> None:
    course = Course(episodes=episodes)
    for name, value in actions:
        course.act(name, value)
    course.finish()
    world = course.world
    logged = world.facts(TrajectoryLogged)
    failed = world.facts(RequestFailed)
    ends = Counter((fact.trajectory, fact.attempt) for fact in logged)
    ends.update((entry.trajectory, entry.attempt) for entry in failed)
    assert max(ends.values(), default=1) == 1
    assert set(ends) | course.cancelled >= set(course.placed)
    assert set(ends) <= set(course.placed)
    for fact in logged:
        request = course.placed[fact.trajectory, fact.attempt]
        assert (fact.version, fact.digest) == (
            request.spec.version,
            digest_of(request.spec.version),
        )
        trajectory = world.trajectory(fact)
        versions = {segment.version for segment in trajectory.segments if segment.kind == "model"}
        assert versions == {fact.version}
    worker = course.worker
    assert worker.machine.served.version == course.target
    assert world.facts(WorkerReady)[-1].version == course.target
    assert worker.counts["refused"] == 0 or episodes
    assert (worker.engine.active, worker.tasks.calls) == (0, [])
