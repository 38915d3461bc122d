"""Tests of MCP tools, with servers as processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import requests

from dora_pipe.config import model
from dora_pipe.config.outside import McpServer
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.adapters import mcp
from dora_pipe.producers.adapters.mcp import McpTools
from dora_pipe.producers.adapters.mcp_client import Connection, ServerAway, ServerRefused
from dora_pipe.producers.tasks.messages import tool_schema
from dora_pipe.producers.tasks.registry import open_task, reward_digest
from dora_pipe.producers.tasks.task import DescribedTool, Observation, Retry, Task, ToolCall, Turn
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S, ToolEnvironment, call_tools
from tests.support.data_files import write_jsonl
from tests.support.tidy import ROOT
from tests.support.user_run import until

COMMAND = (sys.executable, str(ROOT / "tests" / "support" / "mcp_server.py"))


def http(*words: str) -> Iterator[str]:
    with subprocess.Popen([*COMMAND, "--http", *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


@pytest.fixture(params=["pipe", "json", "events"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[McpServer]:
    if request.param == "pipe":
        yield McpServer(command=COMMAND)
        return
    monkeypatch.setenv("NOTES_KEY", "secret")
    for url in http(*(["--sse"] if request.param == "events" else [])):
        yield McpServer(url=url, key_env="NOTES_KEY")


@pytest.fixture
def closing() -> Iterator[list[McpTools]]:
    opened: list[McpTools] = []
    yield opened
    for tools in opened:
        for each in tools._servers:
            each._shared.close()


def called(tools: list[DescribedTool], name: str, **arguments: Any) -> Observation:
    call = ToolCall(name=name, arguments=arguments, id="call-0")
    return asyncio.run(call_tools(tools, Turn(text="", tool_calls=(call,))))


def told(tools: list[DescribedTool], name: str, **arguments: Any) -> str:
    return str(called(tools, name, **arguments).messages[0]["content"])


def test_a_servers_tools_are_told_with_its_words_and_called(
    server: McpServer, closing: list[McpTools]
) -> None:
    closing.append(here := McpTools([server]))
    tools = here.tools()
    assert [tool.name for tool in tools][:2] == ["add-numbers", "note"]
    schema = tool_schema(tools[0])
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert told(tools, "add-numbers", a=2, b=40) == "42"
    word = "Å…\x85\u2028 日本"  # ISO-8859-1 decoding or line splitting would change it
    assert told(tools, "note", word=word) == json.dumps(
        {"notes": [word]}, ensure_ascii=False
    ).replace(": ", ":")
    assert told(tools, "note", word="\ud83d").endswith(r',"\\ud83d"]}')
    assert told(tools, "picture") == "see\n[image]"
    failed = called(tools, "fail")
    assert (failed.messages[0]["content"], failed.ok) == ("error: it is\nbroken", False)
    assert told(tools, "add-numbers", a=2) == "error: a and b are needed"
    assert (
        told(tools, "add-number") == "error: unknown tool `add-number`: did you mean `add-numbers`?"
    )


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    opened: list[Connection] = []

    def connect(*words: Any, **options: Any) -> Connection:
        opened.append(Connection(*words, **options))
        return opened[-1]

    monkeypatch.setattr(mcp, "Connection", connect)
    return opened


def test_a_session_is_shared_by_all_episodes_or_belongs_to_one(
    server: McpServer, closing: list[McpTools], connections: list[Connection]
) -> None:
    for sessions, second in (("shared", ["a", "b"]), ("episode", ["b"])):
        config = McpServer(
            command=server.command,
            url=server.url,
            key_env=server.key_env,
            sessions=sessions,  # type: ignore[arg-type]
        )
        closing.append(here := McpTools([config]))
        connections.clear()
        for word, observed in (("a", ["a"]), ("b", second)):
            tools = here.tools()
            world = ToolEnvironment(Task(), tools)
            assert told(tools, "note", word=word).count('"') == 2 * (1 + len(observed))
            world.close()
        open_sessions = [session for session in connections if not session._living.done()]
        assert len(open_sessions) == 1, "sessions of episodes end with them"


def test_a_server_that_dies_is_started_again_where_it_is_shared(closing: list[McpTools]) -> None:
    closing.append(here := McpTools([McpServer(command=COMMAND)]))
    tools = here.tools()
    with pytest.raises(Retry, match="is gone"):
        told(tools, "die")
    assert told(tools, "add-numbers", a=1, b=1) == "2"


def test_an_episode_whose_server_died_is_not_begun_anew() -> None:
    here = McpTools([McpServer(command=COMMAND, sessions="episode")])
    tools = here.tools()
    assert told(tools, "note", word="a")
    with pytest.raises(Retry, match="is gone"):
        told(tools, "die")
    with pytest.raises(Retry, match="closed the connection of the episode"):
        told(tools, "note", word="b")
    here._servers[0]._shared.close()


def test_a_call_that_hangs_ends_at_the_tools_time_limit(
    server: McpServer, closing: list[McpTools], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing.append(here := McpTools([server]))
    tools = here.tools()
    monkeypatch.setattr(mcp, "LATE_S", 0.2)
    token = TOOL_LIMIT_S.set(0.4)
    try:
        assert told(tools, "hang") == "error: timed out after 0.4 s"
    finally:
        TOOL_LIMIT_S.reset(token)
    if not server.command:  # several requests at a time
        assert told(tools, "add-numbers", a=1, b=2) == "3"


def test_a_server_that_says_much_and_reads_nothing_is_late_and_can_be_closed(
    connections: list[Connection],
) -> None:
    here = McpTools([McpServer(command=COMMAND, sessions="episode")])
    tools = here.tools()
    token = TOOL_LIMIT_S.set(0.4)
    try:
        for words in ({}, {"word": "x" * (1 << 20)}):  # the second one fills its pipe
            assert told(tools, "deaf", **words) == "error: timed out after 0.4 s"
    finally:
        TOOL_LIMIT_S.reset(token)
        tools[0].close()
        here._servers[0]._shared.close()
    assert connections and all(session._living.done() for session in connections)


def test_a_wrong_key_and_a_forgotten_session_are_told_apart() -> None:
    for url in http():
        use = McpServer(url=url)
        with pytest.raises(ServerRefused, match="says 401: who are you"):
            Connection("it", use, secret="wrong", directory="")
        connection = Connection("it", use, secret="secret", directory="")
        with pytest.raises(ServerRefused, match="refuses: no resources/list"):
            connection.ask(methodcaller("list_resources"), 30.0)
        requests.delete(url, headers={"Mcp-Session-Id": "*"}, timeout=30)
        with pytest.raises(ServerAway, match="says 404: no such session"):
            connection.ask(methodcaller("list_tools"), 30.0)
        connection.close()


def test_a_server_that_was_started_here_does_not_outlive_its_task(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r}); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
        "from tests.support.mcp_server import over_a_pipe; over_a_pipe(); time.sleep(3600)"
    )
    code = (
        "import os, signal; from dora_pipe.config.outside import McpServer; "
        "from dora_pipe.producers.adapters.mcp import McpTools; "
        f"McpTools([McpServer(command=({sys.executable!r}, {str(server)!r}))]).tools(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    path = Path("/proc", (tmp_path / "pid").read_text(), "stat")

    def gone() -> bool:
        return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"

    until(gone)
    assert gone()


@pytest.mark.parametrize(
    ("uses", "error", "text"),
    [
        ([McpServer()], ConfigError, "task.mcp[0]: set command or url"),
        ([McpServer(command=("not-there-at-all",))], TaskError, "cannot start"),
        ([McpServer(url="http://127.0.0.1:9/mcp")], TaskError, "does not answer"),
        ([McpServer(command=COMMAND, tools=("nota",))], ConfigError, "has no `nota`"),
        ([McpServer(url="http://x", key_env="NO_SUCH")], ConfigError, "NO_SUCH is not set"),
    ],
)
def test_what_cannot_be_reached_is_named(
    uses: list[McpServer], error: type[TaskError], text: str
) -> None:
    with pytest.raises(error) as caught:
        McpTools(uses).tools()
    assert text in caught.value.message


def test_a_data_set_may_have_tools_of_servers_and_of_its_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2 + 3?", "answer": "5"}])

    def task(**changes: Any) -> Task:
        return open_task(
            model.Task(
                kind="dataset",
                data=str(tmp_path / "rows.jsonl"),
                chat=True,
                reward="exact",
                mcp=(McpServer(command=COMMAND, **changes),),
            )
        )

    first_task, other = task(), task(tools=("note",))
    first_task.check()
    assert not first_task.single_turn()
    assert len(first_task.tools(first_task.rows("train")[0])) == 7
    assert set(first_task.packages()) == {"mcp:notes"}
    assert reward_digest(first_task) != reward_digest(other) != ""
    for task_of in (first_task, other):
        for each in task_of._mcp._servers:  # type: ignore[attr-defined]
            each._shared.close()
