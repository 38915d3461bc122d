"""Agents by command whose own processes a cassette answers: programs in front of which it stands,
an MCP server, marked functions; in task processes.

Method: a sandbox that notes every call, and is away in strict runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import Task
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    AgentEnded,
    EpisodeLost,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.data_files import write_jsonl
from tests.support.tidy import ROOT

SANDBOX = """#!/bin/sh
# Says which call it is, writes what is no text, and fails on request.
echo call >> "$(dirname "$0")/made"
printf 'call %s: %s ' "$(wc -l < "$(dirname "$0")/made")" "$*"
if [ "$1" = bytes ]; then printf '\\377'; fi
if [ "$1" = wait ]; then sleep 60; fi
if [ "$1" = input ]; then cat; fi
if [ "$1" = fail ]; then echo "no such file" >&2; exit 3; fi
"""

SHELL = """#!/bin/sh
# An agent in a language of its own: it tells what its sandbox said, and what that ended with.
sandbox() { "$DORA_PIPE" cassette call --name sandbox -- ./sandbox "$@" 2>&1; }
first="$(sandbox ls)"
sandbox bytes | od -c > bytes.txt
failed="$(sandbox fail)"; status=$?
given="$(echo words | "$DORA_PIPE" cassette call --stdin --name sandbox -- ./sandbox input)"
printf '"%s/%s/%s/%s/%s/%s"' "$first" "$(tr -d ' \\n' < bytes.txt)" "$failed" "$status" \\
    "$given" "$(sandbox ls)" > "$DORA_PIPE_RESULT"
"""

PYTHON = """
import asyncio, json, os, subprocess, sys
from dora_pipe.producers.tasks.taped import taped

@taped
async def search(query: str) -> dict:
    return {"found": [query, (await ask("mark", query))]}

async def ask(*words):
    process = await asyncio.create_subprocess_exec(
        "./sandbox", *words, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()

def notes(*asked):
    server = subprocess.Popen(
        [os.environ["DORA_PIPE"], "cassette", "mcp", "--name", "sum", "--",
         sys.executable, "server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"]})  # as clients of MCP start servers
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "me"}}
    words = [("initialize", hello), *(("tools/call", one) for one in asked)]
    found = []
    for at, (method, params) in enumerate(words):
        line = {"jsonrpc": "2.0", "id": at, "method": method, "params": params}
        server.stdin.write(json.dumps(line).encode() + b"\\n")
        server.stdin.flush()
        found.append(json.loads(server.stdout.readline()))
    server.stdin.close()
    server.wait()
    return found

async def main():
    found = [await search("a"), await search("b"),
             notes({"name": "add-numbers", "arguments": {"a": 1, "b": 2}})]
    with open(os.environ["DORA_PIPE_RESULT"], "w") as file:
        json.dump(json.dumps(found), file)

asyncio.run(main())
"""

SWALLOWS = """#!/bin/sh
"$DORA_PIPE" cassette call -- ./sandbox other
sleep 60
echo went on > other
echo '"made up"' > "$DORA_PIPE_RESULT"
"""


KILLED = """#!/bin/sh
echo "$PPID" > process
"$DORA_PIPE" cassette call -- ./sandbox ls
exec "$DORA_PIPE" cassette call -- ./sandbox "$(cat word)"
"""
ONE = "g0000000000-001"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DORA_PIPE", str(Path(sys.executable).parent / "dora-pipe"))
    for name, text in (("sandbox", SANDBOX), ("agent.sh", SHELL), ("other.sh", SWALLOWS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "agent.py").write_text(PYTHON)
    shutil.copy(ROOT / "tests/support/mcp_server.py", tmp_path / "server.py")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "go", "answer": "x"}])
    return tmp_path


@contextmanager
def pool_of(folder: Path, mode: Any, run: str, *command: str, **task: Any) -> Iterator[TaskPool]:
    config = Task(
        kind="dataset",
        directory=str(folder),
        data=str(folder / "rows.jsonl"),
        reward="exact",
        command=command,
        cassette=str(folder / "c.jsonl"),
        cassette_mode=mode,
        **task,
    )
    with TaskPool(config, run=run) as pool:
        pool.wait()
        yield pool


def agent_call(by: str) -> AgentCall:
    return AgentCall(
        request=f"{by}/1", split="train", index=0, base_url="http://nobody.invalid/v1", api_key="k"
    )


def until(done: Callable[[], bool], pool: TaskPool) -> list[TaskEvent]:
    """What the pool says until something is so, or it says something."""
    end = time.monotonic() + 60.0
    while not (events := pool.poll(0.05)) and not done():
        assert time.monotonic() < end, "it never happened"
    return events


def played(pool: TaskPool) -> TaskEvent:
    """What the agent's run on the row comes to."""
    pool.submit(agent_call(ONE))
    (event,) = until(lambda: False, pool)
    return event


def made(folder: Path) -> int:
    """Calls of the sandbox."""
    path = folder / "made"
    return len(path.read_text().split()) if path.exists() else 0


def without_sandbox(folder: Path) -> None:
    (folder / "sandbox").unlink()
    (folder / "server.py").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "calls", "answers"), [(("./agent.sh",), 5, 5), ((sys.executable, "agent.py"), 2, 3)]
)
def test_an_agent_runs_without_its_sandbox_and_is_told_the_very_same(
    folder: Path, command: tuple[str, ...], calls: int, answers: int
) -> None:
    with pool_of(folder, "record", "one", *command) as pool:
        first = played(pool)
    assert isinstance(first, AgentEnded), first
    assert made(folder) == calls
    without_sandbox(folder)
    with pool_of(folder, "strict", "two", *command) as pool:
        again = played(pool)
    assert isinstance(again, AgentEnded), again
    assert again.text == first.text
    for one, given in ((first, 0), (again, answers)):
        assert one.cassette is not None
        assert (one.cassette.answers, one.cassette.asked) == (given, answers - given)
    if calls == 5:
        assert again.text is not None
        assert again.text.startswith("call 1: ls /0000000call2:bytes377")
        assert again.text.endswith("no such file/3/call 4: input words/call 5: ls ")


@pytest.mark.slow
def test_what_a_sandbox_was_never_asked_is_a_miss_with_which_its_agent_ends(folder: Path) -> None:
    with pool_of(folder, "record", "one", "./agent.sh") as pool:
        played(pool)
    with pool_of(folder, "strict", "two", "./other.sh") as pool:
        failed = played(pool)
    assert isinstance(failed, TaskFailed)
    assert failed.error == "CassetteMiss"
    line = 'row 0 of train: sandbox({"command":["./sandbox","other"]}) is not on c.jsonl; nearest:'
    assert failed.message.startswith(line)
    assert not (folder / "other").exists()
    assert made(folder) == 5


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_call_leaves_a_whole_cassette_and_the_call_is_made_again(
    folder: Path,
) -> None:
    (folder / "agent.sh").write_text(KILLED)
    (folder / "word").write_text("wait")
    with pool_of(folder, "record", "one", "./agent.sh") as pool:
        pool.submit(agent_call(ONE))
        until(lambda: made(folder) == 2, pool)
        os.kill(int((folder / "process").read_text()), signal.SIGKILL)
        (event,) = until(lambda: False, pool)
    assert isinstance(event, EpisodeLost | TaskFailed), event
    assert len(list(CassetteFile(folder / "c.jsonl", writes=False).all())) == 1
    (folder / "word").write_text("quick")
    with pool_of(folder, "record", "two", "./agent.sh") as pool:
        again = played(pool)
    assert isinstance(again, AgentEnded), again
    assert again.cassette is not None
    assert (again.cassette.answers, again.cassette.asked) == (1, 1)
