"""Episodes: turns, scores, and what happens when their process dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    PromptReady,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.task_pool import (
    LIMIT_S,
    ask,
    gather,
    prompt,
    score,
    task,
    write_module,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_module(tmp_path)


@pytest.fixture
def episodes(folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder, episodes=True)) as opened:
        opened.wait()
        yield opened


@pytest.fixture
def impatient(folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder, limit_s=LIMIT_S, episodes=True)) as opened:
        opened.wait()
        yield opened


# Episodes.


def test_episode_lives_through_its_turns_and_is_scored_by_its_environment(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    # Opened here: what capfd catches in fixtures is not what it catches in the test.
    with TaskPool(task(folder, episodes=True)) as episodes:
        assert ask(episodes, prompt("a", 4)) == PromptReady(
            request="a", text="episode of 4", episode=True
        )
        assert ask(episodes, EnvStep(request="a", text="go")) == EnvObserved(
            request="a", text="go 1", done=False, tool="echo", ok=True
        )
        assert ask(episodes, EnvStep(request="a", text="stop")) == EnvObserved(
            request="a", text="stop 2", done=True, tool="echo", ok=True
        )
        event = ask(episodes, score("a", "ask the episode"))
        assert event == Rewarded(request="a", reward=2.5, raw=None, parts={})
        assert "closed after 2" in capfd.readouterr().err
        assert isinstance(ask(episodes, EnvStep(request="a", text="go")), TaskFailed)


def test_environment_without_a_score_leaves_it_to_the_task(episodes: TaskPool) -> None:
    ask(episodes, prompt("a", 4))
    assert ask(episodes, score("a", "", 4)) == Rewarded(
        request="a", reward=104.0, raw=None, parts={}
    )


def test_siblings_have_episodes_of_their_own_on_any_process(folder: Path) -> None:
    with TaskPool(task(folder, processes=2, episodes=True)) as pool:
        for number in range(6):
            pool.submit(prompt(f"r{number}"))
        gather(pool, 6)
        for number in range(6):
            for _ in range(number):
                ask(pool, EnvStep(request=f"r{number}", text="go"))
        for number in range(6):
            event = ask(pool, EnvStep(request=f"r{number}", text="go"))
            assert isinstance(event, EnvObserved)
            assert event.text == f"go {number + 1}"


@pytest.mark.parametrize("text", ["raise", "nonsense"])
def test_environment_that_raises_or_talks_nonsense_fails_its_request_only(
    episodes: TaskPool, text: str
) -> None:
    for name in "ab":
        ask(episodes, prompt(name))
    event = ask(episodes, EnvStep(request="a", text=text))
    assert isinstance(event, TaskFailed)
    assert event.message in (
        "no such move",
        "the environment gave str, not an Observation",
    )
    assert isinstance(ask(episodes, EnvStep(request="b", text="go")), EnvObserved)


@pytest.mark.parametrize(("text", "error"), [("die", "ProcessDied"), ("hang", "TimedOut")])
def test_episodes_of_a_process_that_died_for_another_are_lost_and_may_start_again(
    impatient: TaskPool, text: str, error: str
) -> None:
    for name in ("bad", "idle", "waiting"):
        ask(impatient, prompt(name))
    impatient.submit(EnvStep(request="bad", text=text))
    impatient.submit(EnvStep(request="waiting", text="go"))
    impatient.submit(prompt("other", 1))
    events = {event.request: event for event in gather(impatient, 4)}
    failed = events["bad"]
    assert isinstance(failed, TaskFailed)
    assert failed.error == error
    assert isinstance(events["idle"], EpisodeLost)
    assert isinstance(events["waiting"], EpisodeLost)
    assert isinstance(events["other"], PromptReady)
    assert isinstance(ask(impatient, EnvStep(request="idle", text="go")), EpisodeLost)
    assert isinstance(ask(impatient, score("waiting", "")), EpisodeLost)
    assert isinstance(ask(impatient, prompt("idle", 2)), PromptReady)
    assert isinstance(ask(impatient, EnvStep(request="idle", text="go")), EnvObserved)


def test_forgotten_call_and_episode_give_no_event(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    # Opened here: what capfd catches in fixtures is not what it catches in the test.
    with TaskPool(task(folder, episodes=True)) as episodes:
        ask(episodes, prompt("a"))
        episodes.submit(EnvStep(request="a", text="go"))
        episodes.start(Forget(request="a"))
        episodes.start(Forget(request="never heard of"))
        episodes.submit(prompt("b"))
        episodes.poll()
        episodes.forget("b")
        assert episodes.pending == 0
        assert ask(episodes, prompt("c")) == PromptReady(
            request="c", text="episode of 0", episode=True
        )
        ask(episodes, EnvStep(request="c", text="go"))  # behind everything sent before
        assert capfd.readouterr().err.count("closed after") == 2


def test_forgotten_request_that_hangs_is_still_killed_silently(impatient: TaskPool) -> None:
    impatient.submit(score("a", "forever"))
    impatient.poll()
    impatient.forget("a")
    assert isinstance(ask(impatient, score("a", "one")), Rewarded)
    assert impatient.deaths == 1


def test_second_prompt_of_a_request_replaces_its_episode(episodes: TaskPool) -> None:
    ask(episodes, prompt("a"))
    ask(episodes, EnvStep(request="a", text="go"))
    episodes.submit(prompt("a"))
    episodes.submit(prompt("a"))
    assert len(gather(episodes, 1)) == 1
    event = ask(episodes, EnvStep(request="a", text="go"))
    assert isinstance(event, EnvObserved)
    assert event.text == "go 1"
