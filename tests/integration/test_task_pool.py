"""The task pool with real processes: calls, answers, episodes, and tasks that cannot be opened."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks import child as child_module
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
from dora_pipe.producers.tasks.task import Turn
from tests.support.task_pool import (
    LIMIT_S,
    USER_MODULE,
    ask,
    gather,
    prompt,
    score,
    survey,
    task,
    write_module,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_module(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_module(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def pool(shared: Path) -> Iterator[TaskPool]:
    with TaskPool(task(shared)) as opened:
        opened.wait()
        yield opened


@pytest.fixture(scope="module")
def episodes(shared: Path) -> Iterator[TaskPool]:
    with TaskPool(task(shared, episodes=True)) as opened:
        opened.wait()
        yield opened


@pytest.fixture
def impatient(folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder, limit_s=LIMIT_S, episodes=True)) as opened:
        opened.wait()
        yield opened


# What a task brings, and plain calls.


def test_facts_are_digests_and_sizes_of_the_users_task(folder: Path) -> None:
    facts = survey(task(folder))
    assert (facts.train_rows, facts.eval_rows) == (8, 2)
    assert len({facts.train_digest, facts.eval_digest, facts.reward_digest}) == 3
    assert survey(task(folder, rows=7)).train_digest != facts.train_digest
    (folder / "odd_task.py").write_text(USER_MODULE + "# changed\n")
    assert survey(task(folder)).reward_digest != facts.reward_digest


def test_prompts_and_rewards_come_back_under_their_request(pool: TaskPool) -> None:
    pool.submit(prompt("a", 3))
    pool.submit(score("b", "anything", 2))
    assert pool.pending == 2
    assert sorted(gather(pool, 2), key=lambda event: event.request) == [
        PromptReady(request="a", text="row 3", episode=False),
        Rewarded(request="b", reward=102.0, raw=None, parts={}),
    ]
    assert pool.pending == 0


def test_reward_may_have_parts_and_be_any_kind_of_number(pool: TaskPool) -> None:
    rich = Rewarded(request="a", reward=0.5, raw=1.0, parts={"exact": 1.0})
    assert ask(pool, score("a", "rich")) == rich
    assert ask(pool, score("a", "one")) == Rewarded(request="a", reward=1.0, raw=None, parts={})
    assert ask(pool, score("a", "true")) == Rewarded(request="a", reward=1.0, raw=None, parts={})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nan", "NoAnswer", "the reward is nan"),
        ("exit", "SystemExit", "3"),
    ],
)
def test_what_is_no_reward_is_an_error_and_never_a_zero(
    pool: TaskPool, text: str, error: str, message: str
) -> None:
    event = ask(pool, score("a", text))
    assert isinstance(event, TaskFailed)
    assert event.error == error
    assert message in event.message
    assert pool.deaths == 0


def test_what_a_reward_raises_is_told_on_one_line_of_bounded_length(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    # Opened here: what capfd catches in fixtures is not what it catches in the test.
    with TaskPool(task(folder)) as pool:
        event = ask(pool, score("a", "raise"))
        assert isinstance(event, TaskFailed)
        assert event.error == "ValueError"
        assert len(event.message) == 300
        assert "\n" not in event.message
        assert "Traceback" in capfd.readouterr().err


def test_what_users_print_of_sampled_text_steers_no_terminal(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    with TaskPool(task(folder)) as pool:
        assert isinstance(ask(pool, score("a", "print control")), Rewarded)
    err = capfd.readouterr().err
    assert "red\\x1b[31m \\x9b2J\n" in err
    assert "\\x07\n" in err
    assert err.replace("\n", "").isprintable()


def test_row_that_does_not_exist_is_an_error(pool: TaskPool) -> None:
    for index in (8, -1):
        event = ask(pool, prompt("a", index))
        assert isinstance(event, TaskFailed)
        assert f"row {index} of 8" in event.message


def test_more_calls_than_a_window_all_come_back(folder: Path) -> None:
    count = 40 * child_module.WINDOW
    with TaskPool(task(folder, processes=2)) as pool:
        for number in range(count):
            pool.submit(score(f"r{number}", "", number % 8))
        events = gather(pool, count)
    rewards = {event.request: event.reward for event in events if isinstance(event, Rewarded)}
    assert rewards == {f"r{number}": 100.0 + number % 8 for number in range(count)}


# Tasks that cannot be opened, or change.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "arithmetics"}, ConfigError, "unknown task `arithmetics`"),
        ({"kind": "odd_task:Odds"}, TaskError, "`odd_task` has no `Odds`"),
        ({"kind": "no_such_module:Odd"}, TaskError, "cannot import `no_such_module`"),
        ({"kind": "broken:Odd"}, TaskError, "ZeroDivisionError"),
        ({"options": {"row": 1}}, ConfigError, "task.options.row"),
        ({"options": {"rows": 0}}, TaskError, "has no rows"),
    ],
)
def test_task_that_cannot_be_opened_is_refused_with_its_reason(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    config = {"kind": "odd_task:Odd", "directory": str(folder), **changes}
    with pytest.raises(error, match=message):
        survey(model.Task(**config))


def test_data_that_changed_under_a_run_is_found_by_the_next_process(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    (folder / "dying.py").write_text("import os\ndef score(row, text): os._exit(1)\n")
    config = model.Task(kind="dataset", data=str(rows), reward="dying:score", directory=str(folder))
    with TaskPool(config) as pool:
        pool.wait()
        rows.write_text('{"prompt": "b"}\n')
        pool.submit(score("a", ""))
        with pytest.raises(TaskError, match="changed since"):
            gather(pool, 2)


# Episodes: turns, scores, and what happens when their process dies.


def test_episode_lives_through_its_turns_and_is_scored_by_its_environment(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    # Opened here: what capfd catches in fixtures is not what it catches in the test.
    with TaskPool(task(folder, episodes=True)) as episodes:
        assert ask(episodes, prompt("a", 4)) == PromptReady(
            request="a", text="episode of 4", episode=True
        )
        assert ask(episodes, EnvStep(request="a", turn=Turn(text="go"))) == EnvObserved(
            request="a", text="go 1", done=False, tool="echo", ok=True
        )
        assert ask(episodes, EnvStep(request="a", turn=Turn(text="stop"))) == EnvObserved(
            request="a", text="stop 2", done=True, tool="echo", ok=True
        )
        event = ask(episodes, score("a", "ask the episode"))
        assert event == Rewarded(request="a", reward=2.5, raw=None, parts={})
        assert isinstance(ask(episodes, EnvStep(request="a", turn=Turn(text="go"))), TaskFailed)
    assert "closed after 2" in capfd.readouterr().err


def test_samples_have_episodes_of_their_own_on_any_process(folder: Path) -> None:
    with TaskPool(task(folder, processes=2, episodes=True)) as pool:
        for number in range(6):
            pool.submit(prompt(f"r{number}"))
        gather(pool, 6)
        for number in range(6):
            for _ in range(number):
                ask(pool, EnvStep(request=f"r{number}", turn=Turn(text="go")))
        for number in range(6):
            event = ask(pool, EnvStep(request=f"r{number}", turn=Turn(text="go")))
            assert isinstance(event, EnvObserved)
            assert event.text == f"go {number + 1}"


@pytest.mark.parametrize("text", ["raise", "nonsense"])
def test_environment_that_raises_or_talks_nonsense_fails_its_request_only(
    episodes: TaskPool, text: str
) -> None:
    for name in "ab":
        ask(episodes, prompt(name))
    event = ask(episodes, EnvStep(request="a", turn=Turn(text=text)))
    assert isinstance(event, TaskFailed)
    raised = re.fullmatch(r"\w+\.py:\d+: no such move", event.message)
    assert raised or event.message == "the environment gave str, not an Observation"
    assert isinstance(ask(episodes, EnvStep(request="b", turn=Turn(text="go"))), EnvObserved)
    episodes.start(Forget(request="b"))


def test_episodes_of_a_process_that_died_for_another_are_lost_and_may_start_again(
    impatient: TaskPool,
) -> None:
    for name in ("bad", "idle", "waiting"):
        ask(impatient, prompt(name))
    impatient.submit(EnvStep(request="bad", turn=Turn(text="die")))
    impatient.submit(EnvStep(request="waiting", turn=Turn(text="sleep")))
    impatient.submit(prompt("other", 1))
    events = {event.request: event for event in gather(impatient, 4)}
    # Steps are made at the same time: which of them it was is not known the first time.
    assert all(isinstance(events[name], EpisodeLost) for name in ("bad", "idle", "waiting"))
    assert isinstance(events["other"], PromptReady)
    assert isinstance(ask(impatient, EnvStep(request="idle", turn=Turn(text="go"))), EpisodeLost)
    assert isinstance(ask(impatient, score("waiting", "")), EpisodeLost)
    assert isinstance(ask(impatient, prompt("idle", 2)), PromptReady)
    assert isinstance(ask(impatient, EnvStep(request="idle", turn=Turn(text="go"))), EnvObserved)


@pytest.mark.parametrize("text", ["hang", "sleep for ever"])
def test_step_that_hangs_costs_nobody_elses_episode(impatient: TaskPool, text: str) -> None:
    for name in ("bad", "other"):
        ask(impatient, prompt(name))
    failed = ask(impatient, EnvStep(request="bad", turn=Turn(text=text)))
    assert isinstance(failed, TaskFailed)
    assert failed.error == "TimedOut"
    observed = ask(impatient, EnvStep(request="other", turn=Turn(text="go")))
    assert isinstance(observed, EnvObserved)
    assert impatient.deaths == 0


def test_forgotten_call_and_episode_give_no_event(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    # Opened here: what capfd catches in fixtures is not what it catches in the test.
    with TaskPool(task(folder, episodes=True)) as episodes:
        ask(episodes, prompt("a"))
        episodes.submit(EnvStep(request="a", turn=Turn(text="go")))
        episodes.start(Forget(request="a"))
        episodes.start(Forget(request="never heard of"))
        episodes.submit(prompt("b"))
        episodes.poll()
        episodes.forget("b")
        assert episodes.pending == 0
        assert ask(episodes, prompt("c")) == PromptReady(
            request="c", text="episode of 0", episode=True
        )
    # That of `b` is closed where it had begun.
    assert capfd.readouterr().err.count("closed after") in (2, 3)


# Costs.


def test_task_process_never_imports_torch_by_itself() -> None:
    program = (
        "import sys, dora_pipe.producers.tasks.process, dora_pipe.producers.tasks.pool\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.decode().strip() == "[]"
