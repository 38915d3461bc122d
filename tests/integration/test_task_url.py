"""Tests of task servers on other machines: failures restart episodes, and a token is required."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.config.load import from_plain, load_config
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks import pool as pool_module
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, EpisodeLost, PromptReady, Rewarded
from dora_pipe.producers.tasks.links import TOKEN_VARIABLE
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Turn
from tests.support.task_pool import DEADLINE_S, ask, is_gone, prompt, score, write_module
from tests.support.task_server import TOKEN, Server
from tests.support.tidy import ROOT


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_module(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    opened = Server(write_module(tmp_path_factory.mktemp("server")))
    yield opened
    opened.end(signal.SIGKILL)


@contextmanager
def closed_ports(count: int) -> Iterator[list[int]]:
    """Ports that are kept from other processes and refuse connections."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for entry in bound:
            entry.bind(("127.0.0.1", 0))
        yield [entry.getsockname()[1] for entry in bound]


def task(*urls: str, **keys: Any) -> model.Task:
    return model.Task(kind="whatever", url=urls, environment_timeout_s=60.0, **keys)


def pid_there(pool: TaskPool) -> int:
    rewarded = ask(pool, score("pid", "pid"))
    assert isinstance(rewarded, Rewarded)
    return int(rewarded.reward)


def until_gone(pool: TaskPool, pid: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_gone(pid):
        assert time.monotonic() < end
        pool.poll(0.05)


def check_played(pool: TaskPool, name: str) -> None:
    assert isinstance(ask(pool, prompt(name)), PromptReady)
    observed = ask(pool, EnvStep(request=name, turn=Turn(text="go")))
    assert isinstance(observed, EnvObserved)
    assert observed.text == "go 1"


def test_episodes_are_played_at_a_server_and_its_processes_end_with_the_pool(
    folder: Path,
) -> None:
    server = Server(folder)
    with TaskPool(task(server.url, processes=2)) as pool:
        assert pool.wait().train_rows == 8
        for name in "abc":
            check_played(pool, name)
        pid = pid_there(pool)
        assert not is_gone(pid)
    end = time.monotonic() + DEADLINE_S
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert is_gone(pid)
    assert server.end() == 0


def test_process_there_that_dies_loses_its_episodes_which_start_again(server: Server) -> None:
    with TaskPool(task(server.url)) as pool:
        check_played(pool, "a")
        pid = pid_there(pool)
        os.kill(pid, signal.SIGKILL)
        lost = pool.poll(DEADLINE_S) or pool.poll(DEADLINE_S)
        assert [type(event) for event in lost] == [EpisodeLost]
        assert server.url in lost[0].message  # type: ignore[union-attr]
        check_played(pool, "a")
        assert pid_there(pool) != pid


def test_server_that_is_killed_is_reached_again_when_it_is_back(folder: Path) -> None:
    first = Server(folder)
    with TaskPool(task(first.url)) as pool:
        check_played(pool, "a")
        pid = pid_there(pool)
        first.end(signal.SIGKILL)
        until_gone(pool, pid)
        second = Server(folder, port=first.port)
        check_played(pool, "a")
        assert second.end() == 0


def test_of_several_servers_the_one_that_is_there_is_played_at(server: Server) -> None:
    with (
        closed_ports(1) as (closed,),
        TaskPool(task(f"tcp://127.0.0.1:{closed}", server.url, processes=2)) as pool,
    ):
        for name in "abcd":
            check_played(pool, name)
        assert pool.deaths >= 1


def test_server_that_nobody_reaches_ends_the_pool_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "UNREACHED_MAX", 2)
    with (
        closed_ports(1) as (closed,),
        TaskPool(task(f"tcp://127.0.0.1:{closed}")) as pool,
        pytest.raises(TaskError, match=f"{closed} ended"),
    ):
        pool.wait()


def test_each_of_several_servers_may_be_away_as_long_as_a_single_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "UNREACHED_MAX", 2)
    with (
        closed_ports(2) as closed,
        TaskPool(task(*(f"tcp://127.0.0.1:{port}" for port in closed))) as pool,
    ):
        with pytest.raises(TaskError, match="task server connections ended"):
            pool.wait()
        assert pool.deaths == 4


def test_nobody_plays_without_the_token(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(pool_module, "UNREACHED_MAX", 2)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN.upper())
    with (
        TaskPool(task(server.url)) as pool,
        pytest.raises(TaskError, match="task server connections ended"),
    ):
        pool.wait()
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        TaskPool(task(server.url))


def test_strangers_that_say_nothing_hold_up_nobody(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
    with TaskPool(task(server.url)) as pool:
        check_played(pool, "a")
    for entry in silent:
        entry.close()


def test_no_more_processes_than_the_server_allows(folder: Path) -> None:
    server = Server(folder, "--processes", "1")
    with TaskPool(task(server.url, processes=2)) as pool:
        check_played(pool, "a")
        check_played(pool, "b")
        assert pid_there(pool) == pid_there(pool)
    server.end()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": "http://host:1"}, "is not of the form tcp://HOST:PORT"),
        ({"url": ["tcp://host:1", "tcp://host"]}, "`tcp://host` is not of the form"),
        ({"url": "tcp://host:1", "python": "/bin/python"}, "task.python: the task runs where"),
    ],
)
def test_what_is_no_address_is_refused(keys: dict[str, Any], message: str) -> None:
    plain = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "task": {"kind": "arithmetic", **keys},
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_plain(plain)


def test_page_shows_the_keys_of_workers(folder: Path, server: Server) -> None:
    head = '[run]\nname = "page"\nsteps = 2\n\n[model]\npath = "model"\n\n'
    page = (ROOT / "docs" / "environments.md").read_text()
    (toml,) = re.findall(r"```toml\n([^`]*tcp://[^`]*)```", page)
    assert len(re.findall(r"tcp://games-\d:7000", toml)) == 2
    (folder / "page.toml").write_text(
        head + re.sub(r"tcp://games-\d:7000", server.url, toml).replace("= 16", "= 1")
    )
    (folder / "games.token").write_text(f"{TOKEN}\n")
    with TaskPool(load_config(folder / "page.toml", ()).task) as pool:
        check_played(pool, "a")
