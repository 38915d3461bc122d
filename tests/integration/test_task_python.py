"""A task runs in an interpreter of another environment, which has msgspec and nothing of ours."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, Rewarded
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Turn
from tests.support.task_pool import ask, pid_of, prompt, score, survey, wait_until_gone

MODULE = """
import os, sys
import a_game
from dora_pipe.producers.tasks.task import Environment, Observation, Task

class World(Environment):
    def reset(self, row):
        return a_game.NAME
    async def step(self, text):
        return Observation(text=sys.prefix, done=True)

class Game(Task):
    def rows(self, split):
        return [{"n": 1}]
    def environment(self, row):
        return World()
    def reward(self, row, text, turns):
        if text == "pid": return os.getpid()
        brought = {name.partition(".")[0] for name in sys.modules}
        known = {"mine", "a_game", "dora_pipe", "msgspec", "__main__", "sitecustomize"}
        return len(brought - set(sys.stdlib_module_names) - known)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    assert msgspec.__file__ is not None
    shutil.copytree(Path(msgspec.__file__).parent, packages / "msgspec")
    (packages / "a_game.py").write_text('NAME = "a game"\n')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def task(folder: Path, python: Path, **keys: Any) -> model.Task:
    given = {"kind": "mine:Game", "directory": str(folder), **keys}
    return model.Task(python=str(python), **given)


@pytest.fixture
def pool(bare: Path, folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder, bare / "bin" / "python")) as opened:
        opened.wait()
        yield opened


def test_task_runs_with_the_packages_of_its_own_environment(pool: TaskPool, bare: Path) -> None:
    assert ask(pool, prompt("a")).text == "a game"  # type: ignore[union-attr]
    observed = ask(pool, EnvStep(request="a", turn=Turn(text="go")))
    assert isinstance(observed, EnvObserved)
    assert observed.text == str(bare)
    rewarded = ask(pool, score("a", "others"))
    assert isinstance(rewarded, Rewarded)
    assert rewarded.reward == 0  # of this environment it has nothing


def test_task_process_that_dies_is_started_there_again(pool: TaskPool) -> None:
    pid = pid_of(pool)
    os.kill(pid, 9)
    assert wait_until_gone(pid)
    pool.poll()
    assert pid_of(pool) != pid


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "arithmetic"},
        {"kind": "calculator"},
        {"kind": "dataset", "data": "rows.jsonl", "reward": "exact"},
        {"kind": "dataset", "data": "rows.jsonl", "chat": True, "reward": "regex"},
    ],
)
def test_built_in_tasks_need_nothing_else(bare: Path, folder: Path, keys: dict[str, Any]) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    if "data" in keys:
        keys = {**keys, "data": str(rows)}
    if keys.get("reward") == "regex":
        del keys["reward"]
        options = {"pattern": "([0-9]+)"}
        keys["reward"] = (model.RewardUse(use="regex", options=options),)
    elsewhere = task(folder, bare / "bin" / "python", **keys)
    here = survey(msgspec.structs.replace(elsewhere, python=""))
    assert survey(elsewhere) == here  # rows and rewards are the same ones


def test_interpreter_that_will_not_do_is_refused_by_what_is_wrong_with_it(
    bare: Path, folder: Path
) -> None:
    empty = folder / "empty"
    words = [sys.executable, "-m", "venv", "--without-pip", str(empty)]
    subprocess.run(words, check=True)
    old = folder / "old"
    old.write_text("#!/bin/sh\necho 3.10\n")
    old.chmod(0o755)
    no_python = folder / "no_python"
    no_python.write_text("#!/bin/sh\necho hello\n")
    no_python.chmod(0o755)
    for python, message in (
        (folder / "absent", "absent` does not exist"),
        (folder / "mine.py", "mine.py` cannot be run"),
        (no_python, "no_python` is not Python: hello"),
        (old, "old` is Python 3.10, expected 3.11"),
        (empty / "bin" / "python", "python` has no msgspec"),
    ):
        with pytest.raises(ConfigError, match=message):
            survey(task(folder, python))


def test_interpreter_that_is_taken_away_ends_the_pool_in_one_line(bare: Path, folder: Path) -> None:
    link = folder / "python"
    link.write_text(f'#!/bin/sh\nexec {bare / "bin" / "python"} "$@"\n')
    link.chmod(0o755)
    with TaskPool(task(folder, link)) as pool:
        pid = pid_of(pool)
        link.unlink()
        os.kill(pid, 9)
        assert wait_until_gone(pid)
        with pytest.raises(TaskError, match="no task process started"):
            for _ in range(2):
                pool.poll()


def test_configuration_names_an_interpreter_next_to_it(bare: Path, folder: Path) -> None:
    (folder / "games").symlink_to(bare, target_is_directory=True)
    head = '[run]\nname = "page"\nsteps = 2\n\n[model]\npath = "model"\n\n'
    written = folder / "config.toml"
    written.write_text(head + '[task]\nkind = "mine:Game"\npython = "games/bin/python"\n')
    with TaskPool(load_config(written, ()).task) as pool:
        observed = [ask(pool, prompt("a")), ask(pool, EnvStep(request="a", turn=Turn(text="go")))]
        assert [getattr(entry, "text", "") for entry in observed] == ["a game", str(bare)]
