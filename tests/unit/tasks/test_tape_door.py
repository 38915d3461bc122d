"""The door of an agent's tape to the agent's own processes, and their end of it.

Method: the agent's process is a thread of this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.tasks import tape_client, tape_door
from dora_pipe.producers.tasks.cassette import CassetteMiss, CassetteRefused, tool_call
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.kept import RaisedThere
from dora_pipe.producers.tasks.port import Retry
from dora_pipe.producers.tasks.tape import Cassette, EpisodeTape, Mode
from dora_pipe.producers.tasks.tape_client import VARIABLE, TapeClient
from dora_pipe.producers.tasks.tape_door import cassette_variables, open_door
from dora_pipe.producers.tasks.taped import taped

T = TypeVar("T")
LS: tuple[str, dict[str, Any]] = ("sh", {"command": ["ls"]})
EDIT: tuple[str, dict[str, Any]] = ("sh", {"command": ["touch", "b"]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.jsonl"


def tape_of(path: Path, mode: Mode, run: str, by: str = "g-001") -> EpisodeTape:
    file = CassetteFile(path, writes=mode != "strict")
    return EpisodeTape(
        Cassette(file=file, mode=mode, run=run), {"n": 1}, by=by, where="row 1 of train"
    )


def through(tape: EpisodeTape, agent: Callable[[TapeClient], T]) -> T:
    """What a process does that an agent has started."""

    async def run() -> T:
        async with open_door(tape):
            client = TapeClient(cassette_variables()[VARIABLE])
            return await asyncio.to_thread(agent, client)

    return asyncio.run(run())


def asks(client: TapeClient, call: tuple[str, dict[str, Any]], real: str) -> Any:
    """The answer: the cassette's, or else the real one's, which is recorded."""
    begun = client.begin(*call)
    if begun.found is not None:
        return begun.found["value"]
    begun.answered({"value": real})
    return real


def session(*answers: str) -> Callable[[TapeClient], list[Any]]:
    """The same command before and after another one."""
    return lambda client: [
        asks(client, call, real) for call, real in zip((LS, EDIT, LS), answers, strict=True)
    ]


def test_a_second_run_is_answered_as_the_first_in_the_order_of_its_calls(path: Path) -> None:
    first = tape_of(path, "record", "one")
    assert through(first, session("a", "", "a b")) == ["a", "", "a b"]
    second = tape_of(path, "strict", "two")
    assert through(second, session("?", "?", "?")) == ["a", "", "a b"]
    assert (first.use.answers, first.use.asked) == (0, 3)
    assert (second.use.answers, second.use.asked) == (3, 0)
    assert second.use.oldest_ns > 0


def test_a_call_that_is_not_there_is_refused_in_a_line_and_held_against_its_trajectory(
    path: Path,
) -> None:
    through(tape_of(path, "record", "one"), session("a", "", "a b"))
    tape = tape_of(path, "strict", "two")

    def misses(client: TapeClient) -> str:
        with pytest.raises(CassetteMiss) as refused:
            client.begin("sh", {"command": ["ls", "-a"]})
        return str(refused.value)

    line = (
        'row 1 of train: sh({"command":["ls","-a"]}) is not on c.jsonl; nearest:'
        ' sh({"command":["ls"]}), at the same place;'
        ' task.cassette_mode = "record" records it'
    )
    assert through(tape, misses) == line
    assert str(tape.failed) == line


def test_who_goes_without_an_answer_has_recorded_nothing(path: Path) -> None:
    tape = tape_of(path, "record", "one")
    through(tape, lambda client: client.begin(*LS).close())
    assert path.read_bytes() == b""
    assert tape.failed is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"ls\n", "malformed"),
        (b'{"name": "ls"}\n', "missing required field `arguments`"),
        (b'{"name": "ls", "arguments": [1]}\n', "Expected `object`"),
        (b'{"name": "ls", "arguments": {}, "row": 3}\n', "unknown field `row`"),
        (b'{"name": "ls", "arguments": {}}\n{"answer": {"said": 1}}\n', "has a `value`"),
    ],
)
def test_what_is_no_line_of_a_call_is_refused_held_against_its_trajectory_and_recorded_nowhere(
    path: Path, line: bytes, why: str
) -> None:
    def says(client: TapeClient) -> str:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(client.path)
            one.sendall(line)
            *_, last = one.makefile("rb")
        return str(json.loads(last)["refused"])

    tape = tape_of(path, "record", "one")
    assert why in through(tape, says)
    assert path.read_bytes() == b""
    assert isinstance(tape.failed, CassetteRefused)


def test_any_language_asks_in_lines_of_json(path: Path) -> None:
    call = b'{"name": "search", "arguments": {"query": "x"}}\n'

    def says(*lines: bytes) -> Callable[[TapeClient], list[Any]]:
        def agent(client: TapeClient) -> list[Any]:
            heard: list[Any] = []
            with socket.socket(socket.AF_UNIX) as one, one.makefile("rb") as answers:
                one.connect(client.path)
                for line in lines:
                    one.sendall(line)
                    heard.append(json.loads(answers.readline()))
            return heard

        return agent

    answer = b'{"answer": {"value": ["found"]}}\n'
    raised = b'{"answer": {"error": "KeyError", "message": "x"}}\n'
    told = through(tape_of(path, "record", "one"), says(call, answer, call, raised))
    assert told == [{"ask": True}, {"recorded": True}] * 2
    again = through(tape_of(path, "strict", "two"), says(call, call, call))
    assert again[:2] == [json.loads(answer), json.loads(raised)]
    assert again[2]["refused"].startswith('row 1 of train: search({"query":"x"}) is not on c.jsonl')


ASKS = """
from dora_pipe.producers.tasks.tape_client import client_here
client = client_here()
print(client and client.path)
"""


@pytest.mark.parametrize(("variable", "found"), [("/the/door", "/the/door"), ("", "None")])
def test_who_is_started_without_variables_asks_as_the_nearest_process_above(
    variable: str, found: str
) -> None:
    program = [sys.executable, "-c", ASKS]
    starts = f"import subprocess; subprocess.run({program!r}, env={{}}, check=True)"
    done = subprocess.run(
        [sys.executable, "-c", starts],
        env={**os.environ, VARIABLE: variable},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == found


def test_an_answer_that_is_too_long_is_said_to_be_and_not_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape_client, "LINE_BYTES_MAX", 100)
    with pytest.raises(ResourceError, match="too much for a call on a cassette"):
        through(tape_of(path, "record", "one"), session("a" * 100, "", ""))
    assert path.read_bytes() == b""


def test_who_is_refused_before_it_has_spoken_hears_why(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path.parent / "s"))
        listening.listen()
        connection = tape_client._Connection(str(path.parent / "s"))
        accepted, _ = listening.accept()
        accepted.sendall(b'{"refused": "more than 1 calls at once"}\n')
        accepted.close()
    assert connection.ask({"name": "ls"}).refused == "more than 1 calls at once"
    connection.close()


def test_calls_beyond_the_bound_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_door, "CONNECTIONS_MAX", 1)

    def two(client: TapeClient) -> None:
        one = client.begin(*LS)
        try:
            client.begin(*EDIT)
        finally:
            one.close()

    with pytest.raises(CassetteMiss, match="more than 1 calls at once"):
        through(tape_of(path, "record", "one"), two)


def test_an_answer_that_cannot_be_written_is_held_against_its_trajectory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ResourceError("c.jsonl: no space left on device")

    tape = tape_of(path, "record", "one")
    monkeypatch.setattr(CassetteFile, "append", full)
    with pytest.raises(ResourceError, match=r"not recorded: .*no space left"):
        through(tape, session("a", "", ""))
    assert isinstance(tape.failed, Retry)


def test_a_door_is_there_as_long_as_its_agent(path: Path) -> None:
    late = through(tape_of(path, "record", "one"), lambda client: client)
    assert cassette_variables() == {}
    assert not Path(late.path).parent.exists()
    with pytest.raises(ResourceError, match="cannot be reached") as gone:
        late.begin(*LS)
    assert "as long as its agent's trajectory" in str(gone.value.hint)


def test_what_is_asked_of_no_trajectory_is_neither_counted_nor_stands_before_a_call(
    path: Path,
) -> None:
    def listed(client: TapeClient) -> Any:
        begun = client.begin("mcp:notes", {"asked": "tools/list"}, outside=True)
        if begun.found is None:
            begun.answered({"value": ["add"]})
            return ["add"], asks(client, LS, "a")
        return begun.found["value"], asks(client, LS, "?")

    assert through(tape_of(path, "record", "one"), listed) == (["add"], "a")
    tape = tape_of(path, "strict", "two")
    assert through(tape, listed) == (["add"], "a")
    assert tape.use.answers == 1


CALLED: list[str] = []


@taped
def inner(word: str) -> str:
    """A part of `outer`."""
    CALLED.append("inner")
    return word.upper()


@taped
async def outer(word: str, often: int = 2) -> dict[str, Any]:
    """Asks another one on the way."""
    CALLED.append("outer")
    if word == "nothing":
        raise LookupError("no such word")
    return {"said": (inner(word), often)}


async def agent() -> list[Any]:
    """Runs anywhere."""
    found: list[Any] = [await outer("a"), await outer("a", often=3), inner("b")]
    try:
        await outer("nothing")
    except (LookupError, RaisedThere) as error:
        found.append(str(error))
    return found


def test_marked_functions_ask_from_an_agents_own_process_as_in_its_task_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(client: TapeClient) -> list[Any]:
        monkeypatch.setenv(VARIABLE, client.path)
        return asyncio.run(agent())

    CALLED.clear()
    first = through(tape_of(path, "record", "one"), elsewhere)
    assert first == [{"said": ["A", 2]}, {"said": ["A", 3]}, "B", "no such word"]
    assert CALLED == ["outer", "inner", "outer", "inner", "inner", "outer"]
    tape = tape_of(path, "strict", "two")
    assert through(tape, elsewhere) == first
    assert len(CALLED) == 6
    assert tape.use.answers == 4
    here = tape_of(path, "strict", "three")
    assert here.begin(tool_call("outer", {"word": "a", "often": 2})).found == {"value": first[0]}
