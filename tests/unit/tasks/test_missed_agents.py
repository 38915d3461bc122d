"""What becomes of an agent that its cassette has refused something: it ends there and then.

Method: agents that would go on for a minute, whatever they were told.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.producers.tasks import agents
from dora_pipe.producers.tasks.agents import Agent, AgentAsked, CommandAgent, run_agent
from dora_pipe.producers.tasks.background import call_beside
from dora_pipe.producers.tasks.cassette import CassetteMiss, tool_call
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.tape import Cassette, EpisodeTape
from dora_pipe.producers.tasks.tape_door import open_door

ASKED = AgentAsked(base_url="http://nobody.invalid/v1", api_key="k", row={"n": 1})
LONG_S = 60.0
OVER_THE_DOOR = """
import json, os, socket, sys, time
with socket.socket(socket.AF_UNIX) as one:
    one.connect(os.environ["DORA_PIPE_CASSETTE"])
    one.sendall(b'{"name": "search", "arguments": {"at": 0}}\\n')
    one.recv(1000)
time.sleep(60)
open("ended", "w").close()
"""


class Swallows:
    """An agent that makes up what it is refused."""

    def __init__(self, goes_on: Callable[[EpisodeTape], Any], tape: EpisodeTape) -> None:
        self._goes_on, self._tape = goes_on, tape
        self.asked = 0

    source = None

    async def run(self, asked: AgentAsked) -> Any:
        """Asks for ever."""
        return await call_beside(self._goes_on, self._tape)


def asks(tape: EpisodeTape, at: int) -> None:
    """A call that nobody has recorded, and nobody minds."""
    with contextlib.suppress(CassetteMiss):
        tape.begin(tool_call("search", {"at": at}))


async def in_the_loop(tape: EpisodeTape) -> str:
    """Goes on where it is cancelled, too."""
    for _ in range(2):
        asks(tape, 0)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)
    return "made up"


def in_a_thread(tape: EpisodeTape) -> str:
    """As agents of frameworks do that are not `async`."""
    for at in range(int(LONG_S * 100)):
        asks(tape, at)
        threading.Event().wait(0.01)
    return "made up"


def strict_tape(folder: Path) -> EpisodeTape:
    (folder / "c.jsonl").touch()
    cassette = Cassette(file=CassetteFile(folder / "c.jsonl", writes=False), mode="strict")
    return EpisodeTape(cassette, {"n": 1}, by="g-001", where="row 1 of train")


def ended(agent: Agent | Any, tape: EpisodeTape) -> float:
    """After how many seconds it was refused."""

    async def play() -> None:
        async with open_door(tape):
            await run_agent(agent, ASKED, tape)

    began = time.monotonic()
    with pytest.raises(CassetteMiss) as refused:
        asyncio.run(play())
    assert str(refused.value) == (
        'row 1 of train: search({"at":0}) is not on c.jsonl; nothing of this row is;'
        ' task.cassette_mode = "record" records it'
    )
    return time.monotonic() - began


@pytest.mark.parametrize("goes_on", [in_the_loop, in_a_thread])
def test_a_function_that_makes_up_what_it_is_refused_ends_with_its_first_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: Callable[[EpisodeTape], Any]
) -> None:
    monkeypatch.setattr(agents, "END_S", 0.05)
    tape = strict_tape(tmp_path)
    assert ended(Swallows(goes_on, tape), tape) < LONG_S / 6


def test_a_command_that_makes_up_what_it_is_refused_ends_with_its_first_miss(
    tmp_path: Path,
) -> None:
    command = (sys.executable, "-S", "-c", OVER_THE_DOOR)
    assert ended(CommandAgent(command, str(tmp_path)), strict_tape(tmp_path)) < LONG_S / 6
    assert not (tmp_path / "ended").exists()


def test_an_agent_that_is_refused_nothing_gives_what_it_gives(tmp_path: Path) -> None:
    async def fine(_: EpisodeTape) -> str:
        return "found"

    tape = strict_tape(tmp_path)
    agent: Any = Swallows(fine, tape)
    assert asyncio.run(run_agent(agent, ASKED, tape)) == "found"
    assert tape.failed is None
