"""Tests of OpenEnv environments, with the server as a process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks.registry import reward_digest
from dora_pipe.producers.tasks.task import Environment, Retry, Turn
from tests.support.adapters_of_others import opened, task_of
from tests.support.tidy import ROOT

SERVER = ROOT / "examples" / "openenv" / "server.py"


@contextmanager
def serving(sessions: int = 64) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, str(SERVER), "0", str(sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip(), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (result, _):
        yield result


async def begun(world: Environment, seed: int = 1) -> Any:
    return await world.reset({"seed": seed})  # type: ignore[misc]


async def said(world: Environment, text: str) -> Any:
    return await world.respond(Turn(text=text))  # type: ignore[misc]


async def ended(world: Environment) -> None:
    close: Any = world.close
    await close()


def number(seed: int) -> int:
    return random.Random(seed).randint(1, 9)


def test_an_episode_is_played_to_its_end(url: str) -> None:
    async def play() -> None:
        task = task_of(f"openenv:{url}")
        world = opened(task, {})
        assert await begun(world, 4) == "1 to 9?\n"
        right = number(4)
        wrong = await said(world, "50" if right == 1 else "1")
        assert wrong.text in ("\nhigher\n", "\nerror: guess: should be below 50\n")
        assert (await said(world, "many")).text == "\nerror: guess is integer, not 'many'\n"
        assert (await said(world, str(right))).done
        reward: Any = world.reward("", [])
        assert reward.value == pytest.approx(0.9)
        assert reward.parts == {"steps": 2.0, "mistakes": 1.0, "ended": 1.0}
        await ended(world)

    asyncio.run(play())


def test_an_environment_that_fails_is_the_tasks_error_and_one_that_is_away_is_tried_again() -> None:
    async def play(url: str, process: subprocess.Popen[bytes]) -> None:
        task = task_of(f"openenv:{url}")

        async def begun_when_there_is_room() -> Environment:
            for _ in range(100):  # the server may not have noticed the disconnect
                with contextlib.suppress(Retry):
                    await begun(result := opened(task, {}))
                    return result
                await asyncio.sleep(0.05)
            raise AssertionError("there is no room")

        world, other = opened(task, {}), opened(task, {})
        await begun(world)
        with pytest.raises(RuntimeError, match="it broke"):
            await said(world, "99")
        with pytest.raises(Retry, match="at capacity"):
            await begun(other)
        await ended(world)
        other = await begun_when_there_is_room()
        process.kill()
        for words in ("ended the episode", "closed the connection of the episode"):
            with pytest.raises(Retry, match=words):
                await said(other, "1")
        await ended(other)
        for _ in range(65):  # more than task.options.sessions
            with pytest.raises(Retry, match="refused the connection"):
                await begun(opened(task, {}))

    with serving(1) as (url, process):
        asyncio.run(play(url, process))


def test_actions_and_observations_may_be_ones_own(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_words.py").write_text(
        "def act(text):\n    return {'guess': len(text)}\n"
        "def observe(observation):\n    return observation['hint'].upper()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = task_of(f"openenv:{url}")
    task = task_of(f"openenv:{url}", act="own_words:act", observe="own_words:observe")

    async def play() -> None:
        world = opened(task, {})
        assert await begun(world, 4) == "1 TO 9?\n"
        assert (await said(world, "x" * 12)).text == "\nLOWER\n"
        await ended(world)

    asyncio.run(play())
    assert reward_digest(task) != reward_digest(plain)
    ((name, stamp),) = task.packages().items()
    assert name == "openenv:guess" and stamp.startswith("0.7 ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"field": "gues"}, "an action has no `gues`"),
        ({"sessions": 0}, "task.options.sessions"),
    ],
)
def test_options_that_do_not_fit_are_named(url: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(f"openenv:{url}", **options)
    assert words in caught.value.message


def test_an_address_that_is_none_and_a_server_that_is_none_are_named() -> None:
    with pytest.raises(ConfigError, match="expected http"):
        task_of("openenv:host:8000")
    with pytest.raises(TaskError, match="has no metadata"):
        task_of("openenv:http://127.0.0.1:9")
