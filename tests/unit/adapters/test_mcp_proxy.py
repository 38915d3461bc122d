"""An MCP server that a cassette answers, as its agent hears it.

Method: messages of an agent, a tape in memory, and the project's own server of notes.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.adapters.mcp_proxy import serve
from dora_pipe.producers.tasks.cassette import CassetteMiss
from dora_pipe.producers.tasks.tape_client import TapeClient
from tests.support.tidy import ROOT

SERVER = (sys.executable, str(ROOT / "tests/support/mcp_server.py"))
GONE = ("no-such-server",)

HELLO = {"method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}}
READY = {"method": "notifications/initialized"}
ADD = {
    "method": "tools/call",
    "params": {
        "name": "add-numbers",
        "arguments": {"a": 1, "b": 2},
        "_meta": {"progressToken": 7},
    },
}


class Begun:
    def __init__(self, found: Any, keep: Callable[[Any], None]) -> None:
        self.found, self._keep = found, keep

    def answered(self, answer: Any) -> None:
        self._keep(answer)

    def close(self) -> None:
        """Nothing came of it."""


class Tape:
    """What `TapeClient` is for: by the calls before, in memory."""

    def __init__(self, answers: dict[str, Any], *, strict: bool) -> None:
        self.answers, self._strict = answers, strict
        self.begun: list[str] = []

    def begin(self, name: str, arguments: Any, *, outside: bool = False) -> Begun:
        call = json.dumps([name, dict(arguments)], sort_keys=True)
        key = call if outside else json.dumps([*self.begun, call])
        if not outside:
            self.begun.append(call)
        if key not in self.answers and self._strict:
            raise CassetteMiss(f"{name} is not on c.jsonl")
        return Begun(self.answers.get(key), lambda answer: self.answers.update({key: answer}))


def talk(tape: Tape, *said: dict[str, Any], server: Any = SERVER, name: str = "") -> dict[int, Any]:
    """What an agent is answered, by the place of what it said."""
    messages = [
        {"jsonrpc": "2.0", **({} if "notifications" in one["method"] else {"id": at}), **one}
        for at, one in enumerate(said)
    ]
    out = Answers()
    lines = Lines(messages, out)
    serve(server, cast(TapeClient, tape), cast(Any, lines), out, name=name)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    return {one["id"]: one.get("result", one.get("error")) for one in found}


class Answers(io.BytesIO):
    """What the agent hears, a line at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


class Lines:
    """An agent that says its next word when it has the answer to the one before."""

    def __init__(self, messages: list[dict[str, Any]], out: Answers) -> None:
        self._left, self._out = list(messages), out
        self._answers = 0

    def readline(self, size: int) -> bytes:
        while self._out.getvalue().count(b"\n") < self._answers:
            assert self._out.written.wait(30.0)
            self._out.written.clear()
        if not self._left:
            return b""
        message = self._left.pop(0)
        self._answers += "id" in message
        return json.dumps(message).encode() + b"\n"


WORDS = (HELLO, READY, {"method": "tools/list"}, ADD)


def test_a_server_that_is_gone_answers_as_it_did() -> None:
    known: dict[str, Any] = {}
    first = talk(Tape(known, strict=False), *WORDS)
    assert first[0]["protocolVersion"] == "2025-06-18"
    assert first[3] == {"content": [{"type": "text", "text": "3"}]}
    again = talk(Tape({**_as_of(known, GONE)}, strict=True), *WORDS, server=GONE)
    assert again == first


def _as_of(known: dict[str, Any], server: tuple[str, ...]) -> dict[str, Any]:
    """What a server says of itself is known by its name, which is its command without one."""
    return {key.replace(" ".join(SERVER), " ".join(server)): one for key, one in known.items()}


def test_a_named_server_is_known_by_its_name_however_it_is_started() -> None:
    known: dict[str, Any] = {}
    first = talk(Tape(known, strict=False), *WORDS, name="sum")
    assert talk(Tape(known, strict=True), *WORDS, server=GONE, name="sum") == first
    assert any('"sum_add-numbers' in key.replace("\\", "") for key in known)


def test_the_real_server_is_started_for_the_first_call_that_nobody_has_recorded() -> None:
    known: dict[str, Any] = {}
    talk(Tape(known, strict=False), *WORDS[:3], name="sum")
    found = talk(Tape(known, strict=False), HELLO, ADD, name="sum")
    assert found[1] == {"content": [{"type": "text", "text": "3"}]}


def test_what_is_on_no_cassette_is_an_error_that_says_so() -> None:
    found = talk(Tape({}, strict=True), HELLO, server=GONE)
    assert found == {0: {"code": -32001, "message": "mcp:no-such-server is not on c.jsonl"}}


def test_a_refusal_of_the_server_is_an_answer() -> None:
    known: dict[str, Any] = {}
    words = (HELLO, {"method": "resources/read", "params": {"uri": "a"}})
    first = talk(Tape(known, strict=False), *words, name="sum")
    assert first[1]["message"] == "the MCP server sum refuses: no resources/read"
    assert talk(Tape(known, strict=True), *words, server=GONE, name="sum") == first


@pytest.mark.parametrize("server", [GONE, SERVER])
def test_a_server_that_cannot_be_reached_is_no_answer(server: tuple[str, ...]) -> None:
    known: dict[str, Any] = {}
    dies = {"method": "tools/call", "params": {"name": "die"}}
    found = talk(Tape(known, strict=False), dies, server=server)
    assert found[0]["code"] == -32603
    assert known == {}


def test_whether_it_is_there_is_asked_of_nobody_else() -> None:
    tape = Tape({}, strict=True)
    assert talk(tape, {"method": "ping"}, READY, server=GONE) == {0: {}}
    assert tape.begun == []


def test_an_answer_that_cannot_be_recorded_is_an_error() -> None:
    class Full(Tape):
        def begin(self, name: str, arguments: Any, *, outside: bool = False) -> Begun:
            def full(answer: Any) -> None:
                raise ResourceError("the answer is not recorded: no space left")

            return Begun(None, full)

    found = talk(Full({}, strict=False), ADD)
    assert found[0]["message"] == "the answer is not recorded: no space left"
