"""Episodes whose server keeps them: a worker that begins a trajectory again goes on with what is
there, and nothing of it is sampled, or done, a second time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, RewardCall
from dora_pipe.producers.worker.request import EPISODE_RESTARTS_MAX, Phase
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged
from tests.integration.test_worker_episodes import ANY, NAME, PLACES, Stage, check
from tests.support.games import KeptGames
from tests.support.worker import Worker


class KeptStage(Stage):
    """A server that all workers of a world play at."""

    def __init__(self, seed: int = 10, *, turns: int = 5, most: int = 12) -> None:
        super().__init__(seed, turns=turns, most=most)
        self.games = KeptGames(seed=seed, turns=turns)

    def tasks(self) -> KeptGames:
        games = self.games
        return KeptGames(seed=self.seed, turns=self.turns, server=games.server, steps=games.steps)

    def once(self) -> None:
        """Every step was made once."""
        assert len(self.games.steps) == len(set(self.games.steps))


def again(worker: Worker) -> int:
    return worker.counts["episodes started again"] + worker.counts["progress unusable"]


WAYS = [(what, *place) for what in ("kill", "stop") for place in PLACES]


@pytest.mark.parametrize(("what", "phase", "turns"), [*WAYS, ("kill", Phase.REWARDING, ANY)])
def test_another_worker_goes_on_with_the_episode_that_its_server_has_kept(
    what: str, phase: Phase, turns: int
) -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    worker.tasks.held.add(RewardCall)
    stage.until(worker, phase, turns)
    if phase is Phase.RUNNING:
        stage.world.ticks(worker, 12)
    getattr(stage, what)(worker)
    other = stage.worker()
    check(stage, stage.finish(other))
    stage.once()
    assert again(other) == 0
    assert NAME in stage.games.server, "as long as somebody may be asked for it again"
    stage.world.ticks(other, 2)
    assert stage.games.server == {}, "its server is told that nobody comes any more"


def test_step_that_nobody_acknowledged_is_answered_and_not_made_again() -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    stage.until(worker, Phase.ENVIRONMENT, 1)
    worker.tasks.poll()  # the answer is lost with the worker
    assert len(stage.games.steps) == 2
    stage.kill(worker)
    check(stage, stage.finish(stage.worker()))
    stage.once()


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.ENVIRONMENT, Phase.REWARDING])
def test_connection_that_is_lost_costs_nothing(phase: Phase) -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    stage.until(worker, phase, ANY if phase is Phase.REWARDING else 1)
    stage.lose(worker)
    check(stage, stage.finish(worker))
    stage.once()
    assert again(worker) == 0
    assert worker.counts["episodes told again"] == 1


def test_episode_that_its_server_has_not_kept_begins_again_from_its_prompt() -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    stage.until(worker, Phase.RUNNING, 2)
    stage.lose(worker)
    stage.games.server.clear()
    check(stage, stage.finish(worker))
    assert worker.counts["episodes started again"] == 1
    assert stage.games.steps.count((NAME, 0)) == 2

    stage = KeptStage(most=40)
    worker = stage.worker()
    stage.until(worker, Phase.RUNNING, 2)
    stage.kill(worker)
    stage.games.server.clear()
    check(stage, stage.finish(stage.worker()))


def test_records_of_an_environment_that_was_lost_do_not_end_the_one_that_began_after_it() -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    stage.until(worker, Phase.RUNNING, 2)
    stage.kill(worker)
    assert stage.resume is not None
    (said, seen), *_ = stage.games.server[NAME]
    assert isinstance(seen, EnvObserved)
    later = msgspec.structs.replace(seen, text=seen.text + " 7 8 9")
    stage.games.server[NAME] = [(said, later)]
    other = stage.worker()
    found = stage.finish(other)
    assert stage.world.facts(RequestFailed) == []
    assert stage.games.steps.count((NAME, 0)) == 1, "it is answered, not told anew"
    assert again(other) == 1
    first = next(one for one in found.segments if one.kind in ("tool", "environment"))
    assert list(found.token_ids[first.start : first.end])[-3:] == [7, 8, 9]
    stage.world.ticks(other, 2)
    assert stage.games.server == {}


def test_episode_that_is_never_kept_is_handed_back() -> None:
    stage = KeptStage(most=40)
    worker = stage.worker()
    worker.tasks.held.add(EnvStep)
    for _ in range(EPISODE_RESTARTS_MAX + 1):
        stage.until(worker, Phase.ENVIRONMENT, ANY)
        stage.lose(worker)
        stage.games.server.clear()
        stage.world.ticks(worker, 2)
    stage.world.until(worker, lambda: bool(stage.world.facts(RequestFailed)))
    (gone,) = stage.world.facts(RequestFailed)
    assert (gone.error, gone.retryable) == ("EpisodeLost", True)


BLOWS = st.tuples(st.sampled_from(["kill", "stop", "lose", "vanish", "hold"]), st.integers(1, 25))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(BLOWS, min_size=2, max_size=7))
def test_whatever_happens_the_record_is_that_of_an_undisturbed_run_and_steps_are_made_once(
    seed: int, blows: list[tuple[str, int]]
) -> None:
    stage = KeptStage(seed, turns=8, most=12)
    worker = stage.worker()
    vanished = False
    for what, ticks in blows:
        stage.world.ticks(worker, ticks)
        if what == "hold":
            worker.tasks.held ^= {EnvStep}
        elif what == "vanish":
            if any(one[0] == "lose" for one in blows):
                continue
            stage.games.server.clear()
            vanished = True
            stage.kill(worker)
            worker = stage.worker()
        else:
            getattr(stage, what)(worker)
        if stage.world.facts(TrajectoryLogged):
            break
        if what in ("kill", "stop"):
            worker = stage.worker()
    worker.tasks.held.clear()
    check(stage, stage.finish(worker))
    assert vanished or len(stage.games.steps) == len(set(stage.games.steps))
    assert stage.world.facts(RequestFailed) == []
