"""Environments, tools and agents that are answered from a cassette, in task processes.

Method: the user's code notes every call that is really made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.model import Task
from dora_pipe.config.outside import McpServer
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    AgentEnded,
    EnvObserved,
    EnvStep,
    GroupCall,
    GroupRewarded,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    Said,
    TaskCall,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import ToolCall, Turn
from dora_pipe.schemas.control import CassetteUse
from tests.support.data_files import write_jsonl
from tests.support.tidy import ROOT

CODE = '''
import asyncio, os, random
from pathlib import Path
from dora_pipe.producers.tasks.port import Environment, Observation, Retry, Task
from dora_pipe.producers.tasks.taped import cassette_variables, taped

def note(what):
    with Path(__file__).with_name("made").open("a") as made:
        made.write(what + "\\n")

def chance(sides: int) -> int:
    """Throw a die.

    Args:
        sides: It has.
    """
    note("chance")
    if sides == 0:
        raise ValueError("no side")
    return random.randrange(10**9)

class World(Environment):
    def __init__(self):
        note("open")
    def reset(self, row):
        self.turns = 0
        return f"{os.environ.get('SALT', '')}begin {row['n']}"
    def step(self, text):
        note("step")
        self.turns += 1
        if text == "raise":
            raise KeyError("a wall")
        return Observation(text=f"{text} {self.turns}", done=self.turns == 2)
    def reward(self, text, turns):
        note("reward")
        return float(self.turns)

class Rows(Task):
    def rows(self, split):
        return [{"n": n} for n in range(3)]

class Tools(Rows):
    def prompt(self, row):
        return [{"role": "user", "content": "throw"}]
    def tools(self, row):
        return [chance]
    def score(self, row, completion):
        return 1.0

class Judged(Tools):
    def tools(self, row):
        return []
    async def score(self, row, completion):
        return float(len((await judge(completion.text))["why"]))

class Ranked(Judged):
    async def score_group(self, row, completions):
        return [len((await judge(one.text))["why"]) for one in completions]

class Worlds(Rows):
    def environment(self, row):
        return World() if row["n"] else None
    def prompt(self, row):
        return "alone"

@taped
async def search(query: str, most: int = 3) -> dict:
    note("search")
    if query == "nothing":
        raise LookupError("no such word")
    return {"found": (query, most), "by": random.random()}

@taped
async def judge(text: str) -> dict:
    note("judge")
    return {"why": text * random.randrange(1, 100)}

@taped
def plain(word: str) -> str:
    note("plain")
    return word.upper()

async def agent(row):
    found = [await search("a"), await search("a"), await search("b", most=1)]
    try:
        await search("nothing")
    except Exception as error:
        found.append(str(error))
    return str([*found, plain("x")])

async def starts(row):
    words = [os.environ["DORA_PIPE"], "cassette", "call", "--", "echo", "x"]
    for given in ({}, cassette_variables()):
        done = await asyncio.create_subprocess_exec(
            *words, env={**os.environ, **given}, stdout=-1, stderr=-1)
        said, errors = await done.communicate()
        line = errors.decode().partition("\\n")[0]
        note("started" if said == b"x\\n" else line.replace("error: ", "").replace(" ", "_"))

async def swallows(row):
    try:
        await search("never")
    except Exception:
        await asyncio.sleep(60)
        note("went on")
'''

ONE, TWO = "g0000000000-001", "g0000000000-002"
THROW = Turn(text="t", tool_calls=(ToolCall(name="chance", arguments={"sides": 6}, id="c0"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@contextmanager
def pool_of(folder: Path, kind: str, mode: str, run: str, **task: Any) -> Iterator[TaskPool]:
    (folder / "made").write_text("")
    options = {"directory": str(folder), "kind": kind, "cassette": str(folder / "c.jsonl"), **task}
    with TaskPool(Task(cassette_mode=mode, **options), run=run) as pool:  # type: ignore[arg-type]
        pool.wait()
        yield pool


def made(folder: Path) -> list[str]:
    """Calls of the user's code since its pool began."""
    return (folder / "made").read_text().split()


def ask(pool: TaskPool, *calls: TaskCall) -> list[TaskEvent]:
    """What they give, one after the other."""
    found: list[TaskEvent] = []
    end = time.monotonic() + 60.0
    for call in calls:
        pool.submit(call)
        events: list[TaskEvent] = []
        while not events and time.monotonic() < end:
            events = pool.poll(0.2)
        found += events
    return found


def without_use(events: list[TaskEvent]) -> list[TaskEvent]:
    return [
        one
        if isinstance(one, TaskFailed)
        else msgspec.structs.replace(one, cassette=None, **_not_replayable(one))
        for one in events
    ]


def _not_replayable(one: TaskEvent) -> dict[str, Any]:
    return {"replayable": False} if isinstance(one, PromptReady) else {}


def throws(by: str) -> list[TaskCall]:
    two = (ToolCall(name="chance", arguments={"sides": 6}, id=name) for name in ("c0", "c1"))
    none = ToolCall(name="chance", arguments={"sides": 0}, id="c2")
    return [
        PromptCall(request=f"{by}/1", split="train", index=1),
        EnvStep(request=f"{by}/1", turn=Turn(text="t", tool_calls=(*two, none))),
        EnvStep(request=f"{by}/1", turn=THROW),
        RewardCall(request=f"{by}/1", split="train", index=1, text="t", turns=()),
    ]


def walk(by: str, *texts: str, index: int = 1) -> list[TaskCall]:
    return [
        PromptCall(request=f"{by}/1", split="train", index=index),
        *(EnvStep(request=f"{by}/1", turn=Turn(text=text)) for text in texts),
        RewardCall(request=f"{by}/1", split="train", index=index, text=texts[-1], turns=()),
    ]


def test_a_second_run_makes_no_call_of_a_tool_and_is_told_the_very_same(folder: Path) -> None:
    with pool_of(folder, "mine:Tools", "record", "first") as pool:
        first = {by: ask(pool, *throws(by)) for by in (ONE, TWO)}
        assert made(folder) == ["chance"] * 8
    assert without_use(first[ONE]) != without_use(first[TWO])  # by chance, each its own
    with pool_of(folder, "mine:Tools", "record", "second") as pool:
        again = {by: ask(pool, *throws(by)) for by in (TWO, ONE)}
        assert made(folder) == []
    assert {by: without_use(one) for by, one in again.items()} == {
        by: without_use(one) for by, one in first.items()
    }
    last = again[ONE][-1]
    assert isinstance(last, Rewarded)
    assert last.cassette is not None
    assert (last.cassette.answers, last.cassette.asked, last.cassette.turns) == (4, 0, (0, 1))


def test_an_environment_is_not_even_opened_where_the_cassette_has_its_episode(folder: Path) -> None:
    calls = [*walk(ONE, "left", "right"), PromptCall(request="a", split="train", index=0)]
    with pool_of(folder, "mine:Worlds", "record", "first") as pool:
        first = ask(pool, *calls)
        assert made(folder) == ["open", "step", "step", "reward"]
    with pool_of(folder, "mine:Worlds", "strict", "second") as pool:
        facts = pool.facts
        again = ask(pool, *calls)
        assert made(folder) == []
    assert without_use(again) == without_use(first)
    assert facts is not None
    assert (facts.cassette, facts.replayable, facts.first_rows["train"]) == ("strict", True, 0)
    assert isinstance(again[3], Rewarded)
    assert again[3].reward == 2.0


@pytest.mark.slow
def test_an_episode_that_leaves_the_cassette_is_told_to_a_real_environment_and_recorded(
    folder: Path,
) -> None:
    with pool_of(folder, "mine:Worlds", "record", "first") as pool:
        ask(pool, *walk(ONE, "left", "right"))
    with pool_of(folder, "mine:Worlds", "record", "second") as pool:
        found = ask(pool, *walk(ONE, "left", "up"))
        assert made(folder) == ["open", "step", "step", "reward"]
        assert isinstance(found[2], EnvObserved)
        assert (found[2].text, found[2].done) == ("up 2", True)
    with pool_of(folder, "mine:Worlds", "strict", "third") as pool:
        assert without_use(ask(pool, *walk(TWO, "left", "up"))) == without_use(
            [*_by(found, f"{TWO}/1")]
        )
        assert made(folder) == []


def _by(events: list[TaskEvent], request: str) -> Iterator[TaskEvent]:
    for one in events:
        yield msgspec.structs.replace(one, request=request)


@pytest.mark.slow
def test_a_real_environment_that_answers_otherwise_before_ends_the_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(folder, "mine:Worlds", "record", "first") as pool:
        ask(pool, *walk(ONE, "left", "right"))
    monkeypatch.setenv("SALT", "another ")
    with pool_of(folder, "mine:Worlds", "record", "second") as pool:
        *_, failed = ask(pool, *walk(ONE, "left", "up")[:3])
    assert isinstance(failed, TaskFailed)
    assert failed.error == "CassetteDiffers"
    assert "begins otherwise" in failed.message


@pytest.mark.slow
def test_what_an_environment_raises_is_raised_again(folder: Path) -> None:
    calls = walk(ONE, "left", "raise")[:3]
    with pool_of(folder, "mine:Worlds", "record", "first") as pool:
        first = ask(pool, *calls)
    with pool_of(folder, "mine:Worlds", "strict", "second") as pool:
        again = ask(pool, *calls)
        assert made(folder) == []
    assert again[-1] == first[-1]
    assert isinstance(again[-1], TaskFailed)
    assert again[-1].error == "KeyError"


def test_a_strict_cassette_refuses_by_name_what_it_does_not_have(folder: Path) -> None:
    with pool_of(folder, "mine:Tools", "record", "first") as pool:
        ask(pool, *throws(ONE)[:3])
    four = Turn(text="t", tool_calls=(ToolCall(name="chance", arguments={"sides": 4}, id="c0"),))
    with pool_of(folder, "mine:Tools", "strict", "second") as pool:
        *_, failed = ask(pool, throws(ONE)[0], EnvStep(request=f"{ONE}/1", turn=four))
        assert made(folder) == []
    assert isinstance(failed, TaskFailed)
    assert failed.error == "CassetteMiss"
    assert failed.message == (
        'row 1 of train: chance({"sides":4}) is not on c.jsonl;'
        ' nearest: chance({"sides":6}), at the same place;'
        ' task.cassette_mode = "record" records it'
    )


@pytest.mark.slow
def test_refresh_asks_again_and_what_it_records_counts_from_then_on(folder: Path) -> None:
    said: list[Any] = []
    for mode, run in (("record", "first"), ("refresh", "second"), ("strict", "third")):
        with pool_of(folder, "mine:Tools", mode, run) as pool:
            said.append(without_use(ask(pool, *throws(ONE))))
            assert len(made(folder)) == (0 if mode == "strict" else 4)
    assert said[0] != said[1]
    assert said[1] == said[2]


def agent_call(by: str) -> AgentCall:
    return AgentCall(
        request=f"{by}/1", split="train", index=1, base_url="http://nobody.invalid/v1", api_key="k"
    )


def test_an_agents_marked_tools_are_answered_without_a_network(folder: Path) -> None:
    with pool_of(folder, "mine:Tools", "record", "first", agent="mine:agent") as pool:
        (first,) = ask(pool, agent_call(ONE))
        assert made(folder) == ["search"] * 4 + ["plain"]
    with pool_of(folder, "mine:Tools", "strict", "second", agent="mine:agent") as pool:
        (again,) = ask(pool, agent_call(ONE))
        assert made(folder) == []
    assert isinstance(first, AgentEnded)
    assert isinstance(again, AgentEnded)
    assert again.text == first.text
    assert again.cassette is not None
    assert (again.cassette.answers, again.cassette.asked) == (5, 0)


def test_a_marked_judge_of_a_reward_is_answered_without_its_key(folder: Path) -> None:
    def scored(run: str, mode: str, text: str) -> TaskEvent:
        with pool_of(folder, "mine:Judged", mode, run) as pool:
            call = RewardCall(request=f"{ONE}/1", split="train", index=1, text=text, turns=())
            return ask(pool, call)[0]

    first = scored("first", "record", "good")
    assert made(folder) == ["judge"]
    again = scored("second", "strict", "good")
    assert made(folder) == []
    assert without_use([first]) == without_use([again])
    assert isinstance(again, Rewarded)
    assert again.cassette is not None
    assert (again.cassette.answers, again.cassette.asked) == (1, 0)
    missed = scored("third", "strict", "bad")
    assert isinstance(missed, TaskFailed)
    assert missed.error == "CassetteMiss"


@pytest.mark.slow
def test_a_marked_judge_of_all_answers_together_is_answered_too(folder: Path) -> None:
    def ranked(run: str, mode: str, *texts: str) -> TaskEvent:
        said = tuple(Said(text=one, turns=(one,)) for one in texts)
        with pool_of(folder, "mine:Ranked", mode, run) as pool:
            call = GroupCall(request="g0000000000", split="train", index=1, completions=said)
            return ask(pool, call)[0]

    first = ranked("first", "record", "good", "better")
    assert made(folder) == ["judge", "judge"]
    assert isinstance(first, GroupRewarded)
    assert ranked("second", "strict", "good", "better") == first
    assert made(folder) == []
    missed = ranked("third", "strict", "better", "good")
    assert isinstance(missed, TaskFailed)
    assert missed.error == "CassetteMiss"


@pytest.mark.slow
def test_a_function_hands_the_cassette_on_to_what_it_starts_and_nothing_goes_around_a_strict_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORA_PIPE", str(Path(sys.executable).parent / "dora-pipe"))
    with pool_of(folder, "mine:Tools", "record", "first", agent="mine:starts") as pool:
        (first,) = ask(pool, agent_call(ONE))
        assert made(folder) == ["started", "started"]
    assert isinstance(first, AgentEnded)
    assert first.cassette == CassetteUse(asked=1)
    with pool_of(folder, "mine:Tools", "strict", "second", agent="mine:starts") as pool:
        (again,) = ask(pool, agent_call(ONE))
        refused, started = made(folder)
    assert (refused[:40], started) == ("echo_is_asked_by_a_process_of_no_traject", "started")
    assert isinstance(again, AgentEnded)
    assert again.cassette is not None
    assert (again.cassette.answers, again.cassette.asked) == (1, 0)


@pytest.mark.slow
def test_an_agent_that_catches_the_refusal_neither_hides_it_nor_goes_on(folder: Path) -> None:
    (folder / "c.jsonl").touch()
    with pool_of(folder, "mine:Tools", "strict", "first", agent="mine:swallows") as pool:
        (failed,) = ask(pool, agent_call(ONE))
    assert made(folder) == []
    assert isinstance(failed, TaskFailed)
    assert failed.error == "CassetteMiss"
    assert 'search({"most":3,"query":"never"})' in failed.message


@pytest.mark.slow
def test_tools_of_an_mcp_server_need_no_server(folder: Path) -> None:
    (folder / "server.py").write_text((ROOT / "tests/support/mcp_server.py").read_text())
    write_jsonl(folder / "rows.jsonl", [{"prompt": [{"role": "user", "content": "add"}]}])
    data = {"data": str(folder / "rows.jsonl"), "reward": "exact", "answer_column": "prompt"}
    server = McpServer(command=(sys.executable, "server.py"), name="sum")
    sums = Turn(
        text="", tool_calls=(ToolCall(name="sum_add-numbers", arguments={"a": 1, "b": 2}, id="c0"),)
    )
    calls: list[TaskCall] = [
        PromptCall(request=f"{ONE}/1", split="train", index=0),
        EnvStep(request=f"{ONE}/1", turn=sums),
    ]
    with pool_of(folder, "dataset", "record", "first", mcp=(server,), **data) as pool:
        first, packages = ask(pool, *calls), pool.wait().packages
    assert isinstance(first[1], EnvObserved)
    assert first[1].ok, first[1]
    (folder / "server.py").unlink()
    with pool_of(folder, "dataset", "strict", "second", mcp=(server,), **data) as pool:
        again = ask(pool, *calls)
        assert pool.wait().packages == packages
    assert without_use(again) == without_use(first)


def test_a_strict_cassette_that_is_not_there_stops_the_start(folder: Path) -> None:
    with (
        pytest.raises(ConfigError, match="there is no cassette"),
        pool_of(folder, "mine:Tools", "strict", "first"),
    ):
        pass


@pytest.mark.slow
def test_a_use_is_counted_over_an_episode(folder: Path) -> None:
    with pool_of(folder, "mine:Worlds", "record", "first") as pool:
        *_, scored = ask(pool, *walk(ONE, "left", "right"))
    assert isinstance(scored, Rewarded)
    assert scored.cassette == CassetteUse(asked=4)


WRITER = """
import sys
from pathlib import Path
from dora_pipe.producers.tasks.cassette import Recorded
from dora_pipe.producers.tasks.cassette_file import CassetteFile
file = CassetteFile(Path(sys.argv[1]))
for at in range(10**9):
    file.append(Recorded(cassette=1, row="r", history="h", call={"kind": "tool", "name": "t",
        "arguments": {"at": at}}, answer={"text": "x" * 5000, "ok": True}, at_ns=1))
    if at == 20:
        print("writes", flush=True)
"""


def test_a_recording_survives_a_kill_in_the_middle_of_it(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writes\n"
        os.kill(process.pid, signal.SIGKILL)
    after = CassetteFile(path)
    before = len(after)
    assert before > 20
    after.append(next(after.all()))
    assert len(CassetteFile(path, writes=False)) == before + 1
